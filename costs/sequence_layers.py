"""Layers as one device of a tensor-parallel group runs them with sequence parallelism.

Between a row-parallel layer and the next column-parallel ones, a device computes and keeps 1/t of
the tokens (Korthikanti et al., 2022). An all-gather and a reduce-scatter take the place of an
all-reduce and together send as many bytes. In the backward pass the input of the column-parallel
layers is gathered once more, because a device keeps only its tokens of it.

Only models that normalise before each part are run so. Their layers tell: a norm stands before
each first column-parallel layer, and the residual goes past it to the next row-parallel layer.
"""

from dataclasses import replace

from ..schema.operator_counts import LayerCounts, LayerTable, Operator
from .tensor_layers import ShardedLayer, sharded_layers


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
    last = max(n for n, layer in enumerate(table.layers) if layer.role == "row")
    while last + 1 < len(table.layers) and table.layers[last + 1].op == "Dropout":
        last += 1
    plain = sharded_layers(table, degree)
    first = table.layers[norms[0]].id
    before = {source for source, target in table.edges if target == first}
    found = []
    for number, (layer, share) in enumerate(zip(table.layers, plain, strict=True)):
        if norms[0] <= number <= last:
            found.append(_spread(layer, share, degree, is_norm=number in norms))
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
    for number, (row, following) in enumerate(zip(rows, rows[1:], strict=False), 1):
        stream = range(row, norms[number])
        end = norms[number + 1] if number + 1 < len(norms) else following + 1
        if not any((n, m) in edges for n in stream for m in range(following, end)):
            return None
    return norms


def _spread(layer: LayerCounts, share: ShardedLayer, degree: int, *, is_norm: bool) -> ShardedLayer:
    """A layer of which every device has some tokens, or which makes or takes them."""
    half = layer.activation_bytes // 2
    if layer.role == "row":
        counts = replace(
            share.counts,
            forward=_split_rest(share.counts.forward, degree),
            backward=_split_rest(share.counts.backward, degree),
            stashed_bytes=-(-share.counts.stashed_bytes // degree),
        )
        return ShardedLayer(counts=counts, forward_reduced_bytes=half, backward_reduced_bytes=half)
    if layer.role != "replicated":
        return share
    counts = replace(
        share.counts,
        forward=_split_rest(share.counts.forward, degree),
        backward=_split_rest(share.counts.backward, degree),
        stashed_bytes=-(-share.counts.stashed_bytes // degree),
    )
    return replace(share, counts=counts, forward_reduced_bytes=half if is_norm else 0)


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
