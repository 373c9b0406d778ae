"""The state of rounds between two decisions."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....schema.jobs import Job
from ..arrays import Floats, Ints
from ..cluster.active import Active
from ..cluster.pool import Pool
from ..cluster.servers import Servers
from .pairs import PairShares


@dataclass(slots=True)
class RoundState:
    """Jobs with the time they received, and the devices that are up.

    ``up`` [types] are devices that work; ``worker_seconds`` [columns] the sum of the seconds
    received there since the last allocation, at ``last_reset`` (None: there was none).
    ``changed`` says that jobs or devices are others than that allocation saw. ``order`` is the one
    in which types are served, None where it has to be found anew. ``servers`` is None where
    placement does not count. ``random`` draws the order of types for policies that are blind to
    them.
    """

    pool: Pool
    random: np.random.Generator
    servers: Servers | None = None
    active: Active = field(init=False)
    up: Ints = field(init=False)
    worker_seconds: Floats = field(init=False)
    last_reset: float | None = None
    changed: bool = False
    order: list[int] | None = None
    pairs: PairShares = field(default_factory=PairShares)

    @classmethod
    def empty(
        cls, pool: Pool, servers: Sequence[Sequence[int]] | None = None, seed: int = 0
    ) -> "RoundState":
        """No jobs, and every device up.

        Args:
            pool: Devices and throughputs.
            servers: Devices of each type on each server that has it [types][servers]; None:
                placement does not count.
            seed: Of the draws.
        """
        seats = None if servers is None else Servers([list(sizes) for sizes in servers])
        return cls(pool, np.random.default_rng(seed), seats)

    def __post_init__(self) -> None:
        self.active = Active(self.pool)
        self.up = self.pool.capacity
        self.worker_seconds = np.zeros(len(self.pool.columns))

    def admit(self, jobs: list[Job], head_start_seconds: float) -> None:
        """Let jobs in that fit the pool; they have no share before the next allocation."""
        self.active.add(jobs, head_start_seconds)
        self.order = None
        self.worker_seconds += head_start_seconds * len(jobs)
        self.changed = True

    def see(self, up: Ints) -> bool:
        """Note which devices work [types]; whether these are others than before.

        What changed is a reason to allocate anew.
        """
        if not (up != self.up).any():
            return False  # the same array, by which policies know what they solved
        self.up = self.active.capacity = up
        self.changed = True
        return True

    def lost_jobs(self) -> None:
        """Note that jobs left ``active``."""
        self.changed, self.order = True, None

    def leave(self, ids: Collection[str]) -> None:
        """Remove jobs, whatever became of them."""
        places = [place for place, job in enumerate(self.active.jobs) if job.id in ids]
        if not places:
            return
        number = len(self.active)
        self.active.leave(places)
        self.active.sweep()
        self.pairs.drop(np.array(places, dtype=np.int64), number)
        self.lost_jobs()
