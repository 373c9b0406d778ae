"""Place this worker's own stages on its device, without ever moving the rest of the model there.

Stages are cut before anything is moved. A trace records the device of the tensors that a forward
makes, so layers are traced on the worker's device. Meanwhile the parameters are replaced by
stand-ins of the same shapes, which take no memory there.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...devices.collectives import wire_device
from ..group import Place
from ..initial_values import fill, initial_value
from ..setup import check_same_shapes, move_optimizer_state
from .cut import StageModule
from .pieces import broadcast

Buffer = tuple[nn.Module, str, Tensor]


@contextmanager
def shapes_on(
    device: torch.device, model: nn.Module, shapes: Iterable[tuple[nn.Parameter, torch.Size]]
) -> Iterator[None]:
    """Within the context, give parameters and buffers their shapes on a device, without values.

    The tensors that the model's modules move themselves move to the device and stay.

    Args:
        device: The device.
        model: The model.
        shapes: Each parameter, with the shape of the whole parameter.
    """
    known = list(shapes)
    values = [(parameter, parameter.data, parameter.grad) for parameter, _ in known]
    buffers = [(m, key, b) for m in model.modules() for key, b in m._buffers.items()]
    zeros: dict[torch.dtype, Tensor] = {}
    try:
        _show_shapes([(m, key, b) for m, key, b in buffers if b is not None], device)
        for parameter, shape in known:
            if parameter.dtype not in zeros:
                zeros[parameter.dtype] = torch.zeros((), dtype=parameter.dtype, device=device)
            parameter.grad = None
            parameter.data = zeros[parameter.dtype].expand(shape)
        model.to(device)
        yield
    finally:
        for parameter, value, gradient in values:
            parameter.data = value
            parameter.grad = gradient
        for module, key, buffer in buffers:
            module._buffers[key] = buffer


def _show_shapes(buffers: Sequence[Buffer], device: torch.device) -> None:
    """Put tensors of the buffers' shapes in their places, all in one memory of the largest's size.

    Code that views a buffer needs its strides too.
    """
    layouts = {id(b): torch.empty_like(b, device="meta") for _, _, b in buffers}
    room: dict[torch.dtype, int] = {}
    for layout in layouts.values():
        room[layout.dtype] = max(room.get(layout.dtype, 0), layout.numel())
    memory = {dtype: torch.zeros(n, dtype=dtype, device=device) for dtype, n in room.items()}
    shown = {
        name: memory[layout.dtype].as_strided(layout.shape, layout.stride())
        for name, layout in layouts.items()
    }
    for module, key, buffer in buffers:
        module._buffers[key] = shown[id(buffer)]


def place_own(
    own: Sequence[nn.Parameter],
    parts: Sequence[StageModule],
    optimizers: Sequence[torch.optim.Optimizer],
    place: Place,
) -> None:
    """Move this worker's parameters and their optimizer state to its device.

    Args:
        own: This worker's parameters.
        parts: This worker's stages.
        optimizers: The script's optimizers.
        place: This worker among the others.
    """
    for parameter in own:
        fill(parameter, place.device, computes=place.rank == 0)
    for part in parts:
        part.module.to(place.device)  # a module's own ``to`` may move more than its parameters
    for parameter in own:  # also those that no stage uses
        parameter.data = parameter.data.to(place.device)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(place.device)
    for optimizer in optimizers:
        move_optimizer_state(optimizer, own)


def broadcast_parts(
    model: nn.Module, parameters: dict[str, nn.Parameter], own: Collection[str], place: Place
) -> None:
    """Start from the first worker's values; each worker keeps those of its own tensors only.

    Args:
        model: The whole model.
        parameters: All parameters by name; this worker's are on its device.
        own: Names of this worker's parameters and buffers.
        place: This worker among the others.
    """
    if not place.distributed:
        return
    wire = wire_device(place.device)
    for name, tensor in {**parameters, **dict(model.named_buffers())}.items():
        # A deferred value of another worker's parameter is computed here, sent, and freed.
        value = initial_value(tensor) if place.rank == 0 else tensor.detach()
        broadcast(value, wire, src=0, sends=place.rank == 0, keeps=name in own)


def check_same_model(model: nn.Module, parameters: dict[str, nn.Parameter], place: Place) -> None:
    """Compare the names, dtypes and shapes of what the workers have built.

    Raises:
        TargetError: The workers built different models.
    """
    if place.distributed:
        check_same_shapes({**parameters, **dict(model.named_buffers())}, place)


def move_buffers(model: nn.Module, device: torch.device) -> list[Buffer]:
    """Put copies of buffers of other devices on a device; return the originals and places."""
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
