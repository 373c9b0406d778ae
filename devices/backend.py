"""What one kind of device answers, and the registry of kinds.

A kind has two sides. The host side lists the devices of this machine and gives the environment in
which a process sees one of them. The torch side is used inside a worker, for one ``torch.device``:
streams, memory, random state, the library for collectives.
"""

import gc
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from ..schema.plugins import Registry

if TYPE_CHECKING:
    import torch

    from ..schema.launch import Determinism

Mark = Any
"""A moment of a device: what its ``mark`` gave."""
Stream = Any
"""A queue of a device's work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """The local devices of one type. ``memory_bytes`` is that of one device.

    ``kind`` names the backend. ``torch_devices`` are torch's names of them; those of a host's own
    processors are all alike. ``distinctions`` are what another host may add to the type's name, to
    tell it from others that it has.
    """

    device_type: str
    kind: str
    name: str
    torch_devices: tuple[str, ...]
    memory_bytes: int
    compute_capability: str | None = None
    driver: str | None = None
    distinctions: tuple[str, ...] = ()

    @property
    def name_with_memory(self) -> str | None:
        """The type's name where other hosts have others of it: ``V100-32GB``; None: it cannot."""
        said = next((word for word in self.distinctions if word.endswith("GB")), "")
        return f"{self.device_type}{said}" if said and said not in self.device_type else None

    @property
    def num_devices(self) -> int:
        """Devices of this type."""
        return len(self.torch_devices)

    @property
    def backend(self) -> "DeviceBackend":
        """What the kind of these devices answers."""
        return DEVICES.get(self.kind)

    @property
    def is_host(self) -> bool:
        """Whether such a device is a part of the host itself."""
        return self.backend.is_host

    @property
    def num_threads(self) -> int:
        """Threads of a worker's arithmetic on the host."""
        return self.backend.num_threads


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """One type to profile, on one local device. ``speed`` is set where it is emulated."""

    device_type: str
    local: LocalDevice
    torch_device: str
    speed: float | None = None


class DeviceBackend(ABC):
    """One kind of device.

    Attributes:
        kind: Its name; of kinds that torch knows, torch's name of the device type.
        is_host: Whether a device is a part of the host: its memory is the process's, its time the
            processors', and several workers may share one.
        collective: The library that carries collectives between such devices.
        num_threads: Threads of a worker's arithmetic on the host.
        bucket_bytes: Gradients that are reduced at once.
        early_variables: Prefixes of environment variables that are read when the libraries of this
            kind are loaded, with the reason.
        late_variables: Of those, the ones that are read at the first use of a device.
        abortable_with: Environment variables, read when a group is made, with which a process may
            abort the collectives of a group that has lost a worker, and live on; None where it
            cannot.
    """

    kind: ClassVar[str]
    is_host: ClassVar[bool]
    collective: ClassVar[str]
    bucket_bytes: ClassVar[int]
    early_variables: ClassVar[Mapping[str, str]] = {}
    late_variables: ClassVar[Mapping[str, str]] = {}
    abortable_with: ClassVar[Mapping[str, str] | None] = None

    @property
    def num_threads(self) -> int:
        """The threads of a worker: one, unless the kind of device says otherwise."""
        return 1

    # The host's side

    @abstractmethod
    def local_devices(self) -> tuple[LocalDevice, ...]:
        """The devices of this machine that this process may use, one entry a type."""

    def requested(self, item: str, local: Sequence[LocalDevice]) -> DeviceRequest | None:
        """The device that ``--device ITEM`` asks for, if ITEM names none of ``local``.

        None for an item that is not of this kind.
        """
        return None

    @abstractmethod
    def visibility(self, devices: Sequence[str]) -> dict[str, str]:
        """The environment in which a child sees these devices of ours alone, in this order."""

    @abstractmethod
    def worker_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Further environment variables of a worker on such a device."""

    def pins(self, level: "Determinism") -> dict[str, str]:
        """The environment variables by which a determinism level fixes results on such devices."""
        return {}

    # Torch's side

    def toolkit(self) -> str | None:
        """The toolkit that torch was built with for this kind, with version; None without one."""
        return None

    def collective_version(self) -> str | None:
        """The version of ``collective``; None where versions of it work together."""
        return None

    @abstractmethod
    def is_initialized(self) -> bool:
        """Whether this process has used such a device, so that it cannot be forked any more."""

    @abstractmethod
    def set_current(self, device: "torch.device") -> None:
        """Make the device torch's current one."""

    @abstractmethod
    def identity(self, device: "torch.device") -> str | None:
        """The device's identity on its host; None where several workers may share one."""

    @abstractmethod
    def arithmetic(self, device: "torch.device") -> str:
        """The properties that the bits of its results may depend on, beside torch's version."""

    def fix_kernels(self, level: "Determinism") -> None:
        """Fix such devices' kernels for a determinism level other than ``none``."""
        return None

    def is_capturing(self) -> bool:
        """Whether work given to such devices is recorded now, to be done later."""
        return False

    @abstractmethod
    def synchronize(self, device: "torch.device") -> None:
        """Wait until all work of the device is done."""

    @abstractmethod
    def mark(self, device: "torch.device") -> Mark:
        """Mark the moment at which the work queued so far is done; does not wait."""

    def marker(self, device: "torch.device") -> Callable[[], Mark]:
        """``mark`` of one device, for who marks in every pass."""
        return partial(self.mark, device)

    @abstractmethod
    def has_passed(self, mark: Mark) -> bool:
        """Whether a marked moment has passed."""

    @abstractmethod
    def wait_for(self, mark: Mark) -> None:
        """Wait for a marked moment."""

    @abstractmethod
    def seconds_between(self, start: Mark, end: Mark) -> float:
        """Seconds between two marked moments that have passed; 0 where the second was first."""

    @abstractmethod
    def side_stream(self, device: "torch.device") -> Stream | None:
        """A stream beside the one of computation; None where there is only one."""

    @abstractmethod
    def current_stream(self, device: "torch.device") -> Stream | None:
        """The stream that work is queued on."""

    @abstractmethod
    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Queue the work inside a ``with`` statement on another stream."""

    @abstractmethod
    def allocated_bytes(self, device: "torch.device") -> int | None:
        """Bytes in use; None where they are unknown."""

    @abstractmethod
    def peak_bytes(self, device: "torch.device") -> int | None:
        """The most bytes in use since ``reset_peak``, or since the start."""

    def fragmentation_bytes(self, device: "torch.device") -> int | None:
        """The most that the allocator held since ``reset_peak``, beyond the peak of its tensors.

        None where a peak counts the whole process.
        """
        return None

    def beside_bytes(self, device: "torch.device") -> int | None:
        """Bytes of the device that are taken now and that no allocator of tensors holds.

        None where a peak counts the whole process. What other processes take of it is in it.
        """
        return None

    @abstractmethod
    def reset_peak(self, device: "torch.device") -> None:
        """Start a new peak."""

    @abstractmethod
    def release_unused(self) -> None:
        """Return the freed memory that allocators keep for later."""

    @abstractmethod
    def limit_memory(self, limit_bytes: int) -> None:
        """Make this process's allocations fail beyond a limit, where the device itself has none."""

    @abstractmethod
    def seed(self, key: int) -> None:
        """Seed the global random streams of all such devices that are in use."""

    @abstractmethod
    def random_states(self) -> Any:
        """The states of the global random streams, for ``restore_random_states``."""

    @abstractmethod
    def restore_random_states(self, states: Any) -> None:
        """Put them back."""

    def out_of_memory_words(self) -> tuple[str, ...]:
        """Regular expressions for this kind's messages that memory ran out."""
        return ()


# Devices with a torch module of their own (``torch.cuda``, ``torch.xpu``): what all of them share.
#
# Torch gives these modules one form: streams, events, memory statistics and random states by the
# same names. A kind adds how its devices are named, counted, made visible and told apart.


class AcceleratorBackend(DeviceBackend):
    """The torch side of a kind of device that has a torch module of the same name."""

    is_host = False
    bucket_bytes = 25 << 20  # as DistributedDataParallel

    @cached_property
    def module(self) -> Any:
        """Torch's module of this kind."""
        import torch

        return getattr(torch, self.kind)

    def worker_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """One host thread, as torchrun sets: else each worker would use all cores."""
        return {} if "OMP_NUM_THREADS" in inherited else {"OMP_NUM_THREADS": str(self.num_threads)}

    def is_available(self) -> bool:
        """Whether this torch sees such a device."""
        return bool(self.module.is_available())

    def is_initialized(self) -> bool:
        """Whether the driver was initialised in this process."""
        return bool(self.module.is_initialized())

    def set_current(self, device: "torch.device") -> None:
        """For this thread, and those that start later."""
        self.module.set_device(device)

    def synchronize(self, device: "torch.device") -> None:
        """Wait for all streams of the device."""
        self.module.synchronize(device)

    def mark(self, device: "torch.device") -> Mark:
        """Record an event in the current stream, without waiting."""
        event = self.module.Event(enable_timing=True)
        event.record(self.module.current_stream(device))
        return event

    def has_passed(self, mark: Mark) -> bool:
        """Whether the stream has reached the event."""
        return bool(mark.query())

    def wait_for(self, mark: Mark) -> None:
        """Block the host until the stream has reached the event."""
        mark.synchronize()

    def seconds_between(self, start: Mark, end: Mark) -> float:
        """Seconds by the device's clock."""
        return max(float(start.elapsed_time(end)) / 1e3, 0.0)

    def side_stream(self, device: "torch.device") -> Stream | None:
        """A new stream."""
        return self.module.Stream(device)

    def current_stream(self, device: "torch.device") -> Stream | None:
        """The device's current stream."""
        return self.module.current_stream(device)

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Torch's context manager for the stream."""
        found: AbstractContextManager[object] = self.module.stream(stream)
        return found

    def allocated_bytes(self, device: "torch.device") -> int | None:
        """Of tensors, by torch's allocator."""
        return int(self.module.memory_allocated(device))

    def peak_bytes(self, device: "torch.device") -> int | None:
        """Of tensors, by torch's allocator."""
        return int(self.module.max_memory_allocated(device))

    def fragmentation_bytes(self, device: "torch.device") -> int | None:
        """Of torch's allocator: what it held at most, beyond what tensors took at most."""
        held = int(self.module.max_memory_reserved(device))
        return max(0, held - int(self.module.max_memory_allocated(device)))

    def beside_bytes(self, device: "torch.device") -> int | None:
        """What the driver counts as taken, without what torch's allocator holds."""
        free, total = map(int, self.module.mem_get_info(device))
        return max(0, total - free - int(self.module.memory_reserved(device)))

    def reset_peak(self, device: "torch.device") -> None:
        """Reset the peak of torch's allocator."""
        self.module.reset_peak_memory_stats(device)

    def release_unused(self) -> None:
        """Return cached blocks to the driver."""
        gc.collect()
        self.module.empty_cache()

    def limit_memory(self, limit_bytes: int) -> None:
        """Nothing: the device's own memory is the limit."""

    def seed(self, key: int) -> None:
        """Seed all devices with one key."""
        self.module.manual_seed_all(key)

    def random_states(self) -> Any:
        """One a device."""
        return self.module.get_rng_state_all()

    def restore_random_states(self, states: Any) -> None:
        """One a device."""
        self.module.set_rng_state_all(states)

    def out_of_memory_words(self) -> tuple[str, ...]:
        """The messages of torch's allocator."""
        return ("out of memory",)


DEVICES: Registry[DeviceBackend] = Registry(
    "device kind",
    group="hetflow.devices",
    own=("hetflow.devices.cuda", "hetflow.devices.cpu"),
)


def device_backend(backend: type[DeviceBackend]) -> type[DeviceBackend]:
    """Register a class as the backend of its ``kind``; it is made once, without arguments."""
    DEVICES.add(backend.kind, backend(), backend.__module__)
    return backend


def backend_of(device: "torch.device | str") -> DeviceBackend:
    """The backend of a torch device.

    Raises:
        ProblemError: No kind of that name is registered.
    """
    name = device if isinstance(device, str) else device.type
    return DEVICES.get(name.partition(":")[0])


def initialized() -> list[DeviceBackend]:
    """The kinds that are in use in this process. Cheap, and loads nothing."""
    return [kind for kind in DEVICES.registered if not kind.is_host and kind.is_initialized()]


# How running out of memory looks, of any kind of device.


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory has run out (of any device)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and says_out_of_memory(str(error))


def says_out_of_memory(text: str) -> bool:
    """Whether a message of torch's, a device library's or the C++ runtime's says so."""
    return any(re.search(words, text, re.IGNORECASE) for words in _words())


def _words() -> Iterator[str]:
    for backend in DEVICES.registered:
        yield from backend.out_of_memory_words()
