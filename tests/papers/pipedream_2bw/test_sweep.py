"""The planner of thesis 3.3 on the worked case, and its limits."""

import json

import pytest

from hetflow.papers.pipedream_2bw import (
    ClosedForm,
    Configuration,
    ParallelPipelineProblem,
    SweepEstimate,
    SweptRuns,
    fastest,
    sweep,
)
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.tests.data import reference


@pytest.fixture
def worked() -> dict:
    return json.loads((reference.folder() / "ptdp" / "pd2bw_worked.json").read_text())


def problem_of(given: dict) -> ParallelPipelineProblem:
    times = {int(size): seconds for size, seconds in given["fb_s_per_block"].items()}
    return ParallelPipelineProblem(
        num_devices=given["N"],
        global_batch_size=given["B"],
        memory_bytes=given["M"],
        microbatch_sizes=tuple(times),
        cost_model=ClosedForm(
            num_blocks=given["blocks"],
            weight_bytes=given["W"],
            block_seconds=times,
            activation_bytes_per_sample=given["A_total_per_sample"],
            input_bytes_per_sample=given["A_inp_per_sample"],
            devices_per_server=given["gpus_per_server"],
            fast_bytes_per_second=given["B_high"],
            slow_bytes_per_second=given["B_low"],
            recompute_factor=given["c_extra"],
        ),
    )


def as_stored(row) -> dict:
    c = row.configuration
    return {
        "d": c.data_parallel_size, "p": c.pipeline_parallel_size, "b": c.microbatch_size,
        "recompute": c.recompute, "m": row.num_microbatches, "t": row.microbatch_seconds,
        "throughput": row.samples_per_second, "memory": row.memory_bytes, "fits": row.fits,
    }  # fmt: skip


def test_every_worked_row_and_the_choice(worked):
    problem = problem_of(worked["inputs"])
    rows = [as_stored(row) for row in sweep(problem)]
    assert len(rows) == len(worked["rows"])
    for found, stored in zip(rows, worked["rows"], strict=True):
        assert found == pytest.approx(stored, rel=1e-12)
    assert as_stored(fastest(problem)) == pytest.approx(worked["best"], rel=1e-12)


def measured(seconds: dict[Configuration, float], memory: float = 1.0) -> ParallelPipelineProblem:
    return ParallelPipelineProblem(
        num_devices=4,
        global_batch_size=16,
        memory_bytes=1.0,
        microbatch_sizes=(1, 2),
        cost_model=SweptRuns(
            estimates={
                c: SweepEstimate(microbatch_seconds=t, memory_bytes=memory)
                for c, t in seconds.items()
            }
        ),
    )


def configuration(d: int, p: int, b: int) -> Configuration:
    return Configuration(
        data_parallel_size=d, pipeline_parallel_size=p, microbatch_size=b, recompute=False
    )


def test_measured_configurations_are_ranked_by_throughput():
    times = {configuration(4, 1, 1): 1.0, configuration(2, 2, 2): 0.9, configuration(1, 4, 2): 0.6}
    row = fastest(measured(times))
    assert row.configuration == configuration(2, 2, 2)
    assert row.samples_per_second == pytest.approx(4 / 0.9)
    assert row.num_microbatches == 4


def test_two_versions_need_at_least_p_microbatches():
    problem = measured({configuration(1, 4, 2): 0.1})
    assert [row.num_microbatches for row in sweep(problem)] == [8]
    short = ParallelPipelineProblem(
        num_devices=4,
        global_batch_size=6,
        memory_bytes=1.0,
        microbatch_sizes=(2,),
        cost_model=problem.cost_model,
    )
    with pytest.raises(InfeasibleError, match="m >= p"):
        fastest(short)


def test_nothing_fits_says_by_how_much():
    with pytest.raises(InfeasibleError, match="needs 7 bytes on a device of 1, 6 bytes too many"):
        fastest(measured({configuration(4, 1, 1): 1.0}, memory=7.0))


def test_nonsense_is_refused():
    with pytest.raises(ProblemError, match="at least 1"):
        ParallelPipelineProblem(
            num_devices=0,
            global_batch_size=1,
            memory_bytes=1.0,
            microbatch_sizes=(1,),
            cost_model=SweptRuns(estimates={}),
        )
