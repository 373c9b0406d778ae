"""Pipelines that are always full: Piper's problem (NeurIPS'21) and its plans.

A stream of microbatches is so long that filling and draining the pipeline do not count; what
counts is how often a sample leaves it. Devices are of one type. Layers are a graph, and each has
one or two ways to be computed at each tensor-parallel degree.
"""

from .errors import ProblemError
from .plan import Proof
from .records import (
    Bytes,
    Count,
    Name,
    NonNegative,
    PerSecond,
    PositiveBytes,
    Seconds,
    record,
    register_keys,
)

_MOST_CHOICES = 2


@record
class SteadyChoice:
    """A way to compute a layer, such as with recomputation; of one device of its group.

    ``in_flight_bytes`` are kept for each microbatch in flight, ``fixed_bytes`` once.
    """

    name: Name
    seconds: Seconds
    weight_bytes: NonNegative
    in_flight_bytes: NonNegative
    fixed_bytes: NonNegative


@record
class SteadyDegree:
    """The ways to compute a layer on a group of so many devices."""

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
    """A layer with its degrees."""

    name: Name
    degrees: tuple[SteadyDegree, ...]


@record
class SteadySync:
    """What a group of that degree sends more where an edge crosses a boundary, by its end."""

    tensor_parallel_size: Count
    source_bytes: NonNegative
    target_bytes: NonNegative


@record
class SteadyEdge:
    """What a layer sends to another, bytes of a sample; ends are numbers in ``layers``."""

    source: int
    target: int
    sent_bytes: NonNegative
    sync: tuple[SteadySync, ...] = ()


@record
class SteadyProblem:
    """A graph of layers to keep busy on equal devices.

    ``num_microbatches`` of a batch bound the replicas of all stages together, and each stage's
    number divides it. ``bytes_per_second`` is every link's.
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
        """The tensor-parallel degrees of every layer."""
        return tuple(d.tensor_parallel_size for d in self.layers[0].degrees)


@record
class SteadyStage:
    """Layers by number with the name of each one's choice, on equal replicas."""

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
    """Stages from the first to the last; ``sample_seconds`` is the slowest stage's."""

    model: Name
    stages: tuple[SteadyStage, ...]
    sample_seconds: Seconds
    proof: Proof


register_keys(
    SteadyChoice, SteadyDegree, SteadyLayer, SteadySync, SteadyEdge, SteadyProblem, SteadyStage,
    SteadyPlan,
)  # fmt: skip
