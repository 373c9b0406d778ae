"""Partition a graph of layers into replicated stages on unlike devices (thesis 2.4.1).

The text solves level by level for one device type; so does ``solved="nested"``, which stands in
papers/pipedream/, also with the released optimizer's costs. The default is flat. First a stage
takes consecutive devices in the order of the topology and pays for the links that they span; this
finds the configuration 15-1 on four servers of four, which nested levels cannot. Then a stage may
take any devices in any order (anywhere.py). Memory limits and device types are part of the search.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ...schema.errors import TooLittleTimeError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan
from ..effort import DEFAULT, MOST_GIVEN_UP, Effort, OutOfTimeError
from ..methods import METHODS
from .anywhere import blind, exact, has_one_order, relaxed
from .assemble import ORDERED, assemble, explain, fill_seconds
from .at_once import Candidate, at_once
from .bottleneck import TOLERANCE, objective, search_graph, search_line
from .cuts import Cuts, cuts_of, own_order
from .makespan import EXACT, Incumbent, best_step, relaxed_step
from .placements import NoSeatsError, PlacedStage, PlacementSpace, bandwidths_of, build, seat
from .prediction import least_of_one_or_more, least_with_fixed
from .simplest import simplest
from .stage_costs import PlacementSearch, StageCosts, StoppedError
from .uniform import solve as solve_uniform

Method = Literal["auto", "line", "graph"]
_FEW_LIMITS = 8  # tables of ordered placements, once those of all have bounded the step
_LINE_WORK = 200  # entries that a move costs a parametric search over all its limits


def solve(
    problem: PipelineProblem,
    *,
    method: Method = "auto",
    effort: Effort = DEFAULT,
    fastest: bool = False,
    most_given_up: float = MOST_GIVEN_UP,
) -> Plan:
    """Minimise the step, or the slowest stage or boundary in seconds per input.

    Over every partition into cuts of the graph, every number of replicas and every placement on
    devices. Ordered ones (runs in the order of the topology) come first, then any devices in any
    order. These are searched to the end where that is affordable and bounded from below where not.
    The proof says which: ``optimal`` is so over all placements. A graph of more than 2,000 cuts is
    cut in its own order only; the plan then says ``feasible`` and carries a bound. Deterministic,
    unless ``effort`` stops it by a clock. Of plans within a billionth of the best, single stages
    included, the one with the least step time is returned. Where the problem says how far steps may
    be off, the simplest of those that this cannot tell from the best (simplest.py).

    Args:
        problem: Layers, pools, and the choices that govern the search.
        method: ``line`` (parametric search; cuts in one line, at most all workers), ``graph``
            (dynamic program; any), or whichever applies. Both give the same objective.
        effort: How much to search, and which gap is near enough.
        fastest: Take the least plan on paper, however far steps may be off.
        most_given_up: How much slower on paper the simplest may be, relative to the least.

    Returns:
        A plan that ``checks.pipeline.check`` accepts for ``problem``.

    Raises:
        InfeasibleError: No partition fits the memory, or uses exactly what is asked; says which
            stage lacks how many bytes.
        TooLittleTimeError: ``effort`` stopped the search before it had a plan.
    """
    of_passes = partial(_least_of_passes, method=method, effort=effort)

    def least(asked: PipelineProblem) -> Plan:
        return least_of_one_or_more(asked, lambda part: least_with_fixed(part, of_passes, effort))

    if fastest:
        return least(problem)
    return simplest(problem, least, effort=effort, most_given_up=most_given_up)


def _least_of_passes(problem: PipelineProblem, *, method: Method, effort: Effort) -> Plan:
    """The least plan without what a step costs beside its passes, messages and updates."""
    if problem.traits.is_uniform:
        return solve_uniform(problem, effort=effort)
    if problem.solved == "nested":
        return METHODS.get("pipedream-nested")(problem, method=method, effort=effort)
    cuts = cuts_of(problem)
    options = (False, True) if problem.recompute is None else (problem.recompute,)
    links = bandwidths_of(problem)
    tables = [StageCosts(problem, cuts, links, recompute=option) for option in options]
    try:
        space = build(problem, effort)
    # Not even the moves were listed: plans that are known at once are left.
    except OutOfTimeError:
        return _stopped(problem, tables)
    task = _Task(problem, tables, space, method, effort)
    found = [candidate for costs in tables for candidate in task.candidates(costs)]
    # The search ended early; even cuts and single stages may beat what it had.
    if task.was_stopped:
        found += at_once(problem, tables)
    if not found:
        if task.was_stopped:
            return _stopped(problem, tables)
        search = _search(problem, cuts, method)
        fits = partial(search_line, improves=False) if search is search_line else search
        raise explain(problem, tables[-1], space, search, fits)
    return (
        _least_step(task, found)
        if problem.minimises == "step_seconds"
        else _bottleneck(task, found)
    )


def _stopped(problem: PipelineProblem, tables: list[StageCosts]) -> Plan:
    """The best of the plans that are known at once, for a search that was stopped early."""
    found = at_once(problem, tables)
    if not found:
        raise TooLittleTimeError(
            "the search was stopped before it had a plan", hint="give it more time"
        )
    name = "stopped before a search began; the best of even cuts and single stages"
    if problem.minimises != "step_seconds":
        best = _choose(found)
        bound = min(_spread_bound(tables), best.seconds)
        return assemble(problem, best.costs, best.seats, best.seconds, bound, name)
    known = Incumbent()
    for candidate in found:
        known.offer_seated(problem, candidate.costs, candidate.seats)
    assert known.seats is not None
    assert known.costs is not None
    bound = min(relaxed_step(problem, tables), known.seconds)
    return assemble(problem, known.costs, known.seats, known.seconds, bound, name)


@dataclass
class _Task:
    """One problem with its tables, and the results of searches over them."""

    problem: PipelineProblem
    tables: list[StageCosts]
    space: PlacementSpace
    method: Method
    effort: Effort
    was_stopped: bool = False

    def candidates(self, costs: StageCosts) -> list[Candidate]:
        """Single stages, and the least bottleneck of ordered placements."""
        found = _single_stages(self.problem, costs, self.space)
        search = _search(self.problem, costs.cuts, self.method)
        below = np.inf
        if search is search_graph:
            # A limit makes a graph's search affordable: what is known to be possible.
            below = self._first_guess(costs, found)
        placed = self.ask(search, costs, self.space, below)
        # The limit was a guess that memory refused: once more without.
        if placed is None and np.isfinite(below) and not self.was_stopped and not found:
            placed = self.ask(search, costs, self.space, np.inf)
        found += [placed] if placed is not None else []
        return [Candidate(costs, seat(self.problem, self.space, entry)) for entry in found]

    def _first_guess(self, costs: StageCosts, found: list[list[PlacedStage]]) -> float:
        """Seconds that a placement attains: a single stage, or cuts in the layers' own order."""
        known = [objective(costs, placed) for placed in found]
        line = own_order(self.problem, costs.cuts)
        if line is not None and self._is_simple:
            table = StageCosts(self.problem, line, self.space.bandwidths, recompute=costs.recompute)
            placed = self.ask(search_line, table, self.space, np.inf)
            if placed is not None:
                number = {inside: cut for cut, inside in enumerate(costs.cuts.layer_sets)}
                at = [number[inside] for inside in line.layer_sets]
                found.append([(at[first], at[last], move) for first, last, move in placed])
                known.append(objective(costs, found[-1]))
        # The placement that attains the limit must stay within it.
        return min(known, default=np.inf) * (1 + TOLERANCE)

    @property
    def _is_simple(self) -> bool:
        return self.problem.workers == "at_most" and self.problem.num_stages is None

    def ask(
        self, search: PlacementSearch, costs: StageCosts, space: PlacementSpace, below: float
    ) -> list[PlacedStage] | None:
        """A search's answer, or its best so far when the effort's limit is reached."""
        try:
            return search(self.problem, costs, space, below=below, effort=self.effort)
        except OutOfTimeError as stopped:
            self.was_stopped = True
            return stopped.placed if isinstance(stopped, StoppedError) else None


def _bottleneck(task: _Task, found: list[Candidate]) -> Plan:
    """The least bottleneck of ordered placements, then of all."""
    problem, cuts = task.problem, task.tables[0].cuts
    ordered = _choose(found)
    # No partition beats all compute at its best rate, spread over all devices.
    kinds, _ = task.space.moves.numbered("pool", "num_replicas", "span")
    spread = _spread(task.tables, kinds)
    is_closed = cuts.complete and not task.was_stopped
    best, bound = ordered, ordered.seconds
    if not has_one_order(problem):
        try:
            best, bound = _anywhere(task, ordered)
        except OutOfTimeError:
            task.was_stopped = True
    # A search that was closed bounds by itself; work spread over all devices bounds in any case.
    bound = min(max(bound, spread) if is_closed else spread, best.seconds)
    name = _name(problem, cuts)
    is_gap = bound < best.seconds * (1 - EXACT)
    if is_gap and is_closed and best is ordered:
        name += ORDERED
    return assemble(problem, best.costs, best.seats, best.seconds, bound, name)


def _anywhere(task: _Task, ordered: Candidate) -> tuple[Candidate, float]:
    """A placement in any order that beats the ordered one, and a bound of all."""
    # A relaxed search bounds them; where its answer fits the components it is the optimum. Else
    # the exact space is searched, where it is small enough.
    problem, effort, best, bounds = task.problem, task.effort, ordered, []
    search = _search(problem, task.tables[0].cuts, task.method)
    # What a move costs either search: limits in one line, pairs of cuts in a graph.
    per_move = float(_LINE_WORK)
    if search is not search_line:
        per_move = max(per_move, task.tables[0].cuts.size ** 2 / 10)
    most_moves = effort.anywhere_work / per_move
    counted = relaxed(problem, most_moves, effort=effort) or blind(problem, effort)
    for costs in task.tables:
        # Only placements that are faster by more than rounding.
        known = best.seconds * (1 - TOLERANCE)
        bound = best.seconds
        placed = task.ask(search, costs, counted, known)
        if task.was_stopped:
            return best, 0.0
        if placed is not None:
            bound = objective(costs, placed)
            # A relaxed placement that has seats costs what it says: it is the optimum.
            try:
                other = Candidate(costs, seat(problem, counted, placed))
            except NoSeatsError:
                if counted.kind == "blind":
                    # Blind placements have no seats to look for: only the bound counts.
                    bounds.append(bound)
                    continue
                other, bound = _exactly(task, search, costs, best, bound, most_moves)
            best = other if other.seconds < best.seconds else best
        bounds.append(bound)
    return best, min(bounds)


def _exactly(
    task: _Task,
    search: PlacementSearch,
    costs: StageCosts,
    best: Candidate,
    bound: float,
    most_moves: float,
) -> tuple[Candidate, float]:
    """The best placement where what every component holds is counted, and what is proved."""
    space = exact(task.problem, most_moves, task.effort)
    if space is None:
        return best, bound
    placed = task.ask(search, costs, space, best.seconds * (1 - TOLERANCE))
    if task.was_stopped:
        return best, bound
    # Nothing faster in the exact space, so the best known is proved.
    if placed is None:
        return best, best.seconds
    other = Candidate(costs, seat(task.problem, space, placed))
    return other, other.seconds


def _least_step(task: _Task, found: list[Candidate]) -> Plan:
    """The least step, of placements in any order where the search closes, else of ordered ones."""
    problem, tables, cuts = task.problem, task.tables, task.tables[0].cuts
    search, best = _search(problem, cuts, "auto"), Incumbent()
    for candidate in found:
        best.offer_seated(problem, candidate.costs, candidate.seats)
    try:
        bound, claim = _step_bound(task, best, search)
    except OutOfTimeError:
        bound, claim = relaxed_step(problem, tables), ""
    if not cuts.complete:
        bound = min(bound, relaxed_step(problem, tables))
    assert best.seats is not None
    assert best.costs is not None
    suffix = "" if cuts.complete else "; cuts in the layers' own order only"
    name = f"least step over {cuts.size} cuts, flat, ring prices{suffix}{claim}"
    bound = min(bound, best.seconds)
    return assemble(problem, best.costs, best.seats, best.seconds, bound, name)


def _step_bound(task: _Task, best: Incumbent, search: PlacementSearch) -> tuple[float, str]:
    """Look for better plans; a step that no plan beats, and what else is proved."""
    problem, tables, effort, cuts = task.problem, task.tables, task.effort, task.tables[0].cuts
    claim, counted = "", task.space
    if not has_one_order(problem):
        # As in ``_anywhere``, where tables are filled for some tens of caps.
        per_move = cuts.size if tables[0].is_line else cuts.size**2 / 10
        most_moves = effort.relaxed_work / per_move / 10
        counted = relaxed(problem, most_moves, effort=effort) or blind(problem, effort)
    bound = best_step(problem, tables, counted, best, search, effort)
    is_open = not effort.accepts(best.seconds, bound)
    if is_open and not has_one_order(problem):
        before = best.seconds
        # The bound of all placements is still open: good plans are looked for among ordered ones,
        # in fewer tables.
        fewer = replace(effort, most_limits=_FEW_LIMITS)
        ordered = best_step(problem, tables, task.space, best, search, fewer)
        is_least = best.seconds <= before and ordered >= best.seconds * (1 - EXACT)
        if is_least and cuts.complete and best.seats is not None and best.seats.are_runs():
            claim = ORDERED
        bound = max(bound, relaxed_step(problem, tables))
    return bound, claim


def _search(problem: PipelineProblem, cuts: Cuts, method: Method) -> PlacementSearch:
    if method == "auto":
        simple = problem.workers == "at_most" and problem.num_stages is None
        is_line = cuts.before is None and cuts.copied_bytes is None
        method = "line" if is_line and simple else "graph"
    return search_line if method == "line" else search_graph


def _single_stages(
    problem: PipelineProblem, costs: StageCosts, space: PlacementSpace
) -> list[list[PlacedStage]]:
    """Pure data parallelism, on any number of devices."""
    if problem.num_stages not in (None, 1):
        return []
    found = []
    moves = space.moves
    for number in np.flatnonzero((moves.source == 0) & (moves.first == 0)).tolist():
        move = moves[number]
        if problem.workers == "exactly" and move.num_replicas != problem.num_devices:
            continue
        if costs.lack_bytes(0, costs.cuts.size - 1, move, move.num_replicas) <= 0:
            found.append([(0, costs.cuts.size - 1, move)])
    return found


def _choose(found: list[Candidate]) -> Candidate:
    least = min(candidate.seconds for candidate in found)
    # Within a billionth: the least time to fill the pipeline, then the fewest stages.
    ties = [c for c in found if c.seconds <= least * (1 + 1e-9)]
    return min(ties, key=lambda c: (fill_seconds(c.costs, c.seats.placed), len(c.seats.placed)))


def _spread_bound(tables: list[StageCosts]) -> float:
    """A bound before the moves are listed, over every number of replicas on the fastest links."""
    pools = enumerate(tables[0].problem.pools)
    kinds = [(at, m, 0) for at, pool in pools for m in range(1, pool.num_devices + 1)]
    return _spread(tables, kinds)


def _spread(tables: list[StageCosts], kinds: Sequence[tuple[int, ...]]) -> float:
    bounds = []
    for costs in tables:
        # The best rate of any number of replicas, as if it had all the work.
        rate = min(m * costs.slopes(pool, m, span).per_compute for pool, m, span in kinds)
        pools = range(len(costs.problem.pools))
        times = zip(*(_layer_seconds(costs, pool) for pool in pools), strict=True)
        work = sum(min(entry) for entry in times) + float(costs.own_seconds.min())
        bounds.append(rate * work / costs.problem.num_devices)
    return float(min(bounds)) * (1 - TOLERANCE)


def _layer_seconds(costs: StageCosts, pool: int) -> list[float]:
    times = costs.problem.pools[pool]
    passes = 2 if costs.recompute else 1
    return [
        passes * forward + backward
        for forward, backward in zip(times.forward_seconds, times.backward_seconds, strict=True)
    ]


def _name(problem: PipelineProblem, cuts: Cuts) -> str:
    search = _search(problem, cuts, "auto")
    kind = "parametric search" if search is search_line else "dynamic program"
    suffix = "" if cuts.complete else "; cuts in the layers' own order only"
    return f"{kind} over {cuts.size} cuts, flat, {problem.stage_cost} prices{suffix}"
