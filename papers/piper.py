"""Piper (NeurIPS'21): the inputs of its planner as layers of a profile.

A file holds ``nodes`` with ``TMPCs`` {tensor degree: [{id, timePerSample, parameterSize,
memoryUsageA, memoryUsageB, syncTimeFw, syncTimeBw}]}, ``edges`` {sourceId, destId,
communicationCost} and ``mbsInBatch``. All sizes are bytes, also those named ``syncTime``.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from ..formats.importers.registry import layer_importer
from ..schema.errors import FileError
from ..schema.profile import LayerGraph, LayerNode, TensorLayers

_Told = TypeVar("_Told")


def read_tensor_layers(text: str, *, microbatch_size: int, name: str) -> tuple[TensorLayers, ...]:
    """Read the layers of groups of 2 and more devices; see ``read_layers``."""

    def layers(content: Any) -> tuple[TensorLayers, ...]:
        return tuple(
            TensorLayers(
                tensor_parallel_size=int(degree), layers=_graph(content, degree, microbatch_size)
            )
            for degree in sorted(content["nodes"][0]["TMPCs"], key=int)
            if int(degree) > 1
        )

    return _read(text, name, layers)


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

    def layers(content: Any) -> LayerGraph:
        if "1" not in content["nodes"][0]["TMPCs"]:
            raise FileError(f"{name}: no TMPCs of degree 1, from which a profile is made")
        return _graph(content, "1", microbatch_size)

    return _read(text, name, layers)


def _read(text: str, name: str, layers: Callable[[Any], _Told]) -> _Told:
    try:
        return layers(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise FileError(f"{name}: not JSON: {error}") from None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FileError(f"{name}: not an input of Piper: {error!r}") from None


def _graph(content: Any, degree: str, microbatch_size: int) -> LayerGraph:
    names = {node["id"]: f"{node['name']} {node['id']}" for node in content["nodes"]}
    sent = dict.fromkeys(names, 0.0)
    for edge in content["edges"]:
        source = edge["sourceId"]
        sent[source] = max(sent[source], edge["communicationCost"])
    return LayerGraph(
        microbatch_size=microbatch_size,
        nodes=tuple(
            _node(names[node["id"]], node["name"], node["TMPCs"][degree], sent[node["id"]])
            for node in content["nodes"]
        ),
        edges=tuple((names[edge["sourceId"]], names[edge["destId"]]) for edge in content["edges"]),
    )


def _node(name: str, op: str, ways: list[dict[str, Any]], sent_bytes: float) -> LayerNode:
    plain = min(ways, key=lambda way: way["timePerSample"])
    seconds = plain["timePerSample"]
    forward = max(way["timePerSample"] for way in ways) - seconds
    if not 0.0 < forward < seconds:
        forward = seconds / 3
    return LayerNode(
        id=name,
        op=op,
        forward_seconds=forward,
        backward_seconds=seconds - forward,
        activation_bytes=round(sent_bytes),
        weight_bytes=round(plain["parameterSize"]),
        stashed_bytes=round(plain["memoryUsageA"]),
    )
