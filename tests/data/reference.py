"""The reference data that tests and benchmarks compare with, unpacked when first asked for."""

import atexit
import tarfile
import tempfile
from functools import cache
from pathlib import Path

ARCHIVE = Path(__file__).with_name("reference.tar.xz")


@cache
def folder() -> Path:
    """A folder with ``gavel/``, ``pipedream/`` and ``ptdp/``; gone when the process ends."""
    place = tempfile.TemporaryDirectory(prefix="hetflow-reference-")
    atexit.register(place.cleanup)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place.name, filter="data")
    return Path(place.name)
