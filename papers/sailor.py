"""Read the inputs of Sailor's planner (SOSP'25) as a problem of three dimensions.

A folder holds four files: ``profiles_tmp.json`` ({model}/{GPU}/{microbatch}/{degree}/{layer} ->
forward, backward and update seconds); ``llm_info.json`` ({model}/{degree}/{layer} -> numbers of
parameters and activations); ``configs/basic_cluster_config.json`` ({GPU} -> GPUs per node, bytes
per GPU); ``multizone_bandwidths_het.json`` (polynomials of gigabytes per second over log2 of
megabytes, by zone, GPU and number of GPUs of both ends).
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..schema.errors import FileError
from ..schema.parallel import (
    BoundaryRule,
    CostRule,
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from ..schema.spelling import nearest

_FLOAT_BYTES = 4
_BYTES_PER_WEIGHT_BYTE = 6.0  # 24 bytes a parameter: Adam, master copy, gradient, DeepSpeed's two
_RESERVED_BYTES = 5_060_000_000  # Sailor's memory check adds these for CUDA, NCCL and Megatron
_BUCKET_BYTES = 500_000_000  # DeepSpeed's all-reduce bucket, as Sailor's simulator counts it


def read_problem(
    folder: Path,
    model: str,
    num_devices: Mapping[str, int],
    *,
    global_batch_size: int,
    zone: str = "us-central1-a",
    cost_rule: CostRule = "sailor",
    boundary_rule: BoundaryRule = "scattered",
) -> ParallelProblem:
    """Read one model on one pool.

    Bandwidth between different device types is not read: the tables give the slower end's.

    Args:
        folder: The folder with the four files.
        model: A model such as ``OPT-350``.
        num_devices: Number of devices by type, as the files name the types.
        global_batch_size: Samples per step.
        zone: The zone in which all devices are assumed to be.
        cost_rule: Sailor's own, for a comparison with it, or hetflow's.
        boundary_rule: What is sent across the boundaries of stages.

    Raises:
        FileError: A file is missing, is no JSON, or lacks a field.
        ProblemError: A number in it is invalid for a problem.
    """
    profiles = _entry(folder / "profiles_tmp.json", model)
    info = _entry(folder / "llm_info.json", model)
    cluster = _json(folder / "configs" / "basic_cluster_config.json")
    links = _entry(folder / "multizone_bandwidths_het.json", zone)
    names = sorted(_of(info, "1", "llm_info.json"), key=int)
    pools = []
    for device_type, number in num_devices.items():
        server = _of(cluster, device_type, "basic_cluster_config.json")
        pools.append(
            ParallelPool(
                device_type=device_type,
                num_devices=number,
                devices_per_server=server["gpus_per_node"],
                memory_bytes=server["mem_per_gpu"],
                times=tuple(
                    times if cost_rule == "sailor" else _one_update(times, info, names)
                    for times in _times(_of(profiles, device_type, "profiles_tmp.json"), names)
                ),
                links=_links(
                    _of(links, device_type, "multizone_bandwidths_het.json"),
                    zone,
                    device_type,
                    {1, *(int(degree) for degree in info)},
                ),
            )
        )
    return ParallelProblem(
        model=model,
        global_batch_size=global_batch_size,
        layers=tuple(f"layer{name}" for name in names),
        output_bytes=tuple(_FLOAT_BYTES * info["1"][n]["act_output_floats"] for n in names),
        pools=tuple(pools),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=int(degree),
                weight_bytes=tuple(_FLOAT_BYTES * table[n]["params_floats"] for n in names),
                stashed_bytes=tuple(_FLOAT_BYTES * table[n]["act_mem_floats"] for n in names),
            )
            for degree, table in sorted(info.items(), key=lambda item: int(item[0]))
        ),
        bytes_per_weight_byte=_BYTES_PER_WEIGHT_BYTE,
        reserved_bytes=_RESERVED_BYTES,
        bucket_bytes=_BUCKET_BYTES,
        cost_rule=cost_rule,
        boundary_rule=boundary_rule,
    )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}") from None


def _entry(path: Path, key: str) -> Any:
    return _of(_json(path), key, str(path))


def _of(table: Any, key: str, where: str) -> Any:
    if not isinstance(table, dict):
        raise FileError(f"{where}: must hold an object of {key!r}")
    if key not in table:
        guess = nearest(key, list(table))
        raise FileError(
            f"{where}: holds no {key!r}" + (f"; did you mean {guess!r}?" if guess else "")
        )
    return table[key]


def _times(profile: Any, names: list[str]) -> tuple[ShardTimes, ...]:
    found = []
    for size, degrees in sorted(profile.items(), key=lambda item: int(item[0])):
        for degree, rows in sorted(degrees.items(), key=lambda item: int(item[0])):
            missing = [name for name in names if len(rows.get(name, ())) < 3]
            if missing:
                raise FileError(
                    f"profiles_tmp.json: degree {degree} at microbatch {size} has no forward, "
                    f"backward and update of layer {missing[0]}"
                )
            found.append(
                ShardTimes(
                    tensor_parallel_size=int(degree),
                    microbatch_size=int(size),
                    forward_seconds=tuple(rows[name][0] for name in names),
                    backward_seconds=tuple(rows[name][1] for name in names),
                    update_seconds=tuple(rows[name][2] for name in names),
                )
            )
    return tuple(found)


def _one_update(times: ShardTimes, info: Any, names: list[str]) -> ShardTimes:
    """Divide the update of the whole model over its layers, in proportion to their weights.

    The files state the same value for all layers, even different ones, and Sailor's simulator
    counts it once per stage. So we read it as the time for all layers together.
    """
    floats = [_of(info, "1", "llm_info.json")[name]["params_floats"] for name in names]
    whole = times.update_seconds[0]
    return replace(times, update_seconds=tuple(whole * own / sum(floats) for own in floats))


def _links(table: Any, zone: str, device_type: str, degrees: set[int]) -> tuple[DegreeLink, ...]:
    """The bandwidth curve of each number of GPUs, between two ends of this device type.

    Numbers without a curve take that of the largest number below.
    """
    found, where = [], "multizone_bandwidths_het.json"
    known = sorted(int(number) for number in table)
    for degree in sorted(degrees):
        nearest_below = max((k for k in known if k <= degree), default=known[0])
        own = str(nearest_below)
        ends = _of(_of(_of(table, own, where), zone, where), device_type, where)
        found.append(
            DegreeLink(
                tensor_parallel_size=degree,
                curve=LinkCurve(
                    coefficients=tuple(1e9 * each for each in _of(ends, own, where)[0])
                ),
            )
        )
    return tuple(found)
