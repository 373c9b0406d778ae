"""Closed formulas of the papers for in-flight microbatches, warm-up and steps.

p is the pipeline-parallel size, m the number of microbatches, v the number of model chunks per
device. Stages and microbatches are counted from 0. Sources: Narayanan's thesis 2.4.2, 4.2.2 and
table 7.1.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Inputs in flight on one replica of a stage under 1F1B-RR.

    ceil(replicas of this stage and all after it / replicas of this stage), which is p - stage if
    no stage is replicated. For the input stage this is NOAM (2.4.2). It is also the number of
    weight versions that stashing keeps (table 7.1).

    ``replicas`` [stages] are the numbers of ranks that hold each stage.
    """
    return -(-sum(replicas[stage:]) // replicas[stage])


class LastStages(NamedTuple):
    """The stages of a 1F1B pipeline from some stage on, in seconds; also arrays of alternatives."""

    step_seconds: Any = 0.0
    """What the passes and messages of a step take, as if the pipeline began here."""
    trip_seconds: Any = 0.0
    """What one microbatch takes there and back, alone."""
    slowest_seconds: Any = 0.0
    """The longest stage of one microbatch, or message."""
    own_seconds: Any = 0.0
    """The passes of a microbatch on the first of them."""


def one_f_one_b_from(
    behind: LastStages,
    own_seconds: Any,
    message_seconds: Any,
    num_in_flight: int,
    num_microbatches: int,
) -> LastStages:
    """Put a stage before the last stages of a pipeline under 1F1B, whose passes hide messages.

    The step is the longest of several chains of passes and messages, on any stage. Where messages
    take no time it is the sum of all stages and m - 1 times the slowest: equation 4.1, if stages
    are equal.

    Args:
        behind: The stages behind it; ``LastStages()`` for none.
        own_seconds: The passes of a microbatch on the stage.
        message_seconds: One message to the next stage; the one back takes as long.
        num_in_flight: k, the stages from this one on; at most m.
        num_microbatches: m.
    """
    import numpy as np  # takes longer to import than `hetflow show` of a split

    # The first microbatch goes there and back; m - 1 more follow.
    trips, rest = divmod(num_microbatches - 1, num_in_flight)
    both = 2 * message_seconds
    trip = behind.trip_seconds + both + own_seconds
    slowest = np.maximum(behind.slowest_seconds, np.maximum(own_seconds, message_seconds))
    # Each takes the passes of the stage, or a message on its link.
    longest = (num_microbatches - 1) * np.maximum(own_seconds, message_seconds)
    # Or, as no more than k are in flight, each k of them take a round trip.
    more = np.maximum(longest, trips * trip + rest * slowest)
    # Or each two take a trip to the next stage, where one less is in flight, and the last k a
    # whole one.
    if num_microbatches > num_in_flight:
        pairs, rest = divmod(num_microbatches - 1 - num_in_flight, 2)
        next_trip = own_seconds + both + behind.own_seconds
        more = np.maximum(more, trip + pairs * next_trip + rest * own_seconds)
    through = behind.step_seconds + both + own_seconds
    return LastStages(np.maximum(through, trip + more), trip, slowest, own_seconds)


def one_f_one_b_seconds(
    stage_seconds: Sequence[float], message_seconds: Sequence[float], num_microbatches: int
) -> float:
    """The passes and messages of a step of 1F1B, as ``one_f_one_b_from`` counts them.

    Args:
        stage_seconds: [stages] passes of one microbatch.
        message_seconds: [stages - 1] of one message to the next stage.
        num_microbatches: m of the pipeline.
    """
    found, p = LastStages(), len(stage_seconds)
    for number in reversed(range(p)):
        message = message_seconds[number] if number + 1 < p else 0.0
        in_flight = min(p - number, num_microbatches)
        found = one_f_one_b_from(found, stage_seconds[number], message, in_flight, num_microbatches)
    return float(found.step_seconds)


def interleaved_warmup(
    pipeline_parallel_size: int, num_microbatches: int, num_model_chunks: int, position: int
) -> int:
    """Number of chunks' forward passes before the first backward pass under interleaved 1F1B.

    2 (p - position - 1) + (v - 1) p, at most all of them (Megatron-LM; figure 4.4).

    p is ``pipeline_parallel_size``, v ``num_model_chunks``; ``position`` is the device's in the
    pipeline, from 0.
    """
    ahead = 2 * (pipeline_parallel_size - position - 1)
    most = ahead + (num_model_chunks - 1) * pipeline_parallel_size
    return min(num_microbatches * num_model_chunks, most)


@lru_cache(maxsize=4096)
def interleaved_in_flight(
    pipeline_parallel_size: int, num_microbatches: int, num_model_chunks: int, position: int
) -> tuple[tuple[int, ...], ...]:
    """What a device holds at its fullest under interleaved 1F1B: microbatches of each chunk.

    Several answers, [answers][chunks]: which one takes the most memory depends on the chunks. An
    answer that holds no more of any chunk than another is left out.

    ``num_microbatches`` is a multiple of ``pipeline_parallel_size``; ``position`` is the device's
    in the pipeline, from 0.
    """
    p, v = pipeline_parallel_size, num_model_chunks
    m = min(num_microbatches, 3 * p)  # the order repeats itself from group to group
    warmup, held = interleaved_warmup(p, m, v, position), [0] * v
    # After each forward pass, from the warm-up on, the device is as full as it gets.
    found = set()
    for number in range(m * v):
        held[number % (p * v) // p] += 1
        if number >= warmup or number == m * v - 1:
            found.add(tuple(held))
        # Backward passes take the chunks in the opposite order.
        if number >= warmup:
            held[v - 1 - (number - warmup) % (p * v) // p] -= 1
    # One that holds no more of any chunk than another is never the fullest.
    return tuple(
        one
        for one in sorted(found)
        if not any(
            other != one and all(a <= b for a, b in zip(one, other, strict=True)) for other in found
        )
    )
