"""Closed forms of PTD-P (thesis 4.2 to 4.5), which planners do not use.

Symbols: B is the global batch, b the microbatch, b' = B / d of d replicas, p the pipeline's size; l
layers of hidden size h, sequences of s tokens, a vocabulary of V.
"""


def batch_seconds(
    microbatches_of_pipeline: float,
    pipeline_parallel_size: int,
    forward_seconds: float,
    backward_seconds: float,
) -> float:
    """Compute seconds of a batch, (b'/b + p - 1) (t_f(b) + t_b(b)); equation 4.1.

    Args:
        microbatches_of_pipeline: b'/b, where b' = B / d.
        pipeline_parallel_size: p.
        forward_seconds: t_f(b) of a stage.
        backward_seconds: t_b(b) of a stage.
    """
    passes = microbatches_of_pipeline + pipeline_parallel_size - 1
    return passes * (forward_seconds + backward_seconds)


def flops_per_batch(
    global_batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocabulary_size: int,
) -> float:
    """F = 96 B s l h^2 (1 + s/(6h) + V/(16 l h)), recomputation included; equation 4.2."""
    h = hidden_size
    extra = 1 + sequence_length / (6 * h) + vocabulary_size / (16 * num_layers * h)
    return 96 * global_batch_size * sequence_length * num_layers * h**2 * extra


def flops_without_full_recomputation(
    global_batch_size: int,
    sequence_length: int,
    num_layers: int,
    hidden_size: int,
    vocabulary_size: int,
    *,
    selective: bool,
) -> float:
    """Floating-point operations of a batch without full recomputation; counted as in 4.5.1.

    A sample's forward and backward passes of a layer take 3 (24 s h^2 + 4 s^2 h) operations, those
    of the logits 6 s h V.

    Args:
        global_batch_size: B.
        sequence_length: s.
        num_layers: l.
        hidden_size: h.
        vocabulary_size: V.
        selective: Whether the products of the attention's core, 4 s^2 h, are recomputed.
    """
    core = 4 * sequence_length**2 * hidden_size
    layer = 3 * (24 * sequence_length * hidden_size**2 + core) + (core if selective else 0)
    logits = 6 * sequence_length * hidden_size * vocabulary_size
    return float(global_batch_size * (num_layers * layer + logits))
