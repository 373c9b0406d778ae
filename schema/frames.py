"""Records as one line of text, as pandas tables, and as notebooks show them.

pandas is imported only when a table is made.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

from .errors import HetflowError

if TYPE_CHECKING:
    from pandas import DataFrame

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
