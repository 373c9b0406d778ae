"""Seconds of a stage's messages and all-reduces, with pipeline, tensor and data parallelism."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...schema.layers import unit_of
from ...schema.parallel import CostRule, LinkCurve, ParallelProblem, Recompute
from .comm import collective_seconds
from .sharding import owners_seconds


def bubble_fraction(
    pipeline_parallel_size: int, num_microbatches: int, num_model_chunks: int = 1
) -> float:
    """Idle time over ideal time of a pipeline that flushes, (p - 1) / (v m); 4.2.2."""
    return (pipeline_parallel_size - 1) / (num_model_chunks * num_microbatches)


def bucketed_ring_seconds(
    gradient_bytes: float, num_replicas: int, curve: LinkCurve, bucket_bytes: int | None
) -> float:
    """Seconds of a ring all-reduce in buckets; thesis 4.3.3.

    Each bucket takes 2(d - 1) messages of 1/d of its bytes.

    Args:
        gradient_bytes: Bytes of gradients on one device of each replica.
        num_replicas: d.
        curve: Bandwidth of the slowest link of the ring.
        bucket_bytes: Largest size of a bucket; None reduces everything at once.
    """
    if num_replicas < 2:
        return 0.0
    whole, rest = 0.0, gradient_bytes
    if bucket_bytes is not None:
        whole, rest = divmod(gradient_bytes, bucket_bytes)
    full = collective_seconds("all-reduce", bucket_bytes or 0, num_replicas, curve)
    return whole * full + collective_seconds("all-reduce", rest, num_replicas, curve)


def ring_rounds(problem: ParallelProblem) -> int:
    """How often gradients go round the ring of replicas: once where only one gets each sum."""
    return 2 if problem.shard in (None, "optimizer") else 1


def gather_ratio(problem: ParallelProblem) -> float:
    """Seconds in which replicas send each other what each has updated, over those of their sums.

    That is an all-gather of as many bytes as were summed (ZeRO-1): one more round of the ring.
    Weights that are shared are not sent when they are updated.
    """
    return 0.0 if problem.shard in (None, "all") else 1 / ring_rounds(problem)


class SharedUnits(NamedTuple):
    """What stages [starts, ends] have of units that share their weights; empty stages nothing.

    Each repeated layer is gathered and reduced by itself, in every pass. The rest is whole during a
    step. ``gathered_bytes`` are whole at a time: the rest, and the two largest repeated layers.
    """

    layer_bytes: np.ndarray
    num_layers: np.ndarray
    largest_bytes: np.ndarray
    rest_bytes: np.ndarray
    gathered_bytes: np.ndarray


@lru_cache(maxsize=64)
def shared_units(layers: tuple[str, ...], weight_bytes: tuple[int, ...]) -> SharedUnits:
    """The units of all stages of these layers, of which several may be in one repeated layer."""
    size = len(layers) + 1
    tables = SharedUnits(*(np.zeros((size, size)) for _ in SharedUnits._fields))
    units = [unit_of(name) for name in layers]
    held = {unit: np.zeros(size) for unit in units}  # [starts] bytes so far
    number = {unit: place for place, unit in enumerate(held)}
    repeated, rest, count, largest, second = np.zeros((5, size))
    owner = np.full(size, -1)  # the largest repeated layer
    for place, (unit, added) in enumerate(zip(units, weight_bytes, strict=True)):
        more = (np.arange(size) <= place) * added
        if unit:
            now = held[unit]
            count += (now == 0) & (more > 0)
            now += more
            repeated += more
            ahead = np.maximum(second, np.minimum(now, largest))
            second = np.where(owner == number[unit], second, ahead)
            owner = np.where(now > largest, number[unit], owner)
            largest = np.maximum(largest, now)
        else:
            rest += more
        columns = repeated, count, largest, rest, rest + largest + second
        for table, column in zip(tables, columns, strict=True):
            table[:, place + 1] = column
    return tables


def shared_seconds(
    units: SharedUnits, num_replicas: int, links: Sequence[LinkCurve]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of transfers of stages [starts, ends] that share weights.

    Args:
        units: Of the device's tensor-parallel degree.
        num_replicas: d, which share them.
        links: Those that the replicas cross, of one rate each; the slowest counts.

    Returns:
        To gather all repeated layers once, which is as long as to reduce their gradients; to gather
        the largest; and what a step adds: the rest gathered and reduced, and the last reduction.
    """
    layers, number, largest, rest, _ = units

    def slowest(num_bytes: np.ndarray, num_units: np.ndarray) -> np.ndarray:
        taken: np.ndarray = np.max(
            [
                owners_seconds(
                    num_bytes, num_units, num_replicas, link.latency_seconds, link.coefficients[0]
                )
                for link in links
            ],
            axis=0,
        )
        return taken

    once = slowest(2 * rest + largest, 2 * (rest > 0) + (largest > 0))
    return slowest(layers, number), slowest(largest, largest > 0), once


def shared_pass_seconds(
    forward: Any, backward: Any, gather: Any, first: Any, *, recompute: Recompute
) -> Any:
    """What transfers of shared weights add to a microbatch's passes on a stage.

    A forward pass gathers each repeated layer, one ahead of what runs. A backward pass gathers it
    again, once more where all is recomputed, and reduces its gradient. Each takes the longer of
    itself and its transfers; nothing hides the first gather.

    ``backward`` holds what is recomputed; all repeated layers are gathered in ``gather`` seconds,
    the largest of them in ``first``.
    """
    back = (3 if recompute == "full" else 2) * gather
    return np.maximum(gather - forward, 0.0) + np.maximum(back - backward, 0.0) + first


def transfer_seconds(
    rule: CostRule,
    *,
    output_seconds: float,
    gradient_seconds: float,
    is_first: bool,
    is_last: bool,
    num_stages: int,
) -> float:
    """Seconds of a stage's messages for one microbatch.

    With ``hetflow``, a stage sends its output to the next stage and its input's gradient to the
    previous one. With ``sailor``, inner stages do the same. The last stage counts its gradient
    twice, and with more than three stages the first counts its output twice, as Sailor's simulator
    does.
    """
    if is_first and is_last:
        return 0.0
    if is_first:
        return output_seconds * (2 if rule == "sailor" and num_stages > 3 else 1)
    if is_last:
        return gradient_seconds * (2 if rule == "sailor" else 1)
    return output_seconds + gradient_seconds


def interleaved_step_seconds(
    num_microbatches: int,
    pipeline_parallel_size: int,
    num_model_chunks: int,
    chunk_seconds: float,
    update_seconds: list[float],
    reduce_seconds: list[float],
    message_seconds: float = 0.0,
) -> float:
    """Seconds of a step of interleaved 1F1B, as if all chunks were as slow as the slowest.

    (v m + p - 1) passes of a chunk: the bubble is (p - 1) / (v m) of the step without it (4.2.2).
    If chunks are unlike, the passes take no longer than this, as long as the chunk with the longest
    forward pass has the longest backward pass too. Passes hide all messages but those of the first
    microbatch on its way there and of the last one back, if none takes longer than a forward pass.

    Args:
        num_microbatches: m of each pipeline.
        pipeline_parallel_size: p, positions of the pipeline.
        num_model_chunks: v, chunks per position.
        chunk_seconds: Compute of one microbatch in the slowest chunk.
        update_seconds: [positions] optimizer update of all chunks; the longest counts.
        reduce_seconds: [positions] all-reduces of all chunks' gradients; the longest counts.
        message_seconds: Of one microbatch from the first chunk to the last, and back.
    """
    passes = num_model_chunks * num_microbatches + pipeline_parallel_size - 1
    return passes * chunk_seconds + message_seconds + max(update_seconds) + max(reduce_seconds)
