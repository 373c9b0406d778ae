"""The repeated layers of a model: their modules and parameters, and when their passes end.

They are the units in which workers share states (``unit_of``).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..schema.layers import unit_of
from .nested_tensors import tensors_in


def repeated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated layers of a model that have parameters, by name."""
    paths = (path.rpartition(".")[0] for path, _ in model.named_parameters(remove_duplicate=False))
    names = dict.fromkeys(name for path in paths if (name := unit_of(path)))
    return {name: model.get_submodule(name) for name in names}


def layers_of(model: nn.Module) -> dict[int, str]:
    """The layer of each parameter, by the parameter's id; empty for the rest and for tied ones."""
    found: dict[int, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = unit_of(path.rpartition(".")[0])
        found[id(parameter)] = name if found.get(id(parameter), name) == name else ""
    return found


class _AfterBackward(torch.autograd.Function):
    """The identity on a layer's inputs; its backward pass comes when the layer's has ended."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.ended = ended
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.ended()
        return (None, *gradients)


def when_back(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], ended: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A layer's inputs, so that ``ended`` is called when the layer has gone back.

    Returns:
        What to give to the layer; None where it is not told, since no input has a gradient.
    """
    values = [*args, *kwargs.values()]
    places = [n for n, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
    if not places or not torch.is_grad_enabled():
        return None
    inputs = (values[n] for n in places)
    passed = _AfterBackward.apply(ended, *inputs)  # type: ignore[no-untyped-call]
    for n, tensor in zip(places, passed, strict=True):
        values[n] = tensor
    return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))


def when_going_back(output: Any, begins: Callable[[], None]) -> bool:
    """Let ``begins`` be called when the layer that gave this output goes back; whether it may."""
    found = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not torch.is_grad_enabled() or not found:
        return False
    torch.autograd.graph.register_multi_grad_hook(found, lambda _: begins(), mode="any")
    return True
