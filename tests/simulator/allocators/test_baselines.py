"""AlloX, Gandiva's packing, FIFO and static priority beside Gavel's policies."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.mechanisms.allocators import allocator_named
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.clusters.simulator.cases import Case, report, run_case, simulate_rounds
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.formats.importers.gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.papers.gavel.baselines import AlloX, Gandiva
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Job, ModelThroughput, PairThroughput, Throughputs
from hetflow.solvers.lp import assign
from hetflow.tests.profiles import examples

MakeJob = Callable[..., Job]
AT_ONCE = RoundOptions(reset_seconds=0.0, fills_idle=False)


def order(run: object) -> list[str]:
    done = run.jobs  # type: ignore[attr-defined]
    return [job.id for job in sorted(done, key=lambda job: job.finish_seconds)]


def test_allox_runs_the_shortest_first(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1})
    jobs = [job(0, steps=4000.0), job(1, steps=400.0), job(2, steps=2000.0)]
    run = simulate_rounds(jobs, pool, AlloX(), AT_ONCE)
    assert order(run) == ["1", "2", "0"]
    # A round each for 100 s, two for 500 s, then 1,000 s: nobody is stopped on the way.
    assert [job.finish_seconds for job in run.jobs] == pytest.approx([100.0, 860.0, 2080.0])


def test_allox_matches_jobs_to_types(table: Throughputs, job: MakeJob) -> None:
    # conv loses three quarters on the slow device, rnn one quarter: sum 1,000 + 1,333 s against
    # 4,000 + 1,000 s the other way round.
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1, "slow": 1})
    jobs = [job(0, model="rnn", steps=2000.0), job(1, model="conv", steps=4000.0)]
    run = simulate_rounds(jobs, pool, AlloX(), AT_ONCE)
    ends = {done.id: done.finish_seconds for done in run.jobs}
    assert ends == pytest.approx({"0": 2000.0 / 1.5, "1": 1000.0})


def test_allox_is_for_single_devices(pool: ClusterPool, job: MakeJob) -> None:
    with pytest.raises(HetflowError, match="asks for 2"):
        simulate_rounds([job(0, scale_factor=2)], pool, AlloX())


@settings(max_examples=examples(60))
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.floats(0, 100), min_size=5, max_size=5), min_size=n, max_size=n
        )
    )
)
def test_the_assignment_is_the_cheapest(cost: list[list[float]]) -> None:
    matrix = np.array(cost)
    rows, columns = assign(matrix)
    best = min(
        sum(matrix[row, column] for row, column in enumerate(chosen))
        for chosen in permutations(range(5), len(cost))
    )
    assert matrix[rows, columns].sum() == pytest.approx(best)


@pytest.fixture(scope="module")
def shared_table(table: Throughputs) -> Throughputs:
    """Two conv gain by sharing, two rnn lose, on either type."""
    pairs = tuple(
        PairThroughput(
            models=(model, model),
            steps_per_second={"fast": (part * fast,) * 2, "slow": (part * slow,) * 2},
        )
        for model, fast, slow, part in (("conv", 4.0, 1.0, 0.75), ("rnn", 2.0, 1.5, 0.4))
    )
    return Throughputs(models=table.models, pairs=pairs)


def active(table: Throughputs, devices: dict[str, int], jobs: list[Job]) -> Active:
    made = Active(ClusterPool(throughputs=table, num_devices=devices))
    made.add(jobs, 0.0)
    return made


def test_gandiva_packs_only_where_jobs_do_not_fit(shared_table: Throughputs, job: MakeJob) -> None:
    roomy = active(shared_table, {"fast": 2, "slow": 2}, [job(n) for n in range(4)])
    shares = Gandiva().allocate(roomy, 0.0)
    assert shares.pairs is None
    np.testing.assert_allclose(shares.x, 0.5)  # 2 / 4 of each type
    tight = active(shared_table, {"fast": 1}, [job(n) for n in range(4)])
    shares = Gandiva().allocate(tight, 0.0)
    assert shares.pairs is not None
    assert len(shares.pairs.a) == 2  # two pairs, half of the time each
    np.testing.assert_allclose(shares.pairs.time, 0.5)
    assert sorted([*shares.pairs.a, *shares.pairs.b]) == [0, 1, 2, 3]
    assert not shares.x.any()


def test_gandiva_keeps_pairs_that_gain_and_breaks_those_that_lose(
    shared_table: Throughputs, job: MakeJob
) -> None:
    gandiva = Gandiva()
    here = active(shared_table, {"fast": 1}, [job(n, model="conv") for n in range(6)])
    first = gandiva.allocate(here, 0.0).pairs
    second = gandiva.allocate(here, 0.0).pairs
    assert first is not None
    assert second is not None
    np.testing.assert_array_equal(first.a, second.a)
    np.testing.assert_array_equal(first.b, second.b)
    losing = Gandiva()
    here = active(shared_table, {"fast": 1}, [job(n, model="rnn") for n in range(6)])
    found = {tuple(losing.allocate(here, 0.0).pairs.b.tolist()) for _ in range(8)}  # type: ignore[union-attr]
    assert len(found) > 1  # it goes on exploring


def test_gandiva_of_the_published_code_adds_the_types_up(
    shared_table: Throughputs, job: MakeJob
) -> None:
    """Two rnn make 0.8 of one on either type: 1.6 in sum. One type less, and it sees the loss."""

    def partners(pool: dict[str, int]) -> set[tuple[int, ...]]:
        here = active(shared_table, pool, [job(n, model="rnn") for n in range(6)])
        gandiva = Gandiva(sums_types=True)
        return {tuple(gandiva.allocate(here, 0.0).pairs.b.tolist()) for _ in range(8)}  # type: ignore[union-attr]

    assert len(partners({"fast": 1, "slow": 1})) == 1
    assert len(partners({"fast": 1})) > 1


def test_gandiva_of_the_published_code_breaks_what_does_not_run_on_a_type(
    shared_table: Throughputs, job: MakeJob
) -> None:
    only_fast = tuple(
        replace(pair, steps_per_second={"fast": pair.steps_per_second["fast"]})
        for pair in shared_table.pairs
    )
    models = tuple(
        replace(entry, steps_per_second={"fast": entry.steps_per_second["fast"]})
        for entry in shared_table.models
    )
    here = active(
        replace(shared_table, models=models, pairs=only_fast),
        {"fast": 1, "slow": 1},
        [job(n, model="conv") for n in range(6)],
    )

    def partners(gandiva: Gandiva) -> set[tuple[int, ...]]:
        return {tuple(gandiva.allocate(here, 0.0).pairs.b.tolist()) for _ in range(8)}  # type: ignore[union-attr]

    assert len(partners(Gandiva())) == 1  # 1.5 of one alone
    assert len(partners(Gandiva(sums_types=True))) > 1


def test_fifo_and_static_priority(table: Throughputs, job: MakeJob) -> None:
    pool = ClusterPool(throughputs=table, num_devices={"fast": 1})
    jobs = [
        job(0, steps=1440.0),
        job(1, steps=1440.0, priority_weight=1.0),
        job(2, steps=1440.0, priority_weight=9.0),
    ]
    assert order(simulate_rounds(jobs, pool, allocator_named("fifo"), AT_ONCE)) == ["0", "1", "2"]
    first = allocator_named("static_priority")
    assert order(simulate_rounds(jobs, pool, first, AT_ONCE)) == ["2", "0", "1"]


def test_yarn_never_overtakes(job: MakeJob) -> None:
    models = (
        ModelThroughput(model="conv", scale_factor=n, steps_per_second={"fast": 1.0 * n})
        for n in (1, 2, 4)
    )
    table = Throughputs(models=tuple(models))
    jobs = [
        job(0, steps=1000.0, scale_factor=2),
        job(1, steps=4000.0, scale_factor=4),
        job(2, steps=10.0, scale_factor=2),
    ]
    case = Case(throughputs=table, num_devices={"fast": 4}, scheduler="yarn")
    ends = {done.id: done.finish_seconds for done in run_case(case, jobs).jobs}
    assert ends == pytest.approx({"0": 500.0, "1": 1500.0, "2": 1505.0})


@pytest.mark.parametrize(("policy", "within"), [("allox", 0.02), ("gandiva", 0.02)])
def test_agrees_with_the_published_simulator(gavel: Path, policy: str, within: float) -> None:
    rows = json.loads((gavel / "simulated.json").read_text())
    [row] = [r for r in rows if r["policy"] == policy and r["trace"].startswith("small")]
    table = read_gavel_throughputs(gavel / "throughputs" / "simulation_throughputs.json")
    case = Case(
        throughputs=table,
        num_devices={"v100": 4, "p100": 4, "k80": 4},
        scheduler="published-rounds",
        policy=policy,
    )
    run = run_case(case, read_gavel_trace(gavel / "traces" / row["trace"]))
    figures = report(case, run, row["trace"]).metrics
    assert figures.average_jct_seconds == pytest.approx(row["avg_jct_s"], rel=within)
    assert figures.utilisation == pytest.approx(row["utilization"], rel=2 * within)
