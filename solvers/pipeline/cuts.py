"""The cuts of a graph of layers, with sums of times and bytes over the layers before each cut.

A cut is a set of layers that holds every predecessor of its members: the antichain of thesis
2.4.1's branching graphs, named by all that lies before it. A stage is the difference of two
cuts. What crosses a cut is counted from the edges: a tensor made three stages earlier that is
still needed crosses every cut in between, and counts in each.

    layers a -> b, a -> c, b -> d, c -> d: cuts are {}, {a}, {a b}, {a c}, {a b c}, all
    a stage from {a} to {a b c} holds b and c; what a made crosses its first cut, once
    a stage from {a b} to all holds c and d: what a and b made crosses into it

A graph of N layers in a line has N + 1 cuts, one of branches up to their product.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.pipeline import slowest_links, tied_weights
from ...schema.pipeline import PipelineProblem

MAX_CUTS = 2000

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Cuts from the empty set to all layers, smaller ones first; sums over what lies before.

    Args:
        layer_sets: [cuts] layers before the cut, as bits.
        forward_seconds, backward_seconds: [pools, cuts].
        input_gradient_seconds, repeated_seconds: [pools, cuts] of the two halves of a backward
            pass, 0 where they are taken as equal.
        weight_bytes, activation_bytes: [cuts].
        crossing_bytes: [cuts] what crosses the cut, once for each layer that sends.
        before: [cuts, cuts] whether the first lies within the second; None where they are in
            one line.
        complete: Whether these are all the cuts of the graph.
        copied_bytes: [cuts, cuts] tied weights that a stage between two cuts keeps beside
            another stage's; None where no weights are tied.
        split_bytes: [cuts, cuts] tied weights that such a stage shares with other stages.
    """

    layer_sets: tuple[int, ...]
    forward_seconds: Floats
    backward_seconds: Floats
    input_gradient_seconds: Floats
    repeated_seconds: Floats
    weight_bytes: Floats
    activation_bytes: Floats
    crossing_bytes: Floats
    before: Mask | None
    complete: bool
    copied_bytes: Floats | None = None
    split_bytes: Floats | None = None

    @property
    def size(self) -> int:
        """Number of cuts."""
        return len(self.layer_sets)


def cuts_of(problem: PipelineProblem, *, lazy_sources: bool = False, every: bool = False) -> Cuts:
    """List the cuts of a problem's graph.

    Args:
        problem: Layers and edges.
        lazy_sources: A second source enters with its first consumer, as in the released
            optimizer; fewer cuts.
        every: List those too that ``_weightless`` leaves out.

    Returns:
        All cuts that may count (see ``_weightless``); or, where there are more than 2,000, those
        of the layers' own order.
    """
    size = len(problem.layers)
    parents = _parents(problem)
    free = 0 if every else _weightless(problem)
    # Every layer needs the one before: the graph is a line, and all its cuts are prefixes.
    if all(layer in (0, size) or parents[layer] >> (layer - 1) & 1 for layer in range(size)):
        return _sums(problem, [(1 << k) - 1 for k in range(size + 1)], is_line=True, complete=True)
    sets = _lazy_sets(problem, parents, free) if lazy_sources else _sets(parents, free)
    # Too many cuts: those of the layers' own order are left.
    if sets is None:
        line = [(1 << k) - 1 for k in range(size + 1)]
        return _sums(problem, line, is_line=True, complete=False)
    nested = all(before & ~after == 0 for before, after in zip(sets, sets[1:], strict=False))
    return _sums(problem, sets, is_line=nested, complete=True)


def _weightless(problem: PipelineProblem) -> int:
    """Layers, as bits, that take neither time nor bytes, such as selecting an unused state."""
    # Moving such a layer into the stage of its last parent (without one, the first stage) makes no
    # stage slower or larger, and no more crosses a cut. A stage that it leaves empty is dropped:
    # the link past it is no slower than the slower of its two. So only cuts that hold it as soon
    # as its parents count.
    # Not so where a number of stages or workers is asked for, nor where a second device type might
    # be a faster way between devices of one.
    if problem.num_stages is not None or problem.workers == "exactly":
        return 0
    between = problem.inter_bytes_per_second
    if len(problem.pools) > 1 and between is not None:
        if between > min(slowest_links(pool.levels)[-1] for pool in problem.pools):
            return 0
    tied = {name for layer in problem.layers for name in (*layer.shared_with, layer.id)
            if layer.shared_with}  # fmt: skip
    found = 0
    for index, layer in enumerate(problem.layers):
        seconds = sum(
            pool.forward_seconds[index] + pool.backward_seconds[index] for pool in problem.pools
        )
        if seconds == 0 and not layer.has_bytes and layer.id not in tied:
            found |= 1 << index
    # Of a graph of such layers alone, the layers are cut as they are.
    return 0 if found == (1 << len(problem.layers)) - 1 else found


def own_order(problem: PipelineProblem, cuts: Cuts) -> Cuts | None:
    """The cuts of the layers' own order alone, of a graph that has others; else None."""
    # With tied weights a stage is more than the difference of two cuts.
    if cuts.before is None or cuts.copied_bytes is not None:
        return None
    parents, free = _parents(problem), _weightless(problem)
    prefixes = (_closed(parents, (1 << k) - 1, free) for k in range(1, len(problem.layers) + 1))
    # One of weightless layers alone is no cut that counts.
    found = sorted({0, *(inside for inside in prefixes if inside & ~free)})
    return _sums(problem, found, is_line=True, complete=False)


def _parents(problem: PipelineProblem) -> list[int]:
    parents = [0] * len(problem.layers)
    for source, target in problem.links:
        parents[target] |= 1 << source
    return parents


def _sets(parents: list[int], free: int) -> list[int] | None:
    """Every set of layers that holds its members' parents; None if too many."""
    found, newest = {0}, [0]
    while newest:
        following = set()
        # Breadth first: each set grows by one layer whose parents it holds, and by ``free`` ones
        # that then are due.
        for inside in newest:
            for layer, needs in enumerate(parents):
                bit = 1 << layer
                if bit & (free | inside) or needs & ~inside & ~free:
                    continue
                closed = _closed(parents, inside | bit, free)
                # A parent may be a free layer that has parents outside: then it is not due either.
                if not needs & ~closed:
                    following.add(closed)
        following -= found
        found |= following
        newest = list(following)
        if len(found) > MAX_CUTS:
            return None
    # Smaller sets first, so that a cut's predecessors stand before it.
    return sorted(found, key=lambda inside: (inside.bit_count(), inside))


def _closed(parents: list[int], inside: int, free: int) -> int:
    """A set with the layers of ``free`` whose parents are in it."""
    if not free:
        return inside
    for layer, needs in enumerate(parents):
        if free >> layer & 1 and not needs & ~inside:
            inside |= 1 << layer
    return inside


def _lazy_sets(problem: PipelineProblem, parents: list[int], free: int) -> list[int] | None:
    """The empty cut, and what taking in one child after another reaches from the first layer."""
    # Transitive: parents stand before their children.
    ancestors: list[int] = []
    for needs in parents:
        ancestors.append(needs)
        for layer in layers_of(needs):
            ancestors[-1] |= ancestors[layer]
    children = _children(problem)
    first = _closed(parents, 1, free)
    found, newest = {first}, [first]
    while newest and len(found) <= MAX_CUTS:
        following = set()
        for inside in newest:
            open_ = 0
            for layer in layers_of(inside):
                open_ |= children[layer] & ~inside
            following |= {
                _closed(parents, inside | 1 << child | ancestors[child], free)
                for child in layers_of(open_)
            }
        newest = list(following - found)
        found |= following
    if len(found) > MAX_CUTS:
        return None
    everything = {0, (1 << len(parents)) - 1}
    return sorted(found | everything, key=lambda inside: (inside.bit_count(), inside))


def layers_of(inside: int) -> list[int]:
    """The layers of a set, ascending."""
    found = []
    while inside:
        low = inside & -inside
        found.append(low.bit_length() - 1)
        inside ^= low
    return found


def _sums(problem: PipelineProblem, sets: list[int], *, is_line: bool, complete: bool) -> Cuts:
    none = (0.0,) * len(problem.layers)
    per_layer = np.array(
        [pool.forward_seconds for pool in problem.pools]
        + [pool.backward_seconds for pool in problem.pools]
        + [pool.input_gradient_seconds or none for pool in problem.pools]
        + [pool.repeated_seconds or none for pool in problem.pools]
        + [[layer.weight_bytes for layer in problem.layers]]
        + [[layer.kept_bytes for layer in problem.layers]],
        dtype=np.float64,
    )
    if is_line:
        # Along a line each cut adds its layers to the sums; a branching graph needs products.
        added = [layers_of(after & ~before) for before, after in zip(sets, sets[1:], strict=False)]
        steps = [per_layer[:, layers].sum(axis=1) for layers in added]
        start = np.zeros(len(per_layer))
        sums = np.cumsum(np.array([start, *steps]), axis=0).T
    else:
        inside = _membership(sets, len(problem.layers)).astype(np.float64)
        sums = per_layer @ inside.T
    pools = len(problem.pools)
    return Cuts(
        layer_sets=tuple(sets),
        forward_seconds=sums[:pools],
        backward_seconds=sums[pools : 2 * pools],
        input_gradient_seconds=sums[2 * pools : 3 * pools],
        repeated_seconds=sums[3 * pools : 4 * pools],
        weight_bytes=sums[-2],
        activation_bytes=sums[-1],
        crossing_bytes=_crossing(problem, sets, is_line),
        before=None if is_line else _inclusion(sets, len(problem.layers)),
        complete=complete,
        **_tied(problem, sets),
    )


def _tied(problem: PipelineProblem, sets: list[int]) -> dict[str, Floats]:
    """Tied weights between every two cuts; nothing where there are none."""
    tied = tied_weights(problem.layers)
    if not tied:
        return {}
    inside = _membership(sets, len(problem.layers)).astype(np.int64)

    def between(layers: frozenset[int]) -> NDArray[np.int64]:
        count = inside[:, sorted(layers)].sum(axis=1)
        found: NDArray[np.int64] = count[None, :] - count[:, None]
        return found

    copied, split = np.zeros((len(sets),) * 2), np.zeros((len(sets),) * 2)
    # A stage that uses a weight without all its holders keeps a copy; one that has not all users
    # shares it.
    for weights in tied:
        holders, sharers = between(weights.holders), between(weights.sharers)
        size = weights.weight_bytes
        copied += size * ((sharers > 0) & (holders < len(weights.holders)))
        users = holders + sharers
        split += size * ((users > 0) & (users < len(weights.holders | weights.sharers)))
    return {"copied_bytes": copied, "split_bytes": split}


def _membership(sets: list[int], num_layers: int) -> Mask:
    return np.array([[inside >> layer & 1 for layer in range(num_layers)] for inside in sets], bool)


def _children(problem: PipelineProblem) -> list[int]:
    children = [0] * len(problem.layers)
    for source, target in problem.links:
        children[source] |= 1 << target
    return children


def _crossing(problem: PipelineProblem, sets: list[int], is_line: bool) -> Floats:
    children = _children(problem)
    if is_line:
        return _crossing_line(problem, sets, children)
    sent = np.zeros(len(sets))
    for index, inside in enumerate(sets):
        sent[index] = sum(
            problem.layers[layer].activation_bytes
            for layer in layers_of(inside)
            if children[layer] & ~inside
        )
    return sent


def _crossing_line(problem: PipelineProblem, sets: list[int], children: list[int]) -> Floats:
    position = {
        layer: index
        for index, (before, after) in enumerate(zip(sets, sets[1:], strict=False))
        for layer in layers_of(after & ~before)
    }
    # A tensor crosses every cut from its maker to its last reader: +1 and -1, then running sums.
    change = np.zeros(len(sets) + 1)
    for layer, index in position.items():
        last = max((position[child] for child in layers_of(children[layer])), default=index)
        change[index + 1] += problem.layers[layer].activation_bytes
        change[last + 1] -= problem.layers[layer].activation_bytes
    return np.cumsum(change)[:-1]


def _inclusion(sets: list[int], num_layers: int) -> Mask:
    inside = _membership(sets, num_layers).astype(np.float64)
    # One lies within another if they have as many layers in common as it has.
    common = inside @ inside.T
    sizes = inside.sum(axis=1)
    found: Mask = (common == sizes[:, None]) & (sizes[:, None] < sizes[None, :])
    return found
