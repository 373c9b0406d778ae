"""Pairs of jobs on the same devices, and the choice among all combinations (thesis 5.3.1, 5.5)."""

from dataclasses import dataclass, field

import numpy as np

from ..cluster.active import Active
from ..cluster.pool import Floats, Ints


def _ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


def _floats() -> Floats:
    return np.zeros(0)


@dataclass(slots=True)
class PairShares:
    """Pairs that have a share: jobs ``first`` and ``second`` (places among those present).

    ``column`` is where they share, ``share`` the part of time, ``received`` seconds since the
    allocation, ``rate`` and ``beside`` the steps per second of first and second [pairs].
    """

    first: Ints = field(default_factory=_ints)
    second: Ints = field(default_factory=_ints)
    column: Ints = field(default_factory=_ints)
    share: Floats = field(default_factory=_floats)
    received: Floats = field(default_factory=_floats)
    rate: Floats = field(default_factory=_floats)
    beside: Floats = field(default_factory=_floats)

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def of(
        cls, active: Active, first: Ints, second: Ints, column: Ints, share: Floats, head: float
    ) -> "PairShares":
        """Pairs as an allocator gives them, where both run; ``head`` seconds count as received."""
        jobs = active.jobs
        keys = [(job.model, job.scale_factor) for job in jobs]
        both = np.zeros((2, len(first)))
        known: dict[tuple[int, int], Floats] = {}
        for i, (a, b, c) in enumerate(
            zip(first.tolist(), second.tolist(), column.tolist(), strict=True)
        ):
            kinds = (int(active.kind[a]), int(active.kind[b]))
            if kinds not in known:
                known[kinds] = active.pool.pair_rates(keys[a], keys[b])
            both[:, i] = known[kinds][:, c]
        runs = (both > 0).all(axis=0)
        received = np.full(int(runs.sum()), head)
        return cls(first[runs], second[runs], column[runs], share[runs], received, *both[:, runs])

    def drop(self, done: Ints, number: int) -> None:
        """Forget the pairs of jobs that leave, of ``number`` jobs, and count places anew."""
        kept = np.ones(number, dtype=bool)
        kept[done] = False
        place = np.cumsum(kept) - 1
        both = kept[self.first] & kept[self.second]
        for name in self.__slots__:
            setattr(self, name, getattr(self, name)[both])
        self.first, self.second = place[self.first], place[self.second]


@dataclass(slots=True)
class Chosen:
    """The jobs of a round: job ``first``, beside it ``second`` (-1: none).

    ``column`` is what they were chosen for, ``placed`` what they hold: the same, the type of an
    unconsolidated column, or a mix that has it and leftover devices besides. ``pair`` is the place
    among the pairs, -1 for a job alone.
    """

    first: Ints
    second: Ints
    column: Ints
    placed: Ints
    pair: Ints


def choose_combinations(
    active: Active,
    pairs: PairShares,
    ranked: Floats,
    paired: Floats,
    free: Ints,
    order: list[int] | None,
    ties: Floats | None = None,
) -> Chosen:
    """Algorithm 2 with pairs: the highest priority first, no job twice, what fits.

    Args:
        active: The jobs.
        pairs: Pairs with a share.
        ranked: Priorities of jobs alone, minus infinity where one must not run [columns, jobs].
        paired: Priorities of the pairs [pairs].
        free: Devices of each type [types].
        order: Columns one after another, or None: all in one queue.
        ties: Of equal priorities of jobs alone the larger goes first [columns, jobs].
    """
    number, pool = len(active), active.pool
    jobs = ranked.shape[1]
    flat = ranked.ravel()
    able = (flat > -np.inf).nonzero()[0]
    urgency = np.concatenate((flat[able], paired))
    first = np.concatenate((able % jobs, pairs.first))
    second = np.concatenate((np.full(len(able), -1), pairs.second))
    column = np.concatenate((able // jobs, pairs.column))
    pair = np.concatenate((np.full(len(able), -1), np.arange(len(pairs))))
    keys: list[Floats | Ints] = [-urgency]
    if ties is not None:
        keys.insert(0, np.concatenate((-ties.ravel()[able], np.zeros(len(pairs)))))
    if order is not None:
        turn = np.empty(len(order), dtype=np.int64)
        turn[order] = np.arange(len(order))
        keys.append(turn[column])
    ranking = np.lexsort(tuple(keys))
    uses, room = pool.limits(free, active.consolidated)
    needs = [_needs(uses[:, c]) for c in range(len(pool.columns))]
    times = [1 if mix else 0 for mix in pool.is_mix.tolist()]
    left, idle = room.tolist(), int(room.sum())
    busy = [False] * (number + 1)  # the last is nobody
    scale = active.scale.tolist()
    taken = []
    for place, a, b, c in zip(
        ranking.tolist(), first[ranking].tolist(), second[ranking].tolist(),
        column[ranking].tolist(), strict=True,
    ):  # fmt: skip
        if busy[a] or (b >= 0 and busy[b]):
            continue
        often = times[c] or scale[a]
        if any(count * often > left[kind] for kind, count in needs[c]):
            continue
        for kind, count in needs[c]:
            left[kind] -= count * often
            idle -= count * often
        busy[a] = True
        if b >= 0:
            busy[b] = True
        taken.append(place)
        if idle <= 0:
            break
    kept = np.array(taken, dtype=np.int64)
    placed = pool.devices_of[column[kept]]
    chosen = Chosen(first[kept], second[kept], column[kept], placed, pair[kept])
    if idle > 0 and pool.uses_mixes:
        _extend(active, chosen, np.array(left))
    return chosen


def _extend(active: Active, chosen: Chosen, idle: Ints) -> None:
    """Let jobs, in the order chosen, hold leftover devices of other types too (VirtualFlow 6.5.2).

    Each takes the mix on which it is fastest among those that add only idle devices to what it
    holds.
    """
    pool = active.pool
    for place, job in enumerate(chosen.first.tolist()):
        column = int(chosen.column[place])
        if chosen.second[place] >= 0 or not idle.any():
            continue
        held = pool.resources * active.usage(job)
        more = held - held[:, column][:, None]
        fits = ((more >= 0) & (more <= idle[:, None])).all(axis=0)
        rate = np.where(fits & (pool.is_mix == 1), active.rate[:, job], 0.0)
        best = int(rate.argmax())
        if rate[best] > active.rate[column, job]:
            chosen.placed[place] = best
            idle = idle - more[:, best]


def _needs(held: Ints) -> list[tuple[int, int]]:
    return [(kind, count) for kind, count in enumerate(held.tolist()) if count]
