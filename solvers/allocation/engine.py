"""From an instance and a program to time fractions of every job, feasible to the last bit."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..compiling import compiled_if_often
from ..effort import never
from .instance import Instance
from .interior import Walk, walk
from .interior import solve as solve_interior
from .program import (
    Floats,
    FractionProgram,
    Ints,
    Solution,
    gap_between,
    level_of,
    likely_columns,
    merge,
    resource_use,
    shortfall,
    solve_by_simplex,
)
from .space_sharing.column_generation import Pairing, PairTimes, throughput_with_pairs
from .space_sharing.column_generation import solve as solve_with_pairs

DUST = 1e-12
# An interior point with a larger gap is none.
ACCEPTED_GAP = 1e-7
BROKE_DOWN = "because the interior point method broke down"
"""What a solution's method says where simplex took over."""
NO_PAIRS = PairTimes(
    a=np.zeros(0, np.int64), b=np.zeros(0, np.int64), column=np.zeros(0, np.int64), time=np.zeros(0)
)


def _compiled_walk() -> Walk:
    from .interior_compiled import walk

    return walk


_FASTEST_WALK: Walk = compiled_if_often(walk, _compiled_walk)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelProof:
    """Prices that prove, by weak duality, which jobs stop at a level of water filling.

    ``job_prices`` [jobs] is None where each job simply pays the least that its throughput costs
    at ``resource_prices``; with space sharing it and ``time_prices`` are explicit.
    """

    resource_prices: Floats
    job_prices: Floats | None = None
    time_prices: Floats | None = None


@dataclass(frozen=True, slots=True)
class RegionCut:
    """Allocations in which a job (its place) costs at most, or at least, so much per hour."""

    job: int
    dollars: float
    is_at_most: bool


@dataclass(frozen=True, slots=True)
class RegionProof:
    """Prices [resources] that bound a sum of ratios where all ``cuts`` hold."""

    cuts: tuple[RegionCut, ...]
    resource_prices: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Time fractions ``x`` [jobs, columns] and pair times, with what they reach and prove.

    ``throughput`` [jobs] is effective, in steps per second of the instance that was solved.
    ``levels`` prove what water filling adds to the first level, lowest first; ``num_unproved``
    jobs, or rows of equal ones, have no such proof. ``regions`` prove the bound of a sum of ratios:
    together they are all allocations. ``is_filled`` says that water filling shared
    out what another policy's optimum left idle; ``unfilled`` why it could not.
    """

    x: Floats
    pairs: PairTimes | None
    throughput: Floats
    objective: float
    bound: float
    gap: float
    job_prices: Floats
    resource_prices: Floats
    time_prices: Floats | None = None
    method: str
    levels: tuple[LevelProof, ...] = ()
    regions: tuple[RegionProof, ...] = ()
    num_unproved: int = 0
    is_filled: bool = False
    unfilled: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedProgram:
    """A program with its equal rows merged into ``small``; ``row_of`` [jobs] tells them apart."""

    instance: Instance
    program: FractionProgram
    small: FractionProgram
    row_of: Ints
    pairing: Pairing | None

    @classmethod
    def of(
        cls,
        instance: Instance,
        program: FractionProgram,
        key: Ints | None = None,
        worth: Floats | None = None,
        charge: Floats | None = None,
    ) -> "MergedProgram":
        """Merge jobs with the same numbers, the same ``key`` [jobs], and who share alike."""
        if instance.pair_rate is None:
            small, row_of = merge(program, key)
            pairing = None
        else:
            worth = np.zeros_like(instance.rate) if worth is None else worth
            kind = instance.kind
            # Two keys as one number.
            alike = kind if key is None else key * (int(kind.max()) + 1) + kind
            small, row_of = merge(program, alike)
            first = np.unique(row_of, return_index=True)[1]
            pairing = Pairing(
                kind=kind[first],
                rate=instance.pair_rate,
                worth=worth[first],
                charge=np.zeros(len(instance.columns)) if charge is None else charge,
            )
        return cls(instance=instance, program=program, small=small, row_of=row_of, pairing=pairing)

    @property
    def first(self) -> Ints:
        """The first job of each row [rows]."""
        return np.unique(self.row_of, return_index=True)[1]

    def solve(self, small: FractionProgram) -> tuple[Solution, PairTimes]:
        """Solve a program over the rows; without space sharing the pair times are empty."""
        if self.pairing is None:
            return solve_alone(small, self.instance.should_stop), NO_PAIRS
        return solve_with_pairs(small, self.pairing, self.instance.should_stop)

    def outcome(self, found: Solution, totals: PairTimes) -> Outcome:
        """A solution over the rows as time fractions of every job, feasible to the last bit."""
        pairs = None
        if self.pairing is None:
            x = tighten(self.program, found.x[self.row_of])
            found = rescored(self.program, found, x)
            throughput = (self.instance.rate * x).sum(axis=1)
        else:
            reached = throughput_with_pairs(self.small, self.pairing, found.x, totals)[0]
            x, throughput = found.x[self.row_of], reached[self.row_of]
            pairs = spread(totals, self.row_of, self.small.count)
        return Outcome(
            x=x,
            pairs=pairs,
            throughput=throughput,
            objective=found.objective,
            bound=found.bound,
            gap=found.gap,
            job_prices=found.job_prices[self.row_of],
            resource_prices=found.resource_prices,
            time_prices=None if found.time_prices is None else found.time_prices[self.row_of],
            method=found.method,
        )


def optimise(
    instance: Instance,
    program: FractionProgram,
    worth: Floats | None = None,
    charge: Floats | None = None,
) -> Outcome:
    """Maximise a program: equal jobs merged, solved, spread over the jobs again, rounded.

    Of several optima: a point inside the optimal face without space sharing, where equal jobs
    also get equal shares; with it the vertex over groups of rows that HiGHS's simplex ends in.
    """
    merged = MergedProgram.of(instance, program, worth=worth, charge=charge)
    return merged.outcome(*merged.solve(merged.small))


def solve_alone(program: FractionProgram, should_stop: Callable[[], bool] = never) -> Solution:
    """Solve without pairs: interior point, or simplex from there where that breaks down."""
    # An interior point method may stop short on programs without an interior, such as those of
    # jobs that must keep exactly what is the most they can have.
    near = solve_interior(program, _FASTEST_WALK, should_stop)
    if near is not None and (near.gap < ACCEPTED_GAP or should_stop()):
        return near
    likely = None if near is None else likely_columns(program, near)
    found = solve_by_simplex(program, likely, should_stop)
    return replace(found, method=f"{found.method}, {BROKE_DOWN}")


def rescored(program: FractionProgram, found: Solution, x: Floats) -> Solution:
    """A solution with the objective and gap that it has after rounding to ``x`` [jobs]."""
    z = level_of(program, x) if program.level_weight else 0.0
    objective = program.objective(x, z)
    gap = max(gap_between(program, objective, found.bound), shortfall(program, x, z))
    return replace(found, z=z, objective=objective, gap=gap)


def tighten(program: FractionProgram, x: Floats) -> Floats:
    """Round so that 5.1 to 5.3 hold to the last bit, summed in any order."""
    # Entries that are dust beside their row's largest become 0: dividing them again would only
    # make noise.
    x = np.where(x < DUST * x.max(axis=1)[:, None], 0.0, x)
    # The most that a sum of so many terms can err, in units of the last place.
    spare = 1.0 - 4 * np.finfo(float).eps * (x.shape[1] + 1)
    total = x.sum(axis=1)
    x = x * np.where(total > spare, spare / np.where(total > 0, total, 1.0), 1.0)[:, None]
    used = resource_use(program, x)
    room = 1.0 - 4 * np.finfo(float).eps * (len(x) + 1)
    tight = (program.level_capacity == 0) & (used > program.capacity * room)
    share = np.where(tight, program.capacity * room / np.where(tight, used, 1.0), 1.0)
    rounded: Floats = x * np.where(program.resources > 0, share[:, None], 1.0).min(axis=0)
    return rounded


def spread(totals: PairTimes, row_of: Ints, count: Floats) -> PairTimes:
    """Pair times of merged rows as pair times of jobs, each member of a row the same share."""
    order = np.argsort(row_of, kind="stable")
    start = np.concatenate(([0], np.cumsum(count)[:-1])).astype(np.int64)
    parts: list[tuple[Ints, Ints, Ints, Floats]] = []
    # Members of two rows are laid end to end and cut at each other's borders, so few pairs have a
    # share; members of one row pair up around a circle.
    for a, b, c, time in zip(totals.a, totals.b, totals.column, totals.time, strict=True):
        left = order[start[a] : start[a] + int(count[a])]
        right = order[start[b] : start[b] + int(count[b])]
        if a == b:
            first, second, part = _circle(left)
        else:
            n, m = len(left), len(right)
            # Borders in units of 1 / (n m): whole numbers, so equal ones meet exactly.
            cuts = np.unique(np.concatenate((np.arange(n) * m, np.arange(m) * n)))
            ends = np.append(cuts[1:], n * m)
            first, second, part = left[cuts // m], right[cuts // n], (ends - cuts) / (n * m)
        parts.append((first, second, np.full(len(first), c), part * time))
    if not parts:
        return totals
    a, b, c, times = (np.concatenate(side) for side in zip(*parts, strict=True))
    return PairTimes(a=a, b=b, column=c, time=times)


def _circle(members: Ints) -> tuple[Ints, Ints, Floats]:
    # Two around a circle would be one pair twice.
    if len(members) == 2:
        return members[:1], members[1:], np.ones(1)
    return members, np.roll(members, -1), np.full(len(members), 1.0 / len(members))
