"""What a tensor-parallel group exchanges in a pass: f, g and their kin (thesis 4.2.3).

Each is the identity one way and a collective the other, so a layer that is cut over a group gives
every worker the outputs and gradients of the whole layer. All workers of a group must run the
same passes in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.host import TORCH_DEVICE as HOST
from .. import peers


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The workers that share layers, seen from one of them.

    Attributes:
        degree: How many they are.
        lane: This worker's place among them, from 0.
        ranks: Theirs, in order of lanes.
        group: Their process group; None for one alone.
    """

    degree: int = 1
    lane: int = 0
    ranks: tuple[int, ...] = ()
    group: dist.ProcessGroup | None = None


def sum_over(value: Tensor, group: TensorGroup) -> Tensor:
    """The sum over the group, in memory of its own; no gradient flows through it."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if group.group is not None:
        peers.all_reduce(total, group=group.group)
    return total


def largest_over(value: Tensor, group: TensorGroup) -> Tensor:
    """The elementwise maximum over the group; no gradient flows through it."""
    most = value.detach().clone(memory_format=torch.contiguous_format)
    if group.group is not None:
        peers.all_reduce(most, op=dist.ReduceOp.MAX, group=group.group)
    return most


def joined_over(value: Tensor, group: TensorGroup, size: int) -> Tensor:
    """The parts of all workers one behind the other, along the last dimension; no gradient.

    Args:
        value: [..., own part]; parts are as ``torch.tensor_split`` makes them.
        group: The workers.
        size: Of the whole dimension.
    """
    if group.group is None:
        return value.detach().clone()
    first, last = bounds(size, group.lane, group.degree)
    most = -(-size // group.degree)
    # A collective takes equal parts only.
    own = value.new_zeros((most, *value.shape[:-1]))
    own[: last - first] = value.detach().movedim(-1, 0)
    parts = own.new_empty((group.degree * most, *own.shape[1:]))
    peers.all_gather(parts, own, group=group.group)
    ends = [bounds(size, lane, group.degree) for lane in range(group.degree)]
    shares = [parts[lane * most :][: end - begin] for lane, (begin, end) in enumerate(ends)]
    return torch.cat(shares).movedim(0, -1).contiguous()


def parts_of_all(own: Tensor, group: TensorGroup, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Every worker's part of a tensor, in order of lanes, on the host; no gradient.

    Args:
        own: This worker's part.
        group: The workers.
        shapes: Of every worker's part.
    """
    found = []
    for lane, (rank, shape) in enumerate(zip(group.ranks, shapes, strict=True)):
        part = own.detach().contiguous() if lane == group.lane else own.new_empty(shape)
        peers.broadcast(part, src=rank, group=group.group)
        found.append(part.to(HOST))
    return found


def bounds(size: int, lane: int, degree: int) -> tuple[int, int]:
    """Where a worker's part of a dimension begins and ends: as equal as can be, larger first."""
    part, more = divmod(size, degree)
    first = lane * part + min(lane, more)
    return first, first + part + (lane < more)


def copy_to(value: Tensor, group: TensorGroup) -> Tensor:
    """f: every worker reads the same value; its gradient is the sum over all of them."""
    return value if group.degree == 1 else _apply(_Copy, value, group)


def sum_from(value: Tensor, group: TensorGroup) -> Tensor:
    """g: the sum of what the workers made; each gets the whole gradient of it."""
    return value if group.degree == 1 else _apply(_Sum, value, group)


def join_from(value: Tensor, group: TensorGroup, size: int) -> Tensor:
    """The whole of a last dimension that is cut; each worker gets its part of the gradient."""
    return value if group.degree == 1 else _apply(_Join, value, group, size)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    made: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return sum_over(gradient, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return sum_over(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, size: int) -> Tensor:
        ctx.group, ctx.size = group, size
        return joined_over(value, group, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        first, last = bounds(ctx.size, ctx.group.lane, ctx.group.degree)
        return gradient[..., first:last].contiguous(), None, None
