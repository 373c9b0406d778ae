"""Read when spot machines were available: hetflow.market/1, or Can't Be Late's files (NSDI 2024).

The latter are JSON objects with ``metadata.gap_seconds`` (seconds of a tick) and ``data``, a list
in which 1 means NOT available. They were cut from longer traces: ``original_trace`` names the
trace, and ``metadata.start_time`` is the trace's tick with which the window begins.
"""

import json
from pathlib import Path, PurePath
from typing import Any

from ..schema import files
from ..schema.errors import FileError, HetflowError
from ..schema.market import Availability, Market, utc_seconds, utc_text
from .registry import TraceOptions, trace_importer


@trace_importer("cant-be-late")
def read_windows(path: Path, options: TraceOptions) -> Market:
    """Read the windows of a file or folder as a market.

    If the options say when the traces begin, each window gets its time, and its zone is the name of
    its trace; else a window's zone is the file's name, and its time is not known.

    Raises:
        FileError: As ``read_availability``; or a file does not say where in its trace it begins.
    """
    return Market(availability=read_availability(path, trace_start=options.trace_start))


def read_availability(path: Path, *, trace_start: str | None = None) -> tuple[Availability, ...]:
    """Read a file, or all ``.json`` files of a folder in the order of their names.

    Args:
        path: The file or folder.
        trace_start: UTC time of the first tick of the traces that Can't Be Late's windows are of.

    Raises:
        FileError: A file is missing, unreadable, or of neither form; or the folder has none.
    """
    if path.is_dir():
        found = sorted(path.glob("*.json"))
        if not found:
            raise FileError(f"{path}: holds no .json file")
        return tuple(
            window for one in found for window in read_availability(one, trace_start=trace_start)
        )
    text = files.read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    if isinstance(data, dict) and "schema" in data:
        market = files.from_json(text, Market, name=str(path))
        if not market.availability:
            raise FileError(f"{path}: $.availability: holds no windows")
        return market.availability
    return (_published(data, path, trace_start),)


def _published(data: Any, path: Path, trace_start: str | None) -> Availability:
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if not isinstance(metadata, dict) or not isinstance(data.get("data"), list):
        raise FileError(
            f"{path}: must be hetflow.market/1, or have metadata.gap_seconds and data",
        )
    try:
        tick_seconds = float(metadata["gap_seconds"])
    except (KeyError, TypeError, ValueError):
        raise FileError(f"{path}: metadata.gap_seconds must be a number of seconds") from None
    zone, start = path.stem, None
    if trace_start is not None:
        zone, start = _place(data, path, trace_start, tick_seconds)
    try:
        return Availability(
            zone=zone,
            start=start,
            tick_seconds=tick_seconds,
            available=tuple(_turned(tick) for tick in data["data"]),
        )
    except HetflowError as error:
        raise FileError(f"{path}: {error.message}", hint=error.hint) from None


def _place(
    data: dict[str, Any], path: Path, trace_start: str, tick_seconds: float
) -> tuple[str, str]:
    """The name of the window's trace, and the UTC time at which the window begins."""
    trace, offset = data.get("original_trace"), data["metadata"].get("start_time")
    name = PurePath(trace).stem[:200] if isinstance(trace, str) else ""
    if not name or not isinstance(offset, int) or isinstance(offset, bool):
        raise FileError(
            f"{path}: original_trace and metadata.start_time must say where the window begins",
            hint="leave --trace-start away to import it as a window of unknown time",
        )
    begin = utc_seconds(trace_start, "--trace-start", "time") + offset * tick_seconds
    try:
        return name, utc_text(begin)
    except (OverflowError, ValueError, OSError):
        raise FileError(
            f"{path}: metadata.start_time is out of range: {str(offset)[:60]}"
        ) from None


def _turned(tick: object) -> Any:
    return 1 - tick if isinstance(tick, int) and tick in (0, 1) else tick
