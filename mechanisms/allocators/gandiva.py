"""Gandiva's ad-hoc packing, as Gavel's baseline has it (thesis 5.7.3, 5.8)."""

import numpy as np

from ...solvers.allocation.space_sharing.column_generation import PairTimes
from ..arrays import Floats
from ..cluster.active import Active
from .shares import Shares


class Gandiva:
    """Random pairs, kept while they gain; equal time for every pair and job alone.

    While all jobs fit in the cluster no jobs share. Otherwise jobs that are in no pair are paired
    at random, where their scale factors are equal; a pair is broken up when it makes less than
    one of its jobs alone would: when the sum of both rates, each relative to alone, is below 1 on
    average over the types that run both.

    The published code adds the types up instead, so it keeps whatever runs on all of them (on
    three a third of one job's rate is enough), and breaks up what does not run on one.
    """

    name, agnostic, shares_space, leaves_idle = "gandiva", False, True, False

    def __init__(self, seed: int = 0, *, sums_types: bool = False) -> None:
        """Start without pairs.

        Args:
            seed: Of the random pairs.
            sums_types: Judge pairs as the published code does.
        """
        self._random = np.random.default_rng(seed)
        self._partner: dict[str, str] = {}
        self.sums_types = sums_types

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Update the pairs, and give all the same time."""
        place = {job.id: i for i, job in enumerate(active.jobs)}
        if int(active.scale.sum()) <= int(active.capacity.sum()):
            return Shares(self._equal(active, np.arange(len(active)), len(active)))
        self._partner = {
            one: two
            for one, two in self._partner.items()
            if one in place and two in place and self._gain(active, place[one], place[two]) >= 1.0
        }
        self._explore(active)
        first = [place[one] for one, two in self._partner.items() if place[one] < place[two]]
        first.sort()
        second = [place[self._partner[active.jobs[i].id]] for i in first]
        single = np.array([i for i in range(len(active)) if active.jobs[i].id not in self._partner])
        number = len(first) + len(single)
        x = np.zeros_like(active.rate)
        if len(single):
            x[:, single] = self._equal(active, single.astype(np.int64), number)
        each = self._equal(active, np.array(first, dtype=np.int64), number)
        types = len(each)
        return Shares(
            x,
            PairTimes(
                a=np.repeat(np.array(first, dtype=np.int64), types),
                b=np.repeat(np.array(second, dtype=np.int64), types),
                column=np.tile(np.arange(types), len(first)),
                time=each.T.ravel(),
            ),
        )

    def _explore(self, active: Active) -> None:
        alone = [i for i, job in enumerate(active.jobs) if job.id not in self._partner]
        for _ in range(len(alone)):
            if len(alone) < 2:
                return
            one, two = self._random.choice(len(alone), size=2, replace=False).tolist()
            a, b = alone[one], alone[two]
            if active.scale[a] != active.scale[b]:
                continue
            alone = [i for i in alone if i not in (a, b)]
            first, second = active.jobs[a].id, active.jobs[b].id
            self._partner[first], self._partner[second] = second, first

    def _gain(self, active: Active, a: int, b: int) -> float:
        """Sum of a pair's rates relative to the jobs' rates alone; 0 where one of them has none."""
        keys = [(active.jobs[i].model, active.jobs[i].scale_factor) for i in (a, b)]
        rates = active.pool.pair_rates(keys[0], keys[1])
        alone = active.rate[:, [a, b]].T
        runs = (alone > 0).all(axis=0)
        counted = np.ones_like(runs) if self.sums_types else runs
        if not runs.any() or (rates[:, counted] <= 0).any():
            return 0.0
        gain = float((rates[:, runs] / alone[:, runs]).sum())
        return gain if self.sums_types else gain / int(runs.sum())

    def _equal(self, active: Active, jobs: np.ndarray, number: int) -> Floats:
        """1 / ``number`` of each type, at most all of the time in total [types, jobs]."""
        share = active.capacity[:, None] / number / active.scale[jobs]
        answer: Floats = share / np.maximum(share.sum(axis=0), 1.0)
        return answer
