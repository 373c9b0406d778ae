"""Layers as one device of a tensor-parallel group runs them with sequence parallelism.

Between a row-parallel layer and the next column-parallel ones, a device computes and keeps 1/t of
the tokens (Korthikanti et al., 2022). An all-gather and a reduce-scatter take the place of an
all-reduce and together send as many bytes. In the backward pass the input of the column-parallel
layers is gathered once more, because a device keeps only its tokens of it.

Only models that normalise before each part are run so. Their layers tell: a norm stands before
each first column-parallel layer, and the residual goes past it to the next row-parallel layer.
Where a graph hides that (a norm that casts its input to the type that it has), the norms' names do.
"""

from dataclasses import replace
from itertools import pairwise

from ...schema.layers import CoreCounts, LayerCounts, LayerTable, Operator
from .tensor_layers import ShardedLayer, sharded_layers

# Norms before each part; GPT-2, then Llama, Qwen and BLOOM.
_BEFORE_A_PART = ("ln_1", "ln_2", "input_layernorm", "post_attention_layernorm")


def sequence_layers(table: LayerTable, degree: int) -> tuple[ShardedLayer, ...] | None:
    """Every layer's share, in the order of the table; None if tokens cannot be spread.

    Reduced bytes are those of all-reduces: an all-gather or a reduce-scatter counts as half.

    Args:
        table: Of whole layers, with roles.
        degree: Tensor-parallel size, t.
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
    """A layer of which every device has some tokens, or which makes or takes them.

    Args:
        layer: The whole layer.
        share: One device's share of it without sequence parallelism.
        degree: Tensor-parallel size, t.
        half: Half of the bytes of all tokens.
        gathered: The same behind a norm, else 0.
    """
    if layer.role == "row":
        counts = replace(
            share.counts,
            forward=_split_rest(share.counts.forward, degree),
            backward=_split_rest(share.counts.backward, degree),
            stashed_bytes=-(-share.counts.stashed_bytes // degree),
            core=_spread_core(share.counts.core, degree),
        )
        return ShardedLayer(counts=counts, forward_reduced_bytes=half, backward_reduced_bytes=half)
    if layer.role != "replicated":
        return share
    counts = replace(
        share.counts,
        forward=_split_rest(share.counts.forward, degree),
        backward=_split_rest(share.counts.backward, degree),
        stashed_bytes=-(-share.counts.stashed_bytes // degree),
        core=_spread_core(share.counts.core, degree),
    )
    return replace(share, counts=counts, forward_reduced_bytes=gathered)


def _spread_core(core: CoreCounts | None, degree: int) -> CoreCounts | None:
    """Of a layer of tokens, which only keeps something else for a core that follows."""
    if core is None:
        return None
    return replace(core, stashed_bytes=-(-core.stashed_bytes // degree))


def _split_rest(operators: tuple[Operator, ...], degree: int) -> tuple[Operator, ...]:
    """Operators of tokens, with 1/t of their bytes; products keep what they have."""
    return tuple(
        operator
        if operator.flops
        else replace(operator, num_bytes=-(-operator.num_bytes // degree))
        for operator in operators
    )


def _feeding(layer: LayerCounts, degree: int) -> LayerCounts:
    """A layer before the first norm: its output is kept for that norm, so only some tokens are."""
    kept = min(layer.stashed_bytes, layer.activation_bytes)
    return replace(layer, stashed_bytes=layer.stashed_bytes - kept + -(-kept // degree))
