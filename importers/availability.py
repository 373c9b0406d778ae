"""Read when spot machines were available: hetflow.market/1, or Can't Be Late's files (NSDI 2024).

The latter are JSON objects with ``metadata.gap_seconds`` (seconds per window) and ``data``, a list
in which 1 means NOT available.
"""

import json
from pathlib import Path
from typing import Any

from ..schema import files
from ..schema.errors import FileError, HetflowError
from ..schema.market import Availability, Market
from .registry import TraceOptions, trace_importer


@trace_importer("cant-be-late")
def read_windows(path: Path, options: TraceOptions) -> Market:
    """Read the windows of a file or folder as a market.

    Raises:
        FileError: As ``read_availability``.
    """
    return Market(availability=read_availability(path))


def read_availability(path: Path) -> tuple[Availability, ...]:
    """Read a file, or all ``.json`` files of a folder in the order of their names.

    Raises:
        FileError: A file is missing, unreadable, or of neither form; or the folder has none.
    """
    if path.is_dir():
        found = sorted(path.glob("*.json"))
        if not found:
            raise FileError(f"{path}: holds no .json file")
        return tuple(window for one in found for window in read_availability(one))
    text = files.read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    if isinstance(data, dict) and "schema" in data:
        market = files.from_json(text, Market, name=str(path))
        if not market.availability:
            raise FileError(f"{path}: $.availability: holds no windows")
        return market.availability
    return (_published(data, path),)


def _published(data: Any, path: Path) -> Availability:
    metadata = data.get("metadata") if isinstance(data, dict) else None
    if not isinstance(metadata, dict) or not isinstance(data.get("data"), list):
        raise FileError(
            f"{path}: must be hetflow.market/1, or have metadata.gap_seconds and data",
        )
    try:
        return Availability(
            zone=path.stem,
            tick_seconds=float(metadata["gap_seconds"]),
            available=tuple(_turned(tick) for tick in data["data"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, HetflowError):
            raise FileError(f"{path}: {error.message}", hint=error.hint) from None
        raise FileError(f"{path}: metadata.gap_seconds must be a number of seconds") from None


def _turned(tick: object) -> Any:
    return 1 - tick if isinstance(tick, int) and tick in (0, 1) else tick
