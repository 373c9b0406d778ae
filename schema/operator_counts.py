"""What a model's passes compute and move, by operator: counted without running them."""

from typing import Literal

from .layer_trace import LayerTrace
from .optimizer import OptimizerState
from .records import Bytes, Count, Name, NonNegative, record

TensorRole = Literal["replicated", "column", "row", "vocabulary", "sharded"]
"""What a tensor-parallel group does with a layer (thesis 4.2.3).

Every device computes it whole; its products are split by columns or rows, its embedding by rows of
the vocabulary; or it only reads what is split.
"""


@record
class Operator:
    """Equal calls of one operator.

    Args:
        name: As torch names it.
        dtype: Of its first floating-point input or output.
        flops: Floating-point operations of one call that matrix units can do: products and
            convolutions, a multiplication and an addition counted apart; 0 for all others.
        num_bytes: Of its distinct inputs and outputs, each read or written once.
        count: How many such calls.
    """

    name: Name
    dtype: Name
    flops: NonNegative
    num_bytes: Bytes
    count: Count = 1

    @property
    def is_convolution(self) -> bool:
        """Whether torch's switch for convolutions, not that for products, sets its precision."""
        return "conv" in self.name


@record
class PassCounts:
    """One pass of the whole model with its loss, at one batch size.

    ``kept_bytes`` is what is allocated when the forward pass ends, ``peak_bytes`` the most at any
    time, both beyond weights, buffers, gradients, optimizer state and the batch itself, which is
    ``batch_bytes``.
    """

    batch_size: Count
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    kept_bytes: Bytes
    peak_bytes: Bytes
    batch_bytes: Bytes


@record
class LayerCounts:
    """One layer's passes; bytes as ``LayerNode`` has them.

    ``whole_weight_bytes`` of ``weight_bytes`` every device of a tensor-parallel group holds.
    """

    id: Name
    op: str
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    activation_bytes: Bytes
    weight_bytes: Bytes
    stashed_bytes: Bytes
    workspace_bytes: Bytes
    shared_with: tuple[Name, ...] = ()
    shared_weight_bytes: Bytes | None = None
    role: TensorRole = "replicated"
    whole_weight_bytes: Bytes = 0


@record
class LayerTable:
    """The layers at one microbatch size, what flows between them, and the whole pass."""

    whole: PassCounts
    layers: tuple[LayerCounts, ...]
    edges: tuple[tuple[str, str], ...]
    trace: LayerTrace


@record
class ModelCounts:
    """A model's training, counted.

    ``standing_bytes`` are the weights, buffers, gradients and optimizer state that are there
    between two steps; ``update_workspace_bytes`` what an update allocates besides.
    ``tensor_divisor`` is what tensor-parallel degrees must divide; None where no group can share
    the layers, and ``no_tensor_reason`` says why.
    """

    weight_bytes: Bytes
    num_parameters: Count
    standing_bytes: Bytes
    optimizer: OptimizerState
    update: tuple[Operator, ...]
    update_workspace_bytes: Bytes
    passes: tuple[PassCounts, ...]
    tables: tuple[LayerTable, ...] = ()
    torch: str = ""
    tensor_divisor: Count | None = None
    no_tensor_reason: str | None = None
