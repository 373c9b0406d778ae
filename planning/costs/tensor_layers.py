"""Layers as one device of a tensor-parallel group runs them, from counts of whole layers.

Megatron-LM's split (thesis 4.2.3): products by columns, then by rows; embeddings and logits by
vocabulary; norms, dropouts and residuals are computed by every device. What a device keeps, holds
and computes is exact but for rounding up; of the bytes that a product moves, the side that every
device reads or writes whole stays whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...schema.layers import CoreCounts, LayerCounts, LayerTable, Operator

DEGREES = (2, 4, 8)
_PER_HEAD = ("attention", "bmm")  # products of activations alone: split by heads on every side
_SPLIT_OUTPUT = ("column", "sharded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayer:
    """One device's share of a layer.

    ``forward_reduced_bytes`` and ``backward_reduced_bytes`` are all-reduced by its group in a pass.
    """

    counts: LayerCounts
    forward_reduced_bytes: int
    backward_reduced_bytes: int


def degrees_of(divisor: int | None) -> tuple[int, ...]:
    """The degrees that split heads evenly; none where roles are unknown."""
    return () if divisor is None else tuple(d for d in DEGREES if divisor % d == 0)


def sharded_layers(table: LayerTable, degree: int) -> tuple[ShardedLayer, ...]:
    """Every layer's share, in the order of the table.

    A row-parallel layer's output and an embedding's are all-reduced going forward (g of thesis
    figure 4.3), the gradient of a column-parallel layer's input going backward (f): once where
    several read the same, by the first of them. Of a block of h-wide sequences that is b s h
    elements four times, 4.3.2.
    """
    layers = {layer.id: layer for layer in table.layers}
    read = _whole_inputs(table, layers)
    reduced: set[str] = set()
    found = []
    for layer in table.layers:
        input_bytes = max((layers[name].activation_bytes for name in read[layer.id]), default=0)
        backward = 0
        if layer.role == "column":
            backward = sum(
                layers[name].activation_bytes for name in read[layer.id] if name not in reduced
            )
            reduced.update(read[layer.id])
        found.append(
            ShardedLayer(
                counts=_share(layer, input_bytes, degree),
                forward_reduced_bytes=(
                    layer.activation_bytes if layer.role in ("row", "vocabulary") else 0
                ),
                backward_reduced_bytes=backward,
            )
        )
    return tuple(found)


def _whole_inputs(table: LayerTable, layers: dict[str, LayerCounts]) -> dict[str, list[str]]:
    """By layer, those that it reads and whose output every device of the group has."""
    read: dict[str, list[str]] = {name: [] for name in layers}
    for source, target in table.edges:
        if layers[source].role not in _SPLIT_OUTPUT:
            read[target].append(source)
    return read


def _share(layer: LayerCounts, input_bytes: int, degree: int) -> LayerCounts:
    weight_bytes = layer.whole_weight_bytes + _split(
        layer.weight_bytes - layer.whole_weight_bytes, degree
    )
    keeps_whole = layer.role not in _SPLIT_OUTPUT
    saved = layer.weight_bytes - weight_bytes  # the gradient under way is the smaller by as much
    return replace(
        layer,
        forward=_operators(layer, layer.forward, input_bytes, degree),
        backward=_operators(layer, layer.backward, input_bytes, degree),
        weight_bytes=weight_bytes,
        stashed_bytes=layer.stashed_bytes if keeps_whole else _split(layer.stashed_bytes, degree),
        workspace_bytes=(
            max(0, layer.workspace_bytes - saved)
            if keeps_whole
            else _split(layer.workspace_bytes, degree)
        ),
        shared_weight_bytes=_shared_bytes(layer, degree),
        core=None if layer.core is None else _core_share(layer, layer.core, degree),
    )


def _core_share(layer: LayerCounts, core: CoreCounts, degree: int) -> CoreCounts:
    """What selective recomputation changes: heads are split, what is kept is split as without."""
    if layer.role not in _SPLIT_OUTPUT:
        return core
    return CoreCounts(
        forward=tuple(
            replace(
                operator,
                flops=operator.flops / degree,
                num_bytes=_split(operator.num_bytes, degree),
            )
            for operator in core.forward
        ),
        made_bytes=_split(core.made_bytes, degree),
        stashed_bytes=_split(core.stashed_bytes, degree),
    )


def _shared_bytes(layer: LayerCounts, degree: int) -> int | None:
    """Of weights that an earlier layer holds: split where this layer's own would be."""
    whole = layer.shared_weight_bytes
    if whole is None or layer.role not in ("column", "row", "vocabulary"):
        return whole
    return _split(whole, degree)


def _operators(
    layer: LayerCounts, operators: Sequence[Operator], input_bytes: int, degree: int
) -> tuple[Operator, ...]:
    if layer.role == "replicated":
        return tuple(operators)
    found = []
    for operator in operators:
        whole = min(operator.num_bytes, _whole_bytes(layer, operator, input_bytes))
        found.append(
            replace(
                operator,
                flops=operator.flops / degree,
                num_bytes=whole + _split(operator.num_bytes - whole, degree),
            )
        )
    return tuple(found)


def _whole_bytes(layer: LayerCounts, operator: Operator, input_bytes: int) -> int:
    """Of what an operator moves, that which every device of the group moves."""
    is_of_weights = operator.flops > 0 and not any(word in operator.name for word in _PER_HEAD)
    if layer.role == "column":
        return input_bytes if is_of_weights else 0
    if layer.role == "row":  # its bias and all behind the sum are whole
        return layer.activation_bytes if is_of_weights else operator.num_bytes
    return layer.activation_bytes if layer.role == "vocabulary" else 0


def _split(num_bytes: int, degree: int) -> int:
    return -(-num_bytes // degree)


# Layers as one device of a tensor-parallel group runs them with sequence parallelism.
#
# Between a row-parallel layer and the next column-parallel ones, a device computes and keeps 1/t of
# the tokens (Korthikanti et al., 2022). An all-gather and a reduce-scatter take the place of an
# all-reduce and together send as many bytes. In the backward pass the input of the column-parallel
# layers is gathered once more, because a device keeps only its tokens of it.
#
# Only models that normalise before each part are run so. Their layers tell: a norm stands before
# each first column-parallel layer, and the residual goes past it to the next row-parallel layer.
# Where a graph hides that (a norm that casts its input to the type that it has), the norms' names
# do.


# Norms before each part; GPT-2, then Llama, Qwen and BLOOM.
_BEFORE_A_PART = ("ln_1", "ln_2", "input_layernorm", "post_attention_layernorm")


def sequence_layers(table: LayerTable, degree: int) -> tuple[ShardedLayer, ...] | None:
    """Every layer's share, in the order of the table; None if tokens cannot be spread.

    Reduced bytes are those of all-reduces: an all-gather or a reduce-scatter counts as half.
    """
    norms = _norms(table)
    if norms is None:
        return None
    last = _last(table)
    plain = sharded_layers(table, degree)
    first = table.layers[norms[0]].id
    before = {source for source, target in table.edges if target == first}
    # A row layer's output is b s h elements; a norm's may be counted with a cast of its input.
    half = min(layer.activation_bytes for layer in table.layers if layer.role == "row") // 2
    found = []
    for number, (layer, share) in enumerate(zip(table.layers, plain, strict=True)):
        if norms[0] <= number <= last:
            gathered = half if number in norms else 0
            found.append(_spread(layer, share, degree, half, gathered))
        elif layer.id in before:
            found.append(replace(share, counts=_feeding(share.counts, degree)))
        else:
            found.append(share)
    return tuple(found)


def _norms(table: LayerTable) -> list[int] | None:
    """The places of the norms before the column-parallel layers; None if it does not have them."""
    layers, place = table.layers, {layer.id: n for n, layer in enumerate(table.layers)}
    edges = {(place[source], place[target]) for source, target in table.edges}
    rows = [n for n, layer in enumerate(layers) if layer.role == "row"]
    norms: list[int] = []
    start = -1
    for row in rows:
        found = [
            n - 1
            for n in range(start + 2, row)
            if layers[n].role == "column"
            and layers[n - 1].role == "replicated"
            and (n - 1, n) in edges
        ]
        if not found:
            return None
        norms.append(found[0])
        start = row
    if all(layers[norm].id.endswith(_BEFORE_A_PART) for norm in norms):
        return norms
    ends = [*norms[1:], _last(table) + 1]
    streams = [range(row, end) for row, end in zip(rows, ends, strict=True)]
    for stream, following in pairwise(streams):
        if not any((n, m) in edges for n in stream for m in following):
            return None
    return norms


def _last(table: LayerTable) -> int:
    """The place of the last layer that has some tokens: the last row layer, or dropout behind."""
    last = max(n for n, layer in enumerate(table.layers) if layer.role == "row")
    while last + 1 < len(table.layers) and table.layers[last + 1].op == "Dropout":
        last += 1
    return last


def _spread(
    layer: LayerCounts, share: ShardedLayer, degree: int, half: int, gathered: int
) -> ShardedLayer:
    """A layer of which every device has some tokens, or which makes or takes them."""
    if layer.role not in ("row", "replicated"):
        return share
    counts = replace(
        share.counts,
        forward=_split_rest(share.counts.forward, degree),
        backward=_split_rest(share.counts.backward, degree),
        stashed_bytes=_split(share.counts.stashed_bytes, degree),
        core=_spread_core(share.counts.core, degree),
    )
    if layer.role == "row":
        return ShardedLayer(counts=counts, forward_reduced_bytes=half, backward_reduced_bytes=half)
    return replace(share, counts=counts, forward_reduced_bytes=gathered)


def _spread_core(core: CoreCounts | None, degree: int) -> CoreCounts | None:
    """Of a layer of tokens, which only keeps something else for a core that follows."""
    if core is None:
        return None
    return replace(core, stashed_bytes=_split(core.stashed_bytes, degree))


def _split_rest(operators: tuple[Operator, ...], degree: int) -> tuple[Operator, ...]:
    """Operators of tokens, with 1/t of their bytes; products keep what they have."""
    return tuple(
        operator
        if operator.flops
        else replace(operator, num_bytes=_split(operator.num_bytes, degree))
        for operator in operators
    )


def _feeding(layer: LayerCounts, degree: int) -> LayerCounts:
    """A layer before the first norm: its output is kept for that norm, so only some tokens are."""
    kept = min(layer.stashed_bytes, layer.activation_bytes)
    return replace(layer, stashed_bytes=layer.stashed_bytes - kept + _split(kept, degree))
