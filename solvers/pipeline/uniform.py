"""Schedules with equally many replicas of all stages: interleaved, zero-bubble, vertical sync.

Every layout (replicas, places, order of device types) with every number of chunks is looked at,
best bound first. In one, the cuts come from a dynamic program over stages for the least maximum,
O(stages x cuts^2). For vertical sync that maximum is the objective, so the answer is exact. For
schedules that flush the objective is the step as the timer has it: several such cuts are timed and
the best is moved one layer at a time. Where there are few enough cuts in all, each one is timed and
the answer exact. The bound of a layout is the least work of its busiest place, and one microbatch's
way.

    layers of 2, 1, 1, 2 s on 2 equal devices, interleaved with 2 chunks, 4 microbatches
    stages of one layer each; the devices run layers (1, 3) and (2, 4): 3 s a microbatch each
    bound: 4 x 3 = 12 s of the busier one, and 6 s of one microbatch's way: 12 s
    the timer adds what devices wait at the start and the end

All stages have d replicas: d devices at each place. Where devices are few, every layout is listed:
a path through the states of anywhere.py with d replicas at each step. Layouts on the same types
whose links are all no faster than another's are left out. Where there are many, only ordered ones:
each place has a run of d devices of one type right behind the type's previous run, the types one
after another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, permutations, product
from math import ceil, comb
from typing import NamedTuple

import numpy as np

from ...planning.costs.pipeline import StageHeld, shared_level, slowest_links
from ...planning.schedules.counting import (
    DeviceMoment,
    held_by_stage,
    moments_by_rank,
    moments_by_stage,
)
from ...planning.schedules.of_plan import times_of
from ...planning.schedules.registry import generate
from ...planning.schedules.timing import time_schedule
from ...schema.errors import InfeasibleError, ProblemError
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Stage
from ...schema.schedule import HeldMoment, Schedule
from ..effort import DEFAULT, Effort, OutOfTimeError
from .anywhere import has_one_order, relaxed
from .assemble import ORDERED, finish, needs, stage_between
from .at_once import even_cuts, in_one_line
from .cuts import Floats, cuts_of
from .makespan import relaxed_step
from .placements import (
    Ints,
    Move,
    NoSeatsError,
    PlacedStage,
    PlacementSpace,
    bandwidths_of,
    seat,
)
from .stage_costs import StageCosts

_MOST_PATHS = 2000
"""Paths that are looked at for one number of replicas."""


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Devices of a pool, ascending in the order of the topology."""

    pool: int
    devices: tuple[int, ...]

    @classmethod
    def run(cls, pool: int, first_device: int, num_devices: int) -> "PipelinePlace":
        """Devices one after another."""
        return cls(pool, tuple(range(first_device, first_device + num_devices)))


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Places of the pipeline in order, each with as many replicas."""

    num_replicas: int
    places: tuple[PipelinePlace, ...]

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.num_replicas * len(self.places)


class Layouts(NamedTuple):
    """Layouts to look at, and whether none on other devices can be better."""

    found: list[PipelineLayout]
    are_all: bool


def layouts(problem: PipelineProblem) -> Layouts:
    """The layouts of the problem's pools; with ``exactly``, those that use all devices."""
    # Pipelines placed round-robin also send from the last place to the first, a link that paths do
    # not count: where that can differ, only ordered layouts are listed.
    if problem.traits.placement == "round-robin" and not has_one_order(problem):
        return Layouts(list(_ordered(problem)), are_all=False)
    widest = max(pool.num_devices for pool in problem.pools) if problem.replication else 1
    found: list[PipelineLayout] = []
    for replicas in filter(problem.may_replicate, range(1, widest + 1)):
        anywhere = _anywhere(problem, replicas)
        if anywhere is None:
            return Layouts(list(_ordered(problem)), are_all=False)
        found += anywhere
    return Layouts(found, are_all=True)


def _ordered(problem: PipelineProblem) -> Iterator[PipelineLayout]:
    widest = max(pool.num_devices for pool in problem.pools) if problem.replication else 1
    seen = set()
    # Orders that differ in pools of which nothing is used give equal layouts: ``seen`` drops them.
    for replicas in filter(problem.may_replicate, range(1, widest + 1)):
        most = [pool.num_devices // replicas for pool in problem.pools]
        for order in permutations(range(len(problem.pools))):
            for counts in product(*(range(most[pool] + 1) for pool in order)):
                places = tuple(
                    PipelinePlace.run(pool, number * replicas, replicas)
                    for pool, count in zip(order, counts, strict=True)
                    for number in range(count)
                )
                layout = PipelineLayout(replicas, places)
                full = layout.num_devices == problem.num_devices
                if layout.num_devices > problem.most_workers:
                    continue
                if places and layout not in seen and (problem.workers == "at_most" or full):
                    seen.add(layout)
                    yield layout


def _anywhere(problem: PipelineProblem, replicas: int) -> list[PipelineLayout] | None:
    """The best layouts of so many replicas on any devices; None where there are too many."""
    space = relaxed(problem, 10 * _MOST_PATHS, replicas)
    paths = None if space is None else _paths(problem, space)
    if space is None or paths is None:
        return None
    kept: dict[tuple[int, ...], list[tuple[tuple[int, ...], PipelineLayout]]] = {}
    # The fastest links first: a layout is then only ever left out for one that is kept.
    for links, placed in sorted(paths.items(), key=lambda entry: (sum(entry[0][1]), entry[0])):
        pools, own = links
        others = kept.setdefault(pools, [])
        # A kept layout of these types has no slower link, so no cut is slower on it.
        if any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in others):
            continue
        try:
            seats = seat(problem, space, placed)
        except NoSeatsError as error:
            if not error.is_proved:
                # Devices may exist that the search did not find: the list would claim too much.
                return None
            continue
        places = tuple(
            PipelinePlace(move.pool, devices)
            for (_, _, move), devices in zip(seats.placed, seats.devices, strict=True)
        )
        others.append((_links(seats.placed), PipelineLayout(replicas, places)))
    return [layout for others in kept.values() for _, layout in others]


Signature = tuple[tuple[int, ...], tuple[int, ...]]


def _paths(
    problem: PipelineProblem, space: PlacementSpace
) -> dict[Signature, list[PlacedStage]] | None:
    """Placements without cuts by pools and links; None where there are too many paths."""
    out: dict[int, list[Move]] = {}
    for move in space.moves:
        out.setdefault(move.source, []).append(move)
    found: dict[Signature, list[PlacedStage]] = {}
    waiting: list[tuple[int, list[PlacedStage]]] = [(0, [])]
    num_paths = 0
    while waiting:
        state, placed = waiting.pop()
        for move in out.get(state, ()):
            num_paths += 1
            if num_paths > _MOST_PATHS:
                return None
            # Stages are placed from the model's end, so the next one goes in front.
            longer: list[PlacedStage] = [(0, 0, move), *placed]
            waiting.append((move.target, longer))
            full = sum(space.states[move.target].used) == problem.num_devices
            if problem.workers == "at_most" or full:
                pools = tuple(entry[2].pool for entry in longer)
                found.setdefault((pools, _links(longer)), longer)
    return found


def _links(placed: list[PlacedStage]) -> tuple[int, ...]:
    """Slowness of the links inside each place, then of those between neighbours."""
    moves = [move for _, _, move in placed]
    between = (max(a.span, a.gap, b.span) for a, b in zip(moves, moves[1:], strict=False))
    return (*(move.span for move in moves), *between)


def span(problem: PipelineProblem, layout: PipelineLayout, place: int) -> float:
    """Bytes per second of the slowest link among the replicas of a place."""
    here = layout.places[place]
    return _slowest(problem, here.pool, here.devices)


def link(problem: PipelineProblem, layout: PipelineLayout, one: int, other: int) -> float:
    """Bytes per second of the slowest link that any replicas of two places have."""
    here, there = layout.places[one], layout.places[other]
    if here.pool != there.pool:
        spans = (span(problem, layout, one), span(problem, layout, other))
        return min(*spans, problem.inter_bytes_per_second or 0.0)
    return _slowest(problem, here.pool, (*here.devices, *there.devices))


def _slowest(problem: PipelineProblem, pool: int, devices: tuple[int, ...]) -> float:
    levels = problem.pools[pool].levels
    level = shared_level(levels, min(devices), max(devices))
    return slowest_links(levels)[level - 1] if level else float("inf")


class PlaceMoments(NamedTuple):
    """When a device may hold most: arrays over moments."""

    running: Ints
    """The stage of the pass."""
    in_flight: Ints
    """Microbatches that some of its stages have in flight."""
    held: tuple[HeldMoment, ...]
    """[stages] of arrays [moments, 1], as ``StageMemory.at_moments`` takes them."""

    @classmethod
    def of(cls, moments: Sequence[DeviceMoment]) -> "PlaceMoments":
        """The moments of all ranks of a place."""
        # [fields, stages, moments, 1]
        held = np.array([one.held for one in moments]).T[..., None]
        running, in_flight = np.array([(one.running, one.in_flight) for one in moments]).T
        return cls(running, in_flight, tuple(HeldMoment(*own) for own in held.swapaxes(0, 1)))


@dataclass(frozen=True, slots=True)
class ScheduledLayout:
    """A layout with its schedule: what each stage holds, and the place that holds it."""

    layout: PipelineLayout
    num_chunks: int
    schedule: Schedule
    place: tuple[int, ...]
    held: tuple[StageHeld, ...]
    moments: tuple[PlaceMoments, ...] = ()
    """[places]; only those of several stages are asked for."""

    @property
    def num_stages(self) -> int:
        """Stages over all places."""
        return len(self.place)


Cut = tuple[int, ...]
"""Indices of the cuts between stages, the empty and the full one included."""


class ShapeOption:
    """One shape with or without recomputation: costs, memory, bound, and time of its cuts."""

    def __init__(self, problem: PipelineProblem, costs: StageCosts, shape: ScheduledLayout) -> None:
        self.problem, self.costs, self.shape = problem, costs, shape
        layout = shape.layout
        self.spans = [span(problem, layout, place) for place in shape.place]
        self.links = [
            link(problem, layout, one, other)
            for one, other in zip(shape.place, shape.place[1:], strict=False)
        ]
        self.pools = [layout.places[place].pool for place in shape.place]
        self.rounds = ceil(problem.num_microbatches / layout.num_replicas)
        # [places] the stages that a device holds.
        self._held: list[list[int]] = [[] for _ in layout.places]
        for stage, place in enumerate(shape.place):
            self._held[place].append(stage)
        self._at_moments: dict[tuple[int, int, int], tuple[float, Floats, Floats]] = {}
        self.bound = self.bound_of_any_order = self._bound()

    def _bound(self) -> float:
        """A lower bound, in seconds, on every cut of this shape."""
        compute = self.costs.compute_seconds[self.pools]
        # In one line every layer lies on some stage, at best on the one that is fastest for it.
        # Sets of a branching graph are compared only where all stages are of one type.
        if self.costs.cuts.before is None:
            way = float(np.diff(compute, axis=1).min(axis=0).sum())
        else:
            way = float(compute[:, -1].min()) if len(set(self.pools)) == 1 else 0.0
        way += float(self.costs.own_seconds[self.pools].sum())
        # The busiest place has at least the mean work of all.
        share = way / len(self.shape.layout.places)
        if self.problem.traits.flushes:
            # Of a backward pass in halves only the first is on a microbatch's way.
            is_way = not self.problem.traits.splits_backward
            return max(self.rounds * share, way if is_way else 0.0)
        return share / self.shape.layout.num_replicas

    def raise_bound(self, heaviest: float | None) -> None:
        """Take in the least time of the heaviest stage; None where nothing fits."""
        busy = np.inf if heaviest is None else self.rounds * heaviest * (1 - 1e-12)
        self.bound = max(self.bound, busy)

    def memory(self, stage: int, first: int, last: int) -> tuple[float, float]:
        """``StageCosts.memory_parts`` of a stage between two cuts."""
        replicas, held = self.shape.layout.num_replicas, self.shape.held[stage]
        return self.costs.memory_parts(first, last, self.pools[stage], replicas, held)

    def fits(self, cut: Cut) -> bool:
        """Whether the stages of every device fit it together, and none splits a tied weight."""
        between = self.costs.between()
        if not all(between[one, other] for one, other in zip(cut, cut[1:], strict=False)):
            return False
        return all(self._fits(place, stages, cut) for place, stages in enumerate(self._held))

    def _fits(self, place: int, stages: Sequence[int], cut: Cut) -> bool:
        limit = self.problem.pools[self.shape.layout.places[place].pool].limit_bytes
        if limit is None:
            return True
        # At most as if each were at its fullest, which tables of all cuts have.
        apart = [self.memory(stage, *cut[stage : stage + 2]) for stage in stages]
        if sum(one for one, _ in apart) + max(one for _, one in apart) <= limit:
            return True
        return len(stages) > 1 and sum(self._together(place, cut)) <= limit

    def _filled(self, cut: Cut) -> list[tuple[float, int | None]]:
        """[places] bytes that stages take of a device, and what they may take."""
        limits = [self.problem.pools[place.pool].limit_bytes for place in self.shape.layout.places]
        used = [standing + passing for standing, passing in self._parts_of_places(cut)]
        return list(zip(used, limits, strict=True))

    def _parts_of_places(self, cut: Cut) -> list[tuple[float, float]]:
        """[places] bytes that a device's stages hold, and what their passes take for a while."""
        return [
            self.memory(own[0], *cut[own[0] : own[0] + 2])
            if len(own) == 1
            else self._together(place, cut)
            for place, own in enumerate(self._held)
        ]

    def _together(self, place: int, cut: Cut) -> tuple[float, float]:
        """``_parts_of_places`` of a device of several stages, at its fullest moments."""
        # The passes of a device's stages run one after another: one takes its workspace.
        moments, sample_bytes = self.shape.moments[place], self.problem.sample_bytes
        # Of the model's own inputs also those of the next microbatch.
        update, standing = 2.0 * sample_bytes, (moments.in_flight + 1.0) * sample_bytes
        passing = np.zeros_like(standing)
        for own, stage in zip(moments.held, self._held[place], strict=True):
            key = stage, cut[stage], cut[stage + 1]
            if key not in self._at_moments:
                self._at_moments[key] = self.costs.memory.at_moments(
                    self.pools[stage],
                    self.shape.layout.num_replicas,
                    self.shape.held[stage].versions,
                    own,
                    key[1:],
                    recompute=self.costs.recompute,
                )
            of_update, bare, whole = self._at_moments[key]
            update, standing = update + of_update, standing + bare
            passing += np.where(moments.running == stage, whole - bare, 0.0)
        most = max(update, float(standing.max()))
        return most, max(update, float((standing + passing).max())) - most

    def even_memory(self) -> Cut | None:
        """The cut whose fullest stage has the least beyond its share of a device; None: no cut."""

        def beyond(stage: int) -> Floats:
            """Bytes beyond a chunk's share; without a limit any stage is as good."""
            limit, size = self.problem.pools[self.pools[stage]].limit_bytes, self.costs.cuts.size
            over = np.full((size, size), -1.0)
            if limit is not None:
                kept = self._own_bytes(stage)
                over = kept - limit / self.shape.num_chunks
            return np.where(self.costs.between(), over, np.inf)

        found = self._least(beyond)
        return None if found is None else found[1]

    def nearest(self) -> tuple[float, str] | None:
        """Bytes that a cut of even memory lacks, and the device that lacks them; None: no cut."""
        cut = self.even_memory()
        if cut is None:
            return None
        filled = self._filled(cut)
        lack, used, place = max(
            (used - limit if limit is not None else -np.inf, used, place)
            for place, (used, limit) in enumerate(filled)
        )
        if lack <= 0:
            return None
        return lack, needs(self.problem.pools[self.shape.layout.places[place].pool], used)

    def _own_bytes(self, stage: int) -> Floats:
        """[cuts, cuts] bytes of one replica where a stage lies between two cuts."""
        replicas = self.shape.layout.num_replicas
        return self.costs.own_bytes(self.pools[stage], replicas, self.shape.held[stage])

    def matrix(self, stage: int, transfers: float, share: int) -> Floats:
        """[cuts, cuts] what a stage weighs; infinite where it breaks its share of the memory.

        ``transfers`` is how much of its transfers counts; the device's memory is dealt to
        ``share`` chunks.
        """
        cuts, pool = self.costs.cuts, self.pools[stage]
        if self.problem.traits.flushes:
            # [cuts, cuts] begin and end, seconds: prefix sums of compute, the message into the
            # stage.
            compute = self.costs.compute_seconds[pool]
            ends = compute + self.costs.own_seconds[pool]
            found: Floats = ends[None, :] - compute[:, None]
            if stage > 0:
                found = (
                    found + (transfers * 2 / self.links[stage - 1]) * cuts.crossing_bytes[:, None]
                )
                found = found + transfers * 2 * self.costs.message_seconds[:, None]
        else:
            index = self.costs.bandwidths.index(self.spans[stage])
            found = self.costs.matrix(pool, self.shape.layout.num_replicas, index)
            # Without a flush a boundary works beside the stages, so the slower of both counts.
            if stage > 0:
                edge = 2 * cuts.crossing_bytes / self.links[stage - 1]
                edge = edge + 2 * self.costs.message_seconds
                found = np.maximum(found, edge[:, None])
        limit = self.problem.pools[pool].limit_bytes
        barred = ~self.costs.between()
        if limit is not None:
            barred |= self._own_bytes(stage) > limit / share
        return np.where(barred, np.inf, found)

    def even_cut(self) -> Cut | None:
        """A cut in the layers' own order whose stages take about as long; None if there is none."""
        at = in_one_line(self.problem, self.costs)
        stages = [(pool, 1) for pool in self.pools]
        if len(at) <= len(stages):
            return None
        curve = self.costs.compute_seconds.mean(axis=0)[at]
        return tuple(int(at[cut]) for cut in even_cuts(self.problem, curve, stages))

    def least_maximum(
        self, transfers: float, share: int, effort: Effort
    ) -> tuple[float, Cut] | None:
        """The cut with the least heaviest stage; O(stages x cuts^2).

        Raises:
            OutOfTimeError: The effort's limit came first.
        """

        def matrix(stage: int) -> Floats:
            effort.check()
            return self.matrix(stage, transfers, share)

        return self._least(matrix)

    def _least(self, matrix: Callable[[int], Floats]) -> tuple[float, Cut] | None:
        """The least of the largest entries, one of each stage's matrix, and its cut."""
        # [cuts] the least heaviest stage of the stages so far, the last of which ends at a cut.
        size = self.costs.cuts.size
        best = np.full(size, np.inf)
        # Not 0: the first stage decides, whatever its sign.
        best[0] = -np.inf
        chosen = []
        for stage in range(self.shape.num_stages):
            total = np.maximum(best[:, None], matrix(stage))
            chosen.append(total.argmin(axis=0))
            best = total[chosen[-1], np.arange(size)]
        if not np.isfinite(best[-1]):
            return None
        cut = [size - 1]
        for begins in reversed(chosen):
            cut.append(int(begins[cut[-1]]))
        return float(best[-1]), tuple(reversed(cut))

    def slowest(self, cut: Cut) -> float:
        """The steady state's slowest stage or boundary, in seconds per input."""
        slowest = 0.0
        for stage, pool in enumerate(self.pools):
            index = self.costs.bandwidths.index(self.spans[stage])
            replicas = self.shape.layout.num_replicas
            seconds = self.costs.stage_seconds(cut[stage], cut[stage + 1], pool, replicas, index)
            slowest = max(slowest, seconds)
            if stage > 0:
                sent = self.costs.output_seconds(cut[stage], self.links[stage - 1])
                slowest = max(slowest, sent)
        return slowest

    def stages(self, cut: Cut) -> list[Stage]:
        """The stages of a cut, as a plan has them: each states what its device holds."""
        replicas, parts = self.shape.layout.num_replicas, self._parts_of_places(cut)
        pools = [place.pool for place in self.shape.layout.places]
        filled = [
            self.costs.device_bytes(pool, replicas, *own)
            for pool, own in zip(pools, parts, strict=True)
        ]
        return self._stages(cut, filled)

    def _stages(self, cut: Cut, memory_bytes: Sequence[int]) -> list[Stage]:
        """The stages of a cut, whose devices hold so many bytes [places]."""
        costs, shape, found = self.costs, self.shape, []
        for stage, place in enumerate(shape.place):
            # The last stage sends nothing.
            last, sent = cut[stage + 1], 0.0
            if stage + 1 < shape.num_stages:
                sent = costs.output_seconds(last, self.links[stage])
            found.append(
                stage_between(
                    costs,
                    (cut[stage], last),
                    self.pools[stage],
                    shape.layout.places[place].devices,
                    span=costs.bandwidths.index(self.spans[stage]),
                    held=shape.held[stage],
                    sent=sent,
                    memory_bytes=memory_bytes[place],
                )
            )
        return found

    def objective(self, cut: Cut) -> float:
        """What is minimised: the step, or without a flush the slowest stage or boundary."""
        return self.step(cut) if self.problem.traits.flushes else self.slowest(cut)

    def step(self, cut: Cut) -> float:
        """The step of a cut as the timer has it."""
        # Of which memory is no part.
        times = times_of(self._stages(cut, [0] * len(self.shape.layout.places)), flushes=True)
        return time_schedule(self.shape.schedule, times).makespan_seconds


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
    # Over all layouts; each choice of inner boundaries is one cut.
    number = sum(comb(cuts.size - 2, option.shape.num_stages - 1) for option in options)
    if flushes and cuts.before is None and number <= FEW_CUTS:
        is_exact = _time_all(options, cuts.size, best, effort)
    else:
        is_exact = (_approach if flushes else _least_maximum)(options, best, effort)
    if best.option is None:
        raise _infeasible(problem, options, refusal)
    bound, claim = _proved(best.seconds, options, is_exact and cuts.complete, listed.are_all)
    # ``options`` were listed under a limit of time: another layout may be better.
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
    """The layouts that the schedule can have; and why the last refused one cannot."""
    # After a time limit no further layouts are looked at, if there is one.
    count = problem.num_microbatches
    endless = not problem.traits.flushes
    chunk_counts = problem.traits.num_model_chunks
    if problem.num_model_chunks is not None:
        chunk_counts = (problem.num_model_chunks,)
    made: dict[
        tuple[int, int, int],
        tuple[Schedule, tuple[StageHeld, ...], tuple[PlaceMoments, ...]],
    ] = {}
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
                # Schedules depend on these three numbers alone; layouts that differ in devices
                # share them.
                if key not in made:
                    schedule = generate(
                        problem.schedule,
                        pipeline_parallel_size=size,
                        # Without a flush it is generated long enough for its steady state, whose
                        # memory counts.
                        num_microbatches=3 * count if endless else count,
                        num_model_chunks=chunks,
                        replicas=[layout.num_replicas] * size,
                    )
                    moments = moments_by_rank(schedule)
                    by_stage = moments_by_stage(schedule, moments)
                    both = zip(held_by_stage(schedule), by_stage, strict=True)
                    held = tuple(StageHeld(*most, own) for most, own in both)
                    # Ranks are numbered place by place.
                    of_places = tuple(
                        PlaceMoments.of([*chain(*moments[first : first + layout.num_replicas])])
                        for first in range(0, schedule.num_ranks, layout.num_replicas)
                    )
                    made[key] = (schedule, held, of_places)
            except ProblemError as error:
                refusal = error
                continue
            schedule, held, of_places = made[key]
            # So a stage's first rank tells its place.
            place = tuple(ranks[0] // layout.num_replicas for ranks in schedule.placement)
            found.append(ScheduledLayout(layout, chunks, schedule, place, held, of_places))
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
            # Ascending bounds: none of those that follow can be better.
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
            # Ascending bounds, so the first one that is accepted ends the search.
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
    # Whatever the search found, it proves nothing beyond the options' bounds.
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
    """Least maxima with and without transfers, that fit; a chunk's share of the memory first."""
    seen = set()
    for transfers in (0.0, 1.0):
        # Dealt equally, chunks fit together for certain. Else each alone may take all, and only
        # the check tells whether they fit together.
        for share in dict.fromkeys((option.shape.num_chunks, 1)):
            found = option.least_maximum(transfers, share, effort)
            # One chunk, no transfers: the least maximum of all cuts, so a bound of each.
            if option.shape.num_chunks == 1 and transfers == 0.0:
                option.raise_bound(None if found is None else found[0])
            if found is not None and found[1] not in seen and option.fits(found[1]):
                seen.add(found[1])
                yield found[1]
                break
    cut = None if seen else option.even_memory()
    if cut is not None and option.fits(cut):
        yield cut


def _move(option: ShapeOption, cut: Cut, seconds: float, best: _Best, effort: Effort) -> None:
    """Move one boundary by one cut while that is faster; cuts in one line only."""
    if option.costs.cuts.before is not None:
        return
    left, better = _MOVES, True
    while better and left > 0:
        better = False
        for inner in range(1, len(cut) - 1):
            # The first better neighbour is taken at once: looking at all of them costs a schedule
            # each.
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
