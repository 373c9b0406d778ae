"""``hetflow profile``: measure a model on each local device type."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.masking import mask
from ..schema.requests.profile import ProfileRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, emit, emit_json, note, progress_line, warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..schema.profile import Profile


@asks(ProfileRequest, optional=("target",), effort="usual", command="", progress=None)
def profile(
    asked: Asked,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure roughly, within a minute.")
    ] = False,
    thorough: Annotated[
        bool,
        typer.Option("--thorough", help="Measure until intervals are narrower; takes minutes."),
    ] = False,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for <model>.<device type>.json.")
    ] = Path("profiles"),
    from_run: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure nothing: correct --profiles by this run (repeatable); TARGET is left out."
        ),
    ] = None,
    profiles: Annotated[
        Path | None, typer.Option(help="With --from-run: the folder of profiles to correct.")
    ] = None,
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
    from ..devices.local import local_devices, parse_requests
    from ..formats.reports.profile_tables import measured_table
    from ..formats.reports.tables import table_of
    from ..profilers import estimate, targets
    from ..schema import files

    if quick and thorough:
        raise ProblemError("--quick and --thorough: choose one")
    devices = asked.get("devices", ())
    specs = estimate.specs_of(devices)
    types = [spec.device_type for spec in specs]
    if not specs:
        types = [one.device_type for one in parse_requests(devices, local_devices())]
    parsed = targets.parse(target, asked.get("arguments", ()))
    if parsed.source == "hf" and parsed.length is None:
        note(f"samples have 128 tokens, or are an image; {target}@1024 states another length")
    asked["effort"] = "quick" if quick else "thorough" if thorough else "usual"
    asked["command"] = shlex.join(["hetflow", *mask(sys.argv[1:])])
    with _paths(output, name or parsed.model, types, force=force) as paths:
        with _progress() as progress:
            measured_all = measure(**{**asked, "progress": progress})
        for path, measured in zip(paths, measured_all, strict=True):
            files.write(path, measured, force=force)
    if json:
        emit_json([files.to_plain(measured) for measured in measured_all])
    else:
        table = table_of if specs else measured_table
        emit("\n\n".join(table(measured) for measured in measured_all))
    for measured in measured_all[:1]:
        _say_how_found(measured)
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
    from ..formats.reports.profile_tables import corrections_table
    from ..planning.correcting import corrected, read_run
    from ..planning.inputs import profiles_of
    from ..schema import files

    runs = [read_run(path) for path in run_folders]
    before = profiles_of(folder, model or runs[0].record.plan.model)
    types = [profile.device_type for profile in before]
    with _paths(output, before[0].model, types, force=force) as paths:
        found = corrected(before, runs)
        for path, profile in zip(paths, found.profiles, strict=True):
            files.write(path, profile, force=force)
    for remark in found.remarks:
        warn(remark)
    if json:
        emit_json([files.to_plain(profile) for profile in found.profiles])
    else:
        emit("\n\n".join(corrections_table(profile) for profile in found.profiles))
    note(f"next: hetflow solve --profiles {shlex.quote(str(output))} --gpus ... --batch-size ...")


def _say_how_found(measured: "Profile") -> None:
    """Warn of layers that cannot be launched; why another way than the first was taken."""
    from ..formats.reports.profile_tables import TOOLS

    trace = None if measured.layers is None else measured.layers.trace
    if trace is None:
        return
    if trace.obstacle is not None:
        warn(f"layers {trace.obstacle}")
    elif trace.reason is not None:
        note(f"layers found by {TOOLS[trace.way]}; {trace.reason}")


@contextmanager
def _paths(
    folder: Path, model: str, device_types: Sequence[str], *, force: bool
) -> Iterator[list[Path]]:
    """Where each profile goes; refused now rather than after minutes of measuring."""
    from ..schema import files

    names = [f"{_file_name(model)}.{_file_name(device_type)}.json" for device_type in device_types]
    paths = [folder / name for name in names]
    with files.made_folder(folder):
        for path in paths:
            files.check_writable(path, force=force)
        yield paths


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._+-" else "-" for letter in name)


@contextmanager
def _progress() -> "Iterator[Callable[[str, float | None], None]]":
    with progress_line() as tell:
        yield lambda text, left: tell(
            text + ("" if left is None else f" (at most {left:.0f} s left)")
        )
