"""The reference data that tests and benchmarks compare with, unpacked when first asked for."""

import atexit
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ARCHIVE = Path(__file__).with_name("reference.tar.xz")
PLANNERS = Path(__file__).with_name("planners.tar.xz")


def folder() -> Path:
    """A folder with ``gavel/``, ``pipedream/`` and ``ptdp/``; gone when the process ends."""
    return _unpacked(ARCHIVE)


def planners() -> Path:
    """A folder with ``sailor/``; gone when the process ends."""
    return _unpacked(PLANNERS)


@cache
def _unpacked(packed: Path) -> Path:
    place = tempfile.TemporaryDirectory(prefix="hetflow-reference-")
    atexit.register(place.cleanup)
    with tarfile.open(packed) as archive:
        archive.extractall(place.name, filter="data")
    return Path(place.name)
