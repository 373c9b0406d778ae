"""Windows of availability, given as records or as their files."""

from collections.abc import Sequence
from pathlib import Path

from ..importers.availability import read_availability
from ..schema.market import Availability

Windows = Sequence[Availability | Path | str]


def read_windows(windows: Windows) -> list[Availability]:
    """All windows in order; a file may hold several.

    Raises:
        FileError: A file is missing or has faults.
    """
    found: list[Availability] = []
    for window in windows:
        found += [window] if isinstance(window, Availability) else read_availability(Path(window))
    return found
