"""Helpers that all formats of prices share: amounts of dollars, and the files of a folder."""

from math import isfinite
from pathlib import Path

from ..schema.errors import FileError, ProblemError


def dollars_of(text: str) -> float:
    """Read dollars from a cell such as ``0.9000`` or ``$0.9000``.

    Raises:
        ProblemError: The amount is negative, not finite, no number, or of another currency.
    """
    cell = text.strip().removesuffix("USD").strip()
    try:
        dollars = float(cell.removeprefix("$"))
    except ValueError:
        raise ProblemError(
            f"a price must be in US dollars such as $0.90, got {text[:60]!r}"
        ) from None
    if not isfinite(dollars) or dollars < 0:
        raise ProblemError(f"a price must be finite and >= 0, got {text[:60]!r}")
    return dollars


def files_of(path: Path, suffix: str) -> list[Path]:
    """The file itself, or all files with that ending under a folder, sorted by name.

    Raises:
        FileError: The folder holds none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob(f"*{suffix}"))
    if not found:
        raise FileError(f"{path}: holds no {suffix} file")
    return found
