"""Check a pipeline plan's predicted parts of a step, its interval and its tolerance."""

from collections.abc import Iterator
from math import isclose

from ..schema.pipeline import PipelineProblem
from ..schema.plan import Plan, Prediction
from . import definitions, schedule
from .pipeline_recount import pool_of
from .proofs import proof_faults

TOLERANCE = 1e-6


def prediction_faults(plan: Plan, expected: Plan, problem: PipelineProblem) -> list[str]:
    """List the faults of a plan's predicted parts, interval and tolerance.

    Args:
        plan: The plan to check.
        expected: The same plan with the stages' times and the step recomputed.
        problem: The problem that the plan claims to answer.
    """
    return [
        *_rate_faults(plan, problem),
        *_own_faults(plan, problem),
        *_part_faults(plan.predicted, expected),
        *_interval_faults(plan.predicted, problem),
        *_proof_faults(plan, problem),
    ]


def _rate_faults(plan: Plan, problem: PipelineProblem) -> Iterator[str]:
    got = plan.predicted
    rate = problem.global_batch_size / got.step_seconds if got.step_seconds else 0.0
    if differ(got.samples_per_second, rate):
        yield f"predicted.samples_per_second is {got.samples_per_second}, the step gives {rate}"
    if got.load_seconds is not None:
        yield f"predicted.load_seconds is {got.load_seconds}, pipelines have no such part"


def _own_faults(plan: Plan, problem: PipelineProblem) -> Iterator[str]:
    last = len(plan.stages) - 1
    for index, stage in enumerate(plan.stages):
        pool = pool_of(problem, stage)
        assert pool is not None
        own, _ = definitions.own_seconds(problem, pool, len(plan.stages))
        message = definitions.message_seconds(problem) if index < last else 0.0
        latency = None
        if definitions.counts_overheads(problem) and pool.reduce_bytes_per_second is not None:
            latency = pool.reduce_latency_seconds
        for name, got, want in (
            ("pass_seconds", stage.pass_seconds, own),
            ("message_seconds", stage.message_seconds, message),
            ("reduce_latency_seconds", stage.reduce_latency_seconds, latency),
        ):
            if got is not None and (want is None or differ(got, want)):
                yield f"stage {index}: {name} is {got}, the problem says {want}"


def _part_faults(got: Prediction, expected: Plan) -> Iterator[str]:
    """Yield the parts that differ from those recomputed from the stages' times.

    If the stages' times do not determine the parts, the step must be compute and fixed cost only.
    """
    if all(getattr(got, name) is None for name in schedule.PARTS):
        return  # the plan states no parts
    fixed = expected.predicted.fixed_seconds or 0.0
    step = expected.predicted.step_seconds
    wanted = {name: 0.0 for name in schedule.PARTS}
    wanted |= {"fixed_seconds": fixed, "compute_seconds": step - fixed}
    wanted = schedule.parts_of(expected) or wanted
    for name, want in wanted.items():
        part = getattr(got, name)
        if abs((part or 0.0) - want) > TOLERANCE * step + 1e-15:
            yield f"predicted.{name} is {part}, expected {want}"


def _interval_faults(got: Prediction, problem: PipelineProblem) -> Iterator[str]:
    error = problem.step_error
    wanted: tuple[float | None, float | None] = (None, None)
    if error is not None:
        wanted = (max(0.0, got.step_seconds * (1 - error)), got.step_seconds * (1 + error))
    pairs = zip(("low", "high"), (got.step_seconds_low, got.step_seconds_high), wanted, strict=True)
    for name, found, want in pairs:
        same = found is want
        if found is not None and want is not None:
            same = isclose(found, want, rel_tol=TOLERANCE, abs_tol=1e-15)
        if not same:
            yield f"predicted.step_seconds_{name} is {found}, expected {want}"


def _proof_faults(plan: Plan, problem: PipelineProblem) -> Iterator[str]:
    """Check the proof against itself, and its tolerance against the measurements."""
    proof, error = plan.proof, problem.step_error
    if proof.tolerance is not None and (error is None or proof.tolerance > error):
        yield f"proof.tolerance is {proof.tolerance}, the problem's steps are off by {error}"
        return
    yield from proof_faults(proof, TOLERANCE)


def differ(left: float, right: float) -> bool:
    """Whether two numbers differ by more than 1e-6 of the larger one."""
    return not isclose(left, right, rel_tol=TOLERANCE, abs_tol=1e-15)


__all__ = ["prediction_faults"]
