"""A fault in the solvers' counters, timer or terms makes no wrong plan valid."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

from hetflow.checks.pipeline import check
from hetflow.schedules import counting, terms
from hetflow.schedules.operations import Schedule
from hetflow.schedules.replay import flush_step_seconds
from hetflow.schedules.timing import Timing, time_schedule
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.solvers.pipeline import prediction
from hetflow.solvers.pipeline.makespan import bound
from hetflow.solvers.pipeline.solve import solve
from hetflow.solvers.pipeline.uniform import option

searched = importlib.import_module("hetflow.solvers.pipeline.uniform.solve")
POOL = DevicePool(
    device_type="V100",
    levels=(TopologyLevel(num_components=2, bytes_per_second=1e9),),
    forward_seconds=(0.1,) * 4,
    backward_seconds=(0.2,) * 4,
    update_seconds=0.05,
    pass_seconds=0.02,
)


def asked(schedule: str) -> PipelineProblem:
    return PipelineProblem(
        model="m",
        layers=tuple(
            PipelineLayer(id=f"l{n}", activation_bytes=10 << 20, weight_bytes=1 << 20)
            for n in range(4)
        ),
        pools=(POOL,),
        microbatch_size=1,
        num_microbatches=8,
        optimizer=OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0),
        schedule=schedule,
        replication=False,
        message_seconds=0.001,
    )


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_memory_is_counted_apart(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = asked(schedule)
    assert check(solve(problem), problem) == []

    def halved(lists: Schedule) -> tuple[tuple[int, int], ...]:
        return tuple(((held + 1) // 2, 1) for held, _ in counting.held_by_stage(lists))

    monkeypatch.setattr(searched, "held_by_stage", halved)
    faults = check(solve(problem), problem)
    assert any("memory_bytes is" in fault for fault in faults), faults


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
def test_parts_are_taken_apart(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = asked(schedule)

    def shifted(*given: Any) -> Any:
        found = terms.step_terms(*given)
        assert found is not None
        more = found.layer_seconds / 10
        return replace(
            found, layer_seconds=found.layer_seconds - more, pass_seconds=found.pass_seconds + more
        )

    monkeypatch.setattr(prediction, "step_terms", shifted)
    faults = check(solve(problem), problem)
    assert any("virtual_node_seconds is" in fault for fault in faults), faults


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-v"])
def test_steps_are_timed_apart(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = asked(schedule)

    def hasty(*given: Any) -> Timing:
        found = time_schedule(*given)
        return replace(found, makespan_seconds=found.makespan_seconds * 0.9)

    for module in (option, terms):
        monkeypatch.setattr(module, "time_schedule", hasty)
    faults = check(solve(problem), problem)
    assert any("predicted.step_seconds is" in fault for fault in faults), faults


def test_the_replay_is_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = asked("1f1b")

    def hasty(*given: Any) -> float:
        return flush_step_seconds(*given) * 0.9

    for module in (bound, prediction):
        monkeypatch.setattr(module, "flush_step_seconds", hasty)
    faults = check(solve(problem), problem)
    assert any("predicted.step_seconds is" in fault for fault in faults), faults
