"""The ``cpu``: one device is one core that this process may use, and runs one thread."""

import os
import platform
import re
from pathlib import Path

from .backend import LocalDevice, device_backend
from .host import TORCH_DEVICE, HostBackend
from .memory import machine_memory_bytes

DEVICE_TYPE = "cpu"


def cpu_device() -> LocalDevice:
    """The CPU: one device a core that this process may use, memory shared out evenly."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    number = cores or 1
    return LocalDevice(
        device_type=DEVICE_TYPE,
        kind=CpuBackend.kind,
        name=cpu_name(),
        torch_devices=(TORCH_DEVICE,) * number,
        memory_bytes=machine_memory_bytes() // number,
    )


def cpu_name() -> str:
    """The processor's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


@device_backend
class CpuBackend(HostBackend):
    """The cores of this host."""

    kind = "cpu"

    def local_devices(self) -> tuple[LocalDevice, ...]:
        """List all cores, as one device type."""
        return (cpu_device(),)
