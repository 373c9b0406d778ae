"""A job's throughputs on the cluster's device types, and the plan that it runs under."""

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ..planning.inputs import profiles_of
from ..planning.request import PipelineOptions, SolveRequest, SplitOptions
from ..planning.solve import solve
from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError
from ..schema.files import Plan
from ..schema.jobs import Job, ModelThroughput
from ..schema.profile import Profile
from .submission import Submission


def plan_on(asked: Submission, device_type: str, number: int) -> Plan:
    """The plan of a job on so many devices of a type, by its profiles as they are at first.

    Raises:
        HetflowError: There is none, or the profiles are gone.
    """
    return _plan(_kind(asked), device_type, number)


class _Kind(NamedTuple):
    """What a job's plan depends on, besides its devices."""

    profiles: str
    model: str | None
    batch_size: int
    virtual_nodes: int | None
    microbatch_size: int | None


def _kind(asked: Submission) -> _Kind:
    return _Kind(
        asked.profiles, asked.model, asked.batch_size, asked.virtual_nodes, asked.microbatch_size
    )


@lru_cache(maxsize=4096)
def _plan(kind: _Kind, device_type: str, number: int) -> Plan:
    gpus = f"{number}x{device_type}"
    return solve(
        SolveRequest(
            profiles=_profiles(kind.profiles, kind.model),
            pool=Cluster.parse(gpus),
            pool_name=gpus,
            batch_size=kind.batch_size,
            strategy="split" if kind.microbatch_size is None else "pipeline",
            split=SplitOptions(virtual_nodes=kind.virtual_nodes),
            pipeline=PipelineOptions(microbatch_size=kind.microbatch_size),
            fastest=True,
        )
    )


@lru_cache(maxsize=256)
def _profiles(folder: str, model: str | None) -> tuple[Profile, ...]:
    return profiles_of(Path(folder), model)


def kind_of(asked: Submission) -> str:
    """One name for all jobs that reach the same throughputs."""
    what = _kind(asked)
    return "job-" + hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def throughput_of(asked: Submission, num_devices: dict[str, int]) -> ModelThroughput:
    """Steps per second on each type that the job is profiled on and fits.

    Args:
        asked: The job.
        num_devices: The cluster's devices by type.

    Raises:
        InfeasibleError: No type of the cluster can run it.
        HetflowError: The profiles are gone, or have faults.
    """
    profiled = {profile.device_type for profile in _profiles(asked.profiles, asked.model)}
    rates: dict[str, float] = {}
    obstacles = []
    for name, number in num_devices.items():
        if name not in profiled:
            obstacles.append(f"{name}: no profile")
        elif asked.devices > number:
            obstacles.append(f"{name}: {asked.devices} are asked for, the cluster has {number}")
        else:
            try:
                step_seconds = plan_on(asked, name, asked.devices).predicted.step_seconds
                rates[name] = 1.0 / step_seconds
            except InfeasibleError as error:
                obstacles.append(f"{name}: {error.message}")
    if not rates:
        raise InfeasibleError(
            f"no device type of the cluster can run it ({'; '.join(obstacles)})",
            hint=f"profiles are of {', '.join(sorted(profiled))}",
        )
    return ModelThroughput(model=kind_of(asked), scale_factor=asked.devices, steps_per_second=rates)


def as_job(number: int, asked: Submission, submitted: float) -> Job:
    """What a mechanism sees of a job."""
    return Job(
        id=str(number),
        model=kind_of(asked),
        steps=asked.steps,
        scale_factor=asked.devices,
        arrival_seconds=submitted,
        priority_weight=asked.priority_weight,
        slo_seconds=asked.deadline_seconds,
    )
