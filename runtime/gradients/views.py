"""Parameters' places in a flat buffer of gradients."""

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)
_kind = attrgetter("requires_grad", "dtype", "device", "shape")


def view_like(flat: Tensor, offset: int, parameter: nn.Parameter) -> Tensor:
    """The part of ``flat`` for one parameter, in the parameter's memory format."""
    part = flat[offset : offset + parameter.numel()]
    dense = any(
        parameter.dim() == dims and parameter.is_contiguous(memory_format=layout)
        for dims, layout in zip((4, 5), _CHANNELS_LAST, strict=True)
    )
    if dense and not parameter.is_contiguous():
        return part.as_strided(parameter.size(), parameter.stride())
    return part.view(parameter.shape)


def layout_of(parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
    """What the views of parameters depend on; if it changes, buffers must be made again.

    It changes where parameters are frozen, unfrozen, cast, moved, or get another memory format.
    """
    # By ``map``, which takes half as long as a loop.
    return *map(_kind, parameters), *map(Tensor.stride, parameters)
