"""A model's layers: how they were found (the runtime repeats it), and what their passes compute."""

import json
import re
from dataclasses import field
from typing import Any, Literal

from .errors import ProblemError
from .optimizer import OptimizerState
from .options import Activations
from .records import Bytes, Count, Index, Name, NonNegative, adapter_of, record

TraceWay = Literal["fx", "export", "hooks"]
_REPEATED = re.compile(r"(.*?(?:^|[._])\d+)(?:[._]|$)")


@record
class TracedInput:
    """Shape (batch dimension first) and dtype of a tensor that the model was called with."""

    name: Name
    shape: tuple[Index, ...]
    dtype: Name


@record
class LayerTrace:
    """How a model was split into layers, and why the preferred ways failed.

    Args:
        way: ``fx`` (torch.fx) is tried first, then ``export`` (torch.export), then ``hooks`` on
            modules.
        inputs: With ``export``, the tensors that the model is called with.
        constants: With ``export``, the other arguments of the call.
        reason: Why the ways tried before failed.
    """

    way: TraceWay
    inputs: tuple[TracedInput, ...] = ()
    constants: dict[str, bool | int | float | str | None] | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.way == "export" and not self.inputs:
            raise ProblemError("a trace by export names the model's inputs")

    @property
    def obstacle(self) -> str | None:
        """Why pipelines of these layers cannot be launched; None if they can."""
        if self.way != "hooks":
            return None
        return (
            "found by hooks: can be profiled and planned, not launched, because "
            f"{self.reason or 'nothing says how the model was traced'}"
        )


def cannot_spread(trace: LayerTrace | None) -> bool:
    """Whether stages of these layers cannot spread tokens (sequence parallelism)."""
    return trace is not None and trace.way == "export"


def trace_of(plain: dict[str, Any]) -> LayerTrace:
    """Rebuild a trace from the dict that another process sent."""
    trace: LayerTrace = adapter_of(LayerTrace).validate_json(json.dumps(plain))
    return trace


def unit_of(name: str) -> str:
    """The repeated layer that a layer or module is in, by its name; empty for the rest.

    ``blocks.3.attention`` is in ``blocks.3``. Shared states are gathered by such units.
    """
    found = _REPEATED.match(name)
    return found[1] if found else ""


TensorRole = Literal["replicated", "column", "row", "vocabulary", "sharded"]
"""How a tensor-parallel group computes a layer (thesis 4.2.3).

``replicated``: every device computes all of it. ``column``, ``row``: its matrix product is split
by columns or by rows. ``vocabulary``: its embedding is split by rows of the vocabulary.
``sharded``: it has no split weights itself, but its inputs are split.
"""


@record
class Operator:
    """Equal calls of one operator.

    Args:
        name: The operator's name in torch.
        dtype: Type of its first floating-point input or output.
        flops: Floating-point operations of one call that matrix units can do (products and
            convolutions; a multiplication and an addition are two operations); 0 for all others.
        num_bytes: Bytes of its distinct inputs and outputs, each read or written once.
        channels_last: Whether it is a convolution of tensors in torch's memory format of that name.
        count: Number of such calls.
    """

    name: Name
    dtype: Name
    flops: NonNegative
    num_bytes: Bytes
    channels_last: bool = False
    count: Count = 1

    @property
    def is_convolution(self) -> bool:
        """Whether torch's precision setting for convolutions applies, not that for products."""
        return "conv" in self.name


@record
class PassMoment:
    """What a pass holds at one time, and what it would hold besides if states were shared.

    Args:
        taken_bytes: What it takes beside gradients, as ``BatchPoint.pass_bytes``.
        weight_bytes: Of the weights that are whole then, if layers are gathered and freed.
        gradient_bytes: Of the gradients that are whole then, if each is reduced to its owners.
        summed_bytes: Of the gradients that their owners have by then.
    """

    taken_bytes: Bytes
    weight_bytes: Bytes
    gradient_bytes: Bytes
    summed_bytes: Bytes


@record
class SumCounts:
    """Gradients that are summed together, and what a pass still calls when all have come.

    ``num_sums`` collectives carry ``num_bytes``.
    """

    num_bytes: Bytes
    num_sums: Count
    after: tuple[Operator, ...]


@record
class PassCounts:
    """One pass of the whole model with its loss, at one batch size.

    ``kept_bytes`` are allocated when the forward pass ends; ``peak_bytes`` is the maximum at any
    time. Both do not include weights, buffers, gradients, optimizer state and the batch itself,
    whose size is ``batch_bytes``. ``offloaded_bytes`` go to the host in the forward pass, and come
    back in the backward pass. ``sums`` are in the order in which gradients come; ``pinned_bytes``
    and ``moments`` are those of a ``BatchPoint``.
    """

    batch_size: Count
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    kept_bytes: Bytes
    peak_bytes: Bytes
    batch_bytes: Bytes
    offloaded_bytes: Bytes = 0
    pinned_bytes: Bytes | None = None
    moments: tuple[PassMoment, ...] = ()
    sums: tuple[SumCounts, ...] = ()


@record
class CoreCounts:
    """What selective recomputation changes in a layer; the bytes are those of ``LayerCore``."""

    forward: tuple[Operator, ...]
    made_bytes: Bytes
    stashed_bytes: Bytes


@record
class LayerCounts:
    """One layer's passes; the bytes are those of ``LayerNode``.

    Every device of a tensor-parallel group holds ``whole_weight_bytes`` of the ``weight_bytes``.
    ``backward_halves`` are the backward pass in two: the inputs' gradients, then the weights', for
    which ``halved_bytes`` wait in between.
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
    core: CoreCounts | None = None
    frozen_weight_bytes: Bytes | None = None
    backward_halves: tuple[tuple[Operator, ...], tuple[Operator, ...]] | None = None
    halved_bytes: Bytes | None = None
    saved_later: dict[Name, Bytes] | None = None
    padding_bytes: Bytes | None = None
    buffer_bytes: Bytes | None = None
    statistics_bytes: Bytes | None = None


@record
class LayerTable:
    """The layers at one microbatch size, the edges between them, and the whole pass."""

    whole: PassCounts
    layers: tuple[LayerCounts, ...]
    edges: tuple[tuple[str, str], ...]
    trace: LayerTrace


@record
class ModelCounts:
    """The counts of a model's training.

    ``standing_bytes`` are the weights, buffers, gradients and optimizer state between two steps;
    ``update_workspace_bytes`` is what an update allocates temporarily. Tensor-parallel degrees must
    divide ``tensor_divisor``; it is None if the layers cannot be split, for ``no_tensor_reason``.
    ``blocks`` are those of a ``Profile``.
    ``others`` are passes that do not keep all activations of repeated layers, where asked for.
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
    frozen_weight_bytes: Bytes | None = None
    blocks: tuple[Name, ...] | None = None
    others: dict[Activations, tuple[PassCounts, ...]] = field(default_factory=dict)
