"""What the papers say of a schedule's bubble in one line of algebra.

p is the pipeline-parallel size, m the number of microbatches, v the number of model chunks a device
holds. Sources: Narayanan's thesis 4.2.2; Qi et al., "Zero Bubble Pipeline Parallelism", table 2.
"""

from fractions import Fraction


def gpipe_bubble(pipeline_parallel_size: int, num_microbatches: int) -> Fraction:
    """Idle over ideal time of GPipe and of 1F1B with flushes: (p - 1) / m (thesis 4.2.2)."""
    return Fraction(pipeline_parallel_size - 1, num_microbatches)


def interleaved_bubble(
    pipeline_parallel_size: int, num_microbatches: int, num_model_chunks: int
) -> Fraction:
    """Idle over ideal time of interleaved 1F1B: (p - 1) / (v m) (thesis 4.2.2)."""
    return Fraction(pipeline_parallel_size - 1, num_microbatches * num_model_chunks)


def zero_bubble_h1_idle_seconds(
    pipeline_parallel_size: int,
    forward_seconds: float,
    backward_input_seconds: float,
    backward_weight_seconds: float,
) -> float:
    """Idle time on a rank's own span under ZB-H1: (p - 1)(T_F + T_B - T_W) (Qi et al., table 2).

    Of the first rank's, for T_W <= T_F. ZB-H2 has none where T_F = T_B = T_W.
    """
    return (pipeline_parallel_size - 1) * (
        forward_seconds + backward_input_seconds - backward_weight_seconds
    )
