"""Read when spot machines were available: hetflow.market/1, or Can't Be Late's files (NSDI 2024).

The latter are JSON objects with ``metadata.gap_seconds`` (seconds of a tick) and ``data``. In
windows that were cut from longer traces, 1 means NOT available: ``original_trace`` names the trace,
and ``metadata.start_time`` is the trace's tick with which the window begins. In the traces that the
authors publish, a value is the number of instances that there were. Values above 1 tell these; a
file of 0 and 1 alone that names no original trace may be either, and is refused until the user says
which.
"""

import json
from pathlib import Path, PurePath
from typing import Any

from ...schema import files
from ...schema.errors import FileError, HetflowError
from ...schema.market import Availability, Capacity, Market, utc_seconds, utc_text
from ...schema.options import option
from .registry import TraceOptions, trace_importer


@trace_importer("cant-be-late")
def read_windows(path: Path, options: TraceOptions) -> Market:
    """Read the windows of a file or folder as a market.

    If the options say when the traces begin, each window gets its time, and its zone is the name of
    its trace; else a window's zone is the file's name, and its time is not known.

    Raises:
        FileError: As ``read_availability``; or a file does not say where in its trace it begins.
    """
    found = [_read(one, options) for one in _files(path)]
    return Market(
        instance_types=tuple(one for market in found for one in market.instance_types),
        availability=tuple(window for market in found for window in market.availability),
        capacity=tuple(fleet for market in found for fleet in market.capacity),
        prices=tuple(history for market in found for history in market.prices),
    )


def read_availability(path: Path, *, trace_start: str | None = None) -> tuple[Availability, ...]:
    """Read a file, or all ``.json`` files of a folder in the order of their names.

    Args:
        path: The file or folder.
        trace_start: UTC time of the first tick of the traces that Can't Be Late's windows are of.

    Raises:
        FileError: A file is missing, unreadable, of neither form, or does not say what its values
            mean; or the folder has none.
    """
    found = read_windows(path, TraceOptions(trace_start=trace_start)).availability
    if not found:
        raise FileError(f"{path}: $.availability: holds no windows")
    return found


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        raise FileError(f"{path}: holds no .json file")
    return found


def _read(path: Path, options: TraceOptions) -> Market:
    text = files.read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    if isinstance(data, dict) and "schema" in data:
        return files.from_json(text, Market, name=str(path))
    return _published(data, path, options)


def _published(data: Any, path: Path, options: TraceOptions) -> Market:
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if not isinstance(metadata, dict) or not isinstance(data.get("data"), list):
        raise FileError(f"{path}: must be hetflow.market/1, or have metadata.gap_seconds and data")
    try:
        tick_seconds = float(metadata["gap_seconds"])
    except (KeyError, TypeError, ValueError):
        raise FileError(f"{path}: metadata.gap_seconds must be a number of seconds") from None
    zone, start = path.stem, None
    counts = _are_counts(data, path, options)
    if counts and "original_trace" not in data:
        start = options.trace_start  # the file is the whole trace
    elif options.trace_start is not None:
        zone, start = _place(data, path, options.trace_start, tick_seconds)
    try:
        window = Availability(
            zone=zone,
            start=start,
            tick_seconds=tick_seconds,
            available=tuple((_some if counts else _turned)(tick) for tick in data["data"]),
        )
        if not counts:
            return Market(availability=(window,))
        fleet = Capacity(
            zone=zone, start=start, tick_seconds=tick_seconds, num_machines=tuple(data["data"])
        )
        return Market(availability=(window,), capacity=(fleet,))
    except HetflowError as error:
        raise FileError(f"{path}: {error.message}", hint=error.hint) from None


def _are_counts(data: dict[str, Any], path: Path, options: TraceOptions) -> bool:
    """Whether values are numbers of instances, and not 1 where machines are preempted.

    Raises:
        FileError: They may be either, and nobody says which; or the statement cannot be so.
    """
    is_cut = "original_trace" in data
    if not is_cut and any(isinstance(tick, int) and tick > 1 for tick in data["data"]):
        if options.values == "preempted":
            raise FileError(
                f"{path}: a value is above 1, so values are numbers of instances",
                hint=f"give {option('values', 'instances')}",
            )
        return True
    if options.values is None and not is_cut:
        raise FileError(
            f"{path}: 1 may mean that an instance was there, as in the traces that Can't Be Late's "
            "authors publish, or that it was preempted, as in windows cut from them",
            hint="say which as you import it (hetflow import): "
            f"{option('values', 'instances|preempted')}",
        )
    return options.values == "instances"


def _some(tick: object) -> Any:
    return min(tick, 1) if isinstance(tick, int) and not isinstance(tick, bool) else tick


def _place(
    data: dict[str, Any], path: Path, trace_start: str, tick_seconds: float
) -> tuple[str, str]:
    """The name of the window's trace, and the UTC time at which the window begins."""
    trace, offset = data.get("original_trace"), data["metadata"].get("start_time")
    name = PurePath(trace).stem[:200] if isinstance(trace, str) else ""
    if not name or not isinstance(offset, int) or isinstance(offset, bool):
        raise FileError(
            f"{path}: original_trace and metadata.start_time must say where the window begins",
            hint=f"leave {option('trace_start')} away to import it as a window of unknown time",
        )
    begin = utc_seconds(trace_start, option("trace_start"), "time") + offset * tick_seconds
    try:
        return name, utc_text(begin)
    except (OverflowError, ValueError, OSError):
        raise FileError(
            f"{path}: metadata.start_time is out of range: {str(offset)[:60]}"
        ) from None


def _turned(tick: object) -> Any:
    return 1 - tick if isinstance(tick, int) and tick in (0, 1) else tick
