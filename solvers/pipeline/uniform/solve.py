"""Plan schedules with equally many replicas of all stages: interleaved, zero-bubble, vertical sync.

Every layout (replicas, places, order of device types) with every number of chunks is looked at,
best bound first. In one, the cuts come from a dynamic program over stages for the least maximum.
For vertical sync that maximum is the objective, so the answer is exact. For schedules that flush
the objective is the step as the timer has it: several such cuts are timed and the best is moved
one layer at a time; where there are few enough cuts in all, each one is timed and the answer
exact. The bound of a layout is the least work of its busiest place, and one microbatch's way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from ....planning.schedules.counting import held_by_stage
from ....planning.schedules.registry import generate
from ....schema.errors import InfeasibleError, ProblemError
from ....schema.operations import Schedule
from ....schema.pipeline import PipelineProblem
from ....schema.plan import Plan
from ...effort import DEFAULT, Effort, OutOfTimeError
from ..assemble import ORDERED, finish
from ..cuts import cuts_of
from ..makespan.solve import relaxed_step
from ..placements import bandwidths_of
from ..stage_costs import StageCosts
from .layouts import PipelineLayout, layouts
from .option import Cut, ScheduledLayout, ShapeOption

FEW_CUTS = 400
"""So many ways to cut, over all layouts, are all timed."""
_TIMED_LAYOUTS, _MOVES = 12, 60
_EVEN_OPERATIONS = 20_000
"""Operations of schedules that are timed where a search was stopped before it had a plan."""
_EXACT = 1e-9


@dataclass
class _Best:
    """The best plan so far."""

    seconds: float = np.inf
    option: ShapeOption | None = None
    cut: Cut = ()

    def offer(self, option: ShapeOption, cut: Cut, seconds: float) -> bool:
        """Keep a plan that is faster; whether it was."""
        if seconds >= self.seconds * (1 - _EXACT):
            return False
        self.seconds, self.option, self.cut = seconds, option, cut
        return True


def solve(problem: PipelineProblem, *, effort: Effort = DEFAULT) -> Plan:
    """Plan a schedule of pipelines side by side; see the module.

    Raises:
        InfeasibleError: No layout has the schedule's shape and fits the memory.
    """
    cuts = cuts_of(problem, every=True)
    bandwidths = bandwidths_of(problem)
    recompute = (False, True) if problem.recompute is None else (problem.recompute,)
    if problem.traits.splits_backward:
        recompute = (False,)
    tables = [StageCosts(problem, cuts, bandwidths, recompute=option) for option in recompute]
    listed = layouts(problem)
    shapes, refusal = _shapes(problem, listed.found, effort)
    has_all = not effort.should_stop()
    options = [ShapeOption(problem, costs, shape) for shape in shapes for costs in tables]
    options.sort(key=lambda option: option.bound)
    best = _Best()
    flushes = problem.traits.flushes
    number = sum(comb(cuts.size - 2, option.shape.num_stages - 1) for option in options)
    if flushes and cuts.before is None and number <= FEW_CUTS:
        is_exact = _time_all(options, cuts.size, best, effort)
    else:
        is_exact = (_approach if flushes else _least_maximum)(options, best, effort)
    if best.option is None:
        raise _infeasible(problem, options, refusal)
    bound, claim = _proved(best.seconds, options, is_exact and cuts.complete, listed.are_all)
    if not has_all:  # layouts that were not looked at may be better
        bound, claim = (min(bound, relaxed_step(problem, tables)) if flushes else 0.0), ""
    step = best.seconds if flushes else best.seconds * problem.num_microbatches
    held = best.option.shape.num_chunks
    chunks = f", {held} chunks a device" if held > 1 else ""
    suffix = "" if cuts.complete else "; cuts in the layers' own order only"
    searched = f"{len(shapes)} layouts over {cuts.size} cuts{chunks}"
    return finish(
        problem,
        best.option.stages(best.cut),
        recompute=best.option.costs.recompute,
        objective=best.seconds,
        bound=bound,
        step=step,
        method=f"{searched}, flat, ring prices{suffix}{claim}",
        chunks=held,
    )


def _proved(
    seconds: float, options: Sequence[ShapeOption], is_exact: bool, are_all: bool
) -> tuple[float, str]:
    """A bound of all placements, and what to say where that of the ordered ones is better."""
    bound = seconds
    if not is_exact:
        bound = min([seconds, *(option.bound for option in options)])
    if are_all:
        return bound, ""
    bound = min([bound, *(option.bound_of_any_order for option in options)])
    return bound, ORDERED if is_exact and bound < seconds * (1 - _EXACT) else ""


def _shapes(
    problem: PipelineProblem, found_layouts: Sequence[PipelineLayout], effort: Effort
) -> tuple[list[ScheduledLayout], ProblemError | None]:
    """The layouts that the schedule can have; and why the last refused one cannot.

    After a time limit no further layouts are looked at, if there is one.
    """
    count = problem.num_microbatches
    endless = not problem.traits.flushes
    chunk_counts = problem.traits.num_model_chunks
    if problem.num_model_chunks is not None:
        chunk_counts = (problem.num_model_chunks,)
    made: dict[tuple[int, int, int], tuple[Schedule, tuple[tuple[int, int], ...]]] = {}
    found: list[ScheduledLayout] = []
    refusal = None
    for layout in found_layouts:
        if found and effort.should_stop():
            break
        for chunks in chunk_counts:
            size = len(layout.places)
            if size * chunks > len(problem.layers):
                continue
            if problem.num_stages not in (None, size * chunks):
                continue
            if size * chunks > (problem.most_stages or size * chunks):
                continue
            if endless and count % layout.num_replicas:
                continue
            key = (size, chunks, layout.num_replicas)
            try:
                if key not in made:
                    schedule = generate(
                        problem.schedule,
                        pipeline_parallel_size=size,
                        num_microbatches=3 * count if endless else count,
                        num_model_chunks=chunks,
                        replicas=[layout.num_replicas] * size,
                    )
                    made[key] = (schedule, held_by_stage(schedule))
            except ProblemError as error:
                refusal = error
                continue
            schedule, held = made[key]
            place = tuple(ranks[0] // layout.num_replicas for ranks in schedule.placement)
            found.append(ScheduledLayout(layout, chunks, schedule, place, held))
    return found, refusal


def _time_all(options: Sequence[ShapeOption], size: int, best: _Best, effort: Effort) -> bool:
    """Time every cut; whether that came to its end."""
    for option in options:
        if effort.should_stop() and best.option is not None:
            return False
        for inner in combinations(range(1, size - 1), option.shape.num_stages - 1):
            cut = (0, *inner, size - 1)
            if option.bound < best.seconds * (1 - _EXACT) and option.fits(cut):
                best.offer(option, cut, option.step(cut))
    return True


def _least_maximum(options: Sequence[ShapeOption], best: _Best, effort: Effort) -> bool:
    """The steady state's bottleneck, exactly; whether that came to its end."""
    try:
        for option in options:
            if option.bound >= best.seconds * (1 - _EXACT):
                break
            found = option.least_maximum(1.0, 1, effort)
            if found is not None:
                best.offer(option, found[1], found[0])
    except OutOfTimeError:
        if best.option is None:
            _offer_even(options, best)
        return False
    return True


def _approach(options: Sequence[ShapeOption], best: _Best, effort: Effort) -> bool:
    """Time the least maxima of every layout, then move the best cuts one layer at a time."""
    begun: list[tuple[float, int, ShapeOption, Cut]] = []
    try:
        for number, option in enumerate(options):
            if effort.accepts(best.seconds, option.bound):
                break
            for cut in _starts(option, effort):
                seconds = option.step(cut)
                begun.append((seconds, number, option, cut))
                best.offer(option, cut, seconds)
    except OutOfTimeError:
        if best.option is None:
            _offer_even(options, best)
    begun.sort(key=lambda entry: entry[:2])
    for seconds, _, option, cut in begun[:_TIMED_LAYOUTS]:
        if effort.should_stop():
            break
        _move(option, cut, seconds, best, effort)
    return False


def _offer_even(options: Sequence[ShapeOption], best: _Best) -> None:
    """Offer an even cut of the first layouts that one fits; for searches stopped before a plan."""
    left = _EVEN_OPERATIONS
    for option in options:
        cut = option.even_cut()
        if cut is not None and option.fits(cut):
            best.offer(option, cut, option.objective(cut))
            left -= option.shape.schedule.num_operations
        if left <= 0:
            break


def _starts(option: ShapeOption, effort: Effort) -> Iterator[Cut]:
    """Least maxima with and without transfers, that fit; a chunk's share of the memory first.

    Raises:
        OutOfTimeError: The effort's limit came first.
    """
    seen = set()
    for transfers in (0.0, 1.0):
        for share in dict.fromkeys((option.shape.num_chunks, 1)):
            found = option.least_maximum(transfers, share, effort)
            if option.shape.num_chunks == 1 and transfers == 0.0:
                option.raise_bound(None if found is None else found[0])
            if found is not None and found[1] not in seen and option.fits(found[1]):
                seen.add(found[1])
                yield found[1]
                break


def _move(option: ShapeOption, cut: Cut, seconds: float, best: _Best, effort: Effort) -> None:
    """Move one boundary by one cut while that is faster; cuts in one line only."""
    if option.costs.cuts.before is not None:
        return
    left, better = _MOVES, True
    while better and left > 0:
        better = False
        for inner in range(1, len(cut) - 1):
            for shift in (-1, 1):
                moved = (*cut[:inner], cut[inner] + shift, *cut[inner + 1 :])
                if not moved[inner - 1] < moved[inner] < moved[inner + 1]:
                    continue
                if effort.should_stop():
                    return
                if not option.fits(moved):
                    continue
                left -= 1
                found = option.step(moved)
                if found < seconds * (1 - _EXACT):
                    cut, seconds, better = moved, found, True
                    best.offer(option, cut, seconds)


def _infeasible(
    problem: PipelineProblem, options: Sequence[ShapeOption], refusal: ProblemError | None
) -> InfeasibleError:
    if options:
        found = [nearest for option in options if (nearest := option.nearest()) is not None]
        nearest = min(found, key=lambda entry: entry[0], default=None)
        said = "" if nearest is None else f": in the nearest one found a device {nearest[1]}"
        return InfeasibleError(
            f"no {problem.schedule} plan fits the memory{said}",
            hint="use a smaller microbatch, more devices, or 1f1b, which admits unlike replicas",
        )
    why = f": {refusal.message}" if refusal else ""
    return InfeasibleError(
        f"{problem.num_devices} devices and {problem.num_microbatches} microbatches admit no "
        f"{problem.schedule} pipeline of {len(problem.layers)} layers{why}",
        hint="change the batch or the number of devices, or use 1f1b",
    )
