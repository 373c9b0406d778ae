"""This machine: ``hetflow devices``, ``doctor``, ``profile`` (measure a model), ``demo``."""

import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..formats.reports.grid import grid
from ..schema.errors import FileError, HetflowError, ProblemError
from ..schema.masking import mask
from ..schema.requests.profile import DemoRequest, DoctorRequest, ProfileCommandRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit, emit_either, emit_json, note, progress_line, warn


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


@asks(ProfileCommandRequest, optional=("target",), effort="usual", command="", progress=None)
def profile(
    asked: Asked,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for <model>.<device type>.json.")
    ] = Path("profiles"),
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Measure step time and memory over batch sizes, on each local device type.

    Devices named spec:NAME are estimated from counted operators and data sheets, not measured.

    \b
    hetflow profile train.py -o profiles -- --epochs 3
    hetflow profile zoo:resnet18 -o profiles
    hetflow profile train.py:workload --device cpu:fast --device cpu:slow=0.25 --quick
    hetflow profile zoo:resnet18 --device spec:H100 --device spec:A100 -o profiles
    hetflow profile --from-run RUN --profiles profiles -o corrected
    """
    from_run, profiles = asked.pop("from_run", None), asked.pop("profiles", None)
    quick, thorough = asked.pop("quick", False), asked.pop("thorough", False)
    target, name = asked.get("target"), asked.get("name")
    if from_run or profiles is not None:
        if target is not None:
            raise ProblemError("--from-run measures nothing, so it takes no target", hint="drop it")
        if not from_run or profiles is None:
            raise ProblemError("--from-run RUN and --profiles DIR go together", hint="give both")
        fold_runs(from_run, profiles, name, output, force=force, json=json)
        return
    if target is None:
        raise ProblemError("there is nothing to profile", hint="name a target, such as zoo:mlp")
    from .. import profile as measure
    from ..api.profile import profile_paths
    from ..devices.local import local_devices, parse_requests
    from ..formats.reports.tables import TOOLS, measured_table, table_of
    from ..profilers import estimate, targets
    from ..schema import files

    if quick and thorough:
        raise ProblemError("--quick and --thorough: choose one")
    devices = asked.get("devices", ())
    specs = estimate.specs_of(devices)
    requests = () if specs else parse_requests(devices, local_devices())
    types = [spec.device_type for spec in specs] or [one.device_type for one in requests]
    parsed = targets.parse(target, asked.get("arguments", ()))
    if parsed.source == "hf" and parsed.length is None:
        note(f"samples have 128 tokens, or are an image; {target}@1024 states another length")
    asked["effort"] = "quick" if quick else "thorough" if thorough else "usual"
    asked["command"] = shlex.join(["hetflow", *mask(sys.argv[1:])])
    model = name or parsed.model
    with profile_paths(output, model, types, force=force, measured=requests) as paths:
        with progress_line() as tell:

            def progress(text: str, left: float | None) -> None:
                tell(text + ("" if left is None else f" (at most {left:.0f} s left)"))

            measured_all = measure(**{**asked, "progress": progress})
        for path, measured in zip(paths, measured_all, strict=True):
            files.write(path, measured, force=force)
    table = table_of if specs else measured_table
    document = [files.to_plain(measured) for measured in measured_all]
    emit_either(json, document, lambda: "\n\n".join(map(table, measured_all)))
    layers = measured_all[0].layers
    trace = None if layers is None else layers.trace
    if trace is not None and trace.obstacle is not None:
        warn(f"layers {trace.obstacle}")
    elif trace is not None and trace.reason is not None:
        note(f"layers found by {TOOLS[trace.way]}; {trace.reason}")
    size = (measured_all[0].provenance or {}).get("script_batch_size") or "..."
    folder = shlex.quote(str(output))
    note(f"next: hetflow solve --profiles {folder} --gpus ... --batch-size {size}")


def fold_runs(
    run_folders: Sequence[Path],
    folder: Path,
    model: str | None,
    output: Path,
    *,
    force: bool,
    json: bool,
) -> None:
    """Fold runs into the profiles of their model, and write all of these as a new folder."""
    from ..api.profile import profile_paths
    from ..formats.reports.tables import corrections_table
    from ..planning.correcting import corrected, read_run
    from ..planning.inputs import profiles_of
    from ..schema import files

    runs = [read_run(path) for path in run_folders]
    before = profiles_of(folder, model or runs[0].record.plan.model)
    types = [profile.device_type for profile in before]
    with profile_paths(output, before[0].model, types, force=force) as paths:
        found = corrected(before, runs)
        for path, profile in zip(paths, found.profiles, strict=True):
            files.write(path, profile, force=force)
    for remark in found.remarks:
        warn(remark)
    document = [files.to_plain(profile) for profile in found.profiles]
    emit_either(json, document, lambda: "\n\n".join(map(corrections_table, found.profiles)))
    note(f"next: hetflow solve --profiles {shlex.quote(str(output))} --gpus ... --batch-size ...")
