"""``hetflow profile``: measure a model on each local device type."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.masking import mask
from ..schema.requests.profile import ProfileCommandRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit_either, note, progress_line, warn


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
    from ..formats.reports.profile_tables import TOOLS, measured_table
    from ..formats.reports.tables import table_of
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
    from ..formats.reports.profile_tables import corrections_table
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
