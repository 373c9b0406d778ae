"""Read jobs and throughputs from DataFrames and CSV files.

A spreadsheet or a scheduler's log exports such files. The first line names the columns, in any
order; docs/formats.md lists them. All faults of a table are reported at once, each with its line
and column. In a DataFrame, the names of the columns are line 1.
"""

import csv
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar

from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.files import read_text
from ...schema.frames import Lines, Table, lines_of, without_index
from ...schema.jobs import Entity, Job, Jobs, ModelThroughput, PairThroughput, Throughputs
from ...schema.spelling import did_you_mean
from .registry import jobs_importer

Cells = dict[str, str]
T = TypeVar("T")


def csv_lines(path: Path) -> tuple[list[str], Lines]:
    """Read the names of the columns, and the lines: their numbers and cells.

    A byte order mark, blanks around cells and empty lines are left out, and so is the column that
    pandas writes first by default: the numbers of its rows.

    Raises:
        FileError: The file is missing, too large, or no CSV; also while lines are read.
    """
    lines = _lines(path)
    _, names = next(lines, (1, []))
    return without_index(names, ((number, cells) for number, cells in lines if any(cells)))


def _lines(path: Path) -> Lines:
    reader = csv.reader(StringIO(read_text(path).removeprefix("\ufeff")), strict=True)
    try:
        for cells in reader:
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise FileError(f"{path}: line {reader.line_num}: not valid CSV: {error}") from None


def row_of(names: list[str], cells: list[str]) -> Cells:
    """Name the cells of a line.

    Raises:
        ProblemError: The line has more or fewer cells than there are columns.
    """
    if len(cells) != len(names):
        raise ProblemError(f"has {len(cells)} cells, the first line has {len(names)}")
    return dict(zip(names, cells, strict=True))


def each_row(path: Path, names: list[str], lines: Lines, read: Callable[[Cells], T]) -> list[T]:
    """What ``read`` makes of the cells of each line.

    Raises:
        FileError: It refuses a line, or the line has more or fewer cells than there are columns.
    """
    made = []
    for number, cells in lines:
        try:
            made.append(read(row_of(names, cells)))
        except ProblemError as error:
            raise FileError(f"{path}: line {number}: {error.message}") from None
    return made


MOST_FAULTS = 10


def _whole(text: str) -> int:
    """Read ``2`` or ``2.0``, as pandas writes whole numbers of a column with an empty cell."""
    return int(text.removesuffix(".0"))


Row = dict[str, Any]
Column = Callable[[str], object]

_JOB_COLUMNS: dict[str, Column] = {
    "id": str,
    "model": str,
    "steps": float,
    "scale_factor": _whole,
    "arrival_seconds": float,
    "priority_weight": float,
    "slo_seconds": float,
    "entity": str,
}
_RATE_COLUMNS: dict[str, Column] = {
    "model": str,
    "device_type": str,
    "steps_per_second": float,
    "scale_factor": _whole,
    "unconsolidated_steps_per_second": float,
    "shared_with": str,
    "shared_with_steps_per_second": float,
}


@jobs_importer(".csv")
def read_jobs_csv(path: Path) -> Jobs:
    """Read jobs from a CSV file; see ``read_jobs_table``."""
    return read_jobs_table(path)


def read_jobs_table(path: Path | Table) -> Jobs:
    """Read jobs, one per line: ``model``, ``steps`` and any optional columns.

    Without an ``id`` column, a job's id is its line number. Every name in ``entity`` becomes an
    entity of weight 1.

    Raises:
        FileError: The file cannot be read, a column is missing or unknown, or a value is invalid.
    """
    name = _name_of(path)
    jobs: list[Job] = []
    faults: list[str] = []
    for line, row in _rows(path, _JOB_COLUMNS, required=("model", "steps"), faults=faults):
        try:
            jobs.append(Job(**{"id": f"line {line}", **row}))
        except ProblemError as error:
            faults.append(f"line {line}: {error.message}")
    _refuse(name, faults)
    ordered = sorted(jobs, key=lambda job: job.arrival_seconds)
    owners = dict.fromkeys(job.entity for job in ordered if job.entity is not None)
    entities = tuple(Entity(name=owner) for owner in owners)
    return _made(name, lambda: Jobs(jobs=tuple(ordered), entities=entities))


def read_throughputs_csv(path: Path | Table) -> Throughputs:
    """Read throughputs, one per line: ``model``, ``device_type`` and ``steps_per_second``.

    A line with ``shared_with`` gives the throughputs of two models that share a device:
    ``steps_per_second`` is that of ``model``, ``shared_with_steps_per_second`` that of the other.

    Raises:
        FileError: As ``read_jobs_csv``; also for a throughput that is given twice.
    """
    alone: dict[tuple[str, int], dict[str, float]] = {}
    apart: dict[tuple[str, int], dict[str, float]] = {}
    shared: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {}
    required = ("model", "device_type", "steps_per_second")
    faults: list[str] = []
    name = _name_of(path)
    for line, row in _rows(path, _RATE_COLUMNS, required=required, faults=faults):
        model, device, scale = row["model"], row["device_type"], row.get("scale_factor", 1)
        rate, other = row["steps_per_second"], row.get("shared_with")
        if (other is None) != ("shared_with_steps_per_second" not in row):
            faults.append(
                f"line {line}: shared_with and shared_with_steps_per_second come together"
            )
            continue
        if other is None:
            known: dict[str, Any] = alone.setdefault((model, scale), {})
            entry: Any = rate
            if "unconsolidated_steps_per_second" in row:
                spread = row["unconsolidated_steps_per_second"]
                apart.setdefault((model, scale), {})[device] = spread
        else:
            known = shared.setdefault((model, other, scale), {})
            entry = (rate, row["shared_with_steps_per_second"])
        if device in known:
            faults.append(f"line {line}: {model} x{scale} on {device} is given twice; keep one")
        known[device] = entry
    _refuse(name, faults)
    if not alone:
        raise FileError(f"{name}: holds no throughputs of models alone")
    return _made(name, lambda: throughputs_of(alone, apart, shared))


def throughputs_of(
    alone: dict[tuple[str, int], dict[str, float]],
    apart: dict[tuple[str, int], dict[str, float]],
    shared: dict[tuple[str, str, int], dict[str, tuple[float, float]]],
) -> Throughputs:
    """A table, by models and scale factor and then by device type."""
    models = tuple(
        ModelThroughput(
            model=model,
            scale_factor=scale,
            steps_per_second=rates,
            unconsolidated_steps_per_second=apart.get((model, scale)),
        )
        for (model, scale), rates in alone.items()
    )
    pairs = tuple(
        PairThroughput(models=(a, b), scale_factor=scale, steps_per_second=rates)
        for (a, b, scale), rates in shared.items()
    )
    return Throughputs(models=models, pairs=pairs)


def _made(name: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except HetflowError as error:
        raise FileError(f"{name}: {error.message}") from None


def _refuse(name: str, faults: list[str]) -> None:
    if faults:
        more = len(faults) - MOST_FAULTS
        said = faults[:MOST_FAULTS] + ([f"and {more} more faults"] if more > 0 else [])
        raise FileError(f"{name}: {'; '.join(said)}")


def _rows(
    path: Path | Table, columns: dict[str, Column], *, required: tuple[str, ...], faults: list[str]
) -> Iterator[tuple[int, Row]]:
    """Yield the lines of a table, numbered, as typed values; empty cells are left out."""
    name = _name_of(path)
    names, lines = csv_lines(path) if isinstance(path, Path) else lines_of(path)
    _check_header(name, names, columns, required)
    for number, cells in lines:
        try:
            yield number, _row(names, cells, columns, required)
        except ProblemError as error:
            faults.append(f"line {number}: {error.message}")


def _name_of(path: Path | Table) -> str:
    return str(path) if isinstance(path, Path) else "the table"


def _check_header(
    table: str, names: list[str], columns: dict[str, Column], required: tuple[str, ...]
) -> None:
    wanted = ", ".join(columns)
    for name in names:
        if name not in columns:
            raise FileError(
                f"{table}: line 1: unknown column {name[:60]!r}"
                + did_you_mean(name, columns, before="; "),
                hint=f"columns are {wanted}",
            )
        if names.count(name) > 1:
            raise FileError(f"{table}: line 1: column {name!r} is there twice; keep one")
    missing = [name for name in required if name not in names]
    if missing:
        raise FileError(
            f"{table}: line 1: the first line must name the columns; {', '.join(missing)} missing",
            hint=f"columns are {wanted}",
        )


def _row(
    names: list[str], cells: list[str], columns: dict[str, Column], required: tuple[str, ...]
) -> Row:
    row: Row = {}
    for name, cell in row_of(names, cells).items():
        if cell:
            row[name] = _value(name, cell, columns[name])
        elif name in required:
            raise ProblemError(f"{name}: must have a value")
    return row


def _value(name: str, text: str, kind: Column) -> object:
    try:
        return kind(text)
    except ValueError:
        wanted = "a whole number" if kind is _whole else "a number"
        raise ProblemError(f"{name}: must be {wanted}, got {text[:60]!r}") from None
