"""Sailor's 15 measured runs of OPT-350M on GH200, by estimated layers in four shards.

Each stage's layers are cut over the four GPUs of a node (hetflow itself trains no such shards).
Gradient synchronisation between nodes is taken as measured: nothing is known of that network.
"""

import json
from dataclasses import replace
from math import ceil
from pathlib import Path

from torch._subclasses.fake_tensor import FakeTensorMode

from hetflow.planning.costs.roofline import Efficiency, seconds_of

from .measured import OPT, SPECS
from .megatron import block_counts, head_counts

_SHARDS = 4
_SPEC = SPECS["GH-96"]


def gh200_errors(folder: Path, efficiency: Efficiency) -> dict[str, list[float]]:
    """Relative errors of the seconds of a step, by number of nodes."""
    runs = json.loads((folder / "sailor" / "measured_runs_gh200_opt350.json").read_text())
    errors: dict[str, list[float]] = {}
    for run in runs:
        seconds = _step_seconds(run, efficiency)
        errors.setdefault(f"{run['file'].split('/')[0]}", []).append(seconds / run["real"] - 1)
    return errors


def _step_seconds(run: dict, efficiency: Efficiency) -> float:
    """As Sailor's judge adds up: (n - 1) of the slowest stage, one of each, update, exchange."""
    stages = [_stage_seconds(layers, run["mbs"], efficiency) for layers in _stages(run)]
    replicas = run["pipeline_list"][0]["dp"][0]
    passes = ceil(run["gbs"] / (run["mbs"] * replicas))
    return (passes - 1) * max(stages) + sum(stages) + run["red_grads"]


def _stages(run: dict) -> list[list[int]]:
    return run["pipeline_list"][0]["layers_per_stage"]


def _stage_seconds(layers: list[int], batch: int, efficiency: Efficiency) -> float:
    shape = replace(OPT, shards=_SHARDS)
    with FakeTensorMode():
        block, head = block_counts(shape, batch), head_counts(shape, batch)

    def seconds(operators: tuple) -> float:
        return seconds_of(operators, _SPEC, efficiency, "tf32")

    sent = 2 * (_SHARDS - 1) / _SHARDS * 4 * batch * shape.sequence * shape.hidden
    reduce = sent / (_SPEC.link_bytes_per_second * efficiency.link)
    # Forward, forward again, backward; two all-reduces in each.
    blocks = sum(1 <= layer <= 24 for layer in layers)
    total = blocks * (2 * seconds(block[0]) + seconds(block[1]) + 6 * reduce)
    if 25 in layers:
        total += seconds(head[0]) + seconds(head[1]) + reduce
    return total
