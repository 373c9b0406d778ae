"""Every virtual node's buffers on every worker, as of the last step that was agreed on.

Batch-norm statistics live where their virtual node runs; when that worker dies they would be
lost. They are small, so each step all workers exchange the buffers that passes have changed,
while gradients are on their way. What arrives counts only once the step is agreed on; until then
the rows of the step before are kept, so that the step can be done again.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..buffers import BufferSlot, VirtualNodeBuffers
from ..exchange import all_gather


class Mirror:
    """One row of bytes for each virtual node: its buffers that passes change.

    Batch-norm's are mirrored from the start. Others join when a pass first changes one: the
    step's sums carry ``found``, ``grow`` takes in what any worker found, and a second exchange
    brings it before the step is agreed on.

    Args:
        buffers: This worker's buffers.
        num_nodes: Virtual nodes of the job.

    ``names`` are the buffers that are mirrored, the same on every worker.
    """

    def __init__(self, buffers: VirtualNodeBuffers, num_nodes: int) -> None:
        self._buffers, self._num_nodes = buffers, num_nodes
        self.names = [slot.name for slot in buffers.slots if slot.writes_silently]
        self._rows = self._start()
        self._arriving: Tensor | None = None
        self._work: dist.Work | None = None
        self._order: list[int] = []
        self._before: tuple[list[str], Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of one virtual node's row."""
        return self._rows.shape[1]

    @property
    def _slots(self) -> list[BufferSlot]:
        by_name = {slot.name: slot for slot in self._buffers.slots}
        return [by_name[name] for name in self.names]

    @property
    def found(self) -> list[float]:
        """Per buffer that is not mirrored: whether a pass of this worker has changed it."""
        rest = [slot for slot in self._buffers.slots if slot.name not in self.names]
        return [float(bool(slot.own)) for slot in rest]

    def grow(self, found: Sequence[float]) -> bool:
        """Mirror what any worker found; whether there was any. ``gather`` must follow."""
        rest = [slot.name for slot in self._buffers.slots if slot.name not in self.names]
        names = {name for name, flag in zip(rest, found, strict=True) if flag}
        if names:
            state, self._before = self.state(), (self.names, self._rows)
            self.names = self.names + [name for name in rest if name in names]
            self.reset(state)
        return bool(names)

    def _start(self) -> Tensor:
        """All rows from the values that nobody has changed."""
        slots = self._slots
        if not slots:
            return torch.empty((self._num_nodes, 0), dtype=torch.uint8)
        return torch.cat([slot.bytes_of(slot.base) for slot in slots]).repeat(self._num_nodes, 1)

    def reset(self, state: dict[str, Any]) -> None:
        """Take all virtual nodes' buffers from what ``VirtualNodeBuffers.capture`` returned."""
        rows = []
        for own in state["nodes"]:
            rows.append([own.get(name, state["base"][name]) for name in self.names])
        if self.names and rows:
            device = self._slots[0].base.device
            self._rows = torch.stack(
                [torch.cat([BufferSlot.bytes_of(v.to(device)) for v in row]) for row in rows]
            )

    def rewrite(self, written: Sequence[BufferSlot]) -> None:
        """The script wrote buffers between steps: they are every virtual node's value now."""
        at = 0
        for slot in self._slots:
            value = slot.bytes_of(slot.base)
            if slot in written:
                self._rows[:, at : at + len(value)] = value
            at += len(value)

    def launch(self, holdings: Sequence[Sequence[int]], rank: int) -> None:
        """Start the exchange after this worker's passes.

        Args:
            holdings: The virtual nodes of each worker, by rank.
            rank: This worker.
        """
        if not self.num_bytes:
            self._arriving, self._work = None, None
            return
        self._order = [node for nodes in holdings for node in nodes]
        most = max(len(nodes) for nodes in holdings)
        own = self._rows.new_zeros((most, self.num_bytes))
        for row, node in zip(own, holdings[rank], strict=False):
            torch.cat([slot.bytes_of(slot.value_of(node)) for slot in self._slots], out=row)
        kept = [n * most + i for n, nodes in enumerate(holdings) for i in range(len(nodes))]
        if len(holdings) == 1:
            self._arriving, self._work = own[: len(kept)], None
            return
        on_host = own.cpu() if own.is_cuda and dist.get_backend() == "gloo" else own
        whole = on_host.new_empty((len(holdings) * most, self.num_bytes))
        self._work = all_gather(whole, on_host, async_op=True)
        self._sent, self._whole, self._kept = on_host, whole, kept

    def wait(self) -> None:
        """Wait until the others' rows are here."""
        if self._work is not None:
            self._work.wait()
            self._arriving, self._work = self._whole[self._kept], None

    def undo(self) -> None:
        """The step is not agreed on: what is on its way will not arrive."""
        self._arriving, self._work = None, None
        if self._before is not None:
            self.names, self._rows = self._before
            self._before = None

    def commit(self) -> None:
        """The step is agreed on: what arrived is what counts."""
        self._before = None
        if self._arriving is not None:
            self._rows[self._order] = self._arriving.to(self._rows.device)
            self._arriving = None

    def state(self) -> dict[str, Any]:
        """Every virtual node's buffers, in the form of ``VirtualNodeBuffers.capture``."""
        slots = self._slots
        nodes = []
        for row in self._rows:
            own, at = {}, 0
            for slot in slots:
                size = slot.base.numel() * slot.base.element_size()
                value = row[at : at + size].clone().view(slot.base.dtype).reshape(slot.base.shape)
                at += size
                if not torch.equal(value, slot.base):
                    own[slot.name] = value
            nodes.append(own)
        return {"base": {slot.name: slot.base for slot in self._buffers.slots}, "nodes": nodes}
