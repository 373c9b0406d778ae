"""The common format of tables and numbers."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import zip_longest
from textwrap import TextWrapper

_most_characters: ContextVar[int | None] = ContextVar("most_characters", default=None)
_LEAST = 8  # characters of a column whose words are broken

# Where a line of a cell may end: not between a number and its unit.
_PLACES = re.compile(r"\s+(?!(?:ms|MiB)\b)|(?<=[._/])(?=[A-Za-z])")

Cells = list[list[str]]


@contextmanager
def fitted_to(width: int | None) -> Iterator[None]:
    """Make the tables of this context at most so many characters wide; None sets no limit."""
    before = _most_characters.set(width)
    try:
        yield
    finally:
        _most_characters.reset(before)


def most_characters() -> int | None:
    """How wide a line of this context may be; None without a limit."""
    return _most_characters.get()


def grid(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain-text table; numbers are printed as given. A column without a name has no rule.

    If the table is too wide, cells go over several lines: at blanks and in dotted names, and
    within words only where nothing else helps.
    """
    from tabulate import DataRow, TableFormat, tabulate  # not at the start of every command

    cells = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths, gap = [max(len(name) + 2, *each) for name, each in _columns(cells)], "  "
    most = most_characters()
    if most is not None and sum(widths) + len(gap) * (len(widths) - 1) > most:
        widths, gap = _fitting(cells, most)
    head, *body = (_lines(row, widths) for row in cells)
    rule = ["-" * width for width in widths]
    line = DataRow("", gap, "")
    text = tabulate(
        [*head, rule, *(line for row in body for line in row)],
        tablefmt=TableFormat(None, None, None, None, line, line, 0, None),
        disable_numparse=True,
    )
    lines = text.split("\n")
    named = zip(headers, rule, strict=True)
    lines[len(head)] = gap.join(r if name else " " * len(r) for name, r in named).rstrip()
    return "\n".join(lines)


def _columns(cells: Cells) -> Iterator[tuple[str, list[int]]]:
    """The name of each column, and the lengths of its cells."""
    for column in zip(*cells, strict=True):
        yield column[0], [len(cell) for cell in column]


def _fitting(cells: Cells, most: int) -> tuple[list[int], str]:
    """The widths of columns, and the gap between them, of a table of at most so many characters."""
    whole = [max(lengths) for _, lengths in _columns(cells)]
    words = [
        max(len(word) for cell in column for word in _PLACES.split(cell))
        for column in zip(*cells, strict=True)
    ]
    for least, gap in ((words, "  "), (words, " "), ([min(_LEAST, n) for n in words], " ")):
        widths = list(whole)
        room = most - len(gap) * (len(widths) - 1)
        while sum(widths) > room and widths != least:
            widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
            widths[widest] -= 1
        if sum(widths) <= room:
            break
    return widths, gap


def _lines(row: list[str], widths: list[int]) -> list[tuple[str, ...]]:
    """[lines] the parts of cells that stand on each line of a row."""
    wrapped = [
        [cell] if len(cell) <= width else _Wrapped(width, break_on_hyphens=False).wrap(cell)
        for cell, width in zip(row, widths, strict=True)
    ]
    return list(zip_longest(*wrapped, fillvalue=""))


class _Wrapped(TextWrapper):
    wordsep_simple_re = re.compile(f"({_PLACES.pattern})")


def shown(number: float | None, form: str = ".4g") -> str:
    """A number in a format; a dash where unknown."""
    return "-" if number is None else format(number, form)


def milliseconds(seconds: float | None) -> str:
    """Seconds as text in milliseconds; a dash where unknown."""
    return "-" if seconds is None else f"{four_digits(seconds * 1e3)} ms"


def four_digits(number: float) -> str:
    """A number with four digits or, from 10,000 on, in whole numbers."""
    return f"{number:,.0f}" if abs(number) >= 9999.5 else f"{number:.4g}"


def mebibytes(size: int | None) -> str:
    """Bytes as text in MiB; a dash where unknown."""
    return "-" if size is None else f"{size / (1 << 20):,.1f} MiB"


def layers_text(layers: Sequence[str]) -> str:
    """The first and the last of a stage's layers, and their number."""
    return f"{layers[0]} .. {layers[-1]} ({len(layers)})" if len(layers) > 1 else layers[0]


def device_name(device_type: str, emulated: bool, estimated: bool = False) -> str:
    """The type's name, marked if it is emulated or estimated."""
    kind = " (emulated)" if emulated else " (estimated)" if estimated else ""
    return f"{device_type}{kind}"
