"""Foreign formats that become records, by name; plug-ins add theirs.

A format gives layers of a model (``hetflow import``), or jobs, which commands read wherever they
take jobs: by the ending of the file's name; or prices of machines (``hetflow import``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..schema.jobs import Jobs
from ..schema.market import PriceHistory
from ..schema.plugins import Registry
from ..schema.profile import LayerGraph


class ReadLayers(Protocol):
    """Reads the layers of a model."""

    __module__: str

    def __call__(self, text: str, *, microbatch_size: int, name: str) -> LayerGraph:
        """From a file's text; ``name`` is the path, for errors."""


ReadJobs = Callable[[Path], Jobs]
ReadPrices = Callable[[Path], tuple[PriceHistory, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerImporter:
    """A format of layer profiles.

    Attributes:
        name: What ``hetflow import --format`` calls it.
        title: What it is, for the profile's provenance.
        read: Reads one.
        without_placeholders: Drops nodes that stand for no work; None where there are none.
    """

    name: str
    title: str
    read: ReadLayers
    without_placeholders: Callable[[LayerGraph], LayerGraph] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsImporter:
    """A format of jobs; the name is the ending of its files, such as ``.trace``."""

    name: str
    read: ReadJobs


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceImporter:
    """A format of price histories; the name is what ``hetflow import --format`` calls it."""

    name: str
    read: ReadPrices


LAYER_IMPORTERS: Registry[LayerImporter] = Registry(
    "import format", group="hetflow.importers", own=("hetflow.importers.pipedream",)
)
JOBS_IMPORTERS: Registry[JobsImporter] = Registry(
    "format of jobs",
    group="hetflow.importers",
    own=("hetflow.importers.csv_tables", "hetflow.importers.gavel"),
)
PRICE_IMPORTERS: Registry[PriceImporter] = Registry(
    "format of prices",
    group="hetflow.importers",
    own=("hetflow.importers.aws_spot_prices", "hetflow.importers.azure_spot_prices"),
    is_optional=True,
)


def layer_importer(
    name: str,
    *,
    title: str,
    without_placeholders: Callable[[LayerGraph], LayerGraph] | None = None,
) -> Callable[[ReadLayers], ReadLayers]:
    """Register a reader of layers; the arguments are the attributes of ``LayerImporter``.

    Returns:
        A decorator that leaves the reader as it is.
    """

    def register(read: ReadLayers) -> ReadLayers:
        made = LayerImporter(
            name=name, title=title, read=read, without_placeholders=without_placeholders
        )
        LAYER_IMPORTERS.add(name, made, read.__module__)
        return read

    return register


def jobs_importer(suffix: str) -> Callable[[ReadJobs], ReadJobs]:
    """Register a reader of jobs for files whose names end so.

    Returns:
        A decorator that leaves the reader as it is.
    """

    def register(read: ReadJobs) -> ReadJobs:
        JOBS_IMPORTERS.add(suffix, JobsImporter(name=suffix, read=read), read.__module__)
        return read

    return register


def price_importer(name: str) -> Callable[[ReadPrices], ReadPrices]:
    """Register a reader of price histories, from a file or a folder.

    Returns:
        A decorator that leaves the reader as it is.
    """

    def register(read: ReadPrices) -> ReadPrices:
        PRICE_IMPORTERS.add(name, PriceImporter(name=name, read=read), read.__module__)
        return read

    return register
