"""Plan a pipeline for ``hetflow solve``, and check the plan."""

import dataclasses
import logging
from collections.abc import Sequence

from ..schema.choices import StageCost
from ..schema.cluster import Cluster
from ..schema.errors import BackendError
from ..schema.layer_trace import LayerTrace
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import Objective, Solved, WorkerCount
from ..schema.plan import Plan
from ..schema.profile import Profile
from ..schema.schedule_traits import DEFAULT_SCHEDULE
from ..solvers.effort import DEFAULT, Effort
from .links import PoolLinks, links_of

_log = logging.getLogger("hetflow")


def solve_pipeline(
    profiles: Sequence[Profile],
    pool: Cluster,
    batch_size: int,
    *,
    pool_name: str,
    microbatch_size: int | None = None,
    link_bytes_per_second: float | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    stage_cost: StageCost = "ring",
    solved: Solved | None = None,
    workers: WorkerCount = "at_most",
    replication: bool = True,
    recompute: bool | None = None,
    num_stages: int | None = None,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
    objective: Objective | None = None,
    num_model_chunks: int | None = None,
    effort: Effort = DEFAULT,
    fastest: bool = False,
) -> Plan:
    """Cut a profiled model into pipeline stages and check the plan.

    Args:
        profiles: One model's profiles, each with layers.
        pool: The devices.
        batch_size: Global batch B, samples per step.
        pool_name: The text by which the user named the pool, for the provenance.
        microbatch_size: Use the layers profiled nearest to this size; None uses the profiles'
            ``layers``.
        link_bytes_per_second: Bandwidth of links that the pool does not state; None takes the
            profiles' measurements.
        schedule: Name of the schedule. This and the following are as in ``PipelineProblem``.
        stage_cost: Name of the stage cost (docs/pipeline.md).
        workers: Whether to use at most or exactly all devices.
        replication: Whether stages may have replicas.
        num_stages: Exact number of stages; None lets the solver choose.
        optimizer: The optimizer that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device to leave free besides what is measured.
        objective: ``step_seconds`` or ``bottleneck``; None takes the first if the schedule has a
            step.
        num_model_chunks: Stages per device, for ``interleaved``; None tries several.
        effort: How much to search, and when to stop.
        fastest: Whether to take the plan with the least predicted time, even if a simpler plan is
            as fast within the accuracy of the measurements.
        solved: None takes ``flat``, or ``nested`` for the stage cost of the published code.
        recompute: Whether stages recompute activations; None lets the solver choose.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together.
        InfeasibleError: No partition fits the devices.
        BackendError: The plan fails its check, which is a bug.
    """
    from ..checks.pipeline import check
    from ..checks.profiled import pipeline_faults
    from ..solvers.pipeline.solve import solve
    from .pipeline_problem import pipeline_problem

    nested = stage_cost == "published" if solved is None else solved == "nested"
    problem = pipeline_problem(
        profiles,
        pool,
        batch_size,
        microbatch_size=microbatch_size,
        link_bytes_per_second=link_bytes_per_second,
        schedule=schedule,
        stage_cost=stage_cost,
        solved="nested" if nested else "flat",
        workers=workers,
        replication=replication,
        recompute=False if nested and recompute is None else recompute,
        num_stages=num_stages,
        optimizer=optimizer,
        objective=objective,
        num_model_chunks=num_model_chunks,
        launchable=not nested,
        memory_reserve_bytes=memory_reserve_bytes,
    )
    plan = solve(problem, effort=effort, fastest=fastest)
    faults = pipeline_faults(problem, profiles, pool, memory_reserve_bytes) + check(plan, problem)
    if faults:
        raise BackendError(f"the solver's own plan fails its check: {'; '.join(faults)}")
    origin = {**(plan.provenance or {}), "pool": pool_name}
    return dataclasses.replace(
        plan,
        trace=trace_for(profiles, pool),
        assumptions=links_between(profiles, pool, link_bytes_per_second).assumed,
        provenance=origin,
    )


def trace_for(profiles: Sequence[Profile], pool: Cluster) -> LayerTrace | None:
    """Return how the layers were traced, which is alike on all device types of the pool.

    If a type was traced in a way that cannot be launched, that trace is returned.
    """
    found = [p.layers.trace for p in profiles if p.device_type in pool.num_devices and p.layers]
    blocked = [trace for trace in found if trace is not None and trace.obstacle is not None]
    return [*blocked, *found][0]


def say_obstacle(trace: LayerTrace | None, num_stages: int) -> None:
    """Warn of a plan whose stages cannot be launched."""
    if num_stages > 1 and trace is not None and trace.obstacle is not None:
        _log.warning(f"the plan cannot be launched: its layers were {trace.obstacle}")


def links_between(
    profiles: Sequence[Profile], pool: Cluster, link_bytes_per_second: float | None
) -> PoolLinks:
    """Return the bandwidths of the pool's links, measured or assumed.

    If a type has several profiles, the first one counts.
    """
    by_type = {profile.device_type: profile for profile in reversed(profiles)}
    chosen = [by_type[name] for name in pool.num_devices]
    return links_of(chosen, pool, link_bytes_per_second)
