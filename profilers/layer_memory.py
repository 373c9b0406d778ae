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
    """

    def __init__(self, standing: Iterable[Any], given: Iterable[Any]) -> None:
        self._standing = {storage_key(tensor) for tensor in standing}
        self._root: dict[int, int | None] = {storage_key(tensor): None for tensor in given}
        self._owner: dict[int, tuple[str, int]] = {}
        self._kept: set[int] = set()
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
                self._owner[key] = (layer, tensor.untyped_storage().nbytes())
            self._alive.append(tensor.untyped_storage())
        self._inner[layer] = self._inner.get(layer, 0)
        for key, storage in saved.items():
            self._alive.append(storage)
            if key in self._standing:
                continue
            root = names.get(key, key)
            if root is not None and root in self._owner:
                self._kept.add(root)
            elif root is not None and key not in names:
                self._inner[layer] += storage.nbytes()
        return answer

    def _root_of(self, tensor: Any, before: str | None) -> int | None:
        key = storage_key(tensor)
        if key not in self._root and before is not None and key not in self._standing:
            self._root[key] = key
            self._owner[key] = (before, tensor.untyped_storage().nbytes())
            self._alive.append(tensor.untyped_storage())
        return self._root.get(key)

    @property
    def stashed_bytes(self) -> dict[str, int]:
        """By layer, what a microbatch in flight keeps."""
        found = dict(self._inner)
        for key in self._kept:
            layer, size = self._owner[key]
            found[layer] = found.get(layer, 0) + size
        return found
