"""What a plan keeps, counted part by part, and that solvers and judges count apart."""

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from hetflow.planning.checks.batch_split import check as split_faults
from hetflow.planning.checks.pipeline import check
from hetflow.planning.costs import comm
from hetflow.planning.costs import pipeline as costs
from hetflow.planning.schedules.of_plan import schedule_of
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.optimizer import OptimizerState, named_optimizer
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync
from hetflow.solvers.pipeline.solve import solve
from hetflow.solvers.split import solve as batch_split

MB = 10**6


def problem(optimizer: OptimizerState, memory_bytes: int, **changes: object) -> PipelineProblem:
    """Four layers of 100 MB of weights and 10 MB of activations on two devices."""
    layers = tuple(
        PipelineLayer(id=f"l{i}", activation_bytes=10 * MB, weight_bytes=100 * MB) for i in range(4)
    )
    pool = DevicePool(
        device_type="V100",
        levels=(TopologyLevel(num_components=2, bytes_per_second=1e9),),
        forward_seconds=(1.0,) * 4,
        backward_seconds=(2.0,) * 4,
        memory_bytes=memory_bytes,
        workspace_bytes=5 * MB,
    )
    made = PipelineProblem(
        model="m", layers=layers, pools=(pool,), microbatch_size=1, num_microbatches=4,
        optimizer=optimizer, replication=False, num_stages=2,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


# Two stages of 200 MB, 1F1B: the first has two microbatches of 20 MB in flight. Copies of the
# weights: a version, the gradients, and what the optimizer keeps; 2BW keeps a version more, and
# receives 10 MB a microbatch on the second.
@pytest.mark.parametrize(
    ("schedule", "name", "expected"),
    [
        ("1f1b", "sgd", [2 * 200 + 40, 2 * 200 + 30]),
        ("1f1b", "sgd-momentum", [3 * 200 + 40, 3 * 200 + 30]),
        ("1f1b", "adamw", [4 * 200 + 40, 4 * 200 + 30]),
        ("gpipe", "adam", [4 * 200 + 80, 4 * 200 + 120]),
        ("2bw", "adam", [5 * 200 + 40, 5 * 200 + 30]),
        ("pipedream", "adam", [5 * 200 + 40, 4 * 200 + 30]),
    ],
)
def test_the_optimizer_s_state_is_counted_once(
    schedule: str, name: str, expected: list[int]
) -> None:
    asked = problem(named_optimizer(name), 10**10, schedule=schedule)
    plan = solve(asked)
    assert [stage.memory_bytes for stage in plan.stages] == [part * MB for part in expected]
    assert plan.optimizer == asked.optimizer
    assert check(plan, asked) == []


# Two stages as above with Adam, and one of 400 MB on both devices, of which each has one microbatch
# in flight.
@pytest.mark.parametrize(
    ("takes", "two", "alone"),
    [
        ({}, [4 * 200 + 40, 4 * 200 + 30], 4 * 400 + 40),
        # In an update there are no activations.
        ({"update_bytes_per_weight_byte": 1.0}, [5 * 200, 5 * 200], 5 * 400),
        # But samples of two microbatches: the last, and the next step's first.
        (
            {"update_bytes_per_weight_byte": 1.0, "sample_bytes": 10 * MB},
            [5 * 200 + 20, 5 * 200 + 20],
            5 * 400 + 20,
        ),
        # Stages without other replicas and tied weights sum nothing. At the first of four layers
        # the gradients of three wait, and its own output is kept.
        ({"waiting_bytes": 25 * MB}, [4 * 200 + 40, 4 * 200 + 30], 4 * 400 + 40 + 25),
        ({"waiting_bytes": 999 * MB}, [4 * 200 + 40, 4 * 200 + 30], 4 * 400 + 10 + 300),
        # Of four microbatches. With two in flight 3 outputs; with one in flight 2 gradients.
        ({"copies_messages": True}, [4 * 200 + 40 + 30, 4 * 200 + 30 + 20], 4 * 400 + 40),
        # The layers behind have freed what they kept: 20 and 60 at the second, 10 and 90 at the
        # first of the first stage.
        (
            {"layer_workspace_bytes": tuple(MB * each for each in (90, 60, 10, 10))},
            [4 * 200 + 20 + 100, 4 * 200 + 30 + 10],
            4 * 400 + 100,
        ),
    ],
)
def test_what_is_there_for_a_while_is_counted(
    takes: dict[str, Any], two: list[int], alone: int
) -> None:
    asked = problem(named_optimizer("adam"), 10**10, sample_bytes=takes.get("sample_bytes", 0))
    takes = {"base_memory_bytes": 0, "workspace_bytes": 0, **takes}
    takes.pop("sample_bytes", None)
    asked = dataclasses.replace(asked, pools=(dataclasses.replace(asked.pools[0], **takes),))
    on_both = dataclasses.replace(asked, num_stages=1, replication=True, workers="exactly")
    for each, expected in ((asked, two), (on_both, [alone])):
        plan = solve(each)
        assert [stage.memory_bytes for stage in plan.stages] == [part * MB for part in expected]
        assert check(plan, each) == []


def test_a_stage_keeps_no_output_that_only_a_later_one_saves() -> None:
    """Of 10 MB that a layer keeps the next one saves 6; weights are padded, buffers there twice."""
    asked = problem(named_optimizer("sgd"), 10**10)
    layers = tuple(
        dataclasses.replace(
            layer,
            saved_later=((place + 1, 6 * MB),) if place < 3 else (),
            padding_bytes=MB,
            buffer_bytes=place * MB,
            statistics_bytes=place * MB,
        )
        for place, layer in enumerate(asked.layers)
    )
    asked = dataclasses.replace(asked, layers=layers)
    plan = solve(asked)
    # 1F1B: the first has two microbatches in flight, both have four in a step.
    expected = [2 * 202 + 2 * (20 - 6) + (2 + 4) * 1, 2 * 202 + 20 + 10 + (2 + 4) * 5]
    assert [stage.memory_bytes for stage in plan.stages] == [part * MB for part in expected]
    assert check(plan, asked) == []


def test_a_plan_for_sgd_is_no_plan_for_adam() -> None:
    tight = problem(named_optimizer("sgd"), 500 * MB)
    plan = solve(tight)
    assert check(plan, tight) == []
    with_adam = dataclasses.replace(tight, optimizer=named_optimizer("adam"))
    faults = check(plan, with_adam)
    assert "memory is planned for sgd (0 bytes of state a byte of weights)" in faults[0]
    said = "stage 0 needs 845000000 bytes on a V100 of 500000000: 345000000 too many"
    assert said in check(dataclasses.replace(plan, optimizer=None), with_adam)
    with pytest.raises(InfeasibleError) as refused:
        solve(with_adam)
    # What a device needs and has is all of it, what is set aside for workspace included.
    assert "bytes (5000000 of them for workspace) on a V100 of 500000000" in str(refused.value)


def with_base(asked: PipelineProblem, base: int | None) -> PipelineProblem:
    pools = tuple(dataclasses.replace(pool, base_memory_bytes=base) for pool in asked.pools)
    return dataclasses.replace(asked, pools=pools)


def test_a_stage_s_memory_is_its_worker_s_peak_where_the_base_was_measured() -> None:
    asked = problem(named_optimizer("sgd"), 10**10)
    bare = [stage.memory_bytes for stage in solve(asked).stages]
    for base in (0, 300 * MB):
        told = with_base(asked, base)
        plan = solve(told)
        assert [stage.memory_bytes for stage in plan.stages] == [b + base + 5 * MB for b in bare]
        assert check(plan, told) == []
        assert "stage 0: memory_bytes is" in check(plan, asked)[0]
        assert "stage 0: memory_bytes is" in check(solve(asked), told)[0]


def test_the_base_counts_against_the_device_once() -> None:
    """The heavier stage needs 440 MB, 5 MB are for workspace; the base leaves too little."""
    asked = problem(named_optimizer("sgd"), 500 * MB)
    assert check(solve(with_base(asked, 55 * MB)), with_base(asked, 55 * MB)) == []
    said = r"needs \d+ bytes \(5000000 of them for workspace, 56000000 of them before there is a "
    with pytest.raises(InfeasibleError, match=said):
        solve(with_base(asked, 56 * MB))
    plan = solve(with_base(asked, 55 * MB))
    faults = check(plan, with_base(asked, 56 * MB))
    assert any("stage 0 needs 501000000 bytes on a V100 of 500000000" in f for f in faults)


def test_stages_on_one_device_count_its_base_once() -> None:
    asked = problem(named_optimizer("sgd"), 10**10, schedule="interleaved", num_stages=None)
    told = with_base(asked, 300 * MB)
    bare, plan = solve(asked), solve(told)
    added = [
        whole.memory_bytes - own.memory_bytes
        for whole, own in zip(plan.stages, bare.stages, strict=True)
    ]
    assert added == [305 * MB] * 4  # each states what its device holds
    assert check(plan, told) == []


def test_stages_on_one_device_are_counted_at_the_same_moment() -> None:
    """Replayed pass by pass; a launch asks of each worker's device what all its stages take."""
    sgd, samples = named_optimizer("sgd"), 4 * MB
    asked = problem(
        sgd, 10**10, schedule="interleaved", num_stages=None, num_microbatches=8,
        sample_bytes=samples,
    )  # fmt: skip
    plan = solve(asked)
    assert check(plan, asked) == []
    for rank, operations in enumerate(schedule_of(plan).ranks):
        flying: list[tuple[int, int]] = []
        most = 0
        for one in operations:
            if one.kind == "forward":
                flying.append((one.stage, one.microbatch))
            # What a stage keeps of a microbatch, its input where it was sent; samples once.
            kept = sum(10 * MB * (2 if stage else 1) for stage, _ in flying)
            most = max(most, kept + samples * (len({number for _, number in flying}) + 1))
            if one.kind == "backward":
                flying.remove((one.stage, one.microbatch))
        filled = 2 * 200 * MB + most
        assert [plan.stages[n].memory_bytes for n in (rank, rank + 2)] == [filled, filled]
        assert lower(plan).workers[rank].memory_bytes == filled


@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1"])
def test_equal_replicas_say_what_the_nearest_plan_lacks(schedule: str) -> None:
    asked = problem(named_optimizer("adam"), 700 * MB, schedule=schedule, num_stages=None)
    with pytest.raises(InfeasibleError, match=r"needs \d+ bytes .* on a V100 of 700000000, \d+"):
        solve(asked)


def broken_everywhere(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, wrong: Callable[[Any], Any]
) -> None:
    """Make one equation of costs wrong wherever it was imported to."""
    right = getattr(module, name)
    for other in list(sys.modules.values()):
        if other.__name__.startswith("hetflow.") and getattr(other, name, None) is right:
            monkeypatch.setattr(other, name, lambda *a, **named: wrong(right(*a, **named)))


@pytest.mark.parametrize(
    ("name", "wrong", "fault"),
    [
        ("replica_bytes", lambda found: found + 1000, "memory_bytes is"),
        (
            "held_moments",
            lambda found: found[1:] or (found[0]._replace(sent=0),),
            "memory_bytes is",
        ),
        ("kept_per_weight_byte", lambda found: found - 2, "memory_bytes is"),
        ("num_in_flight", lambda found: found + 1, "memory_bytes is"),
        ("weight_versions", lambda found: found + 1, "memory_bytes is"),
        ("collective_seconds", lambda found: 2 * found, "reduce_seconds is"),
        ("boundary_seconds", lambda found: 3 * found, "output_seconds is"),
        ("noam", lambda found: found + 1, "noam is"),
        ("worker_bytes", lambda found: found + 1000, "memory_bytes is"),
    ],
)
def test_an_error_in_a_pipeline_s_costs_does_not_reach_its_judge(
    name: str, wrong: Callable[[Any], Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = problem(named_optimizer("adam"), 10**10, schedule="pipedream", workers="exactly")
    levels = (TopologyLevel(num_components=4, bytes_per_second=1e8),)
    pools = (dataclasses.replace(asked.pools[0], levels=levels, copies_messages=True),)
    asked = dataclasses.replace(asked, pools=pools, replication=True)
    assert check(solve(asked), asked) == []
    broken_everywhere(monkeypatch, costs, name, wrong)
    assert any(fault in found for found in check(solve(asked), asked))


@pytest.mark.parametrize("name", ["collective_seconds", "sync_seconds"])
def test_an_error_in_a_split_s_costs_does_not_reach_its_judge(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = BatchPoint(batch_size=4, step_seconds=1.0, peak_memory_bytes=1)
    option = DeviceOption(
        device_type="V100",
        num_devices=4,
        batch_curve=(point,),
        update_seconds=0.1,
        weight_bytes=10**8,
        sync=Sync(num_devices=2, sync_seconds=0.1, latency_seconds=1e-3, bytes_per_second=1e10),
    )
    asked = SplitProblem(model="m", global_batch_size=16, devices=(option,))
    assert split_faults(batch_split.solve(asked), asked) == []
    broken_everywhere(monkeypatch, comm, name, lambda found: 1.01 * found)
    faults = split_faults(batch_split.solve(asked), asked)
    assert any("predicted.sync_seconds is" in fault for fault in faults)
