"""Water filling: lexicographic max-min over a tree of weights (thesis 5.4.3).

All unsaturated jobs rise together, each in proportion to its share of the tree, until some can rise
no further; these keep their level, their share passes to their siblings, and the rest rises on. The
thesis solves a linear program and a MILP for each level. But nearly every level is only one job
that has reached its own best, which needs no program: those levels are a path known in advance
(``tree.Path``), and what is asked is how far up that path all jobs together can go. One program at
a point beyond it gives prices; these refute every point of the path above a lower one; a few such
steps (Newton's method, from above) end where nothing is refuted. There the jobs that would pay for
a little more are stuck; the others rise on, on columns that cost nothing. Without space sharing
each such stage prices a further resource, so there are at most as many stages as resources. Each
takes a few programs of O(jobs x types) an iteration.

    a V100 and a K80; a and b run on the V100 alone, c on both; each does 1 a second where it runs
    all rise to 1/2: then a and b fill the V100; they would pay for more of it, so they are stuck
    c rises on, on the K80, which costs nothing: to 1, its own best; levels 1/2, 1/2, 1

Where that breaks down, or its own prices do not prove every level, ``rise_stepwise`` answers, one
level at a time: slow but numerically robust. Each program raises all active rows along their shares
as far as they go together; the rows whose demand has a price at its optimum can go no further,
whatever the others do. That is one program of the simplex method for each level, up to as many as
rows; each starts from the last one's basis. With space sharing it does so after another try, in
which no program starts from the last one's basis.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....schema.errors import BackendError
from ....schema.jobs import Entity
from ...effort import OutOfTimeError
from ..engine import NO_PAIRS, LevelProof, MergedProgram, Outcome
from ..instance import Instance
from ..program import Bools, Floats, FractionProgram, Ints, Solution, dual_bound, gap_between
from ..space_sharing.column_generation import (
    Pairing,
    PairProgram,
    PairTimes,
    bound_with_pairs,
    no_pairing,
    throughput_with_pairs,
)
from .bottlenecks import (
    AT_CAP,
    NOTHING,
    STUCK_PART,
    AnyCut,
    LeastCost,
    LevelLimits,
    LimitsAlone,
    LimitsWithPairs,
    Linear,
    PriceCut,
    best_levels,
)
from .tree import Path, RowTree

# The proof of water filling: for each stage, the rows that had to stop, and the prices.

# A proof leaves a row room for at most this part of its throughput (twice it of its best) ...
ROOM = 1e-5
# ... or of the pool's worth (or twice the gap).
SLACK = 2e-9
# Levels that differ by less than this part are one.
SAME_LEVEL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FillingStage:
    """Prices ``proof`` that bind at ``level`` [rows], of whom ``active`` [rows] still rose."""

    proof: PriceCut
    level: Floats
    active: Bools


def unproved(
    small: FractionProgram,
    best: Floats,
    stages: Sequence[FillingStage],
    level: Floats,
    reached: Floats,
    gap: float,
) -> Bools:
    """Rows for which no stage proves that they could not rise further [rows].

    Args:
        small: The program over rows.
        best: The level of each row on its fastest column, alone or in a pair [rows].
        stages: Lowest first.
        level: Where each row stopped [rows].
        reached: The levels of the time fractions found [rows].
        gap: By what part these may fall short.
    """
    # [rows] the level of each row on its best column alone.
    alone = small.rate.max(axis=1) / small.level
    loose: Bools = reached < best * (1.0 - ROOM)
    # More by a part of what it has, and, where that is next to nothing, by a part of its best.
    more = np.maximum(reached * (1.0 + ROOM), 2.0 * ROOM * alone)
    for stage in stages:
        # Rows that had stopped by this stage keep paying for what they reached; others can do
        # without.
        pays, wanted = stage.proof.pays(reached), stage.proof.pays(more)
        done = level <= stage.level * (1.0 + SAME_LEVEL)
        others = float((small.count * pays)[done].sum()) - np.where(done, pays, 0.0)
        ends = stage.active & (level >= stage.level * (1.0 - SAME_LEVEL))
        # The row would pay for more, and what it then pays with those that stopped is more than
        # the pool's worth: no room.
        stopped = (wanted > pays) & (others + wanted >= 1.0 - max(SLACK, 2.0 * gap))
        loose &= ~(ends & stopped)
    return loose


def level_proofs(merged: MergedProgram, stages: Sequence[FillingStage]) -> tuple[LevelProof, ...]:
    """Each stage's prices by job; without space sharing those of resources are enough."""
    proofs: list[LevelProof] = []
    for stage in stages:
        job, price, time = stage.proof.priced(stage.level)
        if merged.pairing is None:
            proofs.append(LevelProof(resource_prices=price))
        else:
            proofs.append(
                LevelProof(
                    resource_prices=price,
                    job_prices=job[merged.row_of],
                    time_prices=time[merged.row_of],
                )
            )
    return tuple(proofs)


# Paths end a little above what rows can have: programs say where they stop.
ABOVE = 1e-3
# Every program leaves a column behind; after so many a new one starts.
RENEWED_AFTER = 64
# HiGHS's tolerances are absolute, so rows are measured in what they have, to within this factor.
OFF_SCALE = 30.0
LEAST_PART = 1e-7
MAX_TRIES = 4
RELAXED, MOST_RELAXED = (0.0, 1e-11, 1e-10, 1e-9, 1e-8), 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedLevels:
    """Levels [rows] that can be had by ``found``, and the stages that prove them.

    ``first`` is the program of the first level with its prices of throughput, of resources and
    of time. ``programs`` were solved, by ``method``.
    """

    level: Floats
    found: Solution
    pairs: PairTimes
    stages: tuple[FillingStage, ...]
    first: tuple[FractionProgram, Floats, Floats, Floats]
    programs: int
    method: str


def rise_stepwise(merged: MergedProgram, tree: RowTree, best: Floats) -> RaisedLevels:
    """Raise rows level by level, given the ``best`` level of each [rows].

    Raises:
        BackendError: HiGHS finds no optimum of a program.
        OutOfTimeError: The caller's limit came first.
    """
    small, stages = merged.small, list[FillingStage]()
    pairing = merged.pairing or no_pairing(small)
    level, active = np.zeros(len(best)), small.demands.copy()
    found, pairs, held = None, NO_PAIRS, _Held(small, pairing, small.level * best)
    first: tuple[FractionProgram, Floats, Floats, Floats] | None = None
    while active.any():
        if merged.instance.should_stop():
            raise OutOfTimeError
        # Up to the first event at which a row reaches its own best: until there all rise in
        # proportion.
        path = Path(tree, level, active, best * (1.0 + ABOVE))
        step = path.levels(path.times[1]) - level
        program = replace(
            small, floor=small.level * level, level=small.level * step,
            demands=(level > 0) | (step > 0),
        )  # fmt: skip
        found, pairs = held.solve(program)
        # z > 1 would raise rows beyond their best; a negative one is rounding.
        level = level + min(max(found.z, 0.0), 1.0) * step
        if first is None:
            assert found.time_prices is not None
            # The first level's prices are scaled so that the level itself is their bound.
            asked = replace(program, level=program.level / path.times[1])
            unit = float(program.count @ (found.job_prices * asked.level))
            prices = found.job_prices / unit, found.resource_prices / unit, found.time_prices / unit
            first = asked, *prices
        share = np.where(active, small.count * found.job_prices * program.level, 0.0)
        # A demand with a price at the optimum can rise in no other way: its row is stuck.
        stuck = active & (share > STUCK_PART * share.max())
        if (level < best * (1.0 - AT_CAP))[stuck].any():
            proof = _proof(merged, found, program.floor)
            # A row at its own best needs no proof by prices.
            stages.append(FillingStage(proof=proof, level=level, active=active.copy()))
        active &= ~(stuck | (level >= best * (1.0 - AT_CAP)))
    assert found is not None
    assert first is not None
    reached = throughput_with_pairs(small, pairing, found.x, pairs)[0] / small.level
    # Rows with next to nothing are compared on the scale of their best.
    lacking = ((level - reached) / np.maximum(level, 1e-6 * best)).max()
    return RaisedLevels(
        level=level, pairs=pairs,
        found=replace(found, z=1.0 - max(float(lacking), 0.0), method="HiGHS simplex"),
        stages=tuple(stages), first=first, programs=held.programs, method="level by level",
    )  # fmt: skip


class _Held:
    """A program held open, on the scale of what its rows have."""

    def __init__(self, small: FractionProgram, pairing: Pairing, best: Floats) -> None:
        self.pairing, self.best, self.programs = pairing, best, 0
        self.open: PairProgram | None = None
        self.rates = self.row = np.maximum(small.rate.max(axis=1), 1e-300)
        self.pairs, self.age = NO_PAIRS, 0

    def solve(self, program: FractionProgram) -> tuple[Solution, PairTimes]:
        """Solve, again on another scale where that was far off."""
        for _ in range(MAX_TRIES):
            # Each solved program leaves columns; a fresh one starts from the last pairs.
            if self.open is None or self.age == RENEWED_AFTER:
                seed = self.pairs if self.programs else None
                self.open = PairProgram(program, self.pairing, seed, self.row)
                self.age = 0
            found, self.pairs = self._relaxed(self.open, program)
            self.programs, self.age = self.programs + 1, self.age + 1
            has = program.floor + np.clip(found.z, 0.0, 1.0) * program.level
            # A row that has little would be within an absolute tolerance of anything: rows are
            # measured anew.
            row = np.where(has > 0, np.maximum(has, LEAST_PART * self.best), self.row)
            if (np.abs(np.log(row / self.row)) < np.log(OFF_SCALE)).all():
                break
            self.row, self.open = row, None
        return found, self.pairs

    def _relaxed(self, held: PairProgram, program: FractionProgram) -> tuple[Solution, PairTimes]:
        """Floors that are just out of reach by rounding give way by as little as helps."""
        for part in RELAXED:
            try:
                relaxed = replace(program, floor=program.floor * (1.0 - part))
                return held.solve(relaxed if part else program)
            except BackendError:
                continue
        # Last, from no basis, on the scale of the best rates.
        self.row, self.age = self.rates, 0
        self.open = PairProgram(program, self.pairing, self.pairs)
        return self.open.solve(replace(program, floor=program.floor * (1.0 - MOST_RELAXED)))


def _proof(merged: MergedProgram, found: Solution, floor: Floats) -> LeastCost | Linear:
    small, price = merged.small, found.resource_prices
    if merged.pairing is None:
        price = price / (small.capacity @ price)
        return LeastCost(small, price, price)
    assert found.time_prices is not None
    owed = float(small.count @ (found.job_prices * floor))
    return Linear(small, found.job_prices, price, found.time_prices, found.bound + owed)


# Levels too high by this part may be so by rounding.
ROUNDING = 1e-9
MAX_STEPS = 60
# A quick answer with a larger gap is not taken.
QUICK_GAP = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterFilling:
    """Give each job ``unit`` [jobs] * its level of throughput, levels rising together.

    Levels rise by ``weight`` [jobs] through the tree of ``entities``; ``entity`` [jobs] is each
    job's node, -1 for the top.
    """

    unit: Floats
    weight: Floats
    entity: Ints
    entities: tuple[Entity, ...] = ()

    def optimise(self, instance: Instance) -> Outcome:
        """See ``fill``."""
        return fill(instance, self)


def fill(instance: Instance, goal: WaterFilling) -> Outcome:
    """Water-fill: the unique lexicographic max-min levels.

    The outcome's objective, bound and prices are those of the first level: the least level over
    shares. Its ``levels`` prove the others.

    Raises:
        BackendError: A program broke down, in both ways to the answer.
        OutOfTimeError: The caller's limit came before there was a proof.
    """
    merged = MergedProgram.of(instance, instance.program(level=goal.unit), _alike(goal))
    first = merged.first
    tree = RowTree(goal.entities, goal.entity[first], goal.weight[first], merged.small.count)
    quick: Outcome | None = None
    error, loose = None, 0
    # The first way that proves every level is the answer; else the one that leaves least unproved,
    # as far as time allows.
    for way in _quick_ways(merged):
        try:
            found, left = _outcome(merged, way(tree))
        except BackendError as broken:
            error = broken
            continue
        if not left and found.gap <= QUICK_GAP:
            return found
        if quick is None or (left, found.gap) < (loose, quick.gap):
            quick, loose = found, left
    if quick is not None and instance.should_stop():
        return quick
    try:
        slow, left = _outcome(merged, rise_stepwise(merged, tree, best_levels(merged)))
    except BackendError:
        if quick is None:
            raise error or BackendError("water filling found no answer") from None
        return quick
    return slow if quick is None or (left, slow.gap) < (loose, quick.gap) else quick


def _quick_ways(merged: MergedProgram) -> list[Callable[[RowTree], RaisedLevels]]:
    """Ways along the path; the second try starts each program without the last one's basis."""
    if merged.pairing is None:
        return [
            lambda tree: _rise(merged, tree, LimitsAlone(merged.small, merged.instance.should_stop))
        ]
    return [
        lambda tree: _rise(merged, tree, LimitsWithPairs(merged)),
        lambda tree: _rise(merged, tree, LimitsWithPairs(merged, keeps_basis=False)),
    ]


def _outcome(merged: MergedProgram, raised: RaisedLevels) -> tuple[Outcome, int]:
    """Levels as time fractions of every job, and the number of rows that nothing proves."""
    small, level, pairs = merged.small, raised.level, raised.pairs
    method = f"{raised.found.method.split(',')[0]}; water filling, {raised.method}"
    found = replace(raised.found, method=f"{method}, {raised.programs} programs")
    found = _scored(merged, _no_more_than(merged, found, small.level * level), pairs, raised.first)
    asked = replace(
        merged.program,
        level=raised.first[0].level[merged.row_of],
        demands=raised.first[0].demands[merged.row_of],
        # The objective is the first level's, so its program and prices are what is judged.
    )
    outcome = replace(merged, program=asked).outcome(found, pairs)
    gap = max(outcome.gap, found.gap)
    reached = outcome.throughput[merged.first] / small.level
    loose = unproved(small, best_levels(merged), raised.stages, level, reached, gap)
    left = int(loose.sum())
    levels = level_proofs(merged, raised.stages)
    return replace(outcome, levels=levels, gap=gap, num_unproved=left), left


def _rise(merged: MergedProgram, tree: RowTree, limits: LevelLimits[AnyCut]) -> RaisedLevels:
    """Follow the levels from one shared bottleneck to the next."""
    small = merged.small
    stages: list[FillingStage] = []
    level, active = np.zeros(len(small.count)), small.demands.copy()
    found, pairs, programs = None, NO_PAIRS, 0
    start: tuple[FractionProgram, Floats, Floats, Floats] | None = None
    while active.any():
        caps = limits.caps()
        # Rows that reach their own best leave the path by themselves: only shared bottlenecks take
        # programs.
        path = Path(tree, level, active, caps)
        time, cut, found, pairs, steps = _highest(limits, path)
        programs += steps
        start = start or _first_level(small, path, time, cut, caps)
        level = path.levels(time)
        rising = active & (level < caps * (1.0 - AT_CAP))
        if cut is None:
            break
        # What binds already, and stops no row, would be found again for ever: given up.
        fresh = not limits.binds_already(cut)
        stuck, proof = limits.settle(level, cut, rising)
        rising &= ~stuck
        if not fresh and (rising == active).all():
            raise BackendError("water filling failed: no row stops at binding prices")
        stages.append(FillingStage(proof=proof, level=level, active=active))
        active = rising
    assert found is not None
    assert start is not None
    return RaisedLevels(
        level=level, found=found, pairs=pairs, stages=tuple(stages), first=start,
        programs=programs, method=f"{len(stages)} shared bottlenecks",
    )  # fmt: skip


def _alike(goal: WaterFilling) -> Ints:
    """Number jobs that are equal in the tree; a job that waits in a FIFO node equals no other."""
    table = np.column_stack((goal.entity, goal.weight))
    group: Ints = np.unique(table, axis=0, return_inverse=True)[1].reshape(-1)
    fifo = np.array([node.policy == "fifo" for node in goal.entities] + [False])
    waiting = np.flatnonzero(fifo[goal.entity])
    # Numbers behind the others, so no two are equal.
    group[waiting] = len(table) + np.arange(len(waiting))
    return group


def _highest(
    limits: LevelLimits[AnyCut], path: Path
) -> tuple[float, AnyCut | None, Solution, PairTimes, int]:
    """The last time on a path whose levels can be had, and the prices that refute all later."""
    last = len(path.times) - 1
    # ``stride`` events ahead at first: rows alone reach many bests in one program.
    low, place, steps = 0.0, min(limits.stride, last), 0
    time = path.times[place]
    cut: AnyCut | None = None
    short = np.inf
    while True:
        start, end = limits.base(path.levels(low)), path.levels(time)
        found, pairs = limits.solve(start, end, cut)
        if limits.should_stop():  # perhaps amidst a program, whose prices then refute nothing
            raise OutOfTimeError
        steps += 1
        # What the program found, as levels.
        had = (start + found.z * (end - start)) * (1.0 + limits.precision)
        if not (had >= end).all():
            newer = limits.cut(found)
            # The largest shortfall in relation to the highest level.
            before, short = short, float(((end - had) / end.max()).max())
            # A little that no prices refute, or that better prices do not lessen, is rounding.
            worse = cut is not None and short >= 0.5 * before
            refuted = short > ROUNDING or not (worse or newer.excess(end) <= 0.5 * short)
            refuted &= not limits.binds_already(newer) or short > ROUNDING
        else:
            refuted = False
        if not refuted:
            if cut is not None or place == last:
                break
            # This can be had: look twice as many events ahead.
            low, place = time, min(2 * place, last)
            time = path.times[place]
            continue
        # Newton's step from above: the prices refute every time after the one at which they are
        # just paid.
        earlier = max(_binding(path, newer, time), low)
        # No lower time is left to try, or what is had covers it.
        if (had >= path.levels(earlier)).all() or steps >= MAX_STEPS:
            time, cut = earlier, newer
            break
        if (earlier >= time and cut is not None) or (path.levels(earlier) <= start).all():
            time, cut = earlier, newer
            break
        time, cut = earlier, newer
    levels = path.levels(time)
    # A row with a level next to nothing is measured by its best.
    lacking = ((levels - had) / np.maximum(levels, NOTHING * limits.best)).max()
    return time, cut, replace(found, z=1.0 - max(float(lacking), 0.0)), pairs, steps


def _binding(path: Path, cut: PriceCut, time: float) -> float:
    """The last time up to ``time`` that prices do not refute; 0 if they refute all."""
    # Excess grows with time: halved between events, then within one linear stretch.
    low, high = 0, int(np.searchsorted(path.times, time))
    if cut.excess(path.levels(time)) <= 0:
        return time
    while high - low > 1:
        middle = (low + high) // 2
        if cut.excess(path.levels(path.times[middle])) > 0:
            high = middle
        else:
            low = middle
    start, end = path.times[low], min(path.times[high], time)
    base, top = path.levels(start), path.levels(end)
    # Levels are linear here and costs convex: tangents from the right stay above the root.
    part = 1.0
    for _ in range(MAX_STEPS):
        value, slope = (
            cut.excess(levels := base + part * (top - base)),
            cut.slope(levels, top - base),
        )
        step = value / slope if slope > 0 else np.inf
        if value <= 0 or part - step >= part:
            break
        part = max(part - step, 0.0)
    return start + part * (end - start)


def _first_level(
    small: FractionProgram, path: Path, time: float, cut: PriceCut | None, caps: Floats
) -> tuple[FractionProgram, Floats, Floats, Floats]:
    """The program of the first level, and prices of throughput, resources and time for it."""
    # Where a job's own best ends the first level, it alone has a price.
    alone = path.times[min(1, len(path.times) - 1)]
    until = min(alone, time)
    level = path.levels(until)
    program = replace(small, level=small.level * level / until, demands=level > 0)
    if cut is not None and time <= alone:
        job, price, rent = cut.priced(level)
    # Until the first event, or until the bottleneck if that comes first.
    else:
        stuck = int((level >= caps * (1.0 - 1e-12)).argmax())
        job, price, rent = np.zeros(len(level)), np.zeros(len(small.capacity)), np.zeros(len(level))
        job[stuck] = 1.0
        rent[stuck] = caps[stuck] * small.level[stuck]
    # Scaled so that the demands of one unit of level cost 1.
    unit = float(small.count @ (job * program.level))
    return program, job / unit, price / unit, rent / unit


def _no_more_than(merged: MergedProgram, found: Solution, throughput: Floats) -> Solution:
    """A solution without the last bits that rows got above their throughput [rows]."""
    if merged.pairing is not None:
        return found
    reached = (merged.small.rate * found.x).sum(axis=1)
    part = np.minimum(1.0, throughput / np.where(reached > 0, reached, 1.0))
    return replace(found, x=found.x * part[:, None])


def _scored(
    merged: MergedProgram,
    found: Solution,
    pairs: PairTimes,
    start: tuple[FractionProgram, Floats, Floats, Floats],
) -> Solution:
    """The last solution with the objective, bound and prices of the first level."""
    program, job, price, time = start
    if merged.pairing is None:
        reached = (program.rate * found.x).sum(axis=1)
        bound, job, price = dual_bound(program, job, price)
        times = None
    else:
        reached = throughput_with_pairs(program, merged.pairing, found.x, pairs)[0]
        bound, job, price, times = bound_with_pairs(program, merged.pairing, job, price, time)
    rows = program.demands
    objective = float((reached[rows] / program.level[rows]).min())
    gap = max(gap_between(program, objective, bound), 1.0 - found.z)
    return replace(
        found, z=objective, objective=objective, bound=bound, gap=gap, job_prices=job,
        resource_prices=price, time_prices=times,
    )  # fmt: skip
