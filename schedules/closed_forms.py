"""What the papers say about a schedule in one line of algebra.

p is the pipeline-parallel size, m the number of microbatches, v the number of model chunks a
device holds. Stages, microbatches and versions count from 0. Sources: Narayanan's thesis 2.4.2,
2.4.3, 3.2.1, 4.2.2 and table 7.1.
"""

from collections.abc import Sequence


def in_flight(replicas: Sequence[int], stage: int) -> int:
    """Inputs in flight on one replica of a stage under 1F1B-RR.

    ceil(replicas of this stage and all after it / replicas of this stage); p - stage where no
    stage is replicated. Of the input stage it is NOAM (2.4.2). Also the number of weight versions
    that stashing keeps (table 7.1).

    Args:
        replicas: [stages] how many ranks hold each stage.
        stage: Which stage.
    """
    return -(-sum(replicas[stage:]) // replicas[stage])


def interleaved_warmup(
    pipeline_parallel_size: int, num_microbatches: int, num_model_chunks: int, position: int
) -> int:
    """Forward passes of chunks before the first backward pass under interleaved 1F1B.

    2 (p - position - 1) + (v - 1) p, at most all of them (Megatron-LM; figure 4.4).

    Args:
        pipeline_parallel_size: p.
        num_microbatches: m.
        num_model_chunks: v.
        position: The device's place in the pipeline.
    """
    ahead = 2 * (pipeline_parallel_size - position - 1)
    most = ahead + (num_model_chunks - 1) * pipeline_parallel_size
    return min(num_microbatches * num_model_chunks, most)


def stashing_version(replicas: Sequence[int], stage: int, microbatch: int) -> int:
    """The weight version a microbatch reads under weight stashing (2.4.3).

    max(0, k - (p - stage) + 1) without replicas. A replicated stage makes one version from one
    input on each replica, so its versions count rounds of inputs.
    """
    return max(0, microbatch // replicas[stage] - in_flight(replicas, stage) + 1)


def vertical_sync_version(pipeline_parallel_size: int, num_replicas: int, microbatch: int) -> int:
    """The weight version a microbatch reads on every stage under vertical sync (2.4.3).

    The latest at the input stage when it entered: max(0, k - p + 1).
    """
    return max(0, microbatch // num_replicas - pipeline_parallel_size + 1)


def double_buffered_version(microbatches_per_update: int, microbatch: int) -> int:
    """The weight version a microbatch reads in PipeDream-2BW: max(0, k // m - 1) (3.2.1)."""
    return max(0, microbatch // microbatches_per_update - 1)
