"""The judge accepts what the generators make, and finds what is broken on purpose."""

from collections.abc import Callable
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.formats.reports.timeline import from_text
from hetflow.planning.checks.schedule import validate
from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.timing import StageTimes, time_schedule
from hetflow.schema.schedule import PASSES, RECEIVES, SENDS, Kind, Operation, Schedule, repeat
from hetflow.tests.profiles import examples

UNLIKE_REPLICAS = ["gpipe", "1f1b", "pipedream", "2bw"]
LIKE_REPLICAS = ["pipedream-vertical-sync", "interleaved", "zb-h1", "zb-h2", "zb-v"]
SINGLE = ["dualpipe", "dualpipe-v"]


@st.composite
def schedules(draw: st.DrawFn, largest: int = 6) -> Schedule:
    """Any schedule of any legal shape."""
    name = draw(st.sampled_from(UNLIKE_REPLICAS + LIKE_REPLICAS + SINGLE))
    p = draw(st.integers(1, largest))
    extra: dict[str, int] = {}
    replicas = [1] * p
    if name in UNLIKE_REPLICAS:
        replicas = draw(st.lists(st.integers(1, 4), min_size=p, max_size=p))
    if name in LIKE_REPLICAS:
        replicas = [draw(st.integers(1, 3))] * p
    m = draw(st.integers(1, 20))
    if name == "2bw":
        least = max(-(-sum(replicas[s:]) // replicas[s]) * replicas[s] for s in range(p))
        extra["microbatches_per_update"] = least + draw(st.integers(0, 5))
        m = extra["microbatches_per_update"] * draw(st.integers(1, 4))
    if name == "interleaved":
        extra["num_model_chunks"] = draw(st.integers(1, 4))
        m = p * replicas[0] * draw(st.integers(1, 4))
    if name.startswith("zb-"):
        m += p * replicas[0]
    if name == "dualpipe":
        p += p % 2
        m = 2 * (p + m)
    if name == "dualpipe-v":
        m += 2 * p
    return generate(
        name,
        pipeline_parallel_size=p,
        num_microbatches=m,
        replicas=None if name in SINGLE else replicas,
        **extra,
    )


@settings(max_examples=examples(150))
@given(schedules())
def test_every_generated_schedule_is_sound(schedule: Schedule) -> None:
    assert validate(schedule) == []


@settings(max_examples=examples(60))
@given(schedules(4), st.data())
def test_generated_schedules_end_under_any_times(schedule: Schedule, data: st.DataObject) -> None:
    seconds = st.lists(
        st.integers(1, 9), min_size=schedule.num_stages, max_size=schedule.num_stages
    )
    times = StageTimes(
        forward_seconds=tuple(data.draw(seconds)),
        backward_seconds=tuple(data.draw(seconds)),
        activation_seconds=tuple(data.draw(seconds)[1:]),
        gradient_seconds=tuple(data.draw(seconds)[1:]),
        update_seconds=tuple(data.draw(seconds)),
        reduce_seconds=tuple(data.draw(seconds)),
    )
    timing = time_schedule(schedule, times)
    assert max(timing.busy_seconds) <= timing.makespan_seconds
    free = replace(times, activation_seconds=None, gradient_seconds=None)
    assert time_schedule(schedule, free).makespan_seconds <= timing.makespan_seconds
    causes_come_first(timing.schedule, timing.spans)


def causes_come_first(
    schedule: Schedule, spans: tuple[tuple[tuple[float, float], ...], ...]
) -> None:
    """From the definition: a pass starts after the passes whose results it needs have ended."""
    ends: dict[tuple[str, int, int], float] = {}
    starts: dict[tuple[str, int, int], float] = {}
    for operations, of_rank in zip(schedule.ranks, spans, strict=True):
        free = 0.0
        for op, (start, end) in zip(operations, of_rank, strict=True):
            if op.kind in PASSES or op.kind in (Kind.UPDATE, Kind.REDUCE):
                assert start >= free
                free = end
            if op.kind is Kind.FORWARD:
                ends["F", op.stage, op.microbatch] = end
                starts["F", op.stage, op.microbatch] = start
            if op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                ends["B", op.stage, op.microbatch] = end
                starts["B", op.stage, op.microbatch] = start
    for (letter, stage, k), start in starts.items():
        if letter == "F" and stage:
            assert start >= ends["F", stage - 1, k]
        if letter == "B":
            assert start >= ends["F", stage, k]
            if stage + 1 < schedule.num_stages:
                assert start >= ends["B", stage + 1, k]


def changed(schedule: Schedule, rank: int, operations: list[Operation]) -> Schedule:
    ranks = list(schedule.ranks)
    ranks[rank] = tuple(operations)
    return replace(schedule, ranks=tuple(ranks))


def places(schedule: Schedule, wanted: Callable[[Operation], bool]) -> list[tuple[int, int]]:
    return [
        (rank, at)
        for rank, operations in enumerate(schedule.ranks)
        for at, operation in enumerate(operations)
        if wanted(operation)
    ]


@settings(max_examples=examples(120))
@given(schedules(4), st.data())
def test_an_operation_left_out_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank, at = data.draw(st.sampled_from(places(schedule, lambda op: True)))
    operations = list(schedule.ranks[rank])
    del operations[at]
    assert validate(changed(schedule, rank, operations)) != []


@settings(max_examples=examples(120))
@given(schedules(4), st.data())
def test_an_operation_done_twice_is_found(schedule: Schedule, data: st.DataObject) -> None:
    rank, at = data.draw(st.sampled_from(places(schedule, lambda op: True)))
    operations = list(schedule.ranks[rank])
    operations.insert(at, operations[at])
    assert validate(changed(schedule, rank, operations)) != []


@settings(max_examples=examples(120))
@given(schedules(4), st.data())
def test_a_wrong_weight_version_is_found(schedule: Schedule, data: st.DataObject) -> None:
    versioned = places(schedule, lambda op: op.weight_version is not None)
    rank, at = data.draw(st.sampled_from(versioned))
    operations = list(schedule.ranks[rank])
    version = operations[at].weight_version
    assert version is not None
    operations[at] = replace(
        operations[at], weight_version=version + data.draw(st.sampled_from([-1, 1]))
    )
    assert validate(changed(schedule, rank, operations)) != []


@settings(max_examples=examples(120))
@given(schedules(4), st.data())
def test_use_before_arrival_and_sending_before_making_are_found(
    schedule: Schedule, data: st.DataObject
) -> None:
    transfers = places(schedule, lambda op: op.peer is not None)
    if not transfers:
        return
    rank, at = data.draw(st.sampled_from(transfers))
    operations = list(schedule.ranks[rank])
    moved = operations.pop(at)
    if moved.kind in RECEIVES:
        operations.append(moved)
    else:
        operations.insert(0, moved)
    assert validate(changed(schedule, rank, operations)) != []


@settings(max_examples=examples(80))
@given(schedules(4), st.data())
def test_messages_out_of_order_are_found(schedule: Schedule, data: st.DataObject) -> None:
    """Two receives of one channel change places: both passes still have their input."""
    candidates = [
        (rank, first, second)
        for rank, operations in enumerate(schedule.ranks)
        for first, a in enumerate(operations)
        for second, b in enumerate(operations)
        if first < second and a.kind in RECEIVES and (a.kind, a.peer) == (b.kind, b.peer)
    ]
    if not candidates:
        return
    rank, first, second = data.draw(st.sampled_from(candidates))
    operations = list(schedule.ranks[rank])
    operations[first], operations[second] = operations[second], operations[first]
    assert validate(changed(schedule, rank, operations)) != []


def test_channel_faults_say_what_is_wrong() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=2)
    operations = list(schedule.ranks[1])
    first, second = (i for i, op in enumerate(operations) if op.kind is Kind.RECEIVE_ACTIVATION)
    swapped = operations.copy()
    swapped[first], swapped[second] = swapped[second], swapped[first]
    wrong_order = (
        "rank 0 sends activations to rank 1 in another order than they are received "
        "(2 sent, 2 received)"
    )
    assert wrong_order in validate(changed(schedule, 1, swapped))
    del operations[second]
    missing = "rank 0 sends activations to rank 1 that are not all received (2 sent, 1 received)"
    assert missing in validate(changed(schedule, 1, operations))


def test_waiting_in_a_circle_is_a_deadlock() -> None:
    """Rank 0 waits for a gradient before it sends the activation that it comes from."""
    schedule = generate("1f1b", pipeline_parallel_size=2, num_microbatches=4)
    operations = list(schedule.ranks[0])
    at = next(i for i, op in enumerate(operations) if op.kind is Kind.RECEIVE_GRADIENT)
    operations.insert(0, operations.pop(at))
    faults = validate(changed(schedule, 0, operations))
    assert any(fault.startswith("deadlock: rank 0 waits for ever in receive") for fault in faults)
    assert any(fault.startswith("deadlock: rank 1") for fault in faults)


def test_replicas_that_reduce_in_different_order_deadlock() -> None:
    schedule = generate("interleaved", pipeline_parallel_size=1, num_microbatches=4,
                        num_model_chunks=2, replicas=[2])  # fmt: skip
    operations = list(schedule.ranks[0])
    first, second = (i for i, op in enumerate(operations) if op.kind is Kind.REDUCE)
    operations[first], operations[second] = operations[second], operations[first]
    assert any("deadlock" in fault for fault in validate(changed(schedule, 0, operations)))


@pytest.mark.parametrize("name", ["pipedream", "pipedream-vertical-sync", "2bw"])
def test_stale_weights_read_consistently_are_found(name: str) -> None:
    """Every pass of one microbatch reads one version less: consistent, and against the rules."""
    schedule = generate(name, pipeline_parallel_size=2, num_microbatches=12)

    def staler(operation: Operation) -> Operation:
        if operation.kind in PASSES and operation.microbatch == 9:
            return replace(operation, weight_version=(operation.weight_version or 0) - 1)
        return operation

    ranks = tuple(tuple(map(staler, operations)) for operations in schedule.ranks)
    bounds_off = replace(schedule, ranks=ranks, max_weight_versions=None)
    faults = validate(bounds_off)
    assert len(faults) == 2
    assert all("demands version" in fault for fault in faults)


def test_stashing_is_no_vertical_sync() -> None:
    schedule = generate("pipedream", pipeline_parallel_size=3, num_microbatches=9)
    assert validate(replace(schedule, weight_semantics="vertical-sync")) != []
    assert validate(replace(schedule, weight_semantics="double-buffered")) != []
    assert validate(replace(schedule, weight_semantics="flush")) != []


def test_broken_promises_are_found() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=4)
    assert "rank 0 holds 4 activations, more than the promised 3" in validate(
        replace(schedule, max_in_flight=(3, 4))
    )
    stashing = generate("pipedream", pipeline_parallel_size=2, num_microbatches=8)
    assert "rank 0 holds 2 weight versions, more than the promised 1" in validate(
        replace(stashing, max_weight_versions=(1, 1))
    )
    assert validate(replace(schedule, max_in_flight=(4,))) == [
        "1 promised numbers of activations for 2 ranks"
    ]


def test_an_update_amid_a_batch_is_found() -> None:
    """A flush with an update moved before the last backward pass."""
    schedule = generate("1f1b", pipeline_parallel_size=1, num_microbatches=3)
    operations = list(schedule.ranks[0])
    operations.insert(-1, operations.pop())
    assert operations[-2].kind is Kind.UPDATE
    assert any("lacks the gradients" in f for f in validate(changed(schedule, 0, operations)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stage", 1, "does not hold the stage"),
        ("microbatch", 7, "there are 2 microbatches"),
        ("peer", 5, "peer 5"),
        ("weight_version", None, "weight version None"),
    ],
)
def test_nonsense_is_named(field: str, value: int | None, words: str) -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=2)
    operations = list(schedule.ranks[0])
    assert operations[0].kind is Kind.FORWARD
    operations[0] = replace(operations[0], **{field: value})
    faults = validate(changed(schedule, 0, operations))
    assert len(faults) == 1
    assert words in faults[0]


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_cannot_be_is_named(peer: int) -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=1)
    operations = list(schedule.ranks[0])
    assert operations[1].kind is Kind.SEND_ACTIVATION
    operations[1] = replace(operations[1], peer=peer)
    assert validate(changed(schedule, 0, operations)) == [
        f"rank 0: send activation of stage 0, microbatch 0: no other rank {peer}"
    ]


def test_a_placement_without_ranks_is_named() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=2)
    assert validate(replace(schedule, placement=((0,), ())))[0].startswith("stage 1 stands on")
    assert validate(replace(schedule, placement=((0,), (1, 1))))[0].startswith("stage 1 stands on")


def test_a_schedule_of_nothing_is_named() -> None:
    words = "a schedule needs at least one stage and one microbatch"
    schedule = generate("gpipe", pipeline_parallel_size=1, num_microbatches=1)
    assert words in validate(replace(schedule, num_microbatches=0))
    assert validate(replace(schedule, placement=(), ranks=())) == [words]


def test_replicas_that_update_over_unlike_rounds_are_found() -> None:
    """The second replica joins two rounds in one; both cover every microbatch."""
    schedule = generate("pipedream", pipeline_parallel_size=1, num_microbatches=4, replicas=[2])
    rounds = [op for op in schedule.ranks[1] if op.kind in (Kind.REDUCE, Kind.UPDATE)]
    passes = [replace(op, weight_version=0) for op in schedule.ranks[1] if op not in rounds]
    joined = [replace(op, num_microbatches=4) for op in rounds[:2]]
    assert any("deadlock" in f for f in validate(changed(schedule, 1, passes + joined)))


def test_sends_name_the_rank_that_needs_them() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=4, replicas=[1, 2])
    operations = list(schedule.ranks[0])
    at = next(i for i, op in enumerate(operations) if op.kind in SENDS)
    operations[at] = replace(operations[at], peer=2 if operations[at].peer == 1 else 1)
    assert validate(changed(schedule, 0, operations)) != []


@settings(max_examples=examples(40))
@given(schedules(4), st.integers(2, 4))
def test_batches_repeat(schedule: Schedule, times: int) -> None:
    if schedule.weight_semantics != "flush":
        return
    longer = repeat(schedule, times)
    assert validate(longer) == []
    assert longer.num_microbatches == times * schedule.num_microbatches
    last = max(op.weight_version or 0 for op in longer.ranks[0] if op.kind is Kind.UPDATE)
    assert last == times


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 3))
def test_every_update_is_a_round_of_the_replicas(replicas: list[int], rounds: int) -> None:
    n = lcm(*replicas) * rounds
    schedule = generate(
        "pipedream", pipeline_parallel_size=len(replicas), num_microbatches=n, replicas=replicas
    )
    for operations, stages in zip(schedule.ranks, schedule.stages_of_rank, strict=True):
        count = replicas[stages[0]]
        updates = [op for op in operations if op.kind is Kind.UPDATE]
        assert [op.weight_version for op in updates] == list(range(1, n // count + 1))
        assert {op.num_microbatches for op in updates} == {count}


def test_a_custom_order_that_cannot_work_is_refused() -> None:
    lines = ["F0 F1 BW0 BW1", "F0 BW0 BW1 F1"]
    schedule = from_text("mine", lines, placement=((0,), (1,)), num_microbatches=2)
    assert validate(schedule) == [
        "rank 1: backward of stage 1, microbatch 1 before forward of stage 1, microbatch 1"
    ]
