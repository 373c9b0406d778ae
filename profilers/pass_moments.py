"""The times of a pass at which devices that share states may hold most (docs/sharding.md).

Weights and gradients of shared states come and go with layers, activations by themselves. So the
most of their sum is found layer by layer, in a pass with whole states.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from ..planning.costs.memory import most_of
from ..runtime.repeated_layers import (
    layers_of,
    repeated_layers,
    when_back,
    when_going_back,
    when_loss_is_back,
)
from ..schema.layers import PassMoment


class _Interval(NamedTuple):
    """What a pass takes for a while; weights by their layers' places in the forward pass."""

    taken_bytes: int
    weights: tuple[int, ...] | None
    gradients: Mapping[str, int]
    summed: frozenset[str]


class PassWatch:
    """Finds the times of a pass at which devices that share states may hold most.

    Layers come and go as in ``runtime.sharding``. The first one comes with what is in no layer.
    Forward, one layer and the next are whole; backward, one and the one before, of which the last
    comes when the model's output has its gradient. Gradients leave when their layer has gone back:
    they are there twice then, and are summed when the next layer's leave.

    Args:
        model: The model; its gradients are there.
        taken: The most bytes since it was called last, beyond those before the pass, and now.
        blocks: Names of its blocks; empty for the repeated layers.
    """

    def __init__(
        self, model: Any, taken: Callable[[], tuple[int, int]], blocks: Sequence[str] = ()
    ) -> None:
        self._model, self._taken, self._blocks = model, taken, blocks
        self._names: list[str] = []  # in the order of forward passes
        self._weights: tuple[int, ...] | None = (0,)  # beside the rest's; None: not even those
        self._back: frozenset[str] = frozenset()
        self._leaving: frozenset[str] = frozenset()
        self._summed: frozenset[str] = frozenset()
        self._found: list[_Interval] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the one pass in the body."""
        handles = [
            handle
            for name, layer in repeated_layers(self._model, self._blocks).items()
            for handle in (
                layer.register_forward_pre_hook(partial(self._begins, name), with_kwargs=True),
                layer.register_forward_hook(partial(self._ends, name)),
            )
        ]
        handles.append(self._model.register_forward_hook(lambda *given: self._has_run(given[-1])))
        self._taken()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._note(self._taken()[0])
        for name in (*reversed(self._names), ""):  # also layers whose inputs have no gradients
            if name not in self._summed | self._leaving:
                self._leave(name)
        self._weights = None
        self._summed |= self._leaving
        self._note(self._taken()[1])

    def _begins(self, name: str, _: Any, args: Any, kwargs: Any) -> Any:
        self._names.append(name)
        place = len(self._names) - 1
        self._becomes(place, place + 1)
        return when_back(args, kwargs, partial(self._went_back, name, place))

    def _ends(self, name: str, layer: Any, args: Any, output: Any) -> None:
        place = len(self._names) - 1
        self._becomes(place + 1)
        when_going_back(output, partial(self._goes_back, name, place))

    def _has_run(self, output: Any) -> None:
        last = len(self._names) - 1
        when_loss_is_back(output, lambda: self._becomes(last))

    def _goes_back(self, name: str, place: int) -> None:
        self._becomes(place, place - 1)
        self._back = frozenset({name})

    def _went_back(self, name: str, place: int) -> None:
        self._becomes(place, place - 1)
        self._leave(name)
        self._weights = (place - 1,)

    def _becomes(self, *weights: int) -> None:
        """Note the time that ends, and whose weights are whole from now on."""
        self._note(self._taken()[0])
        self._weights = weights

    def _leave(self, name: str) -> None:
        """A layer's gradients begin to leave, and those of the one before are summed."""
        self._summed |= self._leaving
        # Autograd has made one for each parameter; they are copied end to end for their sum.
        self._note(self._taken()[1], {"": 1, name: 2})
        self._back, self._leaving = frozenset(), frozenset({name})

    def _note(self, taken_bytes: int, gradients: Mapping[str, int] | None = None) -> None:
        """Note a time that ends, and how often gradients of which layers are there in it."""
        there = gradients or dict.fromkeys(self._back | self._leaving | {""}, 1)
        self._found.append(_Interval(taken_bytes, self._weights, there, self._summed))

    @property
    def most_bytes(self) -> int:
        """The most that the pass took."""
        return max(0, *(found.taken_bytes for found in self._found))

    def moments(self) -> tuple[PassMoment, ...]:
        """The moments at which a device may hold most, whatever its share and what is shared."""
        return most_of(self.every())

    def every(self) -> list[PassMoment]:
        """All moments that were seen, in their order."""
        homes = layers_of(self._model, self._blocks)
        weights, gradients = Counter[str](), Counter[str]()
        for parameter in self._model.parameters():
            home = homes[id(parameter)]
            home = home if home in self._names else ""
            weights[home] += parameter.nbytes
            gradients[home] += parameter.nbytes if parameter.requires_grad else 0
        order = dict(enumerate(self._names))

        def whole(places: tuple[int, ...] | None) -> set[str]:
            return set() if places is None else {order.get(place, "") for place in places} | {""}

        return [
            PassMoment(
                taken_bytes=max(0, found.taken_bytes),
                weight_bytes=sum(weights[name] for name in whole(found.weights)),
                gradient_bytes=sum(n * gradients[name] for name, n in found.gradients.items()),
                summed_bytes=sum(gradients[name] for name in found.summed),
            )
            for found in self._found
        ]
