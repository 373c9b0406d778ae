"""Take values of numpy and pandas for the plain ones that they hold.

No library is imported: a value is recognised by its methods.
"""

import re
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
    cells = ((number, [_cell(value) for value in row]) for number, row in rows)
    return without_index([str(name) for name in held.columns], cells)


def without_index(names: list[str], lines: Lines) -> tuple[list[str], Lines]:
    """Leave out the first columns of a table that hold nothing but the numbers of its rows."""
    start = 0
    while len(names) > start + 1 and _INDEX.fullmatch(names[start]):
        start += 1
    return names[start:], ((number, cells[start:]) for number, cells in lines)


def _cell(value: Any) -> str:
    value = plain(value)
    if value is None or value != value or str(value) in ("NaT", "<NA>"):
        return ""
    return str(value)


def is_sequence(value: Any) -> bool:
    """Whether a value is a sequence of values; a text, which is one of letters, is not meant."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
