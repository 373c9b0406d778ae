"""``hetflow devices``, ``doctor`` and ``demo``: what this machine has, lacks and can do."""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from ..formats.reports.grid import grid
from ..schema.errors import FileError, HetflowError
from ..schema.requests.profile import DemoRequest, DoctorRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit, emit_either, emit_json, note


def devices(json: JsonFlag = False) -> None:
    """List the local device types, their memory and how to name them.

    \b
    hetflow devices
    hetflow devices --json
    """
    from ..devices.cpu import DEFAULT_SPEEDS, DEVICE_TYPE, GRAMMAR
    from ..devices.local import local_devices

    found = local_devices()
    if json:
        local = [asdict(device) | {"num_devices": device.num_devices} for device in found]
        base = {"base_device_type": DEVICE_TYPE}
        emulated = [
            {"device_type": name, "emulated": True, "default_speed": speed} | base
            for name, speed in DEFAULT_SPEEDS.items()
        ]
        emit_json({"devices": local, "emulated": emulated})
        return
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
    speeds = DEFAULT_SPEEDS.items()
    shown = ", ".join(f"{name} ({speed:g} of {DEVICE_TYPE})" for name, speed in speeds)
    emit(f"emulated, only when asked for: {shown}, {GRAMMAR}")


@asks(DoctorRequest)
def doctor(asked: Asked, force: ForceFlag = False, json: JsonFlag = False) -> None:
    """Check torch, drivers, devices and extras, and say how to fix what is missing.

    \b
    hetflow doctor
    hetflow doctor --report report.json --suite suite.xml
    """
    from ..devices.doctor import collect_facts, findings, is_usable, suite_results
    from ..devices.doctor import report as report_of

    request = DoctorRequest(**asked)
    report, suite = request.report, request.suite
    if suite is not None and report is None:
        raise HetflowError("--suite is a part of a report", hint="give --report FILE as well")
    facts = collect_facts()
    found = findings(facts)
    if report is not None:
        from ..schema import files

        results = None if suite is None else suite_results(suite)
        document = report_of(facts, found, results)
        files.write_bytes(report, files.to_json(document).encode(), force=force)
        note(
            f"{report} written, without names, paths or serial numbers; read it before you send it"
        )
    if json:
        emit_json({"facts": asdict(facts), "findings": [asdict(f) for f in found]})
    else:
        emit(grid(("what", "found"), facts.rows()))
        emit("")
        for finding in found:
            emit(f"{finding.level}: {finding.text}")
            if finding.mend:
                emit(f"    {finding.mend}")
    if not is_usable(found):
        first = next(finding for finding in found if finding.level == "error")
        raise HetflowError(first.text, hint=first.mend)


@asks(DemoRequest)
def demo(asked: Asked, json: JsonFlag = False) -> None:
    """Profile, solve, launch and compare, on this machine's own devices.

    Uses the machine's GPUs; where there are none, two emulated CPU types, which are real
    processes doing the real arithmetic with only their time stretched. Under two minutes.

    \b
    hetflow demo
    hetflow demo -o demo --epochs 5
    """
    from ..examples.demonstration import check_installed, demonstrate

    request = DemoRequest(**asked)
    output = request.output
    if output is not None and output.exists():
        raise FileError(f"{output}: exists already", hint="name a new folder")
    check_installed()
    with ExitStack() as until_the_end:
        if output is None:
            temporary = tempfile.TemporaryDirectory(prefix="hetflow-demo-")
            folder = Path(until_the_end.enter_context(temporary))
        else:
            folder = output
            folder.mkdir(parents=True)
        text, document = demonstrate(folder, request.epochs, None if json else emit)
    emit_either(json, document, text)
