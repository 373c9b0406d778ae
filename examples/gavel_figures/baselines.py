"""Two baselines that Gavel's figures rest on and hetflow does not offer as policies."""

import numpy as np

from hetflow.simulator import Pool, Shares
from hetflow.simulator.active import Active


class Isolated:
    """X^isolated (thesis 5.4.2): everybody 1/n of each type, whoever else is there."""

    name, agnostic, shares_space = "isolated", False, False

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Split the cluster evenly."""
        capacity = active.pool.capacity.astype(float)
        share = capacity[:, None] / len(active) / active.scale
        share = share / np.maximum(share.sum(axis=0), 1.0)
        return Shares(np.where(active.rate > 0, share, 0.0))


class FaultyFifo:
    """FIFO blind to device types as Gavel's code has it, fault included.

    It draws a free type and then uses another: the last in its list of open types, v100 first of
    all. A type leaves the list when its own devices reach zero, but the one that leaves is the one
    drawn. So jobs pile up on V100s beyond what there are, while the draw says something else.
    """

    name, agnostic, shares_space = "fifo (Gavel's code)", True, False

    def __init__(self, pool: Pool, seed: int = 0) -> None:
        """Start empty.

        Args:
            pool: Its device types, in the order of their names, are the list.
            seed: Of the draws.
        """
        self._random = np.random.default_rng(seed)
        self._order = sorted(range(len(pool.types)), key=lambda kind: pool.types[kind])
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep what runs; a waiting job takes the place of one that is gone, then the rest."""
        jobs = active.jobs
        scale = dict(zip((job.id for job in jobs), active.scale.tolist(), strict=True))
        free = active.pool.capacity.tolist()
        gone = [kind for id_, kind in self._type.items() if id_ not in scale]
        self._type = {id_: kind for id_, kind in self._type.items() if id_ in scale}
        for id_, kind in self._type.items():
            free[kind] -= scale[id_]
        queue = [job.id for job in jobs if job.id not in self._type]
        for kind in gone:
            if queue and scale[queue[0]] <= free[kind]:
                self._take(queue.pop(0), kind, scale, free)
        open_ = [kind for kind in self._order if free[kind] > 0]
        while queue and open_:
            fitting = [place for place, kind in enumerate(open_) if free[kind] >= scale[queue[0]]]
            if not fitting:
                break
            drawn = fitting[int(self._random.integers(len(fitting)))]
            used = open_[-1]
            self._take(queue.pop(0), used, scale, free)
            if free[used] == 0:
                open_.pop(drawn)
        share = np.zeros_like(active.rate)
        for number, job in enumerate(jobs):
            if job.id in self._type:
                share[self._type[job.id], number] = 1.0
        return Shares(share)

    def _take(self, job: str, kind: int, scale: dict[str, int], free: list[int]) -> None:
        self._type[job] = kind
        free[kind] -= scale[job]
