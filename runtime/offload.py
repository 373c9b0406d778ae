"""Activations that wait for their backward pass in the host's memory.

While a layer runs, autograd hands what it saves to a ``Stash``. When the layer has ended, all of
it is copied to pinned memory on a stream beside the computation. The device's own values go when
the next layer has ended too, so a copy has a layer's time. In the backward pass the first use of a
stash begins to fetch the one of the layer before. So two layers' activations are here at once.

The host waits for nothing: the computation waits for copies by events. Memory is taken and given
back in the order of the computation, so its allocator need not know of the other stream.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..devices.backend import Stream, backend_of
from .nested_tensors import storage_key

_LEAST_BYTES = 1 << 16
"""Smaller storages stay: beginning a copy takes as long as these take on a link."""


def pinned_bytes(values: Iterable[Tensor]) -> int:
    """What copies of values take of the host's pinned memory: torch pins powers of two."""
    return sum(1 << (one.nbytes - 1).bit_length() for one in values)


class Lane:
    """How activations of a device reach pinned memory of the host, and come back.

    Attributes:
        pinned_bytes: Of all that went to the host so far.
    """

    def __init__(self, device: torch.device, stream: Stream) -> None:
        self.pinned_bytes = 0
        self._device, self._stream = device, stream
        self._backend = backend_of(device)

    def put(self, values: list[Tensor]) -> tuple[list[Any], Any]:
        """Copy vectors to the host: what stands for them there, and their arrival."""

        def copied(one: Tensor) -> Tensor:
            room = torch.empty(len(one), dtype=one.dtype, pin_memory=True)
            return room.copy_(one, non_blocking=True)

        self.pinned_bytes += pinned_bytes(values)
        return self._beside(lambda: list(map(copied, values)))

    def get(self, held: list[Any]) -> tuple[list[Tensor], Any]:
        """Copy back what ``put`` gave: the vectors, and their arrival."""
        # Taken on the computing stream, which frees them: the side stream waits for it
        # (``_beside``) before it writes.
        rooms = [torch.empty(len(one), dtype=one.dtype, device=self._device) for one in held]
        pairs = list(zip(rooms, held, strict=True))
        return self._beside(lambda: [room.copy_(one, non_blocking=True) for room, one in pairs])

    def _beside(self, copies: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Any]:
        """Queue copies behind all computation that was queued, beside what comes."""
        self._stream.wait_stream(self._backend.current_stream(self._device))
        with self._backend.on_stream(self._stream):
            return copies(), self._stream.record_event()

    def wait(self, arrival: Any) -> None:
        """Let the computation wait for copies."""
        current: Any = self._backend.current_stream(self._device)
        current.wait_event(arrival)


LANES: dict[torch.device, Any] = {}
"""Of the devices in use; None for the host's own, whose activations are there already."""


def lane_of(device: torch.device) -> Any:
    """The lane of a device, which is made when it is first asked for."""
    if device not in LANES:
        stream = backend_of(device).side_stream(device)
        LANES[device] = None if stream is None else Lane(device, stream)
    return LANES[device]


class _Saved:
    """A storage that autograd saved: its values here, or what stands for them on the host."""

    def __init__(self, stash: "Stash", values: Tensor) -> None:
        self.stash = stash
        self.values: Tensor | None = values
        self.held: Any = None

    def __del__(self) -> None:
        if self.values is not None:
            self.stash.settle()  # else its memory would be used again under a copy


class _Part(NamedTuple):
    """A tensor that autograd saved: what it shows of a storage."""

    saved: _Saved
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Stash:
    """What one call of a layer saved for its backward pass.

    Tensors whose storages are among those ``staying`` stay here: weights, and what is not this
    layer's alone.
    """

    _latest: "Callable[[], Stash | None]" = staticmethod(lambda: None)

    def __init__(self, lane: Any, staying: Iterable[Tensor]) -> None:
        self._lane, self._staying = lane, set(map(storage_key, staying))
        self._before = Stash._latest
        self._saved: weakref.WeakValueDictionary[tuple[int, int], _Saved]
        self._saved = weakref.WeakValueDictionary()
        self._is_here, self._arrival = True, None

    def pack(self, tensor: Tensor) -> Any:
        """Take a tensor from autograd; some are given back as they are."""
        if self._stays(tensor):
            return tensor if tensor.is_leaf else tensor.detach()  # an output would hold itself
        # By storage, because a layer saves several views of one; the version tells values apart
        # that were written over each other.
        key = storage_key(tensor), tensor._version
        saved = self._saved.get(key)
        if saved is None:
            # The whole storage, as a vector: each part then finds its view in it.
            number = tensor.untyped_storage().nbytes() // tensor.element_size()
            saved = _Saved(self, tensor.detach().as_strided((number,), (1,), 0))
            self._saved[key] = saved
        part = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Part(saved, tensor.dtype, *part)

    def _stays(self, tensor: Tensor) -> bool:
        if tensor.layout is not torch.strided or is_traceable_wrapper_subclass(tensor):
            return True
        return (
            tensor.untyped_storage().nbytes() < _LEAST_BYTES
            or tensor.is_conj()
            or tensor.is_neg()
            or storage_key(tensor) in self._staying
            or lane_of(tensor.device) is not self._lane
        )

    @staticmethod
    def unpack(packed: Any) -> Tensor:
        """Give autograd a tensor back, and fetch the stash that comes next."""
        if isinstance(packed, Tensor):
            return packed
        stash = packed.saved.stash
        stash.fetch()
        stash.settle()
        # The backward pass comes to the layer before next: its copies run beside this layer's.
        before = stash._before()
        if before is not None:
            before.fetch()
        values: Tensor = packed.saved.values.view(packed.dtype)
        return values.as_strided(packed.size, packed.stride, packed.offset)

    @_disable_dynamo
    def close(self) -> None:
        """Begin to copy all to the host: the layer has ended."""
        saved = list(self._saved.values())
        if not saved:
            return
        copies, self._arrival = self._lane.put([one.values for one in saved])
        for one, held in zip(saved, copies, strict=True):
            one.held = held
        # The layer before leaves only now: its copies had this layer's time to arrive. So two
        # layers' activations are here at most.
        before = self._before()
        if before is not None:
            before.leave()
        Stash._latest = weakref.ref(self)

    def leave(self) -> None:
        """Give the memory here back, when the copies have arrived."""
        # The computing stream waits before the memory goes back to its pool: what is computed in
        # that memory next must not overtake the copies.
        self.settle()
        for one in self._saved.values():
            one.values = None
        self._is_here = False

    def fetch(self) -> None:
        """Begin to copy all back that is not here."""
        if self._is_here:
            return
        self._is_here, saved = True, list(self._saved.values())
        if saved:
            copies, self._arrival = self._lane.get([one.held for one in saved])
            for one, values in zip(saved, copies, strict=True):
                one.values = values

    def settle(self) -> None:
        """Let the computation wait for copies that are under way."""
        if self._arrival is not None:
            self._lane.wait(self._arrival)
            self._arrival = None
