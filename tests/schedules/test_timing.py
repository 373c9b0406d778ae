"""What the timer does beyond the closed forms: transfers, reductions, pairs, bad input."""

from dataclasses import replace

import pytest

from hetflow.planning.schedules.counting import peak_weight_versions
from hetflow.planning.schedules.registry import generate
from hetflow.planning.schedules.timing import StageTimes, time_schedule
from hetflow.schema.errors import ProblemError
from hetflow.schema.schedule import PASSES, SENDS, Kind, Operation, Schedule, repeat


def test_one_microbatch_through_unlike_stages() -> None:
    """By hand: 2 + 1 + 3 forward, 5 + 4 + 6 backward and the transfers between them."""
    schedule = generate("1f1b", pipeline_parallel_size=2, num_microbatches=1)
    times = StageTimes(
        forward_seconds=(2, 3),
        backward_seconds=(6, 5),
        activation_seconds=(1,),
        gradient_seconds=(4,),
        update_seconds=(10, 20),
    )
    timing = time_schedule(schedule, times)
    assert timing.busy_seconds == (2 + 6 + 10, 3 + 5 + 20)
    assert timing.makespan_seconds == 2 + 1 + 3 + 5 + 20
    assert timing.spans[0][-1] == (2 + 1 + 3 + 5 + 4 + 6, 2 + 1 + 3 + 5 + 4 + 6 + 10)


def test_transfers_overlap_with_passes() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=4)
    timing = time_schedule(schedule, StageTimes.uniform(2, 1, 2, transfer_seconds=1))
    forward_ends = [
        span[1]
        for op, span in zip(schedule.ranks[0], timing.spans[0], strict=True)
        if op.kind is Kind.FORWARD
    ]
    assert forward_ends == [1, 2, 3, 4]
    assert timing.makespan_seconds == 15 + 2


def test_a_slow_link_carries_one_message_at_a_time() -> None:
    schedule = generate("gpipe", pipeline_parallel_size=2, num_microbatches=3)
    times = StageTimes(forward_seconds=(1, 1), backward_seconds=(1, 1), activation_seconds=(5,))
    timing = time_schedule(schedule, times)
    sends = [
        span
        for op, span in zip(schedule.ranks[0], timing.spans[0], strict=True)
        if op.kind in SENDS
    ]
    assert sends == [(1, 6), (6, 11), (11, 16)]
    assert timing.makespan_seconds == 16 + 1 + 3 + 1


def test_waiting_for_replicas_costs_what_it_costs() -> None:
    """2-1-1 reaches a pace of 3 only where the two replicas need not wait for each other."""
    schedule = generate(
        "pipedream", pipeline_parallel_size=3, num_microbatches=60, replicas=(2, 1, 1)
    )
    times = StageTimes(forward_seconds=(2, 1, 1), backward_seconds=(4, 2, 2))
    assert time_schedule(schedule, times).steady_seconds_per_microbatch == 3
    waiting = time_schedule(schedule, replace(times, reduce_seconds=(0, 0, 0)))
    assert waiting.steady_seconds_per_microbatch == 4.5
    costly = time_schedule(schedule, replace(times, reduce_seconds=(2, 0, 0)))
    assert costly.steady_seconds_per_microbatch == 5.5


def test_an_overlapped_pair_starts_and_ends_together() -> None:
    """DualPipe hands on neither result of a pair before both passes are done."""
    schedule = generate("dualpipe", pipeline_parallel_size=2, num_microbatches=8)
    timing = time_schedule(schedule, StageTimes.uniform(2, 1, 2))
    pairs = 0
    for operations, spans in zip(schedule.ranks, timing.spans, strict=True):
        for at, op in enumerate(operations[:-2]):
            following = operations[at + 1]
            if op.kind is not Kind.FORWARD or following.kind is not Kind.BACKWARD:
                continue
            for later in range(at + 2, len(operations)):
                send = operations[later]
                if (send.kind, send.microbatch) == (Kind.SEND_ACTIVATION, op.microbatch):
                    assert spans[later][0] == spans[at + 1][1]
                    pairs += 1
    assert pairs > 0


def test_flushed_batches_do_not_overlap_but_on_zero_bubble_spans() -> None:
    """A further 1F1B batch costs a full makespan; ZB-H2's fit together without a gap."""
    for name, gap in (("1f1b", 9), ("zb-h2", 0)):
        schedule = generate(name, pipeline_parallel_size=4, num_microbatches=8)
        times = StageTimes.uniform(4, 1, 2)
        once = time_schedule(schedule, times).makespan_seconds
        twice = time_schedule(repeat(schedule, 2), times).makespan_seconds
        assert twice - once == 24 + gap


def test_utilisation_and_bubbles() -> None:
    schedule = generate("1f1b", pipeline_parallel_size=4, num_microbatches=8)
    timing = time_schedule(schedule, StageTimes.uniform(4, 1, 2))
    assert timing.utilisation == (24 / 33,) * 4
    assert timing.bubble_fraction == 9 / 24
    assert timing.span_bubble_fractions == (9 / 33, 6 / 30, 3 / 27, 0)


def test_one_microbatch_has_no_steady_state() -> None:
    schedule = generate("pipedream", pipeline_parallel_size=2, num_microbatches=1)
    timing = time_schedule(schedule, StageTimes.uniform(2, 1, 2))
    assert timing.steady_seconds_per_microbatch == timing.makespan_seconds == 6


def test_weight_versions_are_those_of_the_neediest_stage() -> None:
    """One rank holds a stage that updates under way and one that does not."""

    def op(kind: Kind, stage: int, microbatch: int, version: int) -> Operation:
        return Operation(kind=kind, stage=stage, microbatch=microbatch, weight_version=version)

    first = [op(Kind.FORWARD, 0, 0, 0), op(Kind.BACKWARD, 0, 0, 0), op(Kind.UPDATE, 0, 0, 1)]
    second = [
        op(Kind.FORWARD, 1, 0, 0),
        op(Kind.UPDATE, 1, 0, 1),
        op(Kind.FORWARD, 1, 1, 1),
        op(Kind.UPDATE, 1, 1, 2),
        op(Kind.BACKWARD, 1, 0, 0),
        op(Kind.BACKWARD, 1, 1, 1),
        op(Kind.UPDATE, 1, 2, 3),
    ]
    schedule = Schedule(
        name="mine",
        placement=((0,), (0,)),
        num_microbatches=2,
        weight_semantics="stashing",
        ranks=((*first, *second),),
    )
    assert peak_weight_versions(schedule) == (3,)


def test_split_backward_passes_default_to_halves() -> None:
    schedule = generate("zb-h1", pipeline_parallel_size=1, num_microbatches=2)
    timing = time_schedule(schedule, StageTimes.uniform(1, 1, 3))
    lengths = {
        op.kind: end - start
        for op, (start, end) in zip(schedule.ranks[0], timing.spans[0], strict=True)
        if op.kind in PASSES
    }
    assert lengths == {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: 1.5, Kind.BACKWARD_WEIGHT: 1.5}


def test_a_deadlock_is_an_error_that_names_the_rank() -> None:
    schedule = generate("1f1b", pipeline_parallel_size=2, num_microbatches=2)
    broken = replace(schedule, ranks=((), schedule.ranks[1]))
    with pytest.raises(ProblemError, match="rank 1 waits for ever in receive_activation"):
        time_schedule(broken, StageTimes.uniform(2, 1, 2))


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"backward_seconds": (1.0,)}, "backward_seconds has 1 entries for 2 stages"),
        ({"activation_seconds": (1.0, 2.0)}, "activation_seconds has 2 entries .* give 1"),
        ({"forward_seconds": (float("nan"), 1.0)}, "must be finite and >= 0, got nan"),
        ({"update_seconds": (-1.0, 1.0)}, "update_seconds must be finite and >= 0, got -1.0"),
        ({"backward_weight_seconds": (3.0, 1.0)}, "at most 2.0"),
    ],
)
def test_bad_times(times: dict[str, tuple[float, ...]], words: str) -> None:
    good = {"forward_seconds": (1.0, 1.0), "backward_seconds": (2.0, 2.0)}
    with pytest.raises(ProblemError, match=words):
        StageTimes(**(good | times))


def test_times_for_another_number_of_stages() -> None:
    schedule = generate("interleaved", pipeline_parallel_size=2, num_microbatches=2,
                        num_model_chunks=2)  # fmt: skip
    with pytest.raises(ProblemError, match="times for 2 stages do not fit a schedule of 4"):
        time_schedule(schedule, StageTimes.uniform(2, 1, 2))
