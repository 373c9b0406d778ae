"""Small clusters, and the reference data."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.clusters.mechanisms.pool import ClusterPool
from hetflow.formats.importers.gavel import read_gavel_throughputs
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs
from hetflow.tests.data import reference


@pytest.fixture(scope="session")
def gavel() -> Path:
    """The folder of Gavel's data."""
    return reference.folder() / "gavel"


@pytest.fixture(scope="session")
def gavel_table(gavel: Path) -> Throughputs:
    """Gavel's throughputs, without pairs."""
    path = gavel / "throughputs" / "simulation_throughputs.json"
    return read_gavel_throughputs(path, pairs=False)


@pytest.fixture(scope="session")
def table() -> Throughputs:
    """Two models that prefer different devices, on up to four of them."""
    return Throughputs(
        models=tuple(
            ModelThroughput(
                model=model,
                scale_factor=scale,
                steps_per_second={"fast": fast * scale, "slow": slow * scale},
            )
            for model, fast, slow in (("conv", 4.0, 1.0), ("rnn", 2.0, 1.5))
            for scale in (1, 2, 4)
        )
    )


@pytest.fixture
def pool(table: Throughputs) -> ClusterPool:
    """Four fast devices and four slow ones, with prices."""
    return ClusterPool(
        throughputs=table,
        num_devices={"fast": 4, "slow": 4},
        dollars_per_hour={"fast": 2.0, "slow": 0.5},
    )


@pytest.fixture(scope="session")
def job() -> Callable[..., Job]:
    """Make a job with sane defaults."""

    def make(number: int, **given: object) -> Job:
        values: dict[str, object] = {"id": str(number), "model": "conv", "steps": 4000.0}
        return Job(**{**values, **given})  # type: ignore[arg-type]

    return make
