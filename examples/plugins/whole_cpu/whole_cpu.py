"""The whole CPU as one device, with a thread for each core that this process may use.

hetflow's own ``cpu`` is one core. Where a model's layers are large, one worker with all cores may
be faster than a worker for each; with this kind a profile says so, and plans use it.
"""

from hetflow.plugins import HostBackend, LocalDevice, cpu_device, device_backend


@device_backend
class WholeCpu(HostBackend):
    """A device kind with one device per host."""

    kind = "whole-cpu"

    @property
    def num_threads(self) -> int:
        """One thread per core that this process may use."""
        return cpu_device().num_devices

    def local_devices(self) -> tuple[LocalDevice, ...]:
        """One device with all cores and all memory."""
        core = cpu_device()
        whole = LocalDevice(
            device_type="wholecpu",
            kind=self.kind,
            name=f"{core.name}, {core.num_devices} cores",
            torch_devices=core.torch_devices[:1],
            memory_bytes=core.memory_bytes * core.num_devices,
        )
        return (whole,)
