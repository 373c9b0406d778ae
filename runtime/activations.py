"""What becomes of repeated layers' activations until they go back: kept, recomputed or offloaded.

Recomputed layers keep their inputs alone, and run forward again when they go back. Each is its
class's child with another ``forward``, so copies of a model and checks of types see what they
always see.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from ..schema.errors import TargetError
from ..schema.options import Activations
from .nested_tensors import tensors_in
from .offload import Stash, lane_of
from .repeated_layers import repeated_layers


def treat(layers: Iterable[nn.Module], how: Activations) -> None:
    """Let layers keep, recompute or offload their activations from now on.

    Layers with batch norm are not recomputed but kept. Its statistics may be those of all workers,
    of which the second forward pass would meet nobody.
    """
    for layer in layers:
        kind: Any = type(layer)
        # A treated layer's class is followed by ``_Treated`` and by the layer's own.
        kind = kind.__mro__[2] if issubclass(kind, _Treated) else kind
        has_norm = any(isinstance(module, _BatchNorm) for module in layer.modules())
        is_kept = how == "kept" or (how == "recomputed" and has_norm)
        layer.__class__ = kind if is_kept else _treated(kind, how)


@contextmanager
def treated(model: nn.Module, how: Activations, blocks: Sequence[str] = ()) -> Iterator[None]:
    """Within the context the activations of a model's blocks are treated so.

    Without ``blocks`` they are its repeated layers.

    Raises:
        TargetError: There are none of which this would change anything.
    """
    layers = repeated_layers(model, blocks).values()
    treat(layers, how)
    try:
        if how != "kept" and not any(isinstance(layer, _Treated) for layer in layers):
            raise TargetError(
                f"the model has no repeated layers (as blocks.0, blocks.1) that can be {how}"
                + (": those with batch norm cannot" if layers else ""),
                hint="leave it out",
            )
        yield
    finally:
        treat(layers, "kept")


class _Treated(nn.Module):
    """A layer whose forward pass is another than its class's."""


@cache
def _treated(kind: Any, how: Activations) -> type[nn.Module]:
    run = {"recomputed": _recomputed, "offloaded": _offloaded}[how]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(kind.forward, self)
        return run(self, own, args, kwargs) if torch.is_grad_enabled() else own(*args, **kwargs)

    facts = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Treated, kind), facts)


@_disable_dynamo(recursive=False)
def _offloaded(layer: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    lane = lane_of(next(layer.parameters()).device)
    if lane is None:
        return own(*args, **kwargs)
    # What needs no gradient, such as a mask, is an input of other layers too.
    inputs = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.requires_grad]
    stash = Stash(lane, [*layer.parameters(), *layer.buffers(), *inputs])
    with saved_tensors_hooks(stash.pack, stash.unpack):
        answer = own(*args, **kwargs)
    stash.close()
    return answer


# The compiler takes no contexts of a second pass but its own modes: the layer itself is compiled.
@_disable_dynamo(recursive=False)
def _recomputed(layer: nn.Module, own: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = tuple(map(_without_cache, args))
    kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
    contexts = partial(_contexts, layer)
    return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _contexts(layer: nn.Module) -> "tuple[_Noting, _Repeating]":
    noting = _Noting(layer)
    return noting, _Repeating(noting)


def _without_cache(value: Any) -> Any:
    """None for a cache of keys and values (transformers'): a second pass would add to it again."""
    return None if type(value).__name__.endswith("Cache") else value


class _Noting:
    """The first forward pass, which notes what buffers were that it changes (spectral norm's).

    Attributes:
        before: (buffers of a module, name, what it was) of each.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._modules = list(layer.modules())
        self.before: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def __enter__(self) -> None:
        self._all = [
            (m._buffers, name, b, b._version, b.clone())
            for m in self._modules
            for name, b in m._buffers.items()
            if b is not None
        ]

    def __exit__(self, *error: object) -> None:
        # What is not changed need not be held until the layer goes back.
        self.before = [
            (buffers, name, copy)
            for buffers, name, b, version, copy in self._all
            if b._version != version or buffers.get(name) is not b
        ]
        self._all.clear()


class _Repeating:
    """The second forward pass begins with the buffers of the first one, and leaves them alone."""

    def __init__(self, noted: _Noting) -> None:
        self._noted = noted

    def __enter__(self) -> None:
        self._kept = [(buffers, name, buffers.get(name)) for buffers, name, _ in self._noted.before]
        for buffers, name, before in self._noted.before:
            buffers[name] = before.clone()

    def __exit__(self, *error: object) -> None:
        for buffers, name, buffer in self._kept:
            buffers[name] = buffer
