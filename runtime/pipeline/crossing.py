"""Send the values of a stage from one tensor-parallel group to another in parts (thesis 4.4.1).

A value that crosses between stages is equal on every worker of a group. So each worker sends only
its part of it, and the receiving group joins the parts by an all-gather (scatter/gather). Between
groups of unlike degrees each worker sends to all whose parts overlap its own. Over all links of two
groups, each byte of the value is sent once.

A value of which every worker has a share of its own (the output of a column-parallel layer) goes
whole to the worker at the same position.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import peers
from ..tensor.operators import TensorGroup
from .channels import Inbox, Outbox
from .messages import ALIGNMENT, Message, Value
from .transport import overlap, part

OwnShares = tuple[bool, ...]
"""For each value of a message, whether each worker has a share of its own; empty: none is."""


class Received(NamedTuple):
    """A message, and which of its values are this worker's own shares."""

    message: Message
    shares: OwnShares

    def of_gradients(self) -> OwnShares:
        """The same for the gradients of the values, in order of those that have one."""
        _, wants = self.message
        if not any(self.shares):
            return ()
        return tuple(share for share, wanted in zip(self.shares, wants, strict=True) if wanted)


class Sender:
    """The sending end of all channels to one group.

    Args:
        outboxes: (the receiver's position in its group, the channel) for each worker sent to.
        group: This worker's group.
        degree: Number of workers in the other group.
    """

    def __init__(
        self, outboxes: Sequence[tuple[int, Outbox]], group: TensorGroup, degree: int
    ) -> None:
        self._outboxes, self._group, self._degree = outboxes, group, degree

    def send(self, values: tuple[Value, ...], shares: OwnShares, limit: int | None = None) -> None:
        """Start to send this worker's parts; see ``Outbox.send``."""
        if self._degree == self._group.degree == 1:
            for _, outbox in self._outboxes:
                outbox.send(values, limit)
            return
        shapes = tuple(
            tuple(value.shape) if isinstance(value, Tensor) and not _at(shares, number) else None
            for number, value in enumerate(values)
        )
        for other, outbox in self._outboxes:
            parts = (
                value if shape is None else self._part(value, other)
                for value, shape in zip(values, shapes, strict=True)
            )
            outbox.send((*parts, shapes), limit)

    def _part(self, value: Value, other: int) -> Tensor:
        assert isinstance(value, Tensor)
        group = self._group
        first, last = overlap(value.numel(), group.lane, group.degree, other, self._degree)
        own = value.detach().reshape(-1)[first:last]
        return own.requires_grad_() if value.requires_grad else own

    def flush(self) -> None:
        """Wait until all messages were sent."""
        for _, outbox in self._outboxes:
            outbox.flush()


class Receiver:
    """The receiving end of all channels from one group.

    Args:
        inboxes: (the sender's position in its group, the channel) for each worker heard from.
        group: This worker's group, which joins the parts.
        degree: Number of workers in the other group.
        device: Where parts are joined.
    """

    def __init__(
        self,
        inboxes: Sequence[tuple[int, Inbox]],
        group: TensorGroup,
        degree: int,
        device: torch.device,
    ) -> None:
        self._inboxes, self._group, self._degree = inboxes, group, degree
        self._device = device

    def take(self) -> Received:
        """Wait for the next message, and join its parts. All workers of the group call it."""
        messages = [(lane, inbox.take()) for lane, inbox in self._inboxes]
        _, (values, wants) = messages[0]
        if self._degree == self._group.degree == 1:
            return Received((values, wants), ())
        *found, shapes = values
        assert isinstance(shapes, tuple)
        split = [number for number, shape in enumerate(shapes) if shape is not None]
        parts = [
            self._own_part(torch.Size(shapes[n]), [(lane, m[0][n]) for lane, m in messages])
            for n in split
        ]
        for number, whole in zip(split, self._joined(parts), strict=True):
            found[number] = whole.view(shapes[number])
        shares = tuple(
            shape is None and isinstance(value, Tensor)
            for shape, value in zip(shapes, found, strict=True)
        )
        return Received((tuple(found), wants[:-1]), shares if any(shares) else ())

    def _own_part(self, shape: torch.Size, pieces: list[tuple[int, Any]]) -> "_Part":
        """This worker's part of a value, from the pieces of all that send to it."""
        group, size = self._group, shape.numel()
        first, last = part(size, group.lane, group.degree)
        if len(pieces) == 1:
            return _Part(pieces[0][1].to(self._device), size)
        own = pieces[0][1].new_empty(last - first, device=self._device)
        for lane, piece in pieces:
            begin, end = overlap(size, group.lane, group.degree, lane, self._degree)
            own[begin - first : end - first] = piece
        return _Part(own, size)

    def _joined(self, parts: list["_Part"]) -> list[Tensor]:
        """The whole values, flat, from the parts of this worker's group: one all-gather for all."""
        degree = self._group.degree
        if degree == 1:
            return [own for own, _ in parts]
        # A row is one worker's parts as bytes, padded to equal lengths.
        starts, end = [], 0
        for own, size in parts:
            starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
            end = starts[-1] + -(-size // degree) * own.element_size()
        if not end:
            return [own for own, _ in parts]
        if len(parts) > 1:
            end = -(-end // ALIGNMENT) * ALIGNMENT
        first = parts[0].own.view(torch.uint8)
        row = first
        if len(parts) > 1 or first.numel() < end:
            row = first.new_zeros(end)
            for (own, _), start in zip(parts, starts, strict=True):
                row[start : start + own.nbytes] = own.view(torch.uint8)
        rows = row.new_empty(degree * end)
        peers.all_gather(rows, row, group=self._group.group)
        table = rows.view(degree, end)
        return [
            _whole(table[:, start:], own.dtype, size, degree)
            for (own, size), start in zip(parts, starts, strict=True)
        ]


class _Part(NamedTuple):
    """A worker's part of a value, flat, and the number of elements of the whole."""

    own: Tensor
    size: int


def _whole(rows: Tensor, dtype: torch.dtype, size: int, degree: int) -> Tensor:
    """One value from the rows of all workers, which begin with their parts as bytes."""
    most = -(-size // degree) * dtype.itemsize
    if size % degree == 0:
        return rows[:, :most].view(dtype).reshape(-1)
    found = []
    for lane in range(degree):
        first, last = part(size, lane, degree)
        found.append(rows[lane, : (last - first) * dtype.itemsize].view(dtype))
    return torch.cat(found)


def _at(shares: OwnShares, number: int) -> bool:
    return bool(shares) and shares[number]
