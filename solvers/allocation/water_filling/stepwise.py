"""Water filling one level at a time: slow but numerically robust (thesis 5.4.3).

Each program raises all active rows along their shares as far as they go together; the rows whose
demand has a price at its optimum can go no further, whatever the others do. That is one program
of the simplex method for each level, up to as many as rows, where ``water`` needs a few for each
device type; each starts from the last one's basis.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....schema.errors import BackendError
from ...effort import OutOfTimeError
from ..engine import NO_PAIRS, LevelProof, MergedProgram
from ..program import Bools, Floats, FractionProgram, Solution
from ..space_sharing.column_generation import (
    Pairing,
    PairProgram,
    PairTimes,
    no_pairing,
    throughput_with_pairs,
)
from .bottlenecks import AT_CAP, STUCK_PART, LeastCost, Linear, PriceCut
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
    alone = small.rate.max(axis=1) / small.level
    loose: Bools = reached < best * (1.0 - ROOM)
    more = np.maximum(reached * (1.0 + ROOM), 2.0 * ROOM * alone)
    for stage in stages:
        pays, wanted = stage.proof.pays(reached), stage.proof.pays(more)
        done = level <= stage.level * (1.0 + SAME_LEVEL)
        others = float((small.count * pays)[done].sum()) - np.where(done, pays, 0.0)
        ends = stage.active & (level >= stage.level * (1.0 - SAME_LEVEL))
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


def rise(merged: MergedProgram, tree: RowTree, best: Floats) -> RaisedLevels:
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
        path = Path(tree, level, active, best * (1.0 + ABOVE))
        step = path.levels(path.times[1]) - level
        program = replace(
            small, floor=small.level * level, level=small.level * step,
            demands=(level > 0) | (step > 0),
        )  # fmt: skip
        found, pairs = held.solve(program)
        level = level + min(max(found.z, 0.0), 1.0) * step
        if first is None:
            assert found.time_prices is not None
            asked = replace(program, level=program.level / path.times[1])
            unit = float(program.count @ (found.job_prices * asked.level))
            prices = found.job_prices / unit, found.resource_prices / unit, found.time_prices / unit
            first = asked, *prices
        share = np.where(active, small.count * found.job_prices * program.level, 0.0)
        stuck = active & (share > STUCK_PART * share.max())
        if (level < best * (1.0 - AT_CAP))[stuck].any():
            proof = _proof(merged, found, program.floor)
            stages.append(FillingStage(proof=proof, level=level, active=active.copy()))
        active &= ~(stuck | (level >= best * (1.0 - AT_CAP)))
    assert found is not None
    assert first is not None
    reached = throughput_with_pairs(small, pairing, found.x, pairs)[0] / small.level
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
            if self.open is None or self.age == RENEWED_AFTER:
                seed = self.pairs if self.programs else None
                self.open = PairProgram(program, self.pairing, seed, self.row)
                self.age = 0
            found, self.pairs = self._relaxed(self.open, program)
            self.programs, self.age = self.programs + 1, self.age + 1
            has = program.floor + np.clip(found.z, 0.0, 1.0) * program.level
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
