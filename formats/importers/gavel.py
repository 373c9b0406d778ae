"""Read Gavel's files: throughput tables and traces. Nothing in them is evaluated.

A table maps device types to job types to steps per second. Its keys are the text of a Python
tuple, such as ``('ResNet-18 (batch size 16)', 1)``, read here by a strict pattern. A throughput of
0 is a value: the job does not fit. A trace has one tab-separated job per line.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.files import read_text, reading
from ...schema.jobs import Job, Jobs, Throughputs
from .csv_tables import throughputs_of
from .registry import jobs_importer

_KEY = re.compile(r"\('([^'\\]+)', ([0-9]{1,6})\)")
_APART = "_unconsolidated"
_FIELDS = 10

Key = tuple[str, int]


def read_gavel_throughputs(path: Path, *, pairs: bool = True) -> Throughputs:
    """Read a Gavel throughput table.

    Args:
        path: The JSON file.
        pairs: Whether to read colocated pairs too; most of a table is pairs.

    Raises:
        FileError: Not JSON, or not such a table; says where.
    """
    try:
        table = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise FileError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise FileError(f"{path}: nested too deeply to be a throughput table") from None
    except ValueError:
        raise FileError(f"{path}: holds a whole number of thousands of digits") from None
    try:
        rows = _rows(table)
        alone: dict[Key, dict[str, float]] = {}
        apart: dict[Key, dict[str, float]] = {}
        shared: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {}
        for device, key, rates in rows:
            where = f"{device}, {key}"
            single = _rate(rates.get("null"), where)
            if device.endswith(_APART):
                apart.setdefault(key, {})[device.removesuffix(_APART)] = single
                continue
            alone.setdefault(key, {})[device] = single
            if pairs:
                _add_pairs(shared, device, key, rates)
        apart = {key: rates for key, rates in apart.items() if key[1] > 1}
        return throughputs_of(alone, apart, shared)
    except HetflowError as error:
        raise FileError(f"{path}: {error.message}") from None


def _rows(table: Any) -> list[tuple[str, Key, dict[str, Any]]]:
    rows = []
    for device, entries in _object(table, "the table").items():
        for text, rates in _object(entries, device).items():
            rows.append((device, _key(text, device), _object(rates, f"{device}, {text}")))
    return rows


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileError(f"{where}: must be an object, got {type(value).__name__}")
    return value


def _key(text: str, where: str) -> Key:
    match = _KEY.fullmatch(text)
    if not match or int(match[2]) < 1:
        raise FileError(f"{where}: key {text[:60]!r} is not ('job type', scale factor)")
    return match[1], int(match[2])


def _add_pairs(
    shared: dict[tuple[str, str, int], dict[str, tuple[float, float]]],
    device: str,
    key: Key,
    rates: dict[str, Any],
) -> None:
    for text, both in rates.items():
        if text == "null":
            continue
        other = _key(text, f"{device}, {key}")
        if other[1] != key[1] or (other[0], key[0], key[1]) in shared and other != key:
            continue  # only equal scale factors share a device, and each pair is there twice
        where = f"{device}, {key} with {other}"
        if not isinstance(both, list) or len(both) != 2:
            raise FileError(f"{where}: must be two rates, got {str(both)[:60]}")
        first, second = _rate(both[0], where), _rate(both[1], where)
        if other == key:  # the table does not say which of the two is the first
            first = second = (first + second) / 2
        if first > 0 and second > 0:
            shared.setdefault((key[0], other[0], key[1]), {})[device] = (first, second)


def _rate(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileError(f"{where}: a rate must be a number, got {str(value)[:60]}")
    try:
        rate = float(value)
    except OverflowError:  # whole numbers in JSON may exceed a float
        rate = math.inf
    if not math.isfinite(rate) or rate < 0:
        raise FileError(f"{where}: a rate must be finite and >= 0, got {str(value)[:60]}")
    return rate


def read_gavel_trace(path: Path) -> Iterator[Job]:
    """Read a Gavel trace, one job at a time: a trace may be larger than memory.

    Job ids are line numbers from 0.

    Raises:
        FileError: The file cannot be read, or a line is cut short, out of order or invalid.
    """
    with reading(path), path.open(encoding="utf-8") as lines:
        yield from parse_gavel_trace(lines, str(path))


@jobs_importer(".trace")
def read_gavel_jobs(path: Path) -> Jobs:
    """Read all jobs of a Gavel trace.

    Raises:
        FileError: As ``read_gavel_trace``.
    """
    return Jobs(jobs=tuple(read_gavel_trace(path)))


def parse_gavel_trace(lines: Iterable[str], name: str = "trace") -> Iterator[Job]:
    """Parse the lines of a Gavel trace; ``name`` stands for the file in errors.

    Raises:
        FileError: As ``read_gavel_trace``.
    """
    last = -math.inf
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        job = _job(line.rstrip("\n").split("\t"), number - 1, f"{name}: line {number}")
        if job.arrival_seconds < last:
            raise FileError(
                f"{name}: line {number}: arrives at {job.arrival_seconds} s, before the line "
                f"above at {last} s; sort the trace by arrival"
            )
        last = job.arrival_seconds
        yield job


def _job(fields: list[str], index: int, where: str) -> Job:
    if len(fields) != _FIELDS:
        raise FileError(
            f"{where}: has {len(fields)} of {_FIELDS} fields; the trace may be truncated"
        )
    steps, scale, weight, slo, arrival = fields[5:]
    slo_seconds = _number(slo, f"{where}: slo_seconds")
    try:
        return Job(
            id=str(index),
            model=fields[0],
            steps=_number(steps, f"{where}: steps"),
            scale_factor=int(_number(scale, f"{where}: scale_factor", is_whole=True)),
            priority_weight=_number(weight, f"{where}: priority_weight"),
            slo_seconds=slo_seconds if slo_seconds > 0 else None,
            arrival_seconds=_number(arrival, f"{where}: arrival_seconds"),
        )
    except ProblemError as error:
        raise FileError(f"{where}: {error.message}") from None


def _number(text: str, where: str, *, is_whole: bool = False) -> float:
    try:
        value = int(text) if is_whole else float(text)
    except ValueError:
        kind = "a whole number" if is_whole else "a number"
        raise FileError(f"{where}: must be {kind}, got {text[:60]!r}") from None
    if not math.isfinite(value):
        raise FileError(f"{where}: must be finite, got {text[:60]!r}")
    return value
