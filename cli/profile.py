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

    from ..schema.layer_trace import LayerTrace
    from ..schema.profile import BatchPoint, Profile


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
    from ..devices.local import local_devices
    from ..devices.requests import parse_requests
    from ..profilers import estimate, targets
    from ..reports.tables import table_of
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
    from ..planning.correcting import corrected, read_run
    from ..planning.inputs import profiles_of
    from ..reports.corrections import corrections_table
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


_TOOLS = {"fx": "torch.fx", "export": "torch.export", "hooks": "hooks"}


def _how_found(trace: "LayerTrace | None") -> str | None:
    """Which way took the model apart, and what that means for a launch."""
    if trace is None:
        return None
    if trace.obstacle is not None:
        return f"layers {trace.obstacle}"
    return f"layers found by {_TOOLS[trace.way]}: pipelines of them can be launched"


def _say_how_found(measured: "Profile") -> None:
    """Warn of layers that cannot be launched; why another way than the first was taken."""
    trace = None if measured.layers is None else measured.layers.trace
    if trace is None:
        return
    if trace.obstacle is not None:
        warn(f"layers {trace.obstacle}")
    elif trace.reason is not None:
        note(f"layers found by {_TOOLS[trace.way]}; {trace.reason}")


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
        yield lambda text, left: tell(text + _left(left))


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f" (at most {seconds:.0f} s left)"


def measured_table(measured: "Profile") -> str:
    """What was measured: the batch curve, and what a step costs beside it."""
    from ..reports.grid import grid

    busy = measured.busy.batch_curve if measured.busy else ()
    of_busy = {point.batch_size: point for point in busy}
    has_parts = any(point.load_seconds is not None for point in measured.batch_curve)
    rows = []
    for point in measured.batch_curve:
        row = [
            str(point.batch_size),
            _step(point),
            *((_ms(point.pass_seconds), _ms(point.load_seconds), _ms(point.virtual_node_seconds))
              if has_parts else ()),
            f"{point.batch_size / point.step_seconds:.1f}",
            f"{point.peak_memory_bytes / 2**20:.0f}",
        ]  # fmt: skip
        if busy:
            row.append(_step(of_busy[point.batch_size]) if point.batch_size in of_busy else "-")
        rows.append(row)
    parts = ["pass ms", "load ms", "runtime ms"] if has_parts else []
    headers = ["batch size", "step ms", *parts, "samples/s", "peak MiB"]
    if measured.busy:
        headers.append(f"step ms, {measured.busy.num_devices} busy")
    table = grid(headers, rows)
    ending = f"ended: {(measured.provenance or {}).get('curve_stopped', '')}"
    if measured.out_of_memory_batch_size:
        ending += f" at batch size {measured.out_of_memory_batch_size}"
    if measured.only_batch_size is not None:
        ending += (
            f"; only batch size {measured.only_batch_size} was measured, and plans can use no "
            "other: state some (--batch-sizes 1,8,32), or measure longer with --thorough"
        )
    return "\n".join(
        [_head(measured), table, ending, *_step_lines(measured), *_layer_lines(measured)]
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _step(point: "BatchPoint") -> str:
    """Milliseconds and how well they are known."""
    error = point.step_seconds_error
    return _ms(point.step_seconds) + (f" +-{error:.1%}" if error is not None else "")


def _step_lines(measured: "Profile") -> list[str]:
    """What a step costs beside its virtual nodes, what is wide, what was not measured."""
    how, lines = measured.provenance or {}, []
    if measured.fixed_seconds is not None:
        line = f"a step adds: fixed {_ms(measured.fixed_seconds)} ms, update "
        line += f"{_ms(measured.update_seconds)} ms alone"
        if measured.busy:
            line += f"; fixed {_ms(measured.busy.fixed_seconds)} ms, update "
            line += f"{_ms(measured.busy.update_seconds)} ms with {measured.busy.num_devices} busy"
        if measured.step_error is not None:
            line += f"; steps put together so are off by {measured.step_error:.1%}"
        lines.append(line)
    for kind in ("alone", "busy"):
        found = how.get(kind, {})
        if found.get("wide_batch_sizes") and (kind == "alone" or measured.busy):
            sizes = ", ".join(map(str, found["wide_batch_sizes"]))
            lines.append(
                f"wider than +-{found['tolerance']:.0%} {kind}, at batch size {sizes}: a quieter "
                f"machine or --thorough makes it narrower"
            )
    if how.get("loading", "measured") != "measured":
        lines.append(f"loading not measured: {how['loading']}")
    of_sync = how.get("sync", {})
    no_ring = of_sync.get("at_batch_1", of_sync).get("messages", {}).get("no_ring")
    if no_ring is not None:
        lines.append(f"no ring was fitted, so sync is known for as many devices only: {no_ring}")
    return lines


def _layer_lines(measured: "Profile") -> list[str]:
    """How layers were found; by microbatch size their raw sums, and their memory."""
    found = None if measured.layers is None else _how_found(measured.layers.trace)
    lines = [] if found is None else [found]
    for graph, how in zip(
        measured.layer_tables, (measured.provenance or {}).get("layers", ()), strict=True
    ):
        stashed = sum(node.stashed_bytes or 0 for node in graph.nodes) / 2**20
        spaces = [n.workspace_bytes for n in graph.nodes if n.workspace_bytes is not None]
        space = f"{max(spaces) / 2**20:.1f} MiB" if spaces else "not measured"
        lines.append(
            f"{len(graph.nodes)} layers at {graph.microbatch_size}: alone they sum to "
            f"{how['isolated_over_whole_forward']:.0%} of the forward and "
            f"{how['isolated_over_whole_backward']:.0%} of the backward pass (scaled to it); "
            f"stash {stashed:.1f} MiB, largest workspace {space}"
        )
    return lines + _pipeline_lines(measured)


def _pipeline_lines(measured: "Profile") -> list[str]:
    """What rehearsed pipelines cost beyond layers and bytes; why links were not measured."""
    costs, why = measured.pipeline, (measured.provenance or {}).get("links", {}).get("skipped")
    lines = [] if measured.layers is None or why is None else [f"links not measured ({why})"]
    if costs is not None:
        off = "" if costs.step_error is None else f"; steps off by {costs.step_error:.1%}"
        lines.append(
            f"pipelines: {costs.pass_seconds * 1e3:.2f} ms a pass, "
            f"{costs.message_seconds * 1e3:.2f} ms a message, "
            f"{costs.fixed_seconds * 1e3:.2f} ms a step beyond layers and bytes{off}"
        )
    return lines


def _head(measured: "Profile") -> str:
    """One line: what was measured where, and what is not in the table."""
    how, sync, emulated = measured.provenance or {}, measured.sync, measured.emulation
    facts = [f"update {measured.update_seconds * 1e3:.2f} ms"]
    if measured.optimizer is not None:
        chosen = ", by default" if measured.optimizer.is_default else ""
        facts[0] += f" by {measured.optimizer.name}{chosen}"
    if sync is None:
        facts.append(f"sync not measured ({how.get('sync', {}).get('skipped', 'unknown')})")
    else:
        at_most = "" if sync.sync_seconds is not None else "unknown, at most "
        facts.append(
            f"sync {at_most}{sync.counted_seconds * 1e3:.2f} ms over {sync.num_devices} devices"
        )
    if measured.links is not None:
        rate = measured.links.bytes_per_second / 1e9
        facts.append(f"links {measured.links.latency_seconds * 1e6:.0f} us + {rate:.2f} GB/s")
    kind = ""
    if emulated:
        kind = f" (emulated: {emulated.speed:g} of {emulated.base_device_type})"
        facts.append(f"held passes off by at most {how['emulation']['worst_error']:.1%}")
    return f"{measured.model} on {measured.device_type}{kind}; {', '.join(facts)}"
