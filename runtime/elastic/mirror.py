"""Every virtual node's buffers on every worker, as of the last step that was agreed on.

Batch-norm statistics are held where their virtual node runs; if that worker dies, they would be
lost. They are small. So in each step all workers exchange the buffers that passes have changed, at
the same time as gradients and together with the step's sums. Received values count only once the
step is agreed on. Until then the earlier values are kept, so that the step can be repeated.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...devices.collectives import wire_device
from .. import peers
from ..buffers import BufferSlot, VirtualNodeBuffers

_ALIGNMENT = 16  # bytes of the largest element, so that a part can be viewed as its own dtype


class Mirror:
    """One row of bytes for each virtual node: its buffers that passes change.

    Batch-norm's buffers are mirrored from the start. Others are added when a pass first changes
    one: the step's sums carry ``found``, ``grow`` adds what any worker found, and a second
    exchange sends their values before the step is agreed on.

    Attributes:
        names: Names of the mirrored buffers, equal on every worker.
    """

    def __init__(self, buffers: VirtualNodeBuffers, num_nodes: int) -> None:
        self._buffers, self._num_nodes = buffers, num_nodes
        self.names = [slot.name for slot in buffers.slots if slot.writes_silently]
        self._held = self._start()
        self._message: _Message | None = None
        self._arriving: _Rows | None = None
        self._spare: Tensor | None = None
        self._work: peers.Transfer | None = None
        self._before: tuple[list[str], _Rows] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes of one virtual node's row."""
        return sum(_padded(slot.base) for slot in self._slots)

    @property
    def _slots(self) -> list[BufferSlot]:
        by_name = {slot.name: slot for slot in self._buffers.slots}
        return [by_name[name] for name in self.names]

    @property
    def found(self) -> list[float]:
        """For each buffer that is not mirrored: 1 if a pass of this worker changed it, else 0."""
        return [float(bool(slot.own)) for slot in self._rest]

    @property
    def _rest(self) -> list[BufferSlot]:
        """The buffers that are not mirrored, in order."""
        if len(self.names) == len(self._buffers.slots):  # as a rule
            return []
        mirrored = set(self.names)
        return [slot for slot in self._buffers.slots if slot.name not in mirrored]

    def grow(self, found: Sequence[float]) -> bool:
        """Mirror what any worker found; return if there was any. Then exchange once more."""
        rest = [slot.name for slot in self._rest]
        names = {name for name, flag in zip(rest, found, strict=True) if flag}
        if names:
            # The step may still be lost; ``undo`` then takes the names back too.
            state, self._before = self.state(), (self.names, self._held)
            # In the buffers' order, equal on all workers: rows carry no names.
            self.names = self.names + [name for name in rest if name in names]
            self.reset(state)
        return bool(names)

    def _start(self) -> "_Rows":
        return self._rows_of([[slot.base for slot in self._slots]] * self._num_nodes)

    def _rows_of(self, values: Sequence[Sequence[Tensor]]) -> "_Rows":
        slots = self._slots
        device = slots[0].base.device if slots else None
        # [virtual nodes, bytes]
        whole = torch.zeros((len(values), self.num_bytes), dtype=torch.uint8, device=device)
        for row, entries in zip(whole, values, strict=True):
            _write(_parts_of(row, slots), entries)
        return _Rows(whole, [(node, 0) for node in range(len(values))])

    def reset(self, state: dict[str, Any]) -> None:
        """Take all virtual nodes' buffers from a state of ``VirtualNodeBuffers.capture``.

        Those of which a virtual node has its own copy there are mirrored from now on.
        """
        self._message = None
        changed = {name for own in state["nodes"] for name in own}
        self.names = self.names + [slot.name for slot in self._rest if slot.name in changed]
        if self.names and state["nodes"]:
            base = state["base"]
            self._held = self._rows_of(
                [[own.get(name, base[name]) for name in self.names] for own in state["nodes"]]
            )

    def rewrite(self, written: Sequence[BufferSlot]) -> None:
        """Give every virtual node the buffers that the script wrote between steps."""
        slots = self._slots
        for node in range(self._num_nodes):
            for part, slot in zip(_parts_of(self._held.row(node), slots), slots, strict=True):
                if slot in written:
                    part.copy_(slot.base)

    def launch(
        self, holdings: Sequence[Sequence[int]], rank: int, sums: Tensor | None = None
    ) -> None:
        """Start the exchange after this worker's passes.

        Args:
            holdings: [workers] the virtual nodes of each worker, by rank.
            rank: This worker's rank.
            sums: [numbers] float64, added up over the workers along with it; each entry's sum must
                be exact in any order.
        """
        slots, length = self._slots, 0 if sums is None else len(sums)
        known = self._message
        if known is None or known.key != (holdings, rank, length):
            known = self._message = _Message(holdings, rank, length, slots)
            self._spare = None
        if sums is not None:
            known.sums.copy_(sums)
        _write(known.parts, [slot.value_of(node) for node in holdings[rank] for slot in slots])
        own = known.own
        if len(holdings) > 1:
            own = own.to(wire_device(own.device))
        # Two receive buffers take turns: the rows of the last step that was agreed on stay in one,
        # while this step's arrive in the other.
        whole, self._spare = self._spare, None
        if whole is None:  # [workers, bytes]
            whole = torch.empty((len(holdings), len(own)), dtype=torch.uint8, device=own.device)
        if len(holdings) > 1:
            self._work = peers.all_gather(whole.view(-1), own, async_op=True)
        else:
            whole[0] = own
        self._arriving = _Rows(whole, known.places)

    def wait(self) -> Tensor:
        """Wait until the others' rows have arrived; return the sums over the workers."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        assert self._arriving is not None
        assert self._message is not None
        length = self._message.sums.numel()
        # Added here, by each worker: an all-gather of bytes adds nothing.
        return self._arriving.whole[:, : length * 8].view(torch.float64).sum(0)

    def undo(self) -> None:
        """Drop the exchange in progress, because the step is not agreed on."""
        # A broken group may still write into its receive buffers, so they are not reused.
        self._message, self._arriving, self._spare, self._work = None, None, None, None
        if self._before is not None:
            self.names, self._held = self._before
            self._before = None

    def commit(self) -> None:
        """Make the received rows count, because the step is agreed on."""
        self._before = None
        if self._arriving is not None:
            before, self._held, self._arriving = self._held, self._arriving, None
            now = self._held.whole
            # At first the rows are one matrix of nodes, and not messages: of another shape, as a
            # rule, or after a change of workers.
            if (before.whole.shape, before.whole.device) == (now.shape, now.device):
                self._spare = before.whole

    def state(self) -> dict[str, Any]:
        """Every virtual node's buffers, in the form of ``VirtualNodeBuffers.capture``."""
        slots = self._slots
        nodes = []
        for node in range(self._num_nodes):
            own = {}
            for slot, part in zip(slots, _parts_of(self._held.row(node), slots), strict=True):
                if not torch.equal(part.to(slot.base.device), slot.base):
                    own[slot.name] = part.clone()
            nodes.append(own)
        return {"base": {slot.name: slot.base for slot in self._buffers.slots}, "nodes": nodes}


class _Rows:
    """Virtual nodes' rows within messages: for each row its message and its first byte."""

    def __init__(self, whole: Tensor, places: Sequence[tuple[int, int]]) -> None:
        self.whole, self._places = whole, places

    def row(self, node: int) -> Tensor:
        """A virtual node's row, and the bytes after it."""
        message, at = self._places[node]
        return self.whole[message, at:]


class _Message:
    """This worker's message in each step: sums, then its virtual nodes' rows; it is reused."""

    def __init__(
        self,
        holdings: Sequence[Sequence[int]],
        rank: int,
        num_sums: int,
        slots: Sequence[BufferSlot],
    ) -> None:
        self.key = (holdings, rank, num_sums)
        row = sum(_padded(slot.base) for slot in slots)  # bytes, as ``first``
        first = -(-num_sums * 8 // _ALIGNMENT) * _ALIGNMENT
        # An all-gather takes equal lengths, so every message has room for the most rows.
        most = max(len(nodes) for nodes in holdings)
        device = slots[0].base.device if slots else None
        self.own = torch.zeros(first + most * row, dtype=torch.uint8, device=device)
        self.sums = self.own[: num_sums * 8].view(torch.float64)
        self.parts = [
            part
            for number in range(len(holdings[rank]))
            for part in _parts_of(self.own[first + number * row :], slots)
        ]
        places = {
            node: (worker, first + number * row)
            for worker, nodes in enumerate(holdings)
            for number, node in enumerate(nodes)
        }
        self.places = [places[node] for node in sorted(places)]


def _padded(value: Tensor) -> int:
    return -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT


def _parts_of(row: Tensor, slots: Sequence[BufferSlot]) -> list[Tensor]:
    parts, at = [], 0  # views: who writes to one writes into the message
    for slot in slots:
        size = slot.base.numel() * slot.base.element_size()
        parts.append(row[at : at + size].view(slot.base.dtype).view(slot.base.shape))
        at += _padded(slot.base)
    return parts


def _write(parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for part, value in zip(parts, values, strict=True):
            part.copy_(value)
