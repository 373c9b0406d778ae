"""A fault in the solvers' counters, timer or terms makes no wrong plan valid."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.checks import tampered

from hetflow.planning.checks.pipeline import check
from hetflow.planning.schedules import counting, terms
from hetflow.planning.schedules.replay import flush_step_seconds
from hetflow.planning.schedules.timing import Timing, time_schedule
from hetflow.schema.errors import BackendError
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.parallel import LinkCurve
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.plan import ReplicaGroup
from hetflow.schema.schedule import HeldMoment, Schedule
from hetflow.solvers.parallel import pareto
from hetflow.solvers.pipeline import prediction, uniform
from hetflow.solvers.pipeline import step_sums as bound
from hetflow.solvers.pipeline.solve import solve

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


def _half(held: HeldMoment) -> HeldMoment:
    return held._replace(in_flight=(held.in_flight + 1) // 2)


def _with_gradients(held: HeldMoment) -> HeldMoment:
    return held._replace(has_gradients=True)


@pytest.mark.parametrize("otherwise", [_half, _with_gradients])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "zb-h2", "zb-v"])
def test_memory_is_counted_apart(
    schedule: str,
    otherwise: Callable[[HeldMoment], HeldMoment],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few microbatches most are in flight before there are gradients."""
    pool = replace(POOL, copies_messages=True)
    problem = replace(asked(schedule), num_microbatches=2, pools=(pool,))
    assert check(solve(problem), problem) == []

    def fewer(lists: Schedule) -> tuple[tuple[counting.DeviceMoment, ...], ...]:
        return tuple(
            tuple(one._replace(held=tuple(map(otherwise, one.held))) for one in moments)
            for moments in counting.moments_by_rank(lists)
        )

    monkeypatch.setattr(uniform, "moments_by_rank", fewer)
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

    for module in (uniform, terms):
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


@pytest.mark.parametrize("factor", [0.8, 1.25])
@pytest.mark.slow
def test_messages_of_parallel_plans_are_timed_apart(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curve's seconds were a method of its record, which the solver and the judge both called."""
    true = LinkCurve.seconds
    monkeypatch.setattr(LinkCurve, "seconds", lambda *given: true(*given) * factor)
    with pytest.raises(BackendError, match="transfer_seconds is"):
        solved("parallel")


def test_devices_of_a_topology_are_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    true = DevicePool.num_devices.fget
    assert true is not None
    monkeypatch.setattr(DevicePool, "num_devices", property(lambda pool: true(pool) + 1))
    with pytest.raises(BackendError, match="is held, the last is 1"):
        solved("1f1b")


def test_what_devices_cost_is_counted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ReplicaGroup.num_devices.fget
    assert true is not None
    monkeypatch.setattr(ReplicaGroup, "num_devices", property(lambda group: true(group) + 1))
    with pytest.raises(BackendError, match="dollars_per_hour is"):
        solved("parallel")


def test_other_points_of_the_pareto_table_are_judged_when_they_are_solved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were added to a parallel plan after its check."""
    true = pareto.alternatives

    def slower(*given: Any) -> Any:
        found = true(*given)
        return tuple(
            replace(one, predicted=replace(one.predicted, step_seconds=9.0)) for one in found
        )

    monkeypatch.setattr("hetflow.solvers.parallel.pareto.alternatives", slower)
    with pytest.raises(BackendError, match=r"alternatives\[0\]: predicted.step_seconds is 9"):
        solved("parallel")


def solved(name: str) -> Any:
    """Solve a question of the campaign anew, with whatever is planted."""
    tampered.answer.cache_clear()
    try:
        return tampered.answer(name).plan
    finally:
        tampered.answer.cache_clear()
