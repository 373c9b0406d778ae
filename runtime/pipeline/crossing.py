"""Send the values of a stage from one tensor-parallel group to another in parts (thesis 4.4.1).

A value that crosses between stages is equal on every worker of a group. So each worker sends only
its part of it, and the receiving group joins the parts by an all-gather (scatter/gather). Between
groups of unlike degrees each worker sends to all whose parts overlap its own. Over all links of two
groups, each byte of the value is sent once.

A value of which every worker has a share of its own (the output of a column-parallel layer) goes
whole to the worker at the same position. With sequence parallelism a worker has some tokens of a
value; they go to those who need them, and nothing is joined.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import peers
from ..tensor.operators import TensorGroup
from ..tensor.sequence import check_length
from .channels import ALIGNMENT, Inbox, Message, Outbox, Value
from .transport import overlap, part


class Holding(IntEnum):
    """What each worker of a tensor-parallel group holds of a value."""

    WHOLE = 0
    OWN = 1  # a share that only workers at the same position can use
    TOKENS = 2  # a part of the tokens, the last dimension but one


Holdings = tuple[Holding, ...]
"""[values of a message]; empty if all are whole."""


class Received(NamedTuple):
    """A message, and what this worker holds of its values."""

    message: Message
    holdings: Holdings

    def of_gradients(self) -> Holdings:
        """The same for the gradients of the values, in order of those that have one."""
        _, wants = self.message
        pairs = zip(self.holdings, wants, strict=True) if self.holdings else ()
        found = tuple(holding for holding, wanted in pairs if wanted)
        return found if any(found) else ()


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

    def send(self, values: tuple[Value, ...], holdings: Holdings, limit: int | None = None) -> None:
        """Start to send this worker's parts; see ``Outbox.send``."""
        if self._degree == self._group.degree == 1:
            for _, outbox in self._outboxes:
                outbox.send(values, limit)
            return
        holdings = holdings or (Holding.WHOLE,) * len(values)
        notes = tuple(_note(*pair) for pair in zip(values, holdings, strict=True))
        for other, outbox in self._outboxes:
            parts = (
                value if note is None else self._part(value, holding, other)
                for value, note, holding in zip(values, notes, holdings, strict=True)
            )
            outbox.send((*parts, notes), limit)

    def _part(self, value: Value, holding: Holding, other: int) -> Tensor:
        assert isinstance(value, Tensor)
        group, given = self._group, value.detach()
        if holding is Holding.TOKENS:
            size = given.shape[-2] * group.degree
            check_length(size, self._degree)
            start, _ = part(size, group.lane, group.degree)
            first, last = overlap(size, group.lane, group.degree, other, self._degree)
            own = given.narrow(-2, first - start, last - first)
        else:
            first, last = overlap(given.numel(), group.lane, group.degree, other, self._degree)
            own = given.reshape(-1)[first:last]
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
        *found, notes = values
        assert isinstance(notes, tuple)
        split = [number for number, note in enumerate(notes) if isinstance(note, tuple)]
        parts = [
            self._own_part(torch.Size(notes[n]), [(lane, m[0][n]) for lane, m in messages])
            for n in split
        ]
        for number, whole in zip(split, self._joined(parts), strict=True):
            found[number] = whole.view(notes[number])
        for number, note in enumerate(notes):
            if note is True and len(messages) > 1:
                pieces: list[Any] = [message[0][number] for _, message in messages]
                found[number] = torch.cat(pieces, -2).to(self._device)
        holdings = tuple(_held(*pair) for pair in zip(found, notes, strict=True))
        return Received((tuple(found), wants[:-1]), holdings if any(holdings) else ())

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


def _note(value: Value, holding: Holding) -> Value:
    """What a message says of a value: the shape of one sent in parts, True for tokens, or None."""
    if not isinstance(value, Tensor) or holding is Holding.OWN:
        return None
    return True if holding is Holding.TOKENS else tuple(value.shape)


def _held(value: Value, note: Value) -> Holding:
    if note is True:
        return Holding.TOKENS
    return Holding.OWN if note is None and isinstance(value, Tensor) else Holding.WHOLE
