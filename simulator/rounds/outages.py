"""Rounds while devices are down: the devices that are up, the jobs that fit, and stalls."""

import numpy as np

from ...mechanisms.arrays import Ints
from ...mechanisms.cluster.active import Active
from ...mechanisms.cluster.layout import Layout
from ...mechanisms.cluster.pool import Pool
from ...schema.errors import InfeasibleError, ProblemError
from ...schema.jobs import consolidated_devices
from ..cluster.failures import Failures, Fleet
from .options import RoundOptions

# A run is given up when no job has ended for so many times what all jobs present need without
# failures, and for so many failures and repairs.
STALLED_TIMES = 100.0
STALLED_REPAIRS = 10.0
_HOUR = 3600.0


class Outages:
    """The devices that are up in each round; refuses runs in which no job ends any more."""

    def __init__(self, options: RoundOptions, pool: Pool) -> None:
        """Everything is up.

        Args:
            options: Of the rounds.
            pool: The devices.

        Raises:
            ProblemError: The failures are those of other servers than jobs are placed on.
            InfeasibleError: Failures are so frequent that devices would do hardly any useful work.
        """
        assert options.failures is not None
        options.failures.refuse_hopeless(options.round_seconds)
        seats = [[number] for number in pool.capacity.tolist()]
        placed = Layout.apart(seats if options.servers is None else options.servers)
        layout = options.failures.layout or placed
        if layout.sizes != placed.sizes:
            raise ProblemError(
                "servers fail where these rounds place no jobs; give the rounds the same servers"
            )
        self.failures = Failures(options.failures, layout)
        self.standing = self.fleet.standing()
        self._done, self._since = -1, 0.0

    @property
    def fleet(self) -> Fleet:
        """Which devices are down."""
        return self.failures.fleet

    def up(self, now_seconds: float) -> Ints:
        """Devices of each type that work now [types]; ``standing`` says on which servers."""
        self.standing = self.failures.standing(now_seconds)
        return np.array([sum(row) for row in self.standing], dtype=np.int64)

    def consolidated(self, pool: Pool) -> tuple[int, ...] | None:
        """How many devices of each type jobs can hold consolidated on what is up [types]."""
        if pool.consolidated is None:
            return None
        return consolidated_devices(pool.throughputs, self.standing)

    def refuse_to_stall(self, active: Active, now_seconds: float, num_done: int) -> None:
        """Watch whether jobs end.

        Args:
            active: The jobs present.
            now_seconds: Start of the round.
            num_done: Jobs that ended so far.

        Raises:
            InfeasibleError: None has for very much longer than it takes without failures.
        """
        if num_done > self._done:
            self._done, self._since = num_done, now_seconds
        options = self.failures.options
        means = [m for m in (options.mean_seconds, options.server_mean_seconds) if m is not None]
        patience = STALLED_REPAIRS * (max(means) + options.repair_seconds)
        waited = now_seconds - self._since
        if waited <= patience:
            return
        alone = active.left / active.rate.max(axis=0)
        needed = float(alone.max() + (alone * active.scale).sum() / active.pool.capacity.sum())
        if waited <= patience + STALLED_TIMES * needed:
            return
        largest = active.jobs[int(active.scale.argmax())]
        raise InfeasibleError(
            f"no job has ended for {waited / _HOUR:.4g} h, and the {len(active)} jobs present need "
            f"{needed / _HOUR:.4g} h without failures (the limit is {STALLED_TIMES:g} times that, "
            f"and {STALLED_REPAIRS:g} failures and repairs); job {largest.id!r} needs "
            f"{largest.scale_factor} devices up at once",
            hint="make failures rarer, repairs shorter, or the pool larger",
        )
