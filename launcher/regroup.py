"""The generations of a launch over several hosts: all workers start again from a checkpoint.

Each host's controller supervises its own workers. If one of them dies, all hosts stop theirs. When
the last worker is gone, node 0 decides whether all start again.
"""

import time
from collections.abc import Callable, Sequence

from ..schema.launch import LaunchConfig, WorkerSlot
from .failures import Failure
from .heartbeat import Limits, Watch
from .history import History
from .hosts import Together
from .restarts import Tries
from .workers import Workers

Start = Callable[[LaunchConfig, int, dict[str, int]], None]


class Regroup:
    """This host's part of a launch that starts again.

    Args:
        config: The launch.
        slots: Those of this host.
        workers: This host's worker processes.
        hosts: The other controllers.
        start: Starts a generation: config, number, rank of this host's workers by name.
        cause: The first cause among this host's failures, given a moment to be seen.
        limits: When a worker counts as hung.
        interrupted: Raises where a signal came while this host waits for others.
        warn: Tells the user something that does not end the launch.
    """

    def __init__(
        self,
        config: LaunchConfig,
        slots: Sequence[WorkerSlot],
        workers: Workers,
        hosts: Together,
        start: Start,
        *,
        cause: Callable[[LaunchConfig, dict[str, int]], Failure | None],
        limits: Limits,
        interrupted: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._config, self._slots = config, slots
        self._workers, self._hosts, self._start = workers, hosts, start
        self._cause, self._interrupted, self._warn = cause, interrupted, warn
        self._watch, self._tries = Watch(workers, limits), Tries(hosts)
        self._number = 0
        self._ranks = self._named(slots)
        self.history = History()
        everybody = self._named(config.workers)
        self.history.add(0, "start", "the launch", config, everybody, joined=tuple(everybody))

    def _named(self, slots: Sequence[WorkerSlot]) -> dict[str, int]:
        """Names that no generation before had, the same on every host."""
        first = self._number * self._config.world_size
        return {str(first + slot.rank): slot.rank for slot in slots}

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure that ends the launch."""
        time.sleep(wait_seconds)
        for line in self._workers.lines().values():
            line.receive()
        self._watch.look(self._ranks)
        failure = self._cause(self._config, self._ranks) or self._hosts.failure_elsewhere()
        if failure is None or self._hosts.stop_behind(failure) is not None:
            return failure
        return self._again(failure)

    def _again(self, failure: Failure) -> Failure | None:
        """Start anew with all other hosts; the failure where that is not to be."""
        cause = self._hosts.tell_failure(failure)
        if cause.interrupted or not (cause.by_signal or cause.lost_peer):
            return cause
        for name in filter(self._workers.is_held, self._ranks):
            self._workers.forget(name)
        if not self._hosts.starts_again(lambda: self._tries.take(self._number), self._interrupted):
            return self._hosts.why_not(cause)
        left = tuple(self._named(self._config.workers))
        self._number += 1
        self._ranks, everybody = self._named(self._slots), self._named(self._config.workers)
        self._start(self._config, self._number, self._ranks)
        for name, rank in self._ranks.items():
            if rank == 0:
                self._workers.show(name)
        self._warn(f"{cause.sentence()}; starting again from the last checkpoint")
        self.history.add(
            self._number,
            "restart",
            cause.sentence(),
            self._config,
            everybody,
            joined=tuple(everybody),
            left=left,
        )
        return None

    def settle(self) -> None:
        """All workers of this host are done."""

    @property
    def where(self) -> tuple[int, int, int]:
        """Where the last generation reports: its size, its number, the last restart."""
        return self._config.world_size, self._number, self._number

    @property
    def only_newcomers_left(self) -> bool:
        """Whether everyone who trains is done."""
        return all(self._workers.is_done(name) for name in self._ranks)
