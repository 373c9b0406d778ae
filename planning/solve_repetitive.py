"""Plan equal stages of repeating layers by PipeDream-2BW's planner (thesis 3.3)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..schema.choices import CostModelName
from ..schema.cluster import Cluster
from ..schema.errors import BackendError, ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.options import option
from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan
from ..schema.profile import Profile
from ..solvers.pipeline.repetitive.sweep import Configuration, CostModel, Estimate, Measured, Row
from .solve_pipeline import links_between, trace_for


def solve_repetitive(
    profiles: Sequence[Profile],
    pool: Cluster,
    batch_size: int,
    microbatch_sizes: Sequence[int],
    *,
    pool_name: str,
    schedule: str,
    link_bytes_per_second: float | None,
    cost_model: CostModelName,
    runs: Path | None,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
) -> Plan:
    """Choose degrees, microbatch size and recomputation for a model with repeating layers.

    Args:
        profiles: One model's profiles, each with layers.
        pool: The devices, all of one type.
        batch_size: Global batch B, samples per step.
        microbatch_sizes: Profiled sizes to try.
        pool_name: The text by which the user named the pool, for the provenance.
        schedule: Name of a double-buffered schedule.
        link_bytes_per_second: Bandwidth of links that the pool does not state; None takes the
            profiles' measurements.
        cost_model: Which implementation of the thesis's THROUGHPUT(.) and MEMORY(.) to use.
        runs: Folder of run records, for the cost model ``measured``.
        optimizer: The optimizer that will train; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device to leave free besides what is measured.

    Raises:
        ProblemError: Profiles, pool and flags do not fit together.
        InfeasibleError: No configuration fits the memory.
        BackendError: The plan fails its check, which is a bug.
    """
    from ..checks.pipeline import check
    from ..checks.profiled import pipeline_faults
    from ..solvers.pipeline.repetitive.solve import Repetitive, solve
    from .pipeline_problem import pipeline_problem

    problems: dict[int, PipelineProblem] = {}
    for size in microbatch_sizes:
        if batch_size % size == 0:
            problems[size] = pipeline_problem(
                profiles,
                pool,
                batch_size,
                microbatch_size=size,
                link_bytes_per_second=link_bytes_per_second,
                schedule=schedule,
                recompute=None,
                optimizer=optimizer,
                memory_reserve_bytes=memory_reserve_bytes,
            )
    if not problems:
        raise ProblemError(
            f"no profiled microbatch ({', '.join(map(str, microbatch_sizes))}) divides a global "
            f"batch of {batch_size}",
            hint="use another batch, or profile the layers at other microbatch sizes",
        )
    model = Repetitive(problems)
    chosen: CostModel | None = None
    if cost_model == "closed-form":
        chosen = model.closed_form()
    elif cost_model == "measured":
        chosen = _measured(runs, profiles[0].model)
    plan, rows = solve(model, chosen)
    problem = problems[plan.microbatch_size]
    faults = pipeline_faults(problem, profiles, pool, memory_reserve_bytes) + check(plan, problem)
    if faults:
        raise BackendError(f"the planner's own plan fails its check: {'; '.join(faults)}")
    origin = {
        **(plan.provenance or {}),
        "pool": pool_name,
        "cost_model": cost_model,
        "configurations": [_row(row) for row in rows],
    }
    return dataclasses.replace(
        plan,
        trace=trace_for(profiles, pool),
        assumptions=links_between(profiles, pool, link_bytes_per_second).assumed,
        provenance=origin,
    )


def _row(row: Row) -> dict[str, object]:
    return {
        **dataclasses.asdict(row.configuration),
        "accumulation": row.num_microbatches,
        "samples_per_second": row.samples_per_second,
        "memory_bytes": row.memory_bytes,
        "fits": row.fits,
    }


def _measured(folder: Path | None, model: str) -> Measured:
    """Read the configurations that ran under 2BW plans of this model from their run records."""
    from ..schema import files
    from ..schema.run import RunRecord

    if folder is None:
        raise ProblemError(
            f"{option('cost_model', 'measured')} needs runs to learn from",
            hint=f"add {option('runs', 'DIR')}",
        )
    estimates: dict[Configuration, Estimate] = {}
    paths = sorted(folder.rglob("run.json")) if folder.is_dir() else [folder]
    for path in paths:
        record = files.read_any(path)
        if isinstance(record, RunRecord) and record.plan.kind == "pipeline":
            found = _configuration(record, model)
            if found is not None:
                estimates[found[0]] = found[1]
    if not estimates:
        raise ProblemError(
            f"{folder} holds no finished run of {model} under a 2bw plan with equal stages",
            hint="launch some configurations first, or use another cost model",
        )
    return Measured(estimates=estimates)


def _configuration(record: object, model: str) -> tuple[Configuration, Estimate] | None:
    from ..schema.run import RunRecord

    assert isinstance(record, RunRecord)
    plan = record.plan
    assert plan.kind == "pipeline"
    replicas = {stage.num_replicas for stage in plan.stages}
    seconds = record.measured_step_seconds
    is_alike = plan.traits.is_double_buffered and plan.model == model and len(replicas) == 1
    if not is_alike or seconds is None or record.status != "done":
        return None
    size = replicas.pop()
    configuration = Configuration(
        data_parallel_size=size,
        pipeline_parallel_size=len(plan.stages),
        microbatch_size=plan.microbatch_size,
        recompute=plan.recomputes,
    )
    peaks = [device.peak_memory_bytes or 0 for device in record.devices]
    return configuration, Estimate(
        microbatch_seconds=seconds / (plan.num_microbatches // size),
        memory_bytes=float(max(peaks, default=0)),
    )
