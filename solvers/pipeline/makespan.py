"""Minimise the step of a schedule that flushes, as its timer times it.

Four parts. First, a lower bound, sum(a_i) + max(b_i) (step_sums.py), is minimised by bisecting on a
cap for the maximum, as DAPPLE's and Alpa's planners do; for each cap a dynamic program finds the
least sum, and every plan found is timed. Second, the programs run again without the stages that
cannot be in a faster plan. Third, a best-first tree search (``PlanTree``) closes the gap that is
left between the bound and the best step, or reports it. Fourth, where few such tables are
affordable, ``improve`` looks for plans among some of the cuts and runs of devices beforehand.

A node of the tree is the first stages of a plan. A bound of all plans below it adds up its own sum,
the least sum of the other stages, and the larger maximum: its own or the least of the others. The
tables for several caps give these: a plan whose maximum lies between two caps has at least the
least sum under the upper one. Leaves are timed. The search ends when the best open node is no
better than the best plan, which is then optimal, or when its limit of work is reached.

    the best plan known takes 20 s; a node's stages have the sum 5 and the maximum 8
    tables of the rest: cap 8 allows a sum of 9, cap 12 one of 6
    maximum within 8: at least 5 + 9 + 8 = 22; within 12, so above 8: at least 5 + 6 + 8 = 19
    the node stays open at 19; with a plan of 19 s it would be closed

O(moves x cuts) for a cap and cuts in one line; the tree ends at the effort's limit of work.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil
from typing import NamedTuple

import numpy as np

from ...planning.costs.pipeline import overheads
from ...schema.pipeline import PipelineProblem
from ..effort import Effort, OutOfTimeError
from .bottleneck import objective
from .cuts import Cuts, Floats
from .placements import (
    Move,
    Moves,
    NoSeatsError,
    PlacedStage,
    PlacementSpace,
    Seats,
    final_states,
    seat,
)
from .stage_costs import PlacementSearch, Slopes, StageCosts, StoppedError
from .step_sums import Ints, StepModel, Sums, Tables, step_of

EXACT = 1e-9
_CALL = 3000  # entries that looking at a move costs beside its own
_DIVE = 16  # nodes to a dive
_MOST_NODES = 3_000_000  # about a gigabyte


class Incumbent:
    """The fastest plan so far, its costs, and its step."""

    def __init__(self) -> None:
        self.seats: Seats | None = None
        self.costs: StageCosts | None = None
        self.seconds = np.inf
        self._seen: set[tuple[int, bool, tuple[PlacedStage, ...]]] = set()

    @property
    def placed(self) -> list[PlacedStage] | None:
        """The plan's stages."""
        return None if self.seats is None else self.seats.placed

    def offer(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        placed: list[PlacedStage],
    ) -> bool:
        """Seat and time a plan, and keep it if it is faster; whether it was new.

        Raises:
            NoSeatsError: The devices that it counts are nowhere together: it is no plan.
        """
        key = (int(costs.recompute), space.is_ordered, tuple(placed))
        # Remembered even where no devices are found: it would fail again.
        if key in self._seen:
            return False
        self._seen.add(key)
        self.offer_seated(problem, costs, seat(problem, space, placed))
        return True

    def offer_seated(self, problem: PipelineProblem, costs: StageCosts, seats: Seats) -> None:
        """Time a plan whose devices are named, and keep it if it is faster."""
        seconds = step_of(problem, costs, seats.placed)
        # Of steps that are equal but for rounding, the plan of fewer stages stays.
        fewer = self.placed is None or len(seats.placed) < len(self.placed)
        if seconds < self.seconds * (1 - EXACT) or (
            fewer and seconds <= self.seconds * (1 + EXACT)
        ):
            self.seats, self.costs, self.seconds = seats, costs, seconds

    def consider(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        placed: list[PlacedStage],
    ) -> None:
        """Offer a placement that may have no devices."""
        with suppress(NoSeatsError):
            self.offer(problem, costs, space, placed)


class Round(NamedTuple):
    """What a stage of q k + r + 1 microbatches, k of them in flight, adds to the sum.

    It admits microbatch i + k when the gradient of i is back: q times the sum from it on, beside r
    more passes.
    """

    times: int
    before: float
    """The sum of the stages before it, and of the first stage's all-reduce and update."""
    rest: float
    """Seconds of the r passes."""


class Node(NamedTuple):
    """The first stages of a plan; ordered by the bound, then by age."""

    bound: float
    """Seconds that no plan which begins so beats."""
    number: int
    """No two nodes have the same, so a comparison ends here."""
    total: float
    """The sum of the stages so far."""
    ahead: float
    """Their forward part, without the first stage's all-reduce and update."""
    most: float
    """Their maximum: seconds left when the first gradient is back."""
    placed: list[PlacedStage]
    state: int
    """Of the space: the devices left."""
    cut: int
    """Where the next stage begins."""
    link: int
    """The slowest that the boundary before it may be on."""
    rounds: tuple[Round, ...] = ()
    """Of stages that take more microbatches than they admit at once."""


class PlanTree:
    """Plans of one set of tables, by their first stages."""

    def __init__(
        self, problem: PipelineProblem, tables: Tables, sums: Sequence[Sums], best: Incumbent
    ) -> None:
        self.problem, self.tables, self.best = problem, tables, best
        self.space = tables.space
        ordered = sorted(sums, key=lambda entry: -entry.limit)
        self.behind = np.array([entry.behind for entry in ordered])
        self.whole = np.array([entry.whole for entry in ordered])
        # A plan whose maximum is above the next limit down.
        self.above = np.array([*(entry.limit for entry in ordered[1:]), 0.0])
        self.order = count()
        self.entries = self.passes = 0.0  # that the search may still look at, and replay

    def search(self, budget: Effort) -> float:
        """Look for better plans; a step that no plan of these tables can beat."""
        heap: list[Node] = []
        for state in self.tables.final.tolist():
            # By caps, the largest first: a plan whose maximum lies between two of them has at least
            # the least sum under the upper one, and a maximum above the lower one.
            bound = float((self.whole[:, state] + self.above).min())
            if np.isfinite(bound):
                heapq.heappush(heap, Node(bound, next(self.order), 0.0, 0.0, 0.0, [], state, 0, 0))
        self.entries, self.passes, unseated = budget.tree_work, budget.tree_passes, np.inf
        looked = 0
        while heap and self.entries > 0 and self.passes > 0 and len(heap) < _MOST_NODES:
            node = heap[0]
            # The least bound of all open nodes bounds every plan that is left.
            if budget.accepts(self.best.seconds, node.bound):
                break
            if budget.should_stop():
                break
            heapq.heappop(heap)
            if node.state == 0:
                unseated = min(unseated, self._leaf(node))
                if self.space.kind == "blind":
                    # The devices found may lie farther apart than others of the same numbers.
                    unseated = min(unseated, node.bound)
                    break
                continue
            children = self._all_children(node)
            for child in children:
                heapq.heappush(heap, child)
            looked += 1
            # Down the best child of each node there soon is a plan, often a better one.
            while looked % _DIVE == 0 and children and self.space.kind != "blind":
                child = min(children)
                if child.state == 0:
                    self._leaf(child)
                    break
                children = self._all_children(child)
        left = heap[0].bound if heap else np.inf
        return float(min(left, unseated, self.best.seconds))

    def _leaf(self, node: Node) -> float:
        """Time a whole plan; return its bound where it may have devices that were not found."""
        self.passes -= self.problem.num_microbatches * len(node.placed) * 2
        try:
            self.best.offer(self.problem, self.tables.model.costs, self.space, node.placed)
        except NoSeatsError as error:
            return np.inf if error.is_proved else node.bound
        return np.inf

    def _all_children(self, node: Node) -> list[Node]:
        first, last = self.tables.into[node.state], self.tables.into[node.state + 1]
        # What a node costs depends on the moves alone, so the search ends at the same node on
        # every machine.
        self.entries -= (last - first) * (_CALL + self.behind.shape[0] * self.behind.shape[-1])
        return [child for number in range(first, last) for child in self._children(node, number)]

    def _children(self, node: Node, number: int) -> list[Node]:
        """The nodes one stage further, by one of the space's moves."""
        tables, model = self.tables, self.tables.model
        move, kind = tables.space.moves[number], tables.kind_of(number)
        need = max(move.span, move.gap)
        cut, link = node.cut, node.link
        own = tables.options(move, kind, cut, link, np.zeros(model.size), np.inf)
        # [cuts] where the stage may end: by its own part of the sum, infinite where it does not
        # fit.
        # The sum before the stage, the way to it included, and its part on the way back.
        way = float(model.transfer[max(link, move.span), cut]) if cut else 0.0
        before = node.total + way if cut else model.step_end(kind)
        over: Floats = np.zeros(model.size)  # what its reductions take beyond the way back
        if cut:
            # Its all-reduce runs beside the way back to the first stage, so only the rest of it
            # counts.
            over = np.maximum(model.reduce_seconds(kind, cut) - (before - node.ahead - way / 2), 0)
        left = np.maximum(model.left_of(kind, cut, max(link, move.span)) + over, node.most)
        # [limits, cuts]
        totals = self.behind[:, move.source, need, :] + own + node.total
        # [limits, cuts] the sum of a plan below, for each cap of the stages still to be placed.
        # The maximum of a plan below: that of its stages so far, or of one still to be placed,
        # which is above the next cap down.
        least = np.maximum(self.above[:, None], left[None, :])
        # Stages that wait for gradients need the sum from them on, which is known better with each
        # stage placed: they are bounded anew.
        for each in node.rounds:
            least = np.maximum(least, each.times * (totals - each.before) + each.rest)
        admitted = model.round_of(kind, cut)
        if admitted is not None:
            times, rests = admitted
            rests = rests + over
            least = np.maximum(least, times * (totals - before) + rests)
        # The maximum lies under one of the caps, it is not known which: the least over them
        # bounds.
        bounds: Floats = (totals + least).min(axis=0)
        ahead = node.ahead + way / 2 + model.forward_of(kind, cut)
        # Strict, beyond rounding: a plan that is no faster is not looked for.
        found = np.flatnonzero(bounds < self.best.seconds * (1 - EXACT))
        return [
            Node(
                bound=float(bounds[last]),
                number=next(self.order),
                total=node.total + float(own[last]),
                ahead=float(ahead[last]),
                most=float(left[last]),
                placed=[*node.placed, (cut, last, move)],
                state=move.source,
                cut=last,
                link=need,
                rounds=node.rounds
                if admitted is None
                else (
                    *node.rounds,
                    Round(
                        times,
                        float(np.broadcast_to(before, model.size)[last]),
                        float(rests[last]),
                    ),
                ),
            )
            for last in found.tolist()
        ]


# Good plans of problems too large for tables of every cut and every run of devices.
#
# First only some cuts, spread over the model, and runs of a multiple of some number of devices are
# tried; then the cuts near those of the best plan so far, with finer runs, as long as that improves
# the plan. Every plan found is a plan of the whole problem; no bound is proved here.

Sweep = Callable[[Tables, Incumbent], object]
"""Times the plans that one set of tables finds."""
_FEW_CUTS, _NEAREST = 48, 3
_ROUNDS = 4


def improve(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    best: Incumbent,
    sweep: Sweep,
    entries: float,
    effort: Effort,
) -> None:
    """Look for plans better than the best one, by tables of at most so many entries.

    ``entries`` are moves times cuts of one table; ``sweep`` times the plans of tables.

    Raises:
        OutOfTimeError: The effort's limit came first; ``best`` has what was found until then.
    """
    thinned = []
    for step in _steps(problem):
        effort.check()
        thinned.append((step, *_thinned(space, step)))
    # Without replicas whole steps of several devices may leave no run at all.
    kept = [entry for entry in thinned if entry[1]]
    chosen = _spread(costs, entries, kept)
    # Each round looks near the last one's cuts, finer; one that improves nothing would repeat
    # itself.
    for _ in range(_ROUNDS):
        step_seconds = best.seconds
        cuts = _subset(costs.cuts, chosen)
        own = StageCosts(problem, cuts, costs.bandwidths, recompute=costs.recompute)
        some = _finest(kept, len(chosen), entries)
        found = Incumbent()
        # The pessimistic model first: its plans hold where links are slow, and prune the other's.
        for pessimistic in (True, False):
            model = StepModel(problem, own, pessimistic=pessimistic)
            with suppress(OutOfTimeError):  # what was found until then is offered below
                sweep(Tables(model, some, final_states(problem, some), effort), found)
        if found.seats is not None:
            whole = [
                (int(chosen[first]), int(chosen[last]), move)
                for first, last, move in found.seats.placed
            ]
            # Cuts of the subset go back to the numbers of the whole model; devices are the same.
            best.offer_seated(problem, costs, Seats(whole, found.seats.devices))
        effort.check()
        if best.placed is None or best.seconds > step_seconds * (1 - 1e3 * EXACT):
            break
        chosen = _near(costs, best.placed, entries, kept)


def _steps(problem: PipelineProblem) -> Iterator[int]:
    """Runs of any number of devices, of every second, every fourth, ..."""
    step = 1
    while step <= max(pool.num_devices for pool in problem.pools):
        yield step
        step *= 2


def _thinned(space: PlacementSpace, step: int) -> tuple[int, PlacementSpace]:
    """Moves between states that use whole steps of each pool, or all of it; how many."""
    used = np.array([state.used for state in space.states])
    # The last step of a pool may be shorter, so that all of it can be used.
    whole = ((used % step == 0) | (used == used.max(axis=0))).all(axis=1)
    moves = space.moves
    part = np.flatnonzero(whole[moves.source] & whole[moves.target])
    columns = {name: getattr(moves, name)[part] for name in Move._fields}
    return len(part), replace(space, moves=Moves(**columns))


def _finest(
    kept: list[tuple[int, int, PlacementSpace]], num_cuts: int, entries: float
) -> PlacementSpace:
    fitting = (space for _, moves, space in kept if moves * num_cuts <= entries)
    return next(fitting, kept[-1][2])


def _spread(costs: StageCosts, entries: float, kept: list[tuple[int, int, PlacementSpace]]) -> Ints:
    """Cuts about equally far apart in work, each where the least crosses it."""
    size = costs.cuts.size
    few = min(_FEW_CUTS, size)
    moves = next((moves for _, moves, _ in kept if moves * few <= entries), kept[-1][1])
    count = int(np.clip(entries / max(moves, 1), few, size))
    work = costs.compute_seconds.mean(axis=0)
    part = np.searchsorted(np.linspace(0.0, work[-1], count)[1:-1], work, side="right")
    crossing = costs.cuts.crossing_bytes
    order = np.lexsort((crossing, part))
    heads = order[np.unique(part[order], return_index=True)[1]]
    return np.unique([0, *heads.tolist(), size - 1])


def _near(
    costs: StageCosts,
    placed: list[PlacedStage],
    entries: float,
    kept: list[tuple[int, int, PlacementSpace]],
) -> Ints:
    """Return cuts near a plan's boundaries: as many as leave all runs of devices, else a few."""
    size, boundaries = costs.cuts.size, [first for first, _, _ in placed[1:]]
    # So many cuts that each boundary may move equally far, half of them to either side.
    room = entries / max(kept[0][1], 1) / max(len(boundaries), 1)
    reach = max(int(room / 2), _NEAREST)
    near = {cut + by for cut in boundaries for by in range(-reach, reach + 1)}
    return np.array(sorted({0, size - 1} | {cut for cut in near if 0 < cut < size - 1}))


def _subset(cuts: Cuts, chosen: Ints) -> Cuts:
    pairs = np.ix_(chosen, chosen)
    copied, split = cuts.copied_bytes, cuts.split_bytes
    return replace(
        cuts,
        layer_sets=tuple(cuts.layer_sets[cut] for cut in chosen.tolist()),
        forward_seconds=cuts.forward_seconds[:, chosen],
        backward_seconds=cuts.backward_seconds[:, chosen],
        input_gradient_seconds=cuts.input_gradient_seconds[:, chosen],
        repeated_seconds=cuts.repeated_seconds[:, chosen],
        weight_bytes=cuts.weight_bytes[chosen],
        activation_bytes=cuts.activation_bytes[chosen],
        crossing_bytes=cuts.crossing_bytes[chosen],
        copied_bytes=None if copied is None else copied[pairs],
        split_bytes=None if split is None else split[pairs],
    )


_MOST_PESSIMISTIC, _COARSE_LIMITS, _PLAN_TABLES = 8, 12, 4
_HEAVIER = (1.0,)
_PAIRS_AT_ONCE = 10  # pairs of cuts cost a tenth of a window's entries


def best_step(
    problem: PipelineProblem,
    tables: list[StageCosts],
    space: PlacementSpace,
    best: Incumbent,
    search: PlacementSearch,
    effort: Effort,
) -> float:
    """Look for plans faster than the best one; a step that no plan of this space can beat.

    ``best`` is the plan to begin with, and gets what is found.

    Raises:
        OutOfTimeError: The effort's limit came before anything was proved.
    """
    final = final_states(problem, space)
    cost = _cost(tables[0], space)
    affordable = int(effort.limits_work / cost)
    # Where tables are dear, good plans are looked for among ordered placements.
    is_plan_search = space.is_ordered or affordable >= _PLAN_TABLES
    is_coarse = is_plan_search and tables[0].is_line
    # One exact table costs more than a quarter of what a coarse one may.
    if is_coarse and cost > effort.coarse_work / _COARSE_LIMITS / 4:
        for costs in tables:
            entries = effort.coarse_work / _COARSE_LIMITS
            improve(problem, costs, space, best, partial(_sweep, problem, effort), entries, effort)
    # Not even one exact table: two bounds that need none, the better of both.
    if affordable < 1:
        bounds = [
            max(
                _busiest(problem, costs, space, search, best, effort),
                _relaxed(problem, costs, space, effort),
            )
            for costs in tables
        ]
        return float(min([best.seconds, *bounds]))
    models = [
        Tables(StepModel(problem, costs, pessimistic=False), space, final, effort)
        for costs in tables
    ]
    most_limits = min(effort.most_limits, affordable)
    swept = [_sweep(problem, effort, own, best, most_limits) for own in models]
    is_open = not effort.accepts(best.seconds, min(bound for bound, _ in swept))
    for own in models if is_open and is_plan_search else ():
        # Of another objective, so its bound proves nothing about this one.
        pessimistic = StepModel(problem, own.model.costs, pessimistic=True)
        with suppress(OutOfTimeError):  # it proves nothing, it only finds plans
            few = Tables(pessimistic, space, final, effort)
            _sweep(problem, effort, few, best, min(_MOST_PESSIMISTIC, affordable))
    bounds = []
    for own, (bound, sums) in zip(models, swept, strict=True):
        # Once more without stages that the best plan excludes: fewer stages, higher sums.
        if sums and not effort.accepts(best.seconds, bound):
            with suppress(OutOfTimeError):  # the plan that is known leaves stages out
                costs = own.model.costs
                model = StepModel(problem, costs, pessimistic=False, most_seconds=best.seconds)
                own = Tables(model, space, final, effort)
                again, sums = _sweep(problem, effort, own, best, min(most_limits, _COARSE_LIMITS))
                bound = max(bound, again)
        if sums and not effort.accepts(best.seconds, bound):
            bound = max(bound, PlanTree(problem, own, sums, best).search(effort))
        if not effort.accepts(best.seconds, bound):
            costs = own.model.costs
            bound = max(bound, _busiest(problem, costs, space, search, best, effort, heavier=()))
        bounds.append(bound)
    return float(min([best.seconds, *bounds]))


def _cost(costs: StageCosts, space: PlacementSpace) -> float:
    size = costs.cuts.size
    return len(space.moves) * (size if costs.is_line else size * size / _PAIRS_AT_ONCE)


def _relaxed(
    problem: PipelineProblem, costs: StageCosts, space: PlacementSpace, effort: Effort
) -> float:
    """The least sum of the bound alone, memory left out; 0 where even that costs too much."""
    if not costs.is_line or _cost(costs, space) > effort.relaxed_work:
        return 0.0
    model = StepModel(problem, costs, pessimistic=False)
    final = final_states(problem, space)
    found = Tables(model, space, final, effort).sums(np.inf, relaxed=True)
    return float(found.whole[final].min()) * (1 - EXACT)


def _sweep(
    problem: PipelineProblem,
    effort: Effort,
    tables: Tables,
    best: Incumbent,
    most_limits: int = _COARSE_LIMITS,
) -> tuple[float, list[Sums]]:
    """Halve the limits that may still hold a better plan; return a bound, and the sums found."""
    sums = [tables.sums(np.inf)]
    # A heap of (bound, low, high, sum): plans with a maximum in (low, high] have at least the sum
    # that cap ``high`` allows, and at least ``low`` as their maximum.
    intervals: list[tuple[float, float, float, float]] = []
    least = np.inf  # sum + maximum of the best plan of the model

    def settle(found: Sums, low: float) -> None:
        nonlocal least
        placed = tables.placement(found)
        if placed is None:
            return
        best.consider(problem, tables.model.costs, tables.space, placed)
        whole = float(found.whole[tables.final].min())
        most = _most_left(tables, placed)
        # A plan with a maximum between this one's and the cap has no smaller sum, so it is no
        # better: the interval ends at this one's maximum.
        least = min(least, whole + most)
        heapq.heappush(intervals, (whole + low, low, min(most, found.limit), whole))

    settle(sums[0], 0.0)
    while intervals and len(sums) < most_limits:
        goal = least if tables.model.pessimistic else min(least, best.seconds)
        bound, low, high, whole = intervals[0]
        is_near = not tables.model.pessimistic and effort.accepts(best.seconds, bound)
        if is_near or bound >= goal * (1 - EXACT) or effort.should_stop():
            break
        heapq.heappop(intervals)
        # Neighbouring numbers: the interval cannot be halved, so its bound is its answer.
        middle = (low + high) / 2
        if not low < middle < high:
            least = min(least, bound)
            continue
        # The upper half keeps the sum that is known; only the lower half needs a new table.
        heapq.heappush(intervals, (whole + middle, middle, high, whole))
        try:
            sums.append(tables.sums(middle))
        except OutOfTimeError:
            # The lower half stays open with the weaker sum: the bound remains valid.
            heapq.heappush(intervals, (bound, low, middle, whole))
            break
        settle(sums[-1], low)
    return min([least, *(interval[0] for interval in intervals[:1])]), sums


def _most_left(tables: Tables, placed: list[PlacedStage]) -> float:
    model, most, link = tables.model, 0.0, 0
    for first, last, move in placed:
        kind = model.kind(
            move.pool, move.num_replicas, move.span, move.workers, int(move.source == 0)
        )
        left = model.left_of(kind, first, max(link, move.span))
        most, link = max(most, float(left[last])), max(move.span, move.gap)
    return most


class _BusyPrices(StageCosts):
    """What a stage's busiest device has to do in a step, in seconds."""

    def slopes(self, pool: int, num_replicas: int, span: int) -> Slopes:
        """All its passes and the update; transfers and reductions may hide."""
        update = self.problem.pools[pool].update_seconds / max(self.total_weight, 1.0)
        return Slopes(float(ceil(self.problem.num_microbatches / num_replicas)), update, 0.0)


def _busiest(
    problem: PipelineProblem,
    costs: StageCosts,
    space: PlacementSpace,
    search: PlacementSearch,
    best: Incumbent,
    effort: Effort,
    heavier: Sequence[float] = _HEAVIER,
) -> float:
    """A lower bound on the step: the least work of the busiest device."""
    # Transfers hide in it. Where they count too, each ``heavier`` times over, the plan is worth
    # timing: it has fewer stages to fill.
    busy = _BusyPrices(problem, costs.cuts, costs.bandwidths, recompute=costs.recompute)
    transfers = problem.num_microbatches * busy.boundary_seconds
    bound = np.inf
    for weight in (0.0, *heavier):
        busy.boundary_seconds = weight * transfers
        try:
            placed = search(problem, busy, space, effort=effort)
        except OutOfTimeError as stopped:
            # Only without transfers is the objective a bound; with them it just finds plans.
            proved = stopped.bound if isinstance(stopped, StoppedError) else 0.0
            bound = min(bound, proved) if weight == 0.0 else bound
            break
        if placed is not None:
            best.consider(problem, costs, space, placed)
            bound = min(bound, objective(busy, placed)) if weight == 0.0 else bound
    return bound * (1 - EXACT)


def relaxed_step(problem: PipelineProblem, tables: list[StageCosts]) -> float:
    """A lower bound on the step: all work at its best rate, or one microbatch's round trip."""
    passes = 1 if any(not costs.recompute for costs in tables) else 2
    compute = sum(
        min(
            passes * pool.forward_seconds[layer] + pool.backward_seconds[layer]
            for pool in problem.pools
        )
        for layer in range(len(problem.layers))
    ) + min(overheads(problem).stage_seconds)
    share = max(1.0, problem.num_microbatches / problem.num_devices)
    return compute * share * (1 - EXACT)
