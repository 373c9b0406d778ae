"""Pipelines in the steady state: Piper's problem (NeurIPS'21) and its plans.

The stream of microbatches is so long that startup and drain of the pipeline are negligible; the
objective is the time per sample. Devices are of one type. Layers are a graph, and each layer has
one or two ways to be computed at each tensor-parallel degree.
"""

from ...schema.errors import ProblemError
from ...schema.plan import Proof
from ...schema.records import (
    Bytes,
    Count,
    Name,
    NonNegative,
    PerSecond,
    PositiveBytes,
    Seconds,
    record,
)

_MOST_CHOICES = 2


@record
class SteadyChoice:
    """A way to compute a layer, such as with recomputation; the costs are those of one device.

    ``in_flight_bytes`` are kept for each microbatch in flight, ``fixed_bytes`` only once.
    """

    name: Name
    seconds: Seconds
    weight_bytes: NonNegative
    in_flight_bytes: NonNegative
    fixed_bytes: NonNegative


@record
class SteadyDegree:
    """The ways to compute a layer on a group of ``tensor_parallel_size`` devices."""

    tensor_parallel_size: Count
    choices: tuple[SteadyChoice, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.choices) <= _MOST_CHOICES:
            raise ProblemError(
                f"degree {self.tensor_parallel_size} has {len(self.choices)} choices; "
                f"1 or {_MOST_CHOICES} are planned"
            )
        if len({choice.name for choice in self.choices}) < len(self.choices):
            raise ProblemError(f"degree {self.tensor_parallel_size} has two choices of one name")
        if len({choice.weight_bytes for choice in self.choices}) > 1:
            raise ProblemError(
                f"the choices of degree {self.tensor_parallel_size} hold unlike weight_bytes; they "
                "may differ in time and memory only"
            )


@record
class SteadyLayer:
    """A layer, with the ways to compute it at each tensor-parallel degree."""

    name: Name
    degrees: tuple[SteadyDegree, ...]


@record
class SteadySync:
    """Extra bytes per sample that a group sends for an edge that crosses a boundary.

    ``source_bytes`` if the group holds the edge's source, ``target_bytes`` if it holds its target.
    """

    tensor_parallel_size: Count
    source_bytes: NonNegative
    target_bytes: NonNegative


@record
class SteadyEdge:
    """An edge between two layers with its bytes per sample; ends are indices of ``layers``."""

    source: int
    target: int
    sent_bytes: NonNegative
    sync: tuple[SteadySync, ...] = ()


@record
class SteadyProblem:
    """A graph of layers to pipeline over equal devices.

    ``num_microbatches`` is the number of microbatches of a batch. All stages together have at most
    as many replicas, and the replicas of each stage divide it. ``bytes_per_second`` is the
    bandwidth of every link.
    """

    model: Name
    layers: tuple[SteadyLayer, ...]
    edges: tuple[SteadyEdge, ...]
    num_devices: Count
    memory_bytes: PositiveBytes
    bytes_per_second: PerSecond
    num_microbatches: Count

    def __post_init__(self) -> None:
        if not self.layers:
            raise ProblemError("a problem needs at least one layer")
        if self.bytes_per_second <= 0:
            raise ProblemError(f"bytes_per_second must be > 0, got {self.bytes_per_second}")
        degrees = {tuple(d.tensor_parallel_size for d in layer.degrees) for layer in self.layers}
        if len(degrees) > 1:
            raise ProblemError("all layers must have the same tensor-parallel degrees")
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if not 0 <= end < len(self.layers):
                    raise ProblemError(f"an edge ends at layer {end} of {len(self.layers)}")

    @property
    def degrees(self) -> tuple[int, ...]:
        """The tensor-parallel degrees that every layer has."""
        return tuple(d.tensor_parallel_size for d in self.layers[0].degrees)


@record
class SteadyStage:
    """Layers by index, each with the name of its choice, on equal replicas."""

    layers: tuple[int, ...]
    choices: tuple[Name, ...]
    tensor_parallel_size: Count
    num_replicas: Count
    sample_seconds: Seconds
    memory_bytes: Bytes

    def __post_init__(self) -> None:
        if not self.layers or len(self.layers) != len(self.choices):
            raise ProblemError("a stage needs layers, and a choice for each")


@record
class SteadyPlan:
    """Stages in order; ``sample_seconds`` is the time per sample of the slowest stage."""

    model: Name
    stages: tuple[SteadyStage, ...]
    sample_seconds: Seconds
    proof: Proof
