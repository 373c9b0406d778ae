"""The device types of this machine, and what ``--device`` may ask for.

CUDA devices go by the short form of their real names (``V100``, ``H200``). A ``cpu`` device is
one core that runs one thread, with its share of the machine's memory. ``cpu:NAME=FRACTION`` is
emulated: the CPU at a stated fraction of its speed.
"""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..schema.errors import ProblemError
from ..schema.records import nearest
from .memory import machine_memory_bytes

DEFAULT_SPEEDS = {"cpu:fast": 0.5, "cpu:slow": 0.125}
_EMULATED = re.compile(r"^(?P<name>cpu:[A-Za-z][\w.+-]*)(?:=(?P<speed>.*))?$")
_HINT = "`hetflow devices` lists them; cpu:NAME=FRACTION emulates a slower CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """The local devices of one type. ``memory_bytes`` is that of one device.

    ``torch_devices`` are torch's names of them, all ``cpu`` for a CPU's cores.
    """

    device_type: str
    name: str
    torch_devices: tuple[str, ...]
    memory_bytes: int
    compute_capability: str | None = None
    driver: str | None = None

    @property
    def num_devices(self) -> int:
        """Devices of this type."""
        return len(self.torch_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequest:
    """One type to profile, on one local device. ``speed`` is set where it is emulated."""

    device_type: str
    local: LocalDevice
    torch_device: str
    speed: float | None = None


def local_devices() -> tuple[LocalDevice, ...]:
    """Every local device type: CUDA types in torch's order, the CPU last. Imports torch."""
    return (*_cuda_devices(), cpu_device())


def cpu_device() -> LocalDevice:
    """The CPU: one device a core that this process may use, memory shared out evenly."""
    cores = len(os.sched_getaffinity(0))
    return LocalDevice(
        device_type="cpu",
        name=_cpu_name(),
        torch_devices=("cpu",) * cores,
        memory_bytes=machine_memory_bytes() // cores,
    )


def parse_requests(texts: Sequence[str], local: Sequence[LocalDevice]) -> tuple[DeviceRequest, ...]:
    """Read ``--device`` items; none means every CUDA type, or the CPU where there is none.

    Raises:
        ProblemError: A type that this machine has not, a bad speed, or one name twice.
    """
    items = [item.strip() for text in texts for item in text.split(",")]
    if not items:
        cuda = [device for device in local if device.device_type != "cpu"]
        items = [device.device_type for device in cuda] or ["cpu"]
    requests = tuple(_request(item, local) for item in items)
    names = [request.device_type for request in requests]
    for name in names:
        if names.count(name) > 1:
            raise ProblemError(f"--device: {name} is asked for twice; keep one")
    return requests


def _request(item: str, local: Sequence[LocalDevice]) -> DeviceRequest:
    for device in local:
        if item.lower() == device.device_type.lower():
            return DeviceRequest(
                device_type=device.device_type, local=device, torch_device=device.torch_devices[0]
            )
        if item != "cpu" and item in device.torch_devices:
            return DeviceRequest(device_type=device.device_type, local=device, torch_device=item)
    emulated = _EMULATED.match(item)
    if emulated:
        cpu = next(device for device in local if device.device_type == "cpu")
        speed = _speed(emulated["name"], emulated["speed"])
        return DeviceRequest(
            device_type=emulated["name"], local=cpu, torch_device="cpu", speed=speed
        )
    raise ProblemError(_unknown(item, local), hint=_HINT)


def _speed(name: str, text: str | None) -> float:
    if text is None:
        if name not in DEFAULT_SPEEDS:
            raise ProblemError(
                f"--device {name!r}: state its speed as a fraction of the CPU's",
                hint=f"write {name}=0.25",
            )
        return DEFAULT_SPEEDS[name]
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0.001 <= speed <= 1:
        raise ProblemError(
            f"--device {name}={text}: the speed must be a fraction from 0.001 to 1, of the CPU's"
        )
    return speed


def _unknown(item: str, local: Sequence[LocalDevice]) -> str:
    known = [device.device_type for device in local] + list(DEFAULT_SPEEDS)
    known += [name for device in local for name in device.torch_devices if name != "cpu"]
    guess = nearest(item, known)
    mend = f"did you mean {guess!r}?" if guess else f"it has {', '.join(dict.fromkeys(known))}"
    return f"--device {item!r}: this machine has no such device; {mend}"


def _cuda_devices() -> list[LocalDevice]:
    from ..runtime.devices import local_device_types

    by_type: dict[str, list[int]] = {}
    for index, device_type in enumerate(local_device_types()):
        by_type.setdefault(device_type, []).append(index)
    return [_cuda_device(device_type, indices) for device_type, indices in by_type.items()]


def _cuda_device(device_type: str, indices: list[int]) -> LocalDevice:
    import torch

    facts = [torch.cuda.get_device_properties(index) for index in indices]
    return LocalDevice(
        device_type=device_type,
        name=str(facts[0].name),
        torch_devices=tuple(f"cuda:{index}" for index in indices),
        memory_bytes=min(int(fact.total_memory) for fact in facts),
        compute_capability=f"{facts[0].major}.{facts[0].minor}",
        driver=nvidia_driver(),
    )


def nvidia_driver() -> str | None:
    """The version of the loaded NVIDIA kernel module, where there is one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()
