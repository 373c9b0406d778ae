"""Read how many spot machines there were over time: the traces of Bamboo and Parcae.

``bamboo-trace``: a CSV without a head, a time and a number of machines a line; times never
decrease, and the number holds until the next line. The unit of the times differs from file to file.
``parcae-trace``: a JSON list a line, ``[milliseconds, kind, {"nodes": [...], "duration": ms}]``;
kinds ``add`` and ``remove`` name the machines that come and go, others change nothing.
"""

import csv
import json
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from ...schema import files
from ...schema.errors import FileError
from ...schema.market import Capacity, Market
from ...schema.options import option
from .price_cells import files_of
from .registry import TraceOptions, trace_importer

_MOST_TICKS = 1_000_000


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
