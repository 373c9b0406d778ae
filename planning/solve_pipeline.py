"""The pipeline side of ``hetflow solve``: files and flags in, one checked plan out."""

import dataclasses
from collections.abc import Sequence

from ..schema.cluster import Cluster
from ..schema.errors import BackendError
from ..schema.layer_trace import LayerTrace
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import (
    Objective,
    PipelinePlan,
    Solved,
    StageCost,
    WorkerCount,
)
from ..schema.profile import Profile
from ..schema.schedule_traits import DEFAULT_SCHEDULE
from ..solvers.effort import DEFAULT, Effort
from ..solvers.pipeline_links import PoolLinks, links_of


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
    objective: Objective | None = None,
    num_model_chunks: int | None = None,
    effort: Effort = DEFAULT,
    fastest: bool = False,
) -> PipelinePlan:
    """Cut a profiled model into stages and check the plan.

    Args:
        profiles: One model's profiles, each with layers.
        pool: The devices.
        batch_size: Global batch B.
        pool_name: How the user named the pool, for the provenance.
        microbatch_size: Take the layers profiled nearest to this size; None the first.
        link_bytes_per_second: Bandwidth of links that the pool does not state.
        schedule: As in ``PipelineProblem``; so are the next ones but ``solved``.
        stage_cost: Named prices.
        workers: At most or exactly all devices.
        replication: Whether stages may have replicas.
        num_stages: Exactly so many stages.
        optimizer: The one that will train; None takes what the profiles say.
        objective: The whole step or the bottleneck; None takes the step where there is one.
        num_model_chunks: Stages on a device of ``interleaved``; None tries several.
        effort: How much to search, and when to stop.
        fastest: The least plan on paper, also where a simpler one cannot be told from it.
        solved: None takes ``flat``, or ``nested`` for the published prices.
        recompute: None lets the solver choose.

    Raises:
        ProblemError: Profiles, pool and flags that do not go together.
        InfeasibleError: No partition fits.
        BackendError: The plan fails its own check.
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
    )
    plan = solve(problem, effort=effort, fastest=fastest)
    faults = pipeline_faults(problem, profiles, pool) + check(plan, problem)
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
    """How to cut the model: as on all device types, but one that cannot be launched stands out."""
    found = [p.layers.trace for p in profiles if p.device_type in pool.num_devices and p.layers]
    blocked = [trace for trace in found if trace is not None and trace.obstacle is not None]
    return [*blocked, *found][0]


def links_between(
    profiles: Sequence[Profile], pool: Cluster, link_bytes_per_second: float | None
) -> PoolLinks:
    """What the links of the pool's devices are taken for; of a type's profiles the first counts."""
    by_type = {profile.device_type: profile for profile in reversed(profiles)}
    chosen = [by_type[name] for name in pool.num_devices]
    return links_of(chosen, pool, link_bytes_per_second)
