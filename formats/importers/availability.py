"""Read when spot machines were there, or how many: hetflow.market/1, and traces of papers.

``cant-be-late`` (NSDI 2024): JSON objects with ``metadata.gap_seconds`` (seconds of a tick) and
``data``. In windows that were cut from longer traces, 1 means NOT available: ``original_trace``
names the trace, and ``metadata.start_time`` is the trace's tick with which the window begins. In
the traces that the authors publish, a value is the number of instances that there were. Values
above 1 tell these; a file of 0 and 1 alone that names no original trace may be either, and is
refused until the user says which.

``bamboo-trace``: a CSV without a head, a time and a number of machines a line; times never
decrease, and the number holds until the next line. The unit of the times differs from file to file.

``parcae-trace``: a JSON list a line, ``[milliseconds, kind, {"nodes": [...], "duration": ms}]``;
kinds ``add`` and ``remove`` name the machines that come and go, others change nothing.
"""

import csv
import json
from itertools import pairwise
from math import isfinite
from pathlib import Path, PurePath
from typing import Any

from ...schema import files
from ...schema.errors import FileError, HetflowError
from ...schema.market import Availability, Capacity, Market, utc_seconds, utc_text
from ...schema.options import option
from .registry import TraceOptions, json_of, trace_importer
from .spot_prices import files_of

_MOST_TICKS = 1_000_000


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
    data = json_of(text, path)
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
    """Whether values are numbers of instances, and not 1 where machines are preempted."""
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


@trace_importer("bamboo-trace")
def read_bamboo_trace(path: Path, options: TraceOptions) -> Market:
    """Read a file, or all ``.csv`` files under a folder. A tick has its least number of machines.

    The trace ends with its last line: how long that number held is not known.

    Raises:
        FileError: A file is of another form, or its times decrease.
    """
    return Market(capacity=tuple(_of_csv(one, options) for one in files_of(path, ".csv")))


def _of_csv(path: Path, options: TraceOptions) -> Capacity:
    changes: list[tuple[float, int]] = []
    try:
        for number, row in enumerate(csv.reader(files.read_text(path).splitlines()), start=1):
            where = f"{path}: line {number}"
            if row:
                changes.append(_change(row, where, options.time_unit_seconds))
            if len(changes) > 1 and changes[-1][0] < changes[-2][0]:
                raise FileError(f"{where}: its time is before that of the line above")
    except csv.Error as error:
        raise FileError(f"{path}: not a CSV: {error}") from None
    return _capacity(path, changes, options)


def _change(row: list[str], where: str, unit_seconds: float) -> tuple[float, int]:
    try:
        time, number = row
        seconds, machines = float(time) * unit_seconds, int(number)
    except ValueError:
        raise FileError(
            f"{where}: must be a time and a number of machines such as 1800,12, "
            f"got {','.join(row)[:60]!r}"
        ) from None
    if not (isfinite(seconds) and seconds >= 0) or not 0 <= machines < 10**6:
        raise FileError(f"{where}: time and machines must be finite and >= 0")
    return seconds, machines


def _capacity(path: Path, changes: list[tuple[float, int]], options: TraceOptions) -> Capacity:
    """The least number of machines in each whole tick before the last change."""
    tick_seconds = options.tick_seconds
    span = changes[-1][0] - changes[0][0] if changes else 0.0
    if not tick_seconds <= span <= _MOST_TICKS * tick_seconds:
        raise FileError(
            f"{path}: {span:g} s are less than a tick of {tick_seconds:g} s, or more than "
            f"{_MOST_TICKS} of them",
            hint=f"{option('time_unit')} says what the times are in, "
            f"{option('tick_seconds')} how long a tick is",
        )
    num_ticks = int(span / tick_seconds + 1e-9)
    least: list[int | None] = [None] * num_ticks
    for (start, machines), (end, _) in pairwise(changes):
        if end > start:
            first = int((start - changes[0][0]) / tick_seconds + 1e-9)
            last = int(-(-(end - changes[0][0]) // tick_seconds))
            for tick in range(first, min(last, num_ticks)):
                known = least[tick]
                least[tick] = machines if known is None else min(known, machines)
    return Capacity(
        zone=path.stem[:200],
        start=options.trace_start,
        tick_seconds=tick_seconds,
        num_machines=tuple(least),
    )


@trace_importer("parcae-trace")
def read_parcae_trace(path: Path, options: TraceOptions) -> Market:
    """Read a file, or all ``.txt`` files under a folder. Ticks are the durations of the lines.

    Raises:
        FileError: A file is of another form, or a machine leaves that is not there.
    """
    return Market(capacity=tuple(_of_lines(one, options) for one in files_of(path, ".txt")))


def _of_lines(path: Path, options: TraceOptions) -> Capacity:
    there: set[str] = set()
    counts: list[int | None] = []
    tick = 0.0
    for number, line in enumerate(files.read_text(path).splitlines(), start=1):
        where = f"{path}: line {number}"
        time, kind, nodes, duration = _event(line, where)
        if not counts:
            tick = duration
        if duration != tick or time != len(counts) * tick:
            raise FileError(f"{where}: ticks must follow one another, and be of one length")
        if kind == "remove" and not there.issuperset(nodes):
            raise FileError(f"{where}: removes a machine that is not there")
        if kind == "add":
            there |= nodes
        elif kind == "remove":
            there -= nodes
        counts.append(len(there))
    if not counts:
        raise FileError(f"{path}: holds no lines")
    return Capacity(
        zone=path.stem[:200],
        start=options.trace_start,
        tick_seconds=tick / 1000,
        num_machines=tuple(counts),
    )


def _event(line: str, where: str) -> tuple[float, str, set[str], float]:
    try:
        event: Any = json.loads(line)
        time, kind, told = event
        nodes, duration = told["nodes"], told["duration"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise FileError(
            f'{where}: must be [milliseconds, kind, {{"nodes": [...], "duration": milliseconds}}]'
        ) from None
    numbers = all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in (time, duration)
    )
    named = isinstance(nodes, list) and all(isinstance(node, str) for node in nodes)
    if not (numbers and named and isfinite(duration) and duration > 0):
        raise FileError(f"{where}: nodes must be names, times numbers, and the duration > 0")
    return time, str(kind), set(nodes), duration
