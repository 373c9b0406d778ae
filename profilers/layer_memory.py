"""Memory of a layer's passes: what autograd keeps, and the most that is needed for a moment.

What is kept is counted by storages, each once: autograd saves a tensor through
``torch.autograd.graph.saved_tensors_hooks``, and several saved tensors may be views of one
storage. Parameters and buffers are there anyway. A layer's output counts for the layer that made
it, also where only a later one saves it. So the layers of a stage sum to what it keeps.

Temporary memory is the allocator's own account: its statistics on a GPU, the
profiler's allocation events on a CPU (what libraries allocate by themselves is not in it).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..devices.backend import backend_of
from ..runtime.nested_tensors import storage_key

BLOCK_BYTES = 512
"""Of an accelerator's memory, as torch's allocators give it to tensors."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes over what was there before: the highest, and what was left at the end."""

    peak_bytes: int
    end_bytes: int


def footprint(work: Callable[[], Any], device: str) -> Footprint | None:
    """Run once and see what it allocates; None where this torch does not tell.

    What ``work`` answers must be kept by the caller, or it counts as freed.
    """
    return _on_host(work) if backend_of(device).is_host else _on_device(work, device)


def _on_device(work: Callable[[], Any], name: str) -> Footprint | None:
    import torch

    backend, device = backend_of(name), torch.device(name)
    backend.synchronize(device)
    backend.reset_peak(device)
    before = backend.allocated_bytes(device)
    work()
    backend.synchronize(device)
    peak, after = backend.peak_bytes(device), backend.allocated_bytes(device)
    if before is None or peak is None or after is None:
        return None
    return Footprint(max(peak - before, 0), after - before)


def _on_host(work: Callable[[], Any]) -> Footprint | None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    results: Any = getattr(recorded.profiler, "kineto_results", None)
    if not hasattr(results, "experimental_event_tree"):
        return None
    level = peak = 0
    events = _allocations(results.experimental_event_tree())
    for _, change in sorted(events, key=lambda event: event[0]):
        level += change
        peak = max(peak, level)
    return Footprint(peak, level)


def _allocations(events: Iterable[Any]) -> list[tuple[int, int]]:
    """(start, bytes) of every allocation; freed bytes are negative."""
    found, waiting = [], list(events)
    while waiting:
        event = waiting.pop()
        if event.tag.name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
        waiting += event.children
    return found


class StorageLedger:
    """The layer that made each storage of a model's passes, and the storages that autograd keeps.

    Args:
        standing: Tensors that are there anyway: parameters and buffers.
        given: The model's own inputs, which every device holds.
        block_bytes: Allocators give memory in blocks of so many bytes.
    """

    def __init__(self, standing: Iterable[Any], given: Iterable[Any], block_bytes: int = 1) -> None:
        self._block = block_bytes
        self._standing = {storage_key(tensor) for tensor in standing}
        self._root: dict[int, int | None] = {storage_key(tensor): None for tensor in given}
        self._owner: dict[int, tuple[str, int]] = {}
        self._saver: dict[int, str] = {}  # by storage, the first layer that saves it
        self._inner: dict[str, int] = {}
        # Storages are named by address: as long as the ledger lives, none may be given twice.
        self._alive: list[Any] = []

    def record(
        self,
        layer: str,
        call: Callable[[], Any],
        tensors_of: Callable[[Any], list[Any]],
        passed: Iterable[tuple[Any, Any]],
        before: str | None = None,
    ) -> Any:
        """Run a layer's forward pass and note what it keeps.

        Args:
            layer: Its name.
            call: The pass.
            tensors_of: The tensors of its answer.
            passed: Pairs of the tensor that ``call`` gets and the one that was really made (the
                first may be a copy).
            before: The layer that a tensor which nobody is known to have made counts for.

        Returns:
            What ``call`` answers.
        """
        import torch

        names = {}
        for given, made in passed:
            names[storage_key(given)] = self._root_of(made, before)
        saved: dict[int, Any] = {}

        def pack(tensor: Any) -> Any:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                saved[storage_key(tensor)] = storage
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            answer = call()
        for tensor in tensors_of(answer):
            key = storage_key(tensor)
            self._root.setdefault(key, names.get(key, key))
            if key not in names:
                self._owner[key] = (layer, self._size(tensor.untyped_storage()))
            self._alive.append(tensor.untyped_storage())
        self._inner[layer] = self._inner.get(layer, 0)
        for key, storage in saved.items():
            self._alive.append(storage)
            if key in self._standing:
                continue
            root = names.get(key, key)
            if root is not None and root in self._owner:
                self._saver.setdefault(root, layer)
            elif root is not None and key not in names:
                self._inner[layer] += self._size(storage)
        return answer

    def _root_of(self, tensor: Any, before: str | None) -> int | None:
        key = storage_key(tensor)
        if key not in self._root and before is not None and key not in self._standing:
            self._root[key] = key
            self._owner[key] = (before, self._size(tensor.untyped_storage()))
            self._alive.append(tensor.untyped_storage())
        return self._root.get(key)

    def _size(self, storage: Any) -> int:
        return in_blocks(storage.nbytes(), self._block)

    @property
    def stashed_bytes(self) -> dict[str, int]:
        """By layer, what a microbatch in flight keeps."""
        found = dict(self._inner)
        for key in self._saver:
            layer, size = self._owner[key]
            found[layer] = found.get(layer, 0) + size
        return found

    def saved_later(self, layer: str) -> dict[str, int]:
        """Bytes of a layer's outputs that it does not save, by the first layer that does."""
        found: dict[str, int] = {}
        for key, saver in self._saver.items():
            maker, size = self._owner[key]
            if layer == maker != saver:
                found[saver] = found.get(saver, 0) + size
        return found


def in_blocks(num_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """What an allocator takes for a tensor of so many bytes."""
    return -(-num_bytes // block_bytes) * block_bytes


def buffer_bytes(
    module: Any, block_bytes: int = BLOCK_BYTES, owners: Iterable[Any] = ()
) -> tuple[int, int]:
    """Bytes of a module's buffers, and of those that passes change: batch norm's statistics.

    Where a module reads buffers that it does not own, ``owners`` are the modules that do.
    """
    from torch.nn.modules.batchnorm import _NormBase

    norms = {id(buffer) for owner in owners if isinstance(owner, _NormBase)
             for buffer in owner.buffers(recurse=False)}  # fmt: skip
    found = changed = 0
    for child in module.modules():
        for buffer in child.buffers(recurse=False):
            size = in_blocks(buffer.nbytes, block_bytes)
            found += size
            changed += size * (isinstance(child, _NormBase) or id(buffer) in norms)
    return found, changed
