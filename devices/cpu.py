"""The ``cpu`` (one device is one core that this process may use, one thread), and emulated devices.

An emulated one, ``cpu:NAME=FRACTION``, is the CPU at a stated fraction of its speed. Such devices
exist only when they are asked for. Their processes run on the CPU, where each pass is held to a
fixed time (``runtime/emulation.py``).
"""

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..schema.errors import ProblemError
from ..schema.options import option
from .backend import DeviceRequest, LocalDevice, device_backend
from .host import TORCH_DEVICE, HostBackend, cpu_name
from .memory import machine_memory_bytes

if TYPE_CHECKING:
    from ..schema.launch import LaunchConfig


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


@device_backend
class CpuBackend(HostBackend):
    """The cores of this host."""

    kind = "cpu"

    def local_devices(self) -> tuple[LocalDevice, ...]:
        """List all cores, as one device type."""
        return (cpu_device(),)


DEFAULT_SPEEDS = {"cpu:fast": 0.5, "cpu:slow": 0.125}
DEMONSTRATED, DEMONSTRATED_POOL = ("cpu:fast=0.25", "cpu:slow=0.0625"), "1xcpu:fast,2xcpu:slow"
"""What ``hetflow demo`` trains on where there is no GPU, and the pool of it: slow enough that three
of them leave room on two cores for whatever else the machine does."""
GRAMMAR = "cpu:NAME=FRACTION"
_ITEM = re.compile(r"^(?P<name>cpu:[A-Za-z][\w.+-]*)(?:=(?P<speed>.*))?$")


def is_emulated(device_type: str) -> bool:
    """Whether a device type of a plan or profile is emulated, by its name."""
    return ":" in device_type


def base_type(device_type: str, config: "LaunchConfig | None") -> str:
    """The real type behind a device type of a launch: an emulated one names its base."""
    for device in config.emulated if config is not None else ():
        if device.device_type == device_type:
            return device.base_device_type
    base, colon, _ = device_type.partition(":")
    return base if colon and base == DEVICE_TYPE else device_type


@device_backend
class EmulatedBackend(HostBackend):
    """The CPU at stated fractions of its speed, under other names."""

    kind = "emulated"

    def local_devices(self) -> tuple[LocalDevice, ...]:
        """None: emulated devices exist only when they are asked for."""
        return ()

    def requested(self, item: str, local: Sequence[LocalDevice]) -> DeviceRequest | None:
        """``cpu:NAME=FRACTION``, or one of the names that have a speed by default.

        Raises:
            ProblemError: The speed is missing, or no fraction.
        """
        found = _ITEM.match(item)
        if found is None:
            return None
        base = next(device for device in local if device.device_type == DEVICE_TYPE)
        return DeviceRequest(
            device_type=found["name"],
            local=base,
            torch_device=TORCH_DEVICE,
            speed=_speed(found["name"], found["speed"]),
        )


def _speed(name: str, text: str | None) -> float:
    if text is None:
        if name not in DEFAULT_SPEEDS:
            raise ProblemError(
                f"{option('devices', repr(name))}: state its speed as a fraction of the CPU's",
                hint=f"write {name}=0.25",
            )
        return DEFAULT_SPEEDS[name]
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1:
        raise ProblemError(
            f"{option('devices', f'{name}={text}')}: the speed must be a fraction from "
            "0.001 to 1, of the CPU's"
        )
    return speed
