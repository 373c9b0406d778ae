"""A backward pass in two halves, as zero-bubble schedules run it (Qi et al. 2024, section 2).

The first half computes the gradients of a stage's inputs. Where it passes an operator that weights
hang on, it keeps the gradient that arrives there. The second half starts at these operators, so it
computes the weights' gradients and nothing that the first half has computed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

Gradients = tuple[Tensor | None, ...]
# Each a tensor or a GradientEdge; torch's stubs only know lists of one kind.
Roots = list[Any]


@dataclass(slots=True, eq=False)
class _Start:
    """An operator at which the second half starts, and the gradients of its results."""

    node: Node
    weights: set[Tensor] = field(default_factory=set)
    arrived: Gradients = ()

    def keep(self, arrived: Gradients) -> None:
        """Note what arrives in the first half."""
        self.arrived = arrived

    @property
    def edges(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Each result with a gradient, and that gradient."""
        for number, gradient in enumerate(self.arrived):
            if gradient is not None:
                yield GradientEdge(self.node, number), gradient


@dataclass(frozen=True, slots=True)
class WeightHalf:
    """What the second half needs: groups of starts that lead to other weights each."""

    _groups: tuple[tuple[_Start, ...], ...]

    def run(self) -> None:
        """Add the weights' gradients to ``grad``."""
        for starts in self._groups:
            found = [pair for start in starts for pair in start.edges]
            if not found:
                continue
            edges, gradients = zip(*found, strict=True)
            # Of weights that are used twice: one start may lead to another, which already has all.
            several = starts if len(starts) > 1 else ()
            hooks = [start.node.register_prehook(_put(start.arrived)) for start in several]
            try:
                weights = set().union(*(start.weights for start in starts))
                torch.autograd.backward(edges, gradients, retain_graph=True, inputs=list(weights))
            finally:
                _remove(hooks)


def backward_input(
    roots: Roots,
    gradients: Sequence[Tensor] | None,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[Gradients, WeightHalf | None]:
    """Compute the inputs' gradients alone.

    Args:
        roots: Results to differentiate.
        gradients: Of the results; None for a loss.
        inputs: Leaves.
        weights: Leaves of the second half.

    Returns:
        The inputs' gradients (None where no result depends on one), and the second half; None where
        no result depends on any input, so that the second half is the whole pass.
    """
    edges = [root if isinstance(root, GradientEdge) else get_gradient_edge(root) for root in roots]
    above = _Above([edge.node for edge in edges], inputs, weights)
    if not above.nodes:
        return (None,) * len(inputs), None
    starts = {node: _Start(node, found) for node, found in above.starts()}
    for edge, gradient in zip(edges, gradients or (), strict=False):
        if edge.node not in above.nodes and above.weights[edge.node]:
            own = starts.setdefault(edge.node, _Start(edge.node, above.weights[edge.node]))
            own.arrived += (None,) * (edge.output_nr - len(own.arrived)) + (gradient,)
    hooks = [node.register_prehook(starts[node].keep) for node in starts if node in above.nodes]
    try:
        found = torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        _remove(hooks)
    return found, WeightHalf(_grouped(list(starts.values())))


class _Above:
    """The operators between results and inputs, and the weights that each operator leads to.

    Attributes:
        nodes: Operators that lead to an input.
        weights: For every operator, the weights that it leads to, without those behind ``nodes``.
    """

    def __init__(
        self, roots: Sequence[Node], inputs: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> None:
        ends = {get_gradient_edge(leaf).node for leaf in inputs}
        self.nodes: set[Node] = set()
        self.weights: dict[Node, set[Tensor]] = {
            get_gradient_edge(leaf).node: {leaf} for leaf in weights
        }
        for node in _leaves_first(roots):
            behind = [other for other, _ in node.next_functions if other is not None]
            if node in ends or any(other in self.nodes for other in behind):
                self.nodes.add(node)
            led = [self.weights[other] for other in behind if other not in self.nodes]
            self.weights.setdefault(node, set()).update(*led)

    def starts(self) -> Iterator[tuple[Node, set[Tensor]]]:
        """The operators that lead to an input, and beside that to weights; and these weights."""
        return ((node, self.weights[node]) for node in self.nodes if self.weights[node])


def _leaves_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Each operator of a graph once, after all that it leads to."""
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if is_done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(other, False) for other, _ in node.next_functions if other is not None]


def _grouped(starts: Sequence[_Start]) -> tuple[tuple[_Start, ...], ...]:
    """Those that lead to the same weights together."""
    groups: list[tuple[set[Tensor], list[_Start]]] = []
    for start in starts:
        weights, members = set(start.weights), [start]
        for group in [group for group in groups if group[0] & weights]:
            groups.remove(group)
            weights |= group[0]
            members += group[1]
        groups.append((weights, members))
    return tuple(tuple(members) for _, members in groups)


def _put(gradients: Gradients) -> Callable[[Gradients], Gradients]:
    return lambda _: gradients


def _remove(hooks: Sequence[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
