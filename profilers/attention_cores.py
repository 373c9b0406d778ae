"""What selective recomputation changes in each layer: attention cores, found as a stage finds them.

All layers run once, one after another, without the loss. What autograd keeps of them is counted by
storages, each for the layer that made it, with cores recomputed and without.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..runtime.nested_tensors import storage_key, tensors_in

if TYPE_CHECKING:
    from ..runtime.pipeline.cores import Between
    from ..runtime.pipeline.cut import LayeredModel, StageModule


@dataclass(frozen=True, slots=True)
class FoundCore:
    """A core: the layer in which it begins, what is made again of it, and a call that does that."""

    layer: str
    made_bytes: int
    run_again: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class FoundCores:
    """All cores, and by layer how many bytes less its pass keeps if they are recomputed.

    A layer may keep more: what a core reads is kept for it, whether or not autograd would.
    """

    cores: tuple[FoundCore, ...]
    freed_bytes: Mapping[str, int]

    def of_layer(self, layer: str) -> list[FoundCore]:
        """The cores of attention that begin in a layer."""
        return [core for core in self.cores if core.layer == layer]

    def changes(self, layer: str) -> bool:
        """Whether a layer keeps something else, or has something to compute again."""
        return bool(self.freed_bytes.get(layer) or self.of_layer(layer))


def find_cores(
    layered: "LayeredModel", parts: "list[StageModule]", arguments: Mapping[str, Any]
) -> FoundCores:
    """Find the cores of a model.

    Args:
        layered: Its layers.
        parts: One for each layer.
        arguments: A call of the model, by input name.
    """
    import torch

    from ..runtime.pipeline.cores import AttentionCores

    account = _Account([*layered.model.parameters(), *layered.model.buffers(), *arguments.values()])
    values = dict(arguments)
    cores = AttentionCores(account.cut)
    hooks = torch.autograd.graph.saved_tensors_hooks(account.saved, lambda tensor: tensor)
    with hooks, cores:
        for layer, part in zip(layered.layers, parts, strict=True):
            account.layer = layer.id
            answer = part(*(values[name] for name in (*part.arguments, *part.inputs)))
            account.end_layer(tensors_in(answer), cores.between)
            values.update(zip(part.outputs, answer if part.outputs else (), strict=True))
    return account.found()


class _Account:
    """Who made which storage, and who keeps it; storages have numbers while they live."""

    def __init__(self, standing: list[Any]) -> None:
        self.layer = ""
        self._standing = {storage_key(tensor) for tensor in tensors_in(standing)}
        self._alive: list[Any] = []
        self._maker: dict[int, tuple[str, int]] = {}
        self._plain: set[int] = set()
        self._selective: set[int] = set()
        self._begun: str | None = None
        self._cores: list[tuple[str, set[int], Between]] = []

    def saved(self, tensor: Any) -> Any:
        """Note what autograd saves outside of cores."""
        key = self._noted(tensor)
        self._plain.add(key)
        self._selective.add(key)
        return tensor.detach()

    def cut(self, between: "Between") -> None:
        """Note what autograd saves between two cuts."""
        keys = {self._noted(saved.value) for saved in between.saved if saved.value is not None}
        self._plain |= keys
        if between.is_core:
            given = {self._noted(each.value): each.wants_gradient for each in between.given}
            # What has no gradient, such as a mask, is there anyway unless autograd alone keeps it.
            self._selective |= {key for key, wants in given.items() if wants or key in keys}
            self._cores.append((self._begun or self.layer, keys, between))
        else:
            self._selective |= keys
        self._begun = None

    def end_layer(self, made: list[Any], between: "Between") -> None:
        """Note what a layer has made, and what of it is between two cuts."""
        for tensor in made:
            self._noted(tensor)
        for saved in between.saved:
            self._noted(saved.value)
        for given in between.given:
            self._noted(given.value)
        if between.has_begun and self._begun is None:
            self._begun = self.layer

    def _noted(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in self._maker:
            self._alive.append(storage)
            self._maker[key] = self.layer, storage.nbytes()
        return key

    def found(self) -> FoundCores:
        """The cores, and what they free."""
        freed: dict[str, int] = {}
        for keys, sign in ((self._plain, 1), (self._selective, -1)):
            for key in keys - self._standing:
                layer, size = self._maker[key]
                freed[layer] = freed.get(layer, 0) + sign * size
        return FoundCores(
            tuple(
                FoundCore(
                    layer,
                    sum(self._maker[key][1] for key in keys - self._selective - self._standing),
                    between.run_again,
                )
                for layer, keys, between in self._cores
            ),
            freed,
        )
