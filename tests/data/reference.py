"""The reference data that tests and benchmarks compare with, unpacked when first asked for."""

import atexit
import tarfile
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent


def folder() -> Path:
    """A folder with ``gavel/``, ``pipedream/`` and ``ptdp/``; gone when the process ends."""
    return _unpacked("reference.tar.xz")


def availability() -> Path:
    """A folder with ``cant_be_late/REGION/overhead_H/*.json`` and its results; likewise."""
    return _unpacked("availability.tar.xz") / "availability"


def capacity() -> Path:
    """A folder with ``bamboo/`` and ``parcae/``, numbers of spot machines; likewise."""
    return _unpacked("capacity.tar.xz") / "capacity"


def spot_prices() -> Path:
    """A folder with ``aws/``, ``azure/`` and ``instance_types.csv``; likewise."""
    return _unpacked("spot_prices.tar.xz") / "spot_prices"


def planners() -> Path:
    """A folder with ``sailor/``, ``vtrain/`` and ``piper/``; likewise."""
    return _unpacked("planners.tar.xz")


def gpu_runs() -> Path:
    """A folder with ``sailor/`` and ``vtrain/``, times that were measured on GPUs; likewise."""
    return _unpacked("gpu_runs.tar.xz")


@cache
def _unpacked(name: str) -> Path:
    place = tempfile.TemporaryDirectory(prefix="hetflow-reference-")
    atexit.register(place.cleanup)
    with tarfile.open(HERE / name) as archive:
        archive.extractall(place.name, filter="data")
    return Path(place.name)
