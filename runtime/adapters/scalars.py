"""What the script's loggers show of a launch: the predicted and measured step, devices' shares."""

import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ...protocol.environment import PLAN
from ...schema import files
from ...schema.plan import Plan
from .training import Training


def with_scalars(values: Mapping[str, Any], training: Training) -> dict[str, Any]:
    """Values that a script logs, with hetflow's beside them.

    Args:
        values: By name, what the script logs.
        training: This worker's training.

    Returns:
        The values, and ``hetflow/predicted_step_seconds``, ``hetflow/measured_step_seconds`` (the
        median so far; none in the first step), and ``hetflow/samples_RANK_TYPE``, which is what
        each device has of a full global batch.
    """
    start = training.place.start
    found: dict[str, Any] = dict(values)
    plan = start.plan or _plan_beside(os.environ.get(PLAN, ""))
    if isinstance(plan, Plan) and plan.kind == "split":
        found["hetflow/predicted_step_seconds"] = plan.predicted.step_seconds
    measured = training.measured_step_seconds
    if measured is not None:
        found["hetflow/measured_step_seconds"] = measured
    for worker in start.config.workers if start.config is not None else ():
        name = re.sub(r"\W+", "_", worker.device_type)
        samples = sum(node.batch_size for node in worker.virtual_nodes)
        found[f"hetflow/samples_{worker.rank}_{name}"] = samples
    return found


@cache
def _plan_beside(config: str) -> Any:
    """The plan that the launcher keeps beside a launch config; None where this host has none."""
    path = Path(config).with_name("plan.json") if config else Path()
    return files.read_any(path) if path.is_file() else None
