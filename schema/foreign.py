"""Take values of numpy and pandas for the plain ones that they hold.

No library is imported: a value is recognised by its methods.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


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


def lines_of(table: Table) -> tuple[list[str], Iterator[tuple[int, list[str]]]]:
    """Return the names of a table's columns, and its lines as they would stand in a CSV file.

    Returns:
        The names, and the number and cells of each line; the names are line 1. A cell is empty
        where there is no value: None or not a number.
    """
    rows = enumerate(table.itertuples(index=False, name=None), start=2)
    cells = ((number, [_cell(value) for value in row]) for number, row in rows)
    return [str(name) for name in table.columns], cells


def _cell(value: Any) -> str:
    value = plain(value)
    if value is None or value != value or str(value) in ("NaT", "<NA>"):
        return ""
    return str(value)


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence of values; a text, which is one of letters, is not meant."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
