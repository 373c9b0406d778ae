"""Tables: values of numpy and pandas taken for plain ones; records as pandas tables and as text.

pandas is imported only when a table is made. A value of numpy or pandas is known by its methods.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import HetflowError

if TYPE_CHECKING:
    from pandas import DataFrame


@runtime_checkable
class Table(Protocol):
    """A table with named columns, such as a ``pandas.DataFrame``."""

    @property
    def columns(self) -> Any:
        """Names of the columns, in order."""

    def itertuples(self, *, index: bool, name: None) -> Any:
        """Yield the rows as tuples."""


def plain(value: Any) -> Any:
    """Convert numbers, arrays and series to Python's numbers and lists, also inside containers.

    Everything else is returned as it is.
    """
    if isinstance(value, Mapping) and type(value) is dict:
        return {plain(key): plain(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    convert = getattr(value, "tolist", None)
    return convert() if callable(convert) and not isinstance(value, type) else value


def in_tuples(value: Any) -> Any:
    """Convert lists to tuples, also inside dicts, lists and tuples."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return tuple(map(in_tuples, value))
    return {key: in_tuples(entry) for key, entry in value.items()} if type(value) is dict else value


Lines = Iterator[tuple[int, list[str]]]
"""The number and the cells of each line."""

# What pandas calls the column of a default index: in a file, read again once or twice, reset.
_INDEX = re.compile(r"(Unnamed: \d+(\.\d+)?|index)?")


def lines_of(table: Table) -> tuple[list[str], Lines]:
    """Return the names of a table's columns, and its lines as they would stand in a CSV file.

    An index that has a name is a column, as in a file; any other is left out.

    Returns:
        The names, and the number and cells of each line; the names are line 1. A cell is empty
        where there is no value: None or not a number.
    """
    held: Any = table
    names = getattr(getattr(held, "index", None), "names", ())
    levels = [name for name in names if name is not None and name not in list(held.columns)]
    if levels:
        held = held.reset_index(level=levels)
    rows = enumerate(held.itertuples(index=False, name=None), start=2)
    cells = ((number, [_csv_cell(value) for value in row]) for number, row in rows)
    return without_index([str(name) for name in held.columns], cells)


def without_index(names: list[str], lines: Lines) -> tuple[list[str], Lines]:
    """Leave out the first columns of a table that hold nothing but the numbers of its rows."""
    start = 0
    while len(names) > start + 1 and _INDEX.fullmatch(names[start]):
        start += 1
    return names[start:], ((number, cells[start:]) for number, cells in lines)


def _csv_cell(value: Any) -> str:
    value = plain(value)
    if value is None or value != value or str(value) in ("NaT", "<NA>"):
        return ""
    return str(value)


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence of values; a text, which is one of letters, is not meant."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


_MOST_ROWS = 50  # in a notebook; ``to_frame`` has all

Rows = Iterable[Mapping[str, Any]]


class Shown:
    """A record whose parts make a table. It says its ``title`` and its ``table``."""

    __slots__ = ()

    @property
    def title(self) -> str:
        """The record in one line, without the name of its class."""
        raise NotImplementedError

    def table(self) -> tuple[list[str], Rows]:
        """Return the names of the table's columns, and its rows: column -> value."""
        raise NotImplementedError

    def to_frame(self) -> "DataFrame":
        """Build a pandas table of the record's parts; units are in the names of the columns.

        The rows are a split plan's groups, a pipeline's stages, the replicas of each stage of a
        parallel plan, or a profile's batch sizes. Those of an allocation, a simulation or a list of
        jobs are jobs. Those of a run are devices, of throughputs rates, of a cluster device types.

        Raises:
            HetflowError: pandas is not installed, or the record was kept without these parts.
        """
        columns, rows = self.table()
        return frame_of(rows, columns)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}>"

    def _repr_html_(self) -> str:
        from html import escape  # all commands import this module, and none makes a web page

        try:
            columns, rows = self.table()
        except HetflowError:  # kept without its parts
            return f"<p>{escape(repr(self))}</p>"
        every = list(rows)
        lines = [columns, *([_cell(row.get(name)) for name in columns] for row in every)]
        marked = [
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>"
            for tag, line in zip(["th", *["td"] * len(every)], lines, strict=True)
        ][: _MOST_ROWS + 1]
        more = len(every) - _MOST_ROWS
        rest = f"<p>and {more} more rows, in to_frame()</p>" if more > 0 else ""
        return f"<p>{escape(repr(self))}</p><table>{''.join(marked)}</table>{rest}"


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def fields_table(
    records: Iterable[Any], kind: type, *, but: Iterable[str] = (), also: Iterable[str] = ()
) -> tuple[list[str], Rows]:
    """Return a table with a row for each record and a column for each of its fields.

    Args:
        records: The records.
        kind: Their class.
        but: Fields to leave out.
        also: Properties to add, after the fields.
    """
    left_out = set(but)
    names = [field.name for field in fields(kind) if field.name not in left_out]
    columns = [*names, *also]
    return columns, [{name: getattr(each, name) for name in columns} for each in records]


def listed(devices: Mapping[str, float]) -> str:
    """Return numbers of devices by type as they are written: ``2xV100, 8xP100``."""
    return ", ".join(f"{number:g}x{name}" for name, number in devices.items())


def frame_of(rows: Rows, columns: Iterable[str]) -> "DataFrame":
    """Build a pandas table with one row per mapping.

    Args:
        rows: Column -> value, for each row.
        columns: Names of all columns, in order; used even if there are no rows.

    Raises:
        HetflowError: pandas is not installed.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise HetflowError(
            "tables need pandas, which is not installed", hint="pip install pandas"
        ) from None
    return pandas.DataFrame(list(rows), columns=list(columns))
