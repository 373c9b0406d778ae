"""Repeated layers that keep their inputs alone, and run forward again when they go back.

The layers are the units in which states are shared (``unit_of``). Each is its class's child with
another ``forward``, so copies of a model and checks of types see what they always see.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..schema.errors import TargetError
from ..schema.layer_trace import unit_of
from ..schema.options import option


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model that have parameters, by name."""
    paths = (path.rpartition(".")[0] for path, _ in model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(name for path in paths if (name := unit_of(path)))
    return {name: model.get_submodule(name) for name in names}


def recompute(layers: Iterable[nn.Module]) -> None:
    """Let layers compute their activations again in backward passes, from now on."""
    for layer in layers:
        kind: Any = type(layer)
        if not issubclass(kind, _Recomputed):
            layer.__class__ = _recomputed(kind)


def keep(layers: Iterable[nn.Module]) -> None:
    """Let layers keep their activations again."""
    for layer in layers:
        if isinstance(layer, _Recomputed):
            layer.__class__ = type(layer).__mro__[2]


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Within the context a model's repeated layers are recomputed.

    Raises:
        TargetError: There are none.
    """
    layers = repeated_layers(model).values()
    if not layers:
        raise TargetError(
            "the model has no repeated layers (as blocks.0, blocks.1), so none can be recomputed",
            hint=f"leave {option('recompute')} out",
        )
    recompute(layers)
    try:
        yield
    finally:
        keep(layers)


class _Recomputed(nn.Module):
    """A layer whose backward pass runs its forward pass again."""


@cache
def _recomputed(kind: Any) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = partial(kind.forward, self)
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        args = tuple(map(_without_cache, args))
        kwargs = {name: _without_cache(value) for name, value in kwargs.items()}
        contexts = partial(_contexts, self)
        return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    facts = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_Recomputed, kind), facts)


def _without_cache(value: Any) -> Any:
    """None for a cache of keys and values (transformers'): a second pass would add to it again."""
    return None if type(value).__name__.endswith("Cache") else value


def _contexts(
    layer: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _on_copies_of_buffers(layer)


@contextmanager
def _on_copies_of_buffers(layer: nn.Module) -> Iterator[None]:
    """The second forward pass changes no statistics (batch norm's): it has copies of buffers."""
    kept = [(m._buffers, name, b) for m in layer.modules() for name, b in m._buffers.items()]
    for buffers, name, buffer in kept:
        buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer
