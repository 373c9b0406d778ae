"""Memory that no tensor may take: measured, asked for, counted, stated and judged."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hetflow
from hetflow.cli.main import app
from hetflow.planning.checks.profiled import parallel_faults, pipeline_faults, split_faults
from hetflow.planning.parallel_problem import parallel_problem
from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.planning.split_problem import split_problem
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.problem import Problem
from hetflow.schema.profile import (
    BatchPoint,
    BesideTensors,
    BusyHost,
    LayerGraph,
    LayerNode,
    LinkPoint,
    Links,
    Profile,
)

MIB = 1 << 20
CONTEXT, GROUP, CHANNEL = 30 * MIB, 8 * MIB, 2 * MIB


def profile(**changes: Any) -> Profile:
    layers = tuple(
        LayerNode(
            id=f"l{i}", op="Linear", forward_seconds=0.1, backward_seconds=0.2,
            activation_bytes=MIB, weight_bytes=4 * MIB,
        )
        for i in range(4)
    )  # fmt: skip
    edges = tuple((f"l{i}", f"l{i + 1}") for i in range(3))
    point = LinkPoint(num_bytes=1024, there_seconds=1e-4, back_seconds=1e-4, both_seconds=1e-4)
    made = Profile(
        model="m", device_type="V100", device_memory_bytes=200 * MIB, weight_bytes=16 * MIB,
        update_seconds=0.01, optimizer=named_optimizer("sgd"), base_memory_bytes=0,
        batch_curve=(
            BatchPoint(
                batch_size=4, step_seconds=0.4, peak_memory_bytes=60 * MIB,
                fragmentation_bytes=3 * MIB,
            ),
            BatchPoint(
                batch_size=8, step_seconds=0.6, peak_memory_bytes=100 * MIB,
                fragmentation_bytes=5 * MIB,
            ),
        ),
        layers=LayerGraph(microbatch_size=4, nodes=layers, edges=edges),
        links=Links(
            latency_seconds=1e-5, bytes_per_second=1e9, points=(point,), channel_bytes=CHANNEL
        ),
        beside_tensors=BesideTensors(context_bytes=CONTEXT, group_bytes=GROUP),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def sizes(pool: str, asked: int = 0, **changes: Any) -> list[int]:
    problem = split_problem(
        Problem([profile(**changes)], Cluster.parse(pool), 64, memory_reserve_bytes=asked)
    )
    (option,) = problem.devices
    return [point.batch_size for point in option.batch_curve]


def test_a_size_must_fit_beside_context_fragments_and_what_was_asked_for() -> None:
    # 100 MiB, 5 in fragments, 30 of context.
    assert sizes("V100:1:135MB") == [4, 8]
    assert sizes("V100:1:134MB") == [4]
    # A worker among others has a communicator too.
    assert sizes("V100:2:143MB") == [4, 8]
    assert sizes("V100:2:142MB") == [4]
    assert sizes("V100:1:135MB", asked=1) == [4]
    assert sizes("V100:1:100MB", beside_tensors=None) == [4]  # fragments count by themselves
    with pytest.raises(InfeasibleError, match="needs 97517569 bytes"):
        sizes("V100:1:92MB", asked=1)


def test_a_busy_host_s_peaks_hold_the_communicator_and_the_lone_device_s_do_not() -> None:
    made = profile()
    busy = BusyHost(num_devices=2, batch_curve=made.batch_curve, update_seconds=0.01)
    told = dataclasses.replace(made, busy=busy)
    (option,) = split_problem(Problem([told], Cluster.parse("V100:2:140MB"), 64)).devices
    assert [point.batch_size for point in option.batch_curve] == [4]
    assert option.alone is not None
    assert [point.batch_size for point in option.alone.batch_curve] == [4, 8]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_counts_a_channel_to_and_from_every_other_device(schedule: str) -> None:
    told, pool = profile(), Cluster.parse("3xV100")
    problem = pipeline_problem(
        Problem([told], pool, 8, memory_reserve_bytes=MIB), schedule=schedule
    )
    channels = 2 * (2 if schedule == "1f1b" else 4)
    base = CONTEXT + GROUP + channels * CHANNEL + 5 * MIB + MIB
    assert problem.pools[0].base_memory_bytes == base
    assert pipeline_faults(problem, Problem([told], pool, 8, memory_reserve_bytes=MIB)) == []
    (fault,) = pipeline_faults(problem, Problem([told], pool, 8))
    assert f"base_memory_bytes is {base}, the profiles give {base - MIB}" in fault
    alone = pipeline_problem(Problem([told], Cluster.parse("1xV100"), 8), schedule=schedule)
    assert alone.pools[0].base_memory_bytes == CONTEXT + 5 * MIB


def test_a_parallel_plan_s_reserve_is_judged_apart_from_the_problem() -> None:
    told, pool = profile(), Cluster.parse("2xV100")
    problem = parallel_problem(Problem([told], pool, 8, memory_reserve_bytes=7))
    assert problem.reserved_bytes == CONTEXT + GROUP + 2 * CHANNEL + 5 * MIB + 7
    assert parallel_faults(problem, Problem([told], pool, 8, memory_reserve_bytes=7)) == []
    (fault,) = parallel_faults(problem, Problem([told], pool, 8, memory_reserve_bytes=8))
    assert f"reserved_bytes is {problem.reserved_bytes}" in fault
    (fault,) = parallel_faults(
        problem,
        Problem(
            [dataclasses.replace(told, device_memory_bytes=1 << 30)],
            pool,
            8,
            memory_reserve_bytes=7,
        ),
    )
    assert "memory_bytes" in fault


def test_old_profiles_are_planned_as_before() -> None:
    old = profile(beside_tensors=None, batch_curve=profile().batch_curve[:1])
    (point,) = old.batch_curve
    old = dataclasses.replace(
        old, batch_curve=(dataclasses.replace(point, fragmentation_bytes=None),), links=None
    )
    again = files.from_json(files.to_json(old), Profile)
    assert again == old
    assert "beside_tensors" not in files.to_json(old)
    plan = hetflow.solve([old], "V100:1:60MB", batch_size=4, strategy="split")
    assert plan.reserves == ()


def is_refused(plan: Any, pool: str, **asked: Any) -> bool:
    try:
        return hetflow.check(plan, [profile()], pool, **asked) != []
    except InfeasibleError:
        return True


@pytest.mark.parametrize("strategy", ["split", "pipeline", "parallel"])
def test_a_plan_keeps_its_reserve_and_check_holds_it_to_it(strategy: Any) -> None:
    told = [profile()]
    plan = hetflow.solve(
        told, "2xV100", batch_size=8, strategy=strategy, memory_reserve_bytes=20 * MIB
    )
    (reserve,) = plan.reserves
    assert reserve.asked_bytes == 20 * MIB
    assert reserve.context_bytes == CONTEXT
    assert hetflow.check(plan, told, "2xV100") == []
    # Less memory than tensors and reserve take is refused, though the tensors would fit.
    assert is_refused(plan, "V100:2:62MB")
    assert is_refused(plan, "2xV100", memory_reserve_bytes=190 * MIB)


@pytest.mark.parametrize("strategy", ["split", "pipeline", "parallel"])
def test_device_types_are_planned_and_judged_in_any_case(strategy: Any) -> None:
    plan = hetflow.solve([profile()], "2xv100", batch_size=8, strategy=strategy)
    assert set(plan.devices_by_type) == {"V100"}
    assert hetflow.check(plan, [profile()], "2xv100") == []
    assert is_refused(plan, "v100:2:62MB", memory_reserve_bytes=20 * MIB)


def test_the_judge_of_splits_adds_it_up_by_itself() -> None:
    told, pool = profile(), Cluster.parse("V100:1:135MB")
    plan = hetflow.solve([told], pool, batch_size=8, strategy="split")
    assert plan.kind == "split"
    (group,) = plan.groups
    assert group.virtual_node_batch_size == 8
    assert split_faults(plan, Problem([told], pool, 8)) == []
    (fault,) = split_faults(plan, Problem([told], pool, 8, memory_reserve_bytes=3))
    assert "3 too many" in fault


def test_the_command_takes_an_amount_and_shows_what_stays_free(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    folder.mkdir()
    files.write(folder / "m.V100.json", profile())
    run, where = CliRunner(), str(tmp_path / "plan.json")
    asked = ["--profiles", str(folder), "--gpus", "2xV100"]
    more = ["--batch-size", "8", "--memory-reserve"]
    solved = run.invoke(app, ["solve", *asked, *more, "20MiB", "-o", where])
    assert solved.exit_code == 0, solved.output
    assert json.loads(Path(where).read_text())["reserves"][0]["asked_bytes"] == 20 * MIB
    assert run.invoke(app, ["check", where, *asked]).exit_code == 0
    tight = run.invoke(app, ["check", where, *asked, "--memory-reserve", "190MiB"])
    assert tight.exit_code != 0
    shown = run.invoke(app, ["show", where, "--explain"])
    assert "left free of tensors (context 30 MiB, communicators" in shown.output
    assert "asked for 20 MiB" in shown.output
    wrong = run.invoke(app, ["solve", *asked, *more, "much"])
    assert isinstance(wrong.exception, ProblemError)
    assert "'much': is not an amount of memory" in str(wrong.exception)
    with pytest.raises(ProblemError, match="memory_reserve_bytes"):
        hetflow.solve([profile()], "V100", batch_size=8, memory_reserve_bytes=-1)
