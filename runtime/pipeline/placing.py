"""What of the model stands on this worker's device: its own stages, and never the rest.

Stages are cut before anything is moved. Layers are traced on the device, since what a forward
makes is noted with the device that its parameters are on; so stand-ins of the right shapes, which
take no memory there, are in the parameters' places meanwhile.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...devices.collectives import wire_device
from ..group import Place
from ..setup import check_same_shapes, move_optimizer_state
from .cut import StageModule
from .pieces import broadcast

Buffer = tuple[nn.Module, str, Tensor]


@contextmanager
def shapes_on(
    device: torch.device, model: nn.Module, parameters: Iterable[nn.Parameter]
) -> Iterator[None]:
    """Inside, the parameters have their shapes on a device and no values; afterwards as before.

    The model's buffers, and what its modules move by themselves, move to the device and stay.
    """
    values = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
    zeros: dict[torch.dtype, Tensor] = {}
    try:
        for parameter, value, _ in values:
            if value.dtype not in zeros:
                zeros[value.dtype] = torch.zeros((), dtype=value.dtype, device=device)
            parameter.grad = None
            parameter.data = zeros[value.dtype].expand(value.shape)
        model.to(device)
        yield
    finally:
        for parameter, value, gradient in values:
            parameter.data = value
            parameter.grad = gradient


def place_own(
    own: Sequence[nn.Parameter],
    parts: Sequence[StageModule],
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
) -> None:
    """Move this worker's parameters to its device, and what optimizers know of them.

    Args:
        own: Its parameters.
        parts: This worker's stages.
        optimizers: The script's.
        place: This worker among the others.
    """
    for part in parts:
        part.module.to(place.device)  # modules may have more to do than their parameters
    for parameter in own:  # also those that no stage uses
        parameter.data = parameter.data.to(place.device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(place.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer, own)


def broadcast_parts(
    model: nn.Module, parameters: dict[str, nn.Parameter], own: Collection[str], place: Place
) -> None:
    """Start from the first worker's values, of which each worker keeps its own parameters' alone.

    Args:
        model: Its buffers are kept on all workers.
        parameters: All, by name; on the device where they are this worker's.
        own: The names of this worker's.
        place: This worker among the others.
    """
    if not place.distributed:
        return
    buffers = dict(model.named_buffers())
    kept, wire = {*own, *buffers}, wire_device(place.device)
    for name, tensor in {**parameters, **buffers}.items():
        broadcast(tensor.detach(), wire, src=0, sends=place.rank == 0, keeps=name in kept)


def check_same_model(model: nn.Module, parameters: dict[str, nn.Parameter], place: Place) -> None:
    """Compare what the workers have built, by names, types and shapes.

    Raises:
        TargetError: The workers built different models.
    """
    if place.distributed:
        check_same_shapes({**parameters, **dict(model.named_buffers())}, place)


def move_buffers(model: nn.Module, device: torch.device) -> list[Buffer]:
    """Put copies of buffers that stand elsewhere on a device; what stood there, and where."""
    before: list[Buffer] = []
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for name, value in module._buffers.items():
            if value is not None and value.device != device:
                before.append((module, name, value))
                module._buffers[name] = made.setdefault(id(value), value.to(device))
    return before


def put_back(buffers: Sequence[Buffer]) -> None:
    """Undo ``move_buffers``."""
    for module, name, value in buffers:
        module._buffers[name] = value
