"""Devices with a torch module of their own (``torch.cuda``, ``torch.xpu``): what all of them share.

Torch gives these modules one form: streams, events, memory statistics and random states by the same
names. A kind adds how its devices are named, counted, made visible and told apart.
"""

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from .backend import DeviceBackend, Mark, Stream

if TYPE_CHECKING:
    import torch


class AcceleratorBackend(DeviceBackend):
    """The torch side of a kind of device that has a torch module of the same name."""

    is_host = False
    bucket_bytes = 25 << 20  # as DistributedDataParallel

    @property
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
