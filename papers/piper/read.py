"""Read the inputs of Piper's planner (NeurIPS'21): as its problem, or as layers of a profile.

A file holds ``nodes`` with ``TMPCs`` {tensor degree: [{id, timePerSample, parameterSize,
memoryUsageA, memoryUsageB, syncTimeFw, syncTimeBw}]}, ``edges`` {sourceId, destId,
communicationCost} and ``mbsInBatch``. All sizes are bytes, also those named ``syncTime``.
"""

import json
from pathlib import Path
from typing import Any

from ...formats.importers.registry import layer_importer
from ...schema.errors import FileError
from ...schema.profile import LayerGraph, LayerNode, TensorLayers
from .problem import SteadyChoice, SteadyDegree, SteadyEdge, SteadyLayer, SteadyProblem, SteadySync

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


def read_tensor_layers(text: str, *, microbatch_size: int, name: str) -> tuple[TensorLayers, ...]:
    """Read the layers of groups of 2 and more devices; see ``read_layers``."""
    layers, edges, _ = _parsed(text, name)
    return tuple(
        TensorLayers(
            tensor_parallel_size=degree, layers=_graph(layers, edges, degree, microbatch_size)
        )
        for degree in _degrees(layers)
        if degree > 1
    )


@layer_importer("piper", title="Piper (NeurIPS'21)", tensor_layers=read_tensor_layers)
def read_layers(text: str, *, microbatch_size: int, name: str) -> LayerGraph:
    """Read the layers of single devices, with times in seconds.

    The file has one time for both passes. A layer that can also recompute takes so much longer with
    it as its forward pass; of other layers the forward pass counts as a third. What a layer sends
    is the most bytes of its edges. ``memoryUsageB`` is left out: a plan counts weights, gradients
    and optimizer itself. So are ``syncTimeFw`` and ``syncTimeBw``, the additional bytes that groups
    send where stages are cut.

    Args:
        text: The file's content.
        microbatch_size: Samples of a microbatch, which the file does not say.
        name: The file's path, for errors.

    Raises:
        FileError: The text is no JSON, or lacks a field.
        ProblemError: A number in it is invalid.
    """
    layers, edges, _ = _parsed(text, name)
    if 1 not in _degrees(layers):
        raise FileError(f"{name}: no TMPCs of degree 1, from which a profile is made")
    return _graph(layers, edges, 1, microbatch_size)


def _degrees(layers: tuple[SteadyLayer, ...]) -> list[int]:
    return [degree.tensor_parallel_size for degree in layers[0].degrees]


def _graph(
    layers: tuple[SteadyLayer, ...],
    edges: tuple[SteadyEdge, ...],
    degree: int,
    microbatch_size: int,
) -> LayerGraph:
    sent = [
        max((edge.sent_bytes for edge in edges if edge.source == number), default=0.0)
        for number in range(len(layers))
    ]
    return LayerGraph(
        microbatch_size=microbatch_size,
        nodes=tuple(
            _node(layer, degree, bytes_) for layer, bytes_ in zip(layers, sent, strict=True)
        ),
        edges=tuple((layers[edge.source].name, layers[edge.target].name) for edge in edges),
    )


def _node(layer: SteadyLayer, degree: int, sent_bytes: float) -> LayerNode:
    choices = next(d.choices for d in layer.degrees if d.tensor_parallel_size == degree)
    plain = min(choices, key=lambda choice: choice.seconds)
    again = max(choices, key=lambda choice: choice.seconds)
    forward = again.seconds - plain.seconds
    if not 0.0 < forward < plain.seconds:
        forward = plain.seconds / 3
    return LayerNode(
        id=layer.name,
        op=layer.name.rsplit(" ", 1)[0],
        forward_seconds=forward,
        backward_seconds=plain.seconds - forward,
        activation_bytes=round(sent_bytes),
        weight_bytes=round(plain.weight_bytes),
        stashed_bytes=round(plain.in_flight_bytes),
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
