"""Two baselines that Gavel's figures rest on and hetflow does not offer as policies."""

import numpy as np

from hetflow.mechanisms.cluster.active import Active
from hetflow.simulator import Pool, Shares


class Isolated:
    """X^isolated (thesis 5.4.2): everybody 1/n of each type, whoever else is there."""

    name, agnostic, shares_space, leaves_idle = "isolated", False, False, False

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Split the cluster evenly."""
        capacity = active.pool.capacity.astype(float)
        share = capacity[:, None] / len(active) / active.scale
        share = share / np.maximum(share.sum(axis=0), 1.0)
        return Shares(np.where(active.rate > 0, share, 0.0))


class GavelFifo:
    """FIFO blind to device types as Gavel's code has it, faults included.

    It draws a free type and then uses another: the last in its list of open types, v100 first of
    all. A type leaves the list when its own devices reach zero, but the one that leaves is the one
    drawn. So jobs pile up on V100s beyond what there are, while the draw says something else. The
    rows ``fixfifo`` of stored results have this mended. Two faults stay in both: where a job has
    ended, the head of the queue leaves the queue for this time whether it fits or not, and what it
    must fit in are devices that later jobs, not yet counted, may hold.

    Ours is only that nobody gets a type on which it does not run at all.
    """

    agnostic, shares_space, leaves_idle = True, False, True

    def __init__(self, pool: Pool, seed: int = 0, *, mended: bool = False) -> None:
        """Start empty.

        Args:
            pool: Its device types, in the order of their names, are the list.
            seed: Of the draws.
            mended: Use the type that was drawn.
        """
        self.name = "fifo (Gavel's code, mended)" if mended else "fifo (Gavel's code)"
        self._random, self._mended = np.random.default_rng(seed), mended
        self._order = sorted(range(len(pool.types)), key=lambda kind: pool.types[kind])
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep what runs; a waiting job takes the place of one that is gone, then the rest."""
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
