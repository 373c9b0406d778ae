"""Equations of PTD-P (thesis 4.2 to 4.5) that costs and schedules are compared with.

Symbols: p, t, d are the pipeline, tensor and data parallel sizes; B the global batch, b the
microbatch, m = B / (b d) the microbatches of a pipeline, v the model chunks a device; l layers of
hidden size h, sequences of s tokens, a vocabulary of V. Volumes are elements, not bytes.
"""

from math import sqrt

from hetflow.schema.parallel import Recompute


def bubble_of_data_parallel(
    num_devices: int, data_parallel_size: int, num_microbatches_of_batch: int
) -> float:
    """The bubble at t = 1, (n - d) / b' with b' = B / b; 4.3.3, figure 4.6."""
    return (num_devices - data_parallel_size) / num_microbatches_of_batch


def boundary_elements(
    microbatch_size: int, sequence_length: int, hidden_size: int, scattered_over: int = 1
) -> float:
    """Elements sent between two consecutive stages per microbatch and direction, b s h; 4.3.2.

    Args:
        microbatch_size: b.
        sequence_length: s, in tokens.
        hidden_size: h.
        scattered_over: t with the scatter/gather optimization (4.4.1), which sends b s h / t
            elements per device; 1 without it.
    """
    return microbatch_size * sequence_length * hidden_size / scattered_over


def tensor_parallel_elements(
    num_layers: int,
    microbatch_size: int,
    sequence_length: int,
    hidden_size: int,
    tensor_parallel_size: int,
) -> float:
    """Elements sent per device and microbatch in a stage, l_stage 8 b s h (t - 1) / t; 4.3.2.

    The communication of the tensor-parallel all-reduces of ``num_layers`` layers (l_stage).
    """
    share = (tensor_parallel_size - 1) / tensor_parallel_size
    return num_layers * 8 * microbatch_size * sequence_length * hidden_size * share


def data_parallel_elements(num_parameters: float, data_parallel_size: int) -> float:
    """Elements that a device sends in a ring all-reduce of gradients, 2 P (d - 1) / d; 4.3.3.

    Args:
        num_parameters: P, the parameters that the device holds.
        data_parallel_size: d.
    """
    return 2 * num_parameters * (data_parallel_size - 1) / data_parallel_size


def checkpointed_bytes(
    num_checkpoints: float, num_layers: int, input_bytes: float, intermediate_bytes: float
) -> float:
    """Activation bytes of a stage with c checkpoints, c A_input + l/c A_intermediate; 4.3.5."""
    return num_checkpoints * input_bytes + num_layers / num_checkpoints * intermediate_bytes


def best_num_checkpoints(num_layers: int, input_bytes: float, intermediate_bytes: float) -> float:
    """The c that minimises ``checkpointed_bytes``, sqrt(l A_intermediate / A_input); 4.3.5."""
    return sqrt(num_layers * intermediate_bytes / input_bytes)


def stage_activation_bytes(
    num_in_flight: int, input_bytes: float, stashed_bytes: float, *, recompute: bool
) -> float:
    """Activation bytes that a stage holds for its microbatches in flight; 4.2.2, 4.3.5.

    Without recomputation, every microbatch in flight keeps all its activations. With recomputation,
    each keeps only its input, and the one whose backward pass runs has all its activations too.

    Args:
        num_in_flight: Microbatches whose backward pass is outstanding.
        input_bytes: Bytes of the stage's input for one microbatch.
        stashed_bytes: Bytes of activations kept for the backward pass of one microbatch.
        recompute: Whether the stage recomputes activations.
    """
    if not recompute:
        return num_in_flight * stashed_bytes
    return num_in_flight * input_bytes + stashed_bytes


def selective_activation_bytes(num_in_flight: int, kept_bytes: float, core_bytes: float) -> float:
    """Activation bytes of a stage that recomputes attention cores; Korthikanti et al., 2022, 5.

    The paper leaves out the one core that a backward pass has made again.

    Args:
        num_in_flight: Microbatches whose backward pass is outstanding.
        kept_bytes: What one microbatch keeps beside the cores.
        core_bytes: Of the largest core.
    """
    return num_in_flight * kept_bytes + core_bytes


def transformer_layer_bytes(
    sequence_length: int,
    microbatch_size: int,
    hidden_size: int,
    num_heads: int,
    tensor_parallel_size: int = 1,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Activation bytes of a layer on each device, in 16 bits; Korthikanti et al., 2022, table 2.

    s b h (34 + 5 a s / h) on one device. A group of t devices shares 24 of the 34, and with
    sequence parallelism all. The attention core has the 5 a s / h: softmax, its dropout's mask, and
    its output after dropout. Without it 34 s b h are left; of a layer that is recomputed whole,
    its input.

    Args:
        sequence_length: s.
        microbatch_size: b.
        hidden_size: h.
        num_heads: a.
        tensor_parallel_size: t.
        sequence_parallel: Whether the devices of a group share the tokens between its layers.
        recompute: What the backward pass computes again.
    """
    s, b, h, a, t = sequence_length, microbatch_size, hidden_size, num_heads, tensor_parallel_size
    if recompute == "full":
        return float(2 * s * b * h)
    core = 0.0 if recompute == "selective" else 5 * a * s / h
    rest = 34 / t if sequence_parallel else 10 + 24 / t
    return s * b * h * (rest + core / t)


def num_parameters(
    num_layers: int, hidden_size: int, vocabulary_size: int, sequence_length: int
) -> float:
    """P = 12 l h^2 (1 + 13/(12h) + (V + s)/(12 l h)); equation 4.3."""
    h = hidden_size
    extra = 1 + 13 / (12 * h) + (vocabulary_size + sequence_length) / (12 * num_layers * h)
    return 12 * num_layers * h**2 * extra


def training_seconds(
    num_tokens: float, parameters: float, num_devices: int, flops_per_second: float
) -> float:
    """Seconds of a training run, 8 T P / (n X), with recomputation and P >> s, V; equation 4.4.

    Args:
        num_tokens: T.
        parameters: P.
        num_devices: n.
        flops_per_second: X, achieved by one device.
    """
    return 8 * num_tokens * parameters / (num_devices * flops_per_second)
