"""The lines of a CSV file, whichever program wrote it."""

import csv
from io import StringIO
from pathlib import Path

from ...schema.errors import FileError, ProblemError
from ...schema.files import read_text
from ...schema.foreign import Lines, without_index


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


def row_of(names: list[str], cells: list[str]) -> dict[str, str]:
    """Name the cells of a line.

    Raises:
        ProblemError: The line has more or fewer cells than there are columns.
    """
    if len(cells) != len(names):
        raise ProblemError(f"has {len(cells)} cells, the first line has {len(names)}")
    return dict(zip(names, cells, strict=True))
