"""Programs with space sharing: columns for pairs of rows, generated when their reduced cost pays.

Rows that differ only in what they demand are solved as one group (``groups``). The simplex method
of HiGHS solves the program over the columns and constraints at hand (``master``); constraints
join until the groups' times suffice for each of their rows, pairs until none earns anything at
the program's prices (``pairs``). Then the times are dealt out to the rows.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ....schema.errors import BackendError
from ...effort import never
from ..program import Floats, FractionProgram, Ints, Solution, dual_bound, gap_between
from .groups import Groups, deal, each_apart, grouped
from .master import TOLERANCE, Master, RowPrices
from .pairs import Pairing, PairTimes, Partners

__all__ = [
    "PairProgram", "PairTimes", "Pairing", "bound_with_pairs", "no_pairing", "pair_time", "solve",
    "spare_prices", "throughput_with_pairs",
]  # fmt: skip

MAX_ROUNDS = 500
# Up to so many rows need no groups, and up to so many groups all pairs at once are cheaper than
# generating them.
FULL_ROWS = 40


def solve(
    program: FractionProgram, pairing: Pairing, should_stop: Callable[[], bool] = never
) -> tuple[Solution, PairTimes]:
    """Maximise over singles and pairs; exact, a vertex of the groups' optimal face.

    Args:
        program: The program over rows alone.
        pairing: Who may share.
        should_stop: Asked before pairs join; True ends with those at hand.

    Raises:
        BackendError: HiGHS finds no optimum.
    """
    return PairProgram(program, pairing, should_stop=should_stop).solve(program)


class PairProgram:
    """A program held open: other levels, floors and demands, solved from the last basis."""

    def __init__(
        self,
        program: FractionProgram,
        pairing: Pairing,
        seed: PairTimes | None = None,
        row: Floats | None = None,
        should_stop: Callable[[], bool] = never,
    ) -> None:
        """Start with no pairs, or few.

        Args:
            program: The program over rows alone.
            pairing: Who may share.
            seed: Pairs of rows to start from, such as those of a similar program's answer.
            row: What demands are measured in [rows], best rates otherwise; given, every row is
                a group of its own.
            should_stop: Asked before pairs join; True ends with those at hand.
        """
        self._should_stop = should_stop
        self._pairing, self._row = pairing, row
        self._partners = partners_of(program, pairing)
        rows = len(program.count)
        apart = row is not None or rows <= FULL_ROWS
        groups = each_apart(rows) if apart else grouped(program, pairing)
        self._start(program, groups, _triples(program, groups, seed))

    def _start(
        self, program: FractionProgram, groups: Groups, seed: set[tuple[int, int, int]]
    ) -> None:
        self._groups = groups
        self._master = master = Master(
            program, self._pairing, groups, self._row,
            self._partners if groups.number == len(groups.of) else None,
        )  # fmt: skip
        self._whole = groups.number <= FULL_ROWS
        self._known = master.all_pairs() if self._whole else seed
        master.add_pairs(self._known)

    def solve(self, program: FractionProgram) -> tuple[Solution, PairTimes]:
        """Maximise a program that differs from the first in levels, floors and demands alone.

        Raises:
            BackendError: HiGHS finds no optimum.
        """
        if program is not self._master.program:
            self._master.ask(program)
        rounds = 0
        while True:
            rounds += self._optimise()
            master = self._master
            z = float(master.values[0]) * master.unit if master.program.level_weight else 0.0
            dealt = deal(program, self._pairing, self._groups, *master.times(), z)
            if not dealt.clashes:
                break
            # A job would share with itself: its group is taken apart, and solved again.
            apart = self._groups.split(dealt.clashes)
            self._start(program, apart, _triples(program, apart, dealt.pairs))
        return _read(
            program, self._pairing, self._partners, dealt.x, dealt.pairs, master.prices(), rounds
        )

    def _optimise(self) -> int:
        master, rounds = self._master, 0
        while True:
            self._bounded()
            rounds += 1
            fresh = set() if self._whole else master.paying() - self._known
            if not fresh or rounds >= MAX_ROUNDS or self._should_stop():
                return rounds
            self._known |= fresh
            master.add_pairs(fresh)

    def _bounded(self) -> None:
        """Solve, adding constraints until none is violated."""
        try:
            self._separated()
        except BackendError:
            # Floors may be out of reach for the pairs at hand.
            program = self._master.program
            if self._whole or not program.floor.any():
                raise
            fresh = _pairs_for_floors(program, self._pairing, self._groups) - self._known
            if not fresh:
                raise
            self._known |= fresh
            self._master.add_pairs(fresh)
            self._separated()

    def _separated(self) -> None:
        for _ in range(MAX_ROUNDS):
            self._master.solve()
            if not self._master.separate():
                return
        raise BackendError("the allocation program's constraints found no end")


def _triples(
    program: FractionProgram, groups: Groups, pairs: PairTimes | None
) -> set[tuple[int, int, int]]:
    """Pairs of rows as pairs of groups; no job is its own partner."""
    if pairs is None:
        return set()
    alone = np.bincount(groups.of, weights=program.count) < 2
    a, b = groups.of[pairs.a], groups.of[pairs.b]
    kept = (a != b) | ~alone[a]
    low, high = np.minimum(a, b)[kept], np.maximum(a, b)[kept]
    return {*zip(low.tolist(), high.tolist(), pairs.column[kept].tolist(), strict=True)}


def _pairs_for_floors(
    program: FractionProgram, pairing: Pairing, groups: Groups
) -> set[tuple[int, int, int]]:
    """Pairs with which all floors can be met, if that is possible: those of a max-min program."""
    lift = replace(
        program,
        gain=np.zeros_like(program.gain),
        level=program.floor,
        floor=np.zeros_like(program.floor),
        demands=program.floor > 0,
        level_weight=1.0,
        level_capacity=np.zeros_like(program.level_capacity),
    )
    free = replace(
        pairing, worth=np.zeros_like(pairing.worth), charge=np.zeros_like(pairing.charge)
    )
    return _triples(program, groups, solve(lift, free)[1])


def no_pairing(program: FractionProgram) -> Pairing:
    """A pairing in which no two rows may share."""
    columns = program.rate.shape[1]
    return Pairing(
        kind=np.zeros(len(program.count), dtype=np.int64),
        rate=np.zeros((1, 1, columns)),
        worth=np.zeros_like(program.rate),
        charge=np.zeros(columns),
    )


def spare_prices(
    program: FractionProgram, pairing: Pairing, y: Floats, price: Floats, u: Floats
) -> Floats:
    """How much dearer each row's throughput might be before any column pays for itself [rows].

    All rows at once may be dearer by this; 0 where some column costs nothing, alone or in
    a pair.
    """
    partners = partners_of(program, pairing)
    earned = partners.beside(partners.lines(y[:, None] + pairing.worth, u))
    helped = np.maximum(earned.max(axis=1), 0.0)
    rent = program.usage * (price @ program.resources + pairing.charge)
    left = rent - helped + u[:, None] - (y[:, None] + pairing.worth) * program.rate
    beside = pairing.rate.max(axis=1)[pairing.kind]
    fastest = np.maximum(program.rate, np.where(program.rate > 0, beside, 0.0))
    left = np.where(left > TOLERANCE * float(rent.max()), left, 0.0)
    each = np.where(program.rate > 0, left / np.where(fastest > 0, fastest, 1.0), np.inf)
    spare: Floats = 0.5 * each.min(axis=1)
    return spare


def partners_of(program: FractionProgram, pairing: Pairing) -> Partners:
    """Which rows may share with which."""
    return Partners(pairing.rate, pairing.kind, program.rate > 0, program.usage, program.count < 2)


def bound_with_pairs(
    program: FractionProgram,
    pairing: Pairing,
    y: Floats,
    price: Floats,
    u: Floats,
    partners: Partners | None = None,
) -> tuple[float, Floats, Floats, Floats]:
    """The upper bound that prices prove when rows may share; ``u`` [rows] prices time."""
    alone, fair, prices = dual_bound(program, y, price)
    if not np.isfinite(alone):
        return alone, fair, prices, u
    scale = float(prices.sum() / price.sum()) if price.sum() > 0 else 1.0
    rent = prices @ program.resources
    worth = program.gain + fair[:, None] * program.rate - program.usage * rent
    rent = rent + pairing.charge
    time = np.maximum(np.where(program.rate > 0, worth, 0.0).max(axis=1), u * scale)
    partners = partners_of(program, pairing) if partners is None else partners
    value = partners.lines(fair[:, None] + pairing.worth, time)
    time = time + max(0.0, partners.surplus(value, rent)) / 2
    bound = program.capacity @ prices + program.count @ (time - fair * program.floor)
    return float(bound), fair, prices, time


def _read(
    program: FractionProgram,
    pairing: Pairing,
    partners: Partners,
    x: Floats,
    pairs: PairTimes,
    prices: RowPrices,
    rounds: int,
) -> tuple[Solution, PairTimes]:
    spent = pair_time(pairs, len(x)) / program.count + x.sum(axis=1)
    used = program.resources @ (program.count @ (program.usage * x))
    held = program.usage[pairs.a, pairs.column] * pairs.time
    used = used + program.resources[:, pairs.column] @ held
    limit = np.where(program.level_capacity > 0, np.inf, np.maximum(program.capacity, 1e-300))
    spare = 1.0 + 8 * np.finfo(float).eps * (len(pairs.time) + x.size)
    share = max(1.0, spare * float(spent.max()), spare * float((used / limit).max()))
    x, pairs = x / share, replace(pairs, time=pairs.time / share)
    reached, gained = throughput_with_pairs(program, pairing, x, pairs)
    rows = program.demands & (program.level > 0)
    slack = (reached - program.floor)[rows]
    z = float((slack / program.level[rows]).min()) if rows.any() and program.level_weight else 0.0
    objective = gained + program.level_weight * z
    bound, y, price, u = bound_with_pairs(
        program, pairing, prices.y, prices.resources, prices.u, partners
    )
    needed = np.where(program.floor > 0, program.floor, np.inf)
    lacking = np.where(program.demands, (program.floor - reached) / needed, 0.0).max(initial=0.0)
    return Solution(
        x=x,
        z=z,
        objective=objective,
        bound=bound,
        gap=max(gap_between(program, objective, bound), float(lacking)),
        job_prices=y,
        resource_prices=price,
        time_prices=u,
        method=f"HiGHS simplex over pairs, {rounds} rounds",
    ), pairs


def pair_time(pairs: PairTimes, rows: int) -> Floats:
    """Total time of each row spent in pairs [rows]."""
    both = np.concatenate((pairs.a, pairs.b))
    return _summed(both, np.concatenate((pairs.time, pairs.time)), rows)


def _summed(index: Ints, weights: Floats, rows: int) -> Floats:
    total: Floats = np.bincount(index, weights=weights, minlength=rows).astype(np.float64)
    return total


def throughput_with_pairs(
    program: FractionProgram, pairing: Pairing, x: Floats, pairs: PairTimes
) -> tuple[Floats, float]:
    """Throughput of one job of each row [rows], and the total gain."""
    a, b, c = pairs.a, pairs.b, pairs.column
    first = pairing.rate[pairing.kind[a], pairing.kind[b], c] * pairs.time
    second = pairing.rate[pairing.kind[b], pairing.kind[a], c] * pairs.time
    rows = len(x)
    shared = (_summed(a, first, rows) + _summed(b, second, rows)) / program.count
    gain = float(program.count @ (program.gain * x).sum(axis=1))
    gain += float(pairing.worth[a, c] @ first + pairing.worth[b, c] @ second)
    gain -= float((pairing.charge[c] * program.usage[a, c]) @ pairs.time)
    return (program.rate * x).sum(axis=1) + shared, gain
