"""Helpers that all formats of prices share: dollars, times, and the files of a folder."""

from datetime import datetime
from math import isfinite
from pathlib import Path

from ...schema.errors import FileError, ProblemError


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


def seconds_of(text: str, key: str) -> float:
    """Read a time, with its offset from UTC, as seconds since 1970-01-01T00:00:00Z.

    Raises:
        ProblemError: It is no time, or does not say its offset.
    """
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise ProblemError(
            f"{key} must be a time such as 2022-10-26T00:00:00Z, got {text[:60]!r}"
        ) from None
    if parsed.tzinfo is None:
        raise ProblemError(f"{key} {text[:60]!r} does not say its offset from UTC; end it with Z")
    return parsed.timestamp()


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
