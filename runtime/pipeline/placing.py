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
from .. import peers
from ..group import Place
from ..setup import check_same_shapes, move_optimizer_state
from .cut import StageModule

PIECE_BYTES = 25 << 20
"""Of a tensor that is broadcast: what a device needs for tensors that it does not hold."""


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
        _broadcast(tensor.detach(), wire, sends=place.rank == 0, keeps=name in kept)


def _broadcast(tensor: Tensor, wire: torch.device, *, sends: bool, keeps: bool) -> None:
    dense = tensor.contiguous() if sends or keeps else None
    length = max(1, PIECE_BYTES // tensor.element_size())
    for start in range(0, tensor.numel(), length):
        number = min(length, tensor.numel() - start)
        if dense is None:
            passing = torch.empty(number, dtype=tensor.dtype, device=wire)
            peers.broadcast(passing, src=0)
            continue
        piece = dense.view(-1)[start : start + number]
        passing = piece.to(wire)
        peers.broadcast(passing, src=0)
        if not sends and passing is not piece:
            piece.copy_(passing)
    if not sends and dense is not None and dense.data_ptr() != tensor.data_ptr():
        tensor.copy_(dense)


def check_same_model(model: nn.Module, parameters: dict[str, nn.Parameter], place: Place) -> None:
    """Compare what the workers have built, by names, types and shapes.

    Raises:
        TargetError: The workers built different models.
    """
    if place.distributed:
        check_same_shapes({**parameters, **dict(model.named_buffers())}, place)
