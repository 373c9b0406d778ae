"""The fate of buffers such as batch-norm statistics: each virtual node owns its own.

Before a pass the virtual node's buffers stand in the model, by reference; a pass that changes one
leaves the virtual node with its own copy, and the others untouched. So statistics follow the
virtual node, not the device, and memory grows only by the buffers that passes change.

Evaluation and the final model need one value: floating-point buffers become the mean over
virtual nodes weighted by their batch sizes, summed in order of virtual nodes; others (counts of
batches) are virtual node 0's. The same bits come out for every mapping. A buffer that the script
writes between steps holds for every virtual node from then on.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..schema.launch import VirtualNode
from . import peers

AllReduce = Callable[[Tensor], object]


class BufferSlot:
    """One buffer: where it stands in the model, its shared value, and who owns a copy."""

    def __init__(self, name: str, value: Tensor) -> None:
        self.name = name
        self.owners: list[tuple[nn.Module, str]] = []
        self.base = value.detach().clone()
        self.shared = value
        self.own: dict[int, Tensor] = {}
        self.left = value
        self.version = value._version
        # Batch-norm's kernels write its statistics without counting it as a write.
        self.writes_silently = False
        self.checked = False

    @property
    def is_persistent(self) -> bool:
        """Whether it is a part of the model's state, and no cache."""
        module, key = self.owners[0]
        return key not in module._non_persistent_buffers_set

    def current(self) -> Tensor:
        """What stands in the model now."""
        module, key = self.owners[0]
        value = module._buffers[key]
        assert value is not None
        return value

    def install(self, value: Tensor) -> None:
        """Put a value into the model, wherever the buffer stands."""
        for module, key in self.owners:
            module._buffers[key] = value
        self.left, self.version = value, value._version

    def was_written(self) -> bool:
        """Whether it was written to since it was put in place."""
        current = self.current()
        return current is not self.left or current._version != self.version

    def was_changed_by_pass(self) -> bool:
        """Whether the pass that ended has changed it."""
        if not self.checked:
            # Other code may do as batch-norm does: the first pass is judged by the values.
            self.checked = True
            current = self.current()
            same = current.shape == self.base.shape and torch.equal(current, self.base)
            self.writes_silently = self.writes_silently or not same
        return self.writes_silently or self.was_written()

    def value_of(self, node: int) -> Tensor:
        """A virtual node's value: its own copy, or the one that all share."""
        return self.own.get(node, self.base)

    @staticmethod
    def bytes_of(value: Tensor) -> Tensor:
        """The bytes of a value, as a flat tensor."""
        return value.detach().contiguous().reshape(-1).view(torch.uint8)


class Follower(Protocol):
    """Keeps copies of all virtual nodes' buffers, and is told what no pass has changed."""

    def rewrite(self, written: Sequence[BufferSlot]) -> None:
        """The script wrote these between steps."""

    def reset(self, state: dict[str, Any]) -> None:
        """All of them come from a state, in ``VirtualNodeBuffers.capture``'s form."""


class VirtualNodeBuffers:
    """The buffers of a model, one set for each virtual node of this device."""

    def __init__(self, model: nn.Module, local: Sequence[int], batch_sizes: Sequence[int]) -> None:
        """Take the model, this device's virtual nodes, and the batch sizes of all of them."""
        self._model = model
        self._local = tuple(local)
        self._batch_sizes = tuple(batch_sizes)
        self.slots = find_slots(model) if len(batch_sizes) > 1 else []
        self._follower: Follower | None = None

    @classmethod
    def of(
        cls, model: nn.Module, local: Sequence[VirtualNode], batch_sizes: Sequence[int]
    ) -> "VirtualNodeBuffers":
        """The buffers for the virtual nodes of one worker slot."""
        return cls(model, [node.index for node in local], batch_sizes)

    def follow(self, follower: Follower) -> None:
        """Tell ``follower`` what changes outside of passes."""
        self._follower = follower

    def begin_step(self) -> None:
        """Notice what the script wrote since the last pass: it is everyone's value now."""
        written = [slot for slot in self.slots if slot.was_written()]
        for slot in written:
            value = slot.current()
            slot.base, slot.shared = value.detach().clone(), value
            slot.own.clear()
            slot.install(value)
        if written and self._follower is not None:
            self._follower.rewrite(written)

    def move(self, local: Sequence[int], state: dict[str, Any]) -> None:
        """Run other virtual nodes from now on, with their buffers from ``capture``'s form."""
        self._local = tuple(local)
        self._take(state)

    def load(self, node: int) -> None:
        """Put a virtual node's buffers into the model."""
        for slot in self.slots:
            slot.install(slot.own.get(node, slot.shared))

    def save(self, node: int) -> None:
        """Keep what a virtual node's pass changed."""
        for slot in self.slots:
            if not slot.was_changed_by_pass():
                continue
            current = slot.current()
            current = current.detach() if current.requires_grad else current
            if slot.left is slot.shared and current.data_ptr() == slot.shared.data_ptr():
                slot.shared = slot.base.clone()
            slot.own[node] = current
            slot.install(current)

    def merged(self, all_reduce: AllReduce | None) -> dict[str, Tensor]:
        """The merged value of every buffer that a pass has changed, the same on every worker.

        Args:
            all_reduce: Sums a tensor in place over the workers; None for a single worker.
        """
        changed = self._changed_anywhere(all_reduce)
        return {slot.name: self._merged(slot, all_reduce) for slot in changed}

    def install(self, merged: dict[str, Tensor]) -> None:
        """Put merged buffers into the model; virtual nodes keep their own."""
        for slot in self.slots:
            if slot.name in merged:
                slot.install(merged[slot.name].to(slot.base.device))

    def capture(self, holders: Sequence[int], distributed: bool) -> dict[str, Any]:
        """Every virtual node's buffers, on every worker: what a checkpoint keeps.

        Args:
            holders: The rank that holds each virtual node.
            distributed: Whether there are other workers.
        """
        self.begin_step()
        if not self.slots:
            return {"base": dict(self._model.named_buffers()), "nodes": []}
        nodes = []
        for node, holder in enumerate(holders):
            packed = torch.cat([BufferSlot.bytes_of(slot.value_of(node)) for slot in self.slots])
            if distributed:
                peers.broadcast(packed, src=holder)
            nodes.append(self._unpacked(packed))
        return {"base": {slot.name: slot.base for slot in self.slots}, "nodes": nodes}

    def _unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        """Those of a virtual node's buffers that are its own."""
        found, at = {}, 0
        for slot in self.slots:
            size = slot.base.numel() * slot.base.element_size()
            # A clone starts at an aligned address, which a part of the bytes need not.
            flat = packed[at : at + size].clone().view(slot.base.dtype)
            value, at = flat.reshape(slot.base.shape), at + size
            if not torch.equal(value, slot.base):
                found[slot.name] = value
        return found

    def restore(self, state: dict[str, Any]) -> None:
        """Take buffers back from ``capture``, on whatever mapping."""
        self._take(state)
        if self._follower is not None:
            self._follower.reset(state)

    def _take(self, state: dict[str, Any]) -> None:
        if not self.slots:
            with torch.no_grad():
                for name, value in self._model.named_buffers():
                    value.copy_(state["base"][name])
        for slot in self.slots:
            device = slot.base.device
            slot.base = state["base"][slot.name].to(device, copy=True)
            slot.shared = slot.base.clone()
            slot.own = {
                node: state["nodes"][node][slot.name].to(device, copy=True)
                for node in self._local
                if slot.name in state["nodes"][node]
            }
            slot.install(slot.shared)

    def _changed_anywhere(self, all_reduce: AllReduce | None) -> list[BufferSlot]:
        if not self.slots:
            return []
        device = self.slots[0].base.device
        flags = torch.tensor([float(bool(slot.own)) for slot in self.slots], device=device)
        if all_reduce is not None:
            all_reduce(flags)
        return [slot for slot, flag in zip(self.slots, flags.tolist(), strict=True) if flag]

    def _merged(self, slot: BufferSlot, all_reduce: AllReduce | None) -> Tensor:
        if not slot.base.is_floating_point():
            return self._of_first_node(slot, all_reduce)
        rows = torch.zeros(
            (len(self._batch_sizes), slot.base.numel()),
            dtype=torch.float64,
            device=slot.base.device,
        )
        for node in self._local:
            rows[node] = slot.value_of(node).reshape(-1).double()
        if all_reduce is not None:
            # Each row is one worker's plus zeros, so the sum is exact wherever it is made.
            all_reduce(rows)
        mean, total = torch.zeros_like(rows[0]), sum(self._batch_sizes)
        for row, size in zip(rows, self._batch_sizes, strict=True):
            mean += row * (size / total)
        return mean.to(slot.base.dtype).reshape(slot.base.shape)

    def _of_first_node(self, slot: BufferSlot, all_reduce: AllReduce | None) -> Tensor:
        real = torch.view_as_real(slot.base) if slot.base.is_complex() else slot.base
        wide = torch.float64 if slot.base.is_complex() else torch.int64
        value = torch.zeros_like(real, dtype=wide)
        if 0 in self._local:
            own = slot.value_of(0)
            value.copy_(torch.view_as_real(own) if own.is_complex() else own)
        if all_reduce is not None:
            all_reduce(value)
        narrow = value.to(real.dtype)
        return torch.view_as_complex(narrow) if slot.base.is_complex() else narrow


def find_slots(model: nn.Module) -> list[BufferSlot]:
    """Every buffer of a model once, in order, with all the places where it stands."""
    slots: dict[int, BufferSlot] = {}
    for prefix, module in model.named_modules():
        for key, value in module._buffers.items():
            if value is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            slot = slots.setdefault(id(value), BufferSlot(name, value))
            slot.owners.append((module, key))
            slot.writes_silently = slot.writes_silently or isinstance(module, _NormBase)
    return list(slots.values())
