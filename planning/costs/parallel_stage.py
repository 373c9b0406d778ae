"""Seconds of a stage's messages and all-reduces, with pipeline, tensor and data parallelism."""

from ...schema.parallel import CostRule, LinkCurve, ParallelProblem
from .comm import collective_seconds


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
    return 1 if problem.shard_gradients else 2


def gather_ratio(problem: ParallelProblem) -> float:
    """Seconds in which replicas send each other what each has updated, over those of their sums.

    That is an all-gather of as many bytes as were summed (ZeRO-1): one more round of the ring.
    """
    return 1 / ring_rounds(problem) if problem.shard_optimizer else 0.0


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

    Args:
        rule: Which convention to follow.
        output_seconds: Seconds to send the output.
        gradient_seconds: Seconds to send the input's gradient.
        is_first: Whether it is the first stage.
        is_last: Whether it is the last stage.
        num_stages: p, stages of the pipeline.
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
) -> float:
    """Seconds of a step of interleaved 1F1B, as if all chunks were as slow as the slowest.

    (v m + p - 1) passes of a chunk: the bubble is (p - 1) / (v m) of the step without it (4.2.2).
    If chunks are unlike, the passes take no longer than this, as long as the chunk with the longest
    forward pass has the longest backward pass too.

    Args:
        num_microbatches: m of each pipeline.
        pipeline_parallel_size: p, positions of the pipeline.
        num_model_chunks: v, chunks per position.
        chunk_seconds: Compute and messages of one microbatch in the slowest chunk.
        update_seconds: [positions] optimizer update of all chunks; the longest counts.
        reduce_seconds: [positions] all-reduces of all chunks' gradients; the longest counts.
    """
    passes = num_model_chunks * num_microbatches + pipeline_parallel_size - 1
    return passes * chunk_seconds + max(update_seconds) + max(reduce_seconds)
