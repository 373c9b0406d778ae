"""Two baselines of Gavel's figures that hetflow does not offer as policies."""

import numpy as np

from hetflow.clusters.mechanisms.allocators import Shares
from hetflow.clusters.mechanisms.cluster.active import Active
from hetflow.clusters.mechanisms.cluster.pool import ClusterPool


class Isolated:
    """X^isolated (thesis 5.4.2): each of n jobs gets 1/n of each type, whatever the other jobs."""

    name, agnostic, shares_space, leaves_idle = "isolated", False, False, False

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Split the cluster evenly."""
        capacity = active.pool.capacity.astype(float)
        share = capacity[:, None] / len(active) / active.scale
        share = share / np.maximum(share.sum(axis=0), 1.0)
        return Shares(np.where(active.rate > 0, share, 0.0))


class GavelFifo:
    """FIFO without heterogeneity as in Gavel's code, with its faults.

    The code draws a free type at random and then uses another: the last one in its list of open
    types, with v100 first of all. A type should leave the list when all its devices are taken, but
    the drawn type leaves instead. So more jobs are on V100s than there are V100s. The rows
    ``fixfifo`` of stored results have this fixed. Two faults remain in both. Where a job has ended,
    the head of the queue leaves the queue for this time, whether it fits or not. And it must fit
    into devices that later jobs, not yet counted, may hold.

    One rule is ours: no job gets a type on which it cannot run.
    """

    agnostic, shares_space, leaves_idle = True, False, True

    def __init__(self, pool: ClusterPool, seed: int = 0, *, mended: bool = False) -> None:
        """Start without jobs.

        Args:
            pool: Its device types in the order of their names are the list of open types.
            seed: Seed of the random draws.
            mended: Use the type that was drawn.
        """
        self.name = "fifo (Gavel's code, mended)" if mended else "fifo (Gavel's code)"
        self._random, self._mended = np.random.default_rng(seed), mended
        self._order = sorted(range(len(pool.types)), key=lambda kind: pool.types[kind])
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep running jobs; waiting jobs first replace ended ones, then the rest start."""
        place = {job.id: number for number, job in enumerate(active.jobs)}
        scale, runs = active.scale.tolist(), (active.rate > 0).tolist()
        free = active.pool.capacity.tolist()
        queue = sorted((id_ for id_ in place if id_ not in self._type), key=int)

        def fits(id_: str, kind: int) -> bool:
            return bool(scale[place[id_]] <= free[kind] and runs[kind][place[id_]])

        def take(id_: str, kind: int) -> None:
            self._type[id_] = kind
            free[kind] -= scale[place[id_]]

        for id_, kind in sorted(self._type.items(), key=lambda item: int(item[0])):
            if id_ in place:
                free[kind] -= scale[place[id_]]
                continue
            del self._type[id_]
            if queue and fits(head := queue.pop(0), kind):
                take(head, kind)
        open_ = [kind for kind in self._order if free[kind] > 0]
        while queue and open_:
            head = queue.pop(0)
            fitting = [number for number, kind in enumerate(open_) if fits(head, kind)]
            if not fitting:
                break
            drawn = fitting[int(self._random.integers(len(fitting)))]
            used = open_[drawn if self._mended else -1]
            if not runs[used][place[head]]:
                continue
            take(head, used)
            if free[used] == 0:
                open_.pop(drawn)
        share = np.zeros_like(active.rate)
        for id_, kind in self._type.items():
            share[kind, place[id_]] = 1.0
        return Shares(share)
