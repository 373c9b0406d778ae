"""Plan equal stages of repeating layers by PipeDream-2BW's planner (thesis 3.3)."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.plan import Plan
from ..schema.run import RunRecord
from ..solvers.pipeline.repetitive.sweep import Configuration, CostModel, Estimate, Measured, Row
from .judging import confirm
from .pipeline_problem import pipeline_problem
from .pipelines import with_origin
from .request import Question


def solve_repetitive(question: Question, microbatch_sizes: Sequence[int]) -> Plan:
    """Choose degrees, microbatch size and recomputation for a model with repeating layers.

    Args:
        question: What is asked, with a double-buffered schedule and a pool of one type.
        microbatch_sizes: Profiled sizes to try.

    Raises:
        ProblemError: Profiles, pool and options do not fit together.
        InfeasibleError: No configuration fits the memory.
        BackendError: The plan fails its check, which is a bug.
    """
    from ..solvers.pipeline.repetitive.solve import Repetitive, solve

    asked, profiles, pool = question.asked, question.profiles, question.pool
    free = asked.memory_reserve_bytes
    problems = {
        size: pipeline_problem(
            profiles,
            pool,
            asked.batch_size,
            microbatch_size=size,
            link_bytes_per_second=asked.link_bytes_per_second,
            schedule=asked.schedule,
            recompute=None,
            optimizer=question.optimizer,
            memory_reserve_bytes=free,
        )
        for size in microbatch_sizes
        if asked.batch_size % size == 0
    }
    if not problems:
        raise ProblemError(
            f"no profiled microbatch ({', '.join(map(str, microbatch_sizes))}) divides a global "
            f"batch of {asked.batch_size}",
            hint="use another batch, or profile the layers at other microbatch sizes",
        )
    model = Repetitive(problems)
    chosen: CostModel | None = None
    if asked.cost_model == "closed-form":
        chosen = model.closed_form()
    elif asked.cost_model == "measured":
        chosen = _measured(None if asked.runs is None else Path(asked.runs), profiles[0].model)
    plan, rows = solve(model, chosen)
    confirm(plan, problems[plan.microbatch_size], profiles, pool, memory_reserve_bytes=free)
    origin = {"cost_model": asked.cost_model, "configurations": [_row(row) for row in rows]}
    return with_origin(plan, profiles, pool, question.pool_name, **origin)


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

    if folder is None:
        raise ProblemError(
            f"{option('cost_model', 'measured')} needs runs to learn from",
            hint=f"add {option('runs', 'DIR')}",
        )
    estimates: dict[Configuration, Estimate] = {}
    paths = sorted(folder.rglob("run.json")) if folder.is_dir() else [folder]
    for path in paths:
        record = files.read_any(path)
        if isinstance(record, RunRecord) and record.plan.stage_cost is not None:
            found = _configuration(record, model)
            if found is not None:
                estimates[found[0]] = found[1]
    if not estimates:
        raise ProblemError(
            f"{folder} holds no finished run of {model} under a 2bw plan with equal stages",
            hint="launch some configurations first, or use another cost model",
        )
    return Measured(estimates=estimates)


def _configuration(record: RunRecord, model: str) -> tuple[Configuration, Estimate] | None:
    plan = record.plan
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
