"""A predicted step as the sum of its terms, as a table and as data."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ...planning.schedules.closed_forms import one_f_one_b_seconds
from ...planning.schedules.terms import StepTerms, step_terms
from ...schema.errors import ProblemError
from ...schema.plan import Plan, ReplicaGroup, Stage
from ...schema.profile import Estimate
from .grid import four_digits, grid, milliseconds

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a step.

    Args:
        name: What takes the time.
        seconds: Total time within one step, in seconds.
        count: How many times it happens in a step.
        note: Details that the name does not give: the size, the devices; may be empty.
    """

    name: str
    seconds: float
    count: int = 1
    note: str = ""

    @property
    def each_seconds(self) -> float:
        """Seconds for one of the ``count`` times."""
        return self.seconds / self.count


@dataclass(frozen=True, slots=True)
class Explanation:
    """A predicted step and its terms, which add up to it.

    Args:
        title: The plan that is explained.
        step_seconds: The predicted step, in seconds.
        terms: In the order of the step, or in an order that helps the reader.
        remarks: What the numbers leave out, assume, or did not measure: one sentence each.
        low_seconds: Shortest step that the measurements allow; None where that is unknown.
        high_seconds: Longest step that they allow; None where that is unknown.
        is_estimated: Whether a device type in use was estimated, not measured.

    Raises:
        ProblemError: The terms do not add up to the step.
    """

    title: str
    step_seconds: float
    terms: tuple[Term, ...]
    remarks: tuple[str, ...] = ()
    low_seconds: float | None = None
    high_seconds: float | None = None
    is_estimated: bool = False

    def __post_init__(self) -> None:
        total = sum(term.seconds for term in self.terms)
        if abs(total - self.step_seconds) > ROUNDING * max(total, self.step_seconds):
            raise ProblemError(
                f"{self.title}: the terms add up to {total} s, predicted is a step of "
                f"{self.step_seconds} s",
                hint="`hetflow check` says what is wrong with the plan; solve it again",
            )


def explain(plan: Plan) -> Explanation:
    """Explain a plan's predicted step.

    Parts of a pipeline run at the same time. So there a term is the time by which the step would be
    shorter without it (planning/schedules/terms.py). What the plan does not separate stays in one
    term.

    Raises:
        ProblemError: The plan's terms do not add up to its step.
    """
    predicted = plan.predicted
    if not plan.layers:
        title, terms = f", {_devices(plan.num_devices)}", _whole_model_terms(plan)
        remarks = _whole_model_remarks(plan)
    else:
        title = f" = {plan.num_microbatches} microbatches of {plan.microbatch_size}; "
        title += f"{plan.config}, {plan.schedule}"
        if plan.stage_cost is None:
            terms, remarks = _group_terms(plan), iter(())
        else:
            terms, remarks = _chain_terms(plan), _chain_remarks(plan)
    return Explanation(
        title=f"{plan.model}, global batch {plan.global_batch_size}{title}",
        step_seconds=predicted.step_seconds,
        terms=tuple(terms),
        remarks=(
            *map(str, (*plan.estimates, *plan.reserves, *plan.sync_bounds, *plan.assumptions)),
            *remarks,
        ),
        low_seconds=predicted.step_seconds_low,
        high_seconds=predicted.step_seconds_high,
        is_estimated=bool(plan.estimates),
    )


def _whole_model_terms(plan: Plan) -> Iterator[Term]:
    predicted = plan.predicted
    if predicted.compute_seconds is None:
        yield Term("whole step", predicted.step_seconds, note="its parts are not in the plan")
        return
    slowest = _slowest(plan)
    count = 1 if slowest is None else slowest.virtual_nodes
    note = "" if slowest is None else f"{slowest.virtual_node_batch_size} samples"
    where = "of the slowest device" if slowest is None else f"on the slowest {slowest.device_type}"
    yield Term(f"passes {where}", predicted.compute_seconds, count, note)
    for name, seconds in (
        ("waiting for samples", predicted.load_seconds),
        ("the runtime's part of a virtual node", predicted.virtual_node_seconds),
    ):
        if seconds is not None:
            yield Term(name, seconds, count)
    for name, seconds, note in (
        ("fixed cost of the step", predicted.fixed_seconds, ""),
        (
            f"synchronisation over {_devices(plan.num_devices)}",
            predicted.sync_seconds,
            _hidden(slowest),
        ),
        ("update", predicted.update_seconds, ""),
    ):
        if seconds is not None:
            yield Term(name, seconds, note=note)


def _hidden(slowest: ReplicaGroup | None) -> str:
    """The batch size of the measurement, where sizes differ in how much of it passes hide."""
    if slowest is None or slowest.exposed_seconds is None:
        return ""
    return f"behind passes of {slowest.virtual_node_batch_size} samples"


def _slowest(plan: Plan) -> ReplicaGroup | None:
    """The group whose passes the step counts; None where a group does not give their time."""
    timed = [group for group in plan.groups if group.pass_seconds is not None]
    if len(timed) < len(plan.groups):
        return None
    told = plan.predicted
    parts = (told.compute_seconds, told.load_seconds, told.virtual_node_seconds)
    counted = sum(seconds or 0.0 for seconds in parts)
    return min(
        timed,
        key=lambda group: abs(group.virtual_nodes * (group.pass_seconds or 0.0) - counted),
    )


def _whole_model_remarks(plan: Plan) -> Iterator[str]:
    predicted = plan.predicted
    if predicted.compute_seconds is None:
        return
    if predicted.load_seconds is None:
        yield "waiting for samples was not measured apart: where there is any, passes hold it"
    if predicted.virtual_node_seconds is None:
        yield "the runtime's part of a virtual node was not measured apart from its pass"
    if predicted.fixed_seconds is None:
        yield "the fixed cost of a step was not measured: it counts as nothing"
    if plan.num_devices > 1 and not predicted.sync_seconds:
        yield "synchronisation was not measured: it counts as nothing"
    yield from _ratio_remarks(plan)
    estimated = {estimate.device_type for estimate in plan.estimates}
    alone = {group.device_type for group in plan.groups if not group.measured_busy} - estimated
    if plan.num_devices > 1 and alone:
        yield (
            f"{', '.join(sorted(alone))}: measured alone, so what devices of one host take from "
            "each other is not in the passes"
        )


def _ratio_remarks(plan: Plan) -> Iterator[str]:
    """How much the shares of estimated types may cost."""
    # Where a type with the share w of the batch is r slower, the step takes 1 + r times as long.
    # The best split's takes 1 / (1 - w + w / (1 + r)) times as long, so r (1 - w) is lost.
    samples = Counter[str]()
    for group in plan.groups:
        samples[group.device_type] += group.num_devices * group.device_batch_size
    if len(samples) < 2 or not plan.estimates:
        return
    are_all = len(plan.estimates) == len(samples)  # else a time stands beside a measured one

    def lost(estimate: Estimate) -> float:
        return error(estimate) * (1 - samples[estimate.device_type] / samples.total())

    def error(estimate: Estimate) -> float:
        return (estimate.ratio_error if are_all else None) or estimate.step_error

    worst = max(plan.estimates, key=lost)
    yield (
        f"the shares of {', '.join(samples)} stand on estimates: if {worst.device_type} is "
        f"{error(worst):.0%} slower beside the others, which one in ten exceeds, a step is "
        f"{lost(worst):.0%} longer than with the best shares"
    )


def _devices(number: int) -> str:
    return f"{number} device{'' if number == 1 else 's'}"


def _chain_terms(plan: Plan) -> Iterator[Term]:
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


def _chain_remarks(plan: Plan) -> Iterator[str]:
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


def _group_terms(plan: Plan) -> Iterator[Term]:
    found = group_terms(plan.num_rounds, plan.stages, plan.num_model_chunks)
    if found is None:
        yield Term("whole step", plan.predicted.step_seconds, note="its parts are not in the plan")
        return
    for name, seconds in found.items():
        yield Term(name, seconds, plan.num_rounds if name == "passes" else 1)


def group_terms(
    num_microbatches: int, stages: Sequence[Stage], num_model_chunks: int = 1
) -> dict[str, float] | None:
    """The terms of a step of tensor-parallel groups, in seconds (docs/parallel.md).

    ``passes`` are of all microbatches in the slowest stage. ``messages`` are what they add to the
    step beside passes: of interleaved stages, those of one microbatch. ``other stages`` are of one
    microbatch in each of the others, before and after (the bubble of thesis 4.2.2).

    Args:
        num_microbatches: Microbatches per pipeline (m).
        stages: The stages, with their seconds.
        num_model_chunks: Stages per device (v); above 1, all count as slow as the slowest.

    Returns:
        The terms; None where a stage does not give its seconds.
    """
    passes = [stage.compute_seconds for stage in stages]
    waited = [stage.gather_seconds or 0.0 for stage in stages]
    messages = [stage.transfer_seconds for stage in stages]
    updates = [stage.update_seconds for stage in stages]
    reductions = [stage.reduce_seconds for stage in stages]
    if None in (*passes, *messages, *updates, *reductions):
        return None
    own, sent = [each or 0.0 for each in passes], [each or 0.0 for each in messages]
    positions, shown = len(stages) // num_model_chunks, num_microbatches * num_model_chunks
    links: list[float] = []  # a stage's messages are those of the link before it, and behind
    for each in sent[:-1]:
        links.append(max(0.0, each - sum(links[-1:])))
    longest = map(max, [0.0, *links], [*links, 0.0])
    beyond = [max(t - c / 3, 0.0) for t, c in zip(longest, own, strict=True)]
    both = [each + more for each, more in zip(own, beyond, strict=True)]
    slowest, gathers = both.index(max(both)) if num_model_chunks > 1 else own.index(max(own)), 0.0
    waits = sum(sent) + (shown + positions - 1) * beyond[slowest]
    others = (positions - 1) * own[slowest]
    if num_model_chunks == 1:
        bare = one_f_one_b_seconds(own, [0.0] * len(links), num_microbatches)
        both = [each + more for each, more in zip(own, waited, strict=True)]
        with_gathers = one_f_one_b_seconds(both, [0.0] * len(links), num_microbatches)
        waits = one_f_one_b_seconds(both, links, num_microbatches) - with_gathers
        others, gathers = sum(own) - own[slowest], with_gathers - bare
    return {
        "passes": shown * own[slowest],
        **({"gathers of weights": gathers} if any(waited) else {}),
        "messages": waits,
        "other stages": others,
        "update": _most_of_a_device(updates, positions),
        "all reduce": _most_of_a_device(reductions, positions),
    }


def _most_of_a_device(seconds: Sequence[float | None], num_positions: int) -> float:
    """The sum over the stages of a position, of the position where it is largest."""
    return max(
        sum(each or 0.0 for each in seconds[position::num_positions])
        for position in range(num_positions)
    )


def explanation_table(explanation: Explanation) -> str:
    """The terms in milliseconds, their sum, and the remarks, as a table."""
    step = explanation.step_seconds
    rows: list[Sequence[object]] = [
        (
            f"{term.name} ({term.note})" if term.note else term.name,
            term.count,
            milliseconds(term.each_seconds),
            milliseconds(term.seconds),
            _share(term.seconds, step),
        )
        for term in explanation.terms
    ]
    rows.append(("step", "", "", milliseconds(step), _share(step, step)))
    lines = [explanation.title, grid(("term", "times", "each", "together", "share"), rows)]
    return "\n".join([*lines, _interval(explanation), *explanation.remarks])


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain data: seconds, not rounded."""
    return {
        "title": explanation.title,
        "step_seconds": explanation.step_seconds,
        "step_seconds_low": explanation.low_seconds,
        "step_seconds_high": explanation.high_seconds,
        "estimated": explanation.is_estimated,
        "terms": [
            {
                "name": term.name,
                "note": term.note,
                "count": term.count,
                "each_seconds": term.each_seconds,
                "seconds": term.seconds,
                "share": term.seconds / explanation.step_seconds,
            }
            for term in explanation.terms
        ],
        "remarks": list(explanation.remarks),
    }


def _share(seconds: float, step: float) -> str:
    return f"{100 * seconds / step:.1f} %"


def _interval(explanation: Explanation) -> str:
    low, high = explanation.low_seconds, explanation.high_seconds
    if low is None or high is None:
        return "how far off this may be is unknown: the profile does not tell its spread"
    known = "estimates" if explanation.is_estimated else "measurements"
    return f"the {known} allow {milliseconds(low)} to {milliseconds(high)}"
