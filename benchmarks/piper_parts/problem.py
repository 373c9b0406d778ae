"""Pipelines in the steady state: Piper's problem (NeurIPS'21) and its plans.

The stream of microbatches is so long that startup and drain of the pipeline are negligible; the
objective is the time per sample. Devices are of one type. Layers are a graph, and each layer has
one or two ways to be computed at each tensor-parallel degree.

A file of Piper's planner is read as such a problem. It holds ``nodes``
with ``TMPCs`` {tensor degree: [{id, timePerSample, parameterSize, memoryUsageA, memoryUsageB,
syncTimeFw, syncTimeBw}]}, ``edges`` {sourceId, destId, communicationCost} and ``mbsInBatch``. All
sizes are bytes, also those named ``syncTime``.
"""

import json
from pathlib import Path
from typing import Any

from hetflow.schema.errors import FileError, ProblemError
from hetflow.schema.plan import Proof
from hetflow.schema.records import (
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


_BYTES_PER_SECOND = 25.0 * 2**30  # in all of Piper's experiments, whatever the file says


def read_problem(
    path: Path, *, num_devices: int, memory_bytes: int, bytes_per_second: float = _BYTES_PER_SECOND
) -> SteadyProblem:
    """Read one model.

    Args:
        path: A file such as ``bert32a100.json``; its name is the model's.
        num_devices: Number of devices; all are equal.
        memory_bytes: Memory of each device, in bytes.
        bytes_per_second: Bandwidth of every link.

    Raises:
        FileError: The file is missing, is no JSON, or lacks a field.
        ProblemError: A number in it is invalid for a problem.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    layers, edges, num_microbatches = _parsed(text, str(path))
    return SteadyProblem(
        model=path.stem,
        layers=layers,
        edges=edges,
        num_devices=num_devices,
        memory_bytes=memory_bytes,
        bytes_per_second=bytes_per_second,
        num_microbatches=num_microbatches,
    )


def _parsed(text: str, name: str) -> tuple[tuple[SteadyLayer, ...], tuple[SteadyEdge, ...], int]:
    """The layers, the edges and the number of microbatches of a batch.

    Raises:
        FileError: The text is no JSON, or lacks a field; ``name`` is the file's.
    """
    try:
        content = json.loads(text)
        nodes, edges = content["nodes"], content["edges"]
        degrees = sorted(nodes[0]["TMPCs"], key=int)
        number = {node["id"]: place for place, node in enumerate(nodes)}
        return (
            tuple(_layer(node, degrees) for node in nodes),
            tuple(_edge(edge, nodes, number, degrees) for edge in edges),
            content["mbsInBatch"],
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{name}: not JSON: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise FileError(f"{name}: not an input of Piper: {error!r}") from None


def _layer(node: dict[str, Any], degrees: list[str]) -> SteadyLayer:
    return SteadyLayer(
        name=f"{node['name']} {node['id']}",
        degrees=tuple(
            SteadyDegree(
                tensor_parallel_size=int(degree),
                choices=tuple(
                    SteadyChoice(
                        name=way["id"],
                        seconds=way["timePerSample"],
                        weight_bytes=way["parameterSize"],
                        in_flight_bytes=way["memoryUsageA"],
                        fixed_bytes=way["memoryUsageB"],
                    )
                    for way in node["TMPCs"][degree]
                ),
            )
            for degree in degrees
        ),
    )


def _edge(
    edge: dict[str, Any], nodes: list[dict[str, Any]], number: dict[int, int], degrees: list[str]
) -> SteadyEdge:
    source, target = number[edge["sourceId"]], number[edge["destId"]]
    sync = []
    for degree in degrees:
        out = {
            way["syncTimeBw"].get(str(edge["destId"]), 0.0)
            for way in nodes[source]["TMPCs"][degree]
        }
        back = {
            way["syncTimeFw"].get(str(edge["sourceId"]), 0.0)
            for way in nodes[target]["TMPCs"][degree]
        }
        if len(out) > 1 or len(back) > 1:
            raise FileError(
                f"edge {edge['sourceId']} to {edge['destId']}: syncTime differs between the ways "
                "to compute a layer, which is not planned"
            )
        sync.append(
            SteadySync(
                tensor_parallel_size=int(degree), source_bytes=out.pop(), target_bytes=back.pop()
            )
        )
    return SteadyEdge(
        source=source, target=target, sent_bytes=edge["communicationCost"], sync=tuple(sync)
    )
