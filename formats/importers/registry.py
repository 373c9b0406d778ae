"""The registry of foreign formats that hetflow reads, by name; plug-ins add theirs.

A format gives the layers of a model (``hetflow import``), or prices of machines (``hetflow
import``), or jobs. Commands that take jobs recognise a format by the ending of the file's name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ...schema.errors import FileError, ProblemError
from ...schema.jobs import Jobs
from ...schema.market import Market, PriceHistory, utc_seconds
from ...schema.options import option
from ...schema.plugins import Registry
from ...schema.profile import LayerGraph, TensorLayers


class ReadLayers(Protocol):
    """Reads the layers of a model."""

    __module__: str

    def __call__(self, text: str, *, microbatch_size: int, name: str) -> LayerGraph:
        """Read the layers in a file's text; ``name`` is the path, for errors."""


class ReadTensorLayers(Protocol):
    """Reads the layers of tensor-parallel groups."""

    def __call__(self, text: str, *, microbatch_size: int, name: str) -> tuple[TensorLayers, ...]:
        """Read the layers at every degree above 1; the arguments are those of ``ReadLayers``."""


ReadJobs = Callable[[Path], Jobs]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """What a trace's format may leave open.

    Attributes:
        tick_seconds: Length of the ticks to make of a trace that has times instead.
        time_unit_seconds: Seconds of the unit of its times.
        trace_start: UTC time of the trace's first tick, for a format that does not hold it.
        values: What numbers of a format that does not say it mean: ``instances`` that there are,
            or 1 where machines are ``preempted``.

    Raises:
        ProblemError: An option is out of range.
    """

    tick_seconds: float = 300.0
    time_unit_seconds: float = 1.0
    trace_start: str | None = None
    values: Literal["instances", "preempted"] | None = None

    def __post_init__(self) -> None:
        for name in ("tick_seconds", "time_unit_seconds"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ProblemError(f"{name} must be > 0 and finite, got {getattr(self, name)}")
        if self.trace_start is not None:
            utc_seconds(self.trace_start, option("trace_start"), "time")


ReadTraces = Callable[[Path, TraceOptions], Market]
ReadPrices = Callable[[Path], tuple[PriceHistory, ...]]


@dataclass(frozen=True, slots=True)
class LayerImporter:
    """A format of layer profiles.

    Attributes:
        name: The format's name for ``hetflow import --format``.
        title: The format's title, for the profile's provenance.
        read: Reads the layers from a text.
        without_placeholders: Drops nodes that stand for no work; None where the format has none.
        tensor_layers: Reads the layers of tensor-parallel groups; None where the format has none.
    """

    name: str
    title: str
    read: ReadLayers
    without_placeholders: Callable[[LayerGraph], LayerGraph] | None = None
    tensor_layers: ReadTensorLayers | None = None


LAYER_IMPORTERS: Registry[LayerImporter] = Registry(
    "import format",
    group="hetflow.importers",
    own=("hetflow.formats.importers.pipedream", "hetflow.papers.piper"),
)
JOBS_IMPORTERS: Registry[ReadJobs] = Registry(
    "format of jobs",
    group="hetflow.importers",
    own=("hetflow.formats.importers.csv_tables", "hetflow.formats.importers.gavel"),
)
PRICE_IMPORTERS: Registry[ReadPrices] = Registry(
    "format of prices",
    group="hetflow.importers",
    own=("hetflow.formats.importers.spot_prices",),
    is_optional=True,
)
TRACE_IMPORTERS: Registry[ReadTraces] = Registry(
    "format of traces",
    group="hetflow.importers",
    own=("hetflow.formats.importers.availability",),
    is_optional=True,
)


def layer_importer(
    name: str,
    *,
    title: str,
    without_placeholders: Callable[[LayerGraph], LayerGraph] | None = None,
    tensor_layers: ReadTensorLayers | None = None,
) -> Callable[[ReadLayers], ReadLayers]:
    """Register a reader of layers; the arguments are the attributes of ``LayerImporter``.

    Returns:
        A decorator that returns the reader unchanged.

    Raises:
        ProblemError: The name is taken.
    """

    def register(read: ReadLayers) -> ReadLayers:
        made = LayerImporter(name, title, read, without_placeholders, tensor_layers)
        LAYER_IMPORTERS.add(name, made, read.__module__)
        return read

    return register


def jobs_importer(suffix: str) -> Callable[[ReadJobs], ReadJobs]:
    """Register a reader of jobs for files whose names end with ``suffix``."""
    return JOBS_IMPORTERS.adding(suffix)


def price_importer(name: str) -> Callable[[ReadPrices], ReadPrices]:
    """Register a reader of price histories, from a file or a folder, for ``hetflow import``."""
    return PRICE_IMPORTERS.adding(name)


def trace_importer(name: str) -> Callable[[ReadTraces], ReadTraces]:
    """Register a reader of availability or capacity over time, from a file or a folder."""
    return TRACE_IMPORTERS.adding(name)


def json_of(text: str, path: Path) -> Any:
    """The values of a file's JSON.

    Raises:
        FileError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
