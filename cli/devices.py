"""``hetflow devices``: what this machine has, and how to name it."""

from dataclasses import asdict

from .common import JsonFlag, emit, emit_json


def devices(json: JsonFlag = False) -> None:
    """List the local device types, their memory and how to name them.

    \b
    hetflow devices
    hetflow devices --json
    """
    from ..devices.cpu import DEVICE_TYPE
    from ..devices.emulated import DEFAULT_SPEEDS, GRAMMAR
    from ..devices.local import local_devices

    found = local_devices()
    emulated = [
        {
            "device_type": name,
            "emulated": True,
            "default_speed": speed,
            "base_device_type": DEVICE_TYPE,
        }
        for name, speed in DEFAULT_SPEEDS.items()
    ]
    if json:
        local = [asdict(device) | {"num_devices": device.num_devices} for device in found]
        emit_json({"devices": local, "emulated": emulated})
        return
    from ..formats.reports.grid import grid

    rows = [
        (
            device.device_type,
            device.num_devices,
            f"{device.memory_bytes / 2**30:.1f}",
            device.compute_capability or "-",
            device.driver or "-",
            device.name,
        )
        for device in found
    ]
    headers = ("type", "number", "GiB each", "capability", "driver", "name")
    emit(grid(headers, rows))
    emit(f"\nall of them: --gpus {','.join(f'{d.num_devices}x{d.device_type}' for d in found)}")
    shown = ", ".join(
        f"{name} ({speed:g} of {DEVICE_TYPE})" for name, speed in DEFAULT_SPEEDS.items()
    )
    emit(f"emulated, only when asked for: {shown}, {GRAMMAR}")
