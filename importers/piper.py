"""Read the inputs of Piper's planner (NeurIPS'21) as a problem of a steady-state pipeline.

A file holds ``nodes`` with ``TMPCs`` {tensor degree: [{id, timePerSample, parameterSize,
memoryUsageA, memoryUsageB, syncTimeFw, syncTimeBw}]}, ``edges`` {sourceId, destId,
communicationCost} and ``mbsInBatch``. All sizes are bytes, also those named ``syncTime``.
"""

import json
from pathlib import Path
from typing import Any

from ..schema.errors import FileError
from ..schema.steady import (
    SteadyChoice,
    SteadyDegree,
    SteadyEdge,
    SteadyLayer,
    SteadyProblem,
    SteadySync,
)

_BYTES_PER_SECOND = 25.0 * 2**30  # in all of Piper's experiments, whatever the file says


def read_problem(
    path: Path,
    *,
    num_devices: int,
    memory_bytes: int,
    bytes_per_second: float = _BYTES_PER_SECOND,
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
        content = json.loads(path.read_text(encoding="utf-8"))
        nodes, edges = content["nodes"], content["edges"]
        degrees = sorted(nodes[0]["TMPCs"], key=int)
        number = {node["id"]: place for place, node in enumerate(nodes)}
        return SteadyProblem(
            model=path.stem,
            layers=tuple(_layer(node, degrees) for node in nodes),
            edges=tuple(_edge(edge, nodes, number, degrees) for edge in edges),
            num_devices=num_devices,
            memory_bytes=memory_bytes,
            bytes_per_second=bytes_per_second,
            num_microbatches=content["mbsInBatch"],
        )
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None
    except (KeyError, IndexError, TypeError) as error:
        raise FileError(f"{path}: not an input of Piper: {error!r}") from None


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
