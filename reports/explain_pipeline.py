"""The terms of a pipeline plan's predicted step."""

from collections.abc import Iterator
from math import ceil

from ..schedules.terms import StepTerms, step_terms
from ..schema.plan import Plan
from .explain import Explanation, Term
from .grid import four_digits, milliseconds


def explain_pipeline(plan: Plan) -> Explanation:
    """Explain the predicted step of a pipeline plan.

    Parts of a pipeline run at the same time. So a term is the time by which the step would be
    shorter without it (schedules/terms.py).

    Args:
        plan: Of any version of the format; what its stages do not separate stays in one term.
    """
    predicted = plan.predicted
    return Explanation(
        title=f"{plan.model}, global batch {plan.global_batch_size} = {plan.num_microbatches} "
        f"microbatches of {plan.microbatch_size}; {plan.config}, {plan.schedule}",
        step_seconds=predicted.step_seconds,
        terms=tuple(_terms(plan)),
        remarks=tuple(_remarks(plan)),
        low_seconds=predicted.step_seconds_low,
        high_seconds=predicted.step_seconds_high,
        is_estimated=bool(plan.estimates),
    )


def _terms(plan: Plan) -> Iterator[Term]:
    found = step_terms(plan)
    if found is None:
        fixed = plan.predicted.fixed_seconds or 0.0
        why = "its stages do not tell it apart"
        yield Term("all stages and boundaries", plan.predicted.step_seconds - fixed, note=why)
        yield Term("fixed cost of the step", fixed)
        return
    yield _layers(plan, found)
    yield Term(
        "waiting for other stages", found.waiting_seconds, note="filling, draining, uneven stages"
    )
    own = max(stage.pass_seconds or 0.0 for stage in plan.stages)
    yield Term("what passes cost beside layers", found.pass_seconds, note=_each(own, "a pass"))
    if len(plan.stages) > 1:
        message = max(stage.message_seconds or 0.0 for stage in plan.stages)
        note = _each(message, "a message")
        yield Term("what messages cost beside bytes", found.message_seconds, note=note)
        yield Term("bytes on links", found.byte_seconds)
    yield Term("all-reduce of replicas", found.reduce_seconds)
    yield Term("update", found.update_seconds)
    yield Term("fixed cost of the step", found.fixed_seconds)


def _layers(plan: Plan, found: StepTerms) -> Term:
    """The busiest device's passes: microbatches, times the seconds of its stages."""
    name = "passes of layers on the busiest device"
    if plan.traits.updates_each_round:  # no whole number of microbatches
        return Term(name, found.layer_seconds)
    busiest = max(
        plan.stages,
        key=lambda s: (s.compute_seconds or 0.0) * ceil(plan.num_microbatches / s.num_replicas),
    )
    return Term(
        name,
        found.layer_seconds,
        ceil(plan.num_microbatches / busiest.num_replicas),
        "a microbatch",
    )


def _each(seconds: float, what: str) -> str:
    return f"{milliseconds(seconds)} {what}" if seconds else "not counted"


def _remarks(plan: Plan) -> Iterator[str]:
    yield from map(str, plan.estimates)
    yield from map(str, plan.reserves)
    yield from plan.assumptions
    if plan.link_bytes_per_second is not None:
        yield (
            "links that the pool does not state were not measured: they were said to carry "
            f"{four_digits(plan.link_bytes_per_second / 1e6)} MB/s"
        )
    if any(stage.pass_seconds is None for stage in plan.stages):
        yield "what passes cost beside their layers was not measured: it counts as nothing"
    if len(plan.stages) > 1 and plan.stages[0].message_seconds is None:
        yield "what a message costs beside its bytes was not measured: it counts as nothing"
    if plan.predicted.fixed_seconds is None:
        yield "the fixed cost of a step was not measured: it counts as nothing"
    replicated = [stage for stage in plan.stages if stage.num_replicas > 1]
    if any(stage.reduce_latency_seconds is None for stage in replicated):
        yield "all-reduces were not measured: they are rings over the links' bytes per second"
    proof = plan.proof
    if proof.tolerance is not None and (proof.gap or 0.0) > 1e-9:
        yield (
            f"plans within {proof.tolerance:.1%} of the least step cannot be told apart: of those "
            "this one has the fewest stages, then the fewest devices"
        )
