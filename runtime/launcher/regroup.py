"""The generations of a launch over several hosts: all workers start again from a checkpoint.

Each host's controller supervises its own workers. If one of them dies, all hosts stop theirs. When
the last worker is gone, node 0 decides whether all start again.
"""

import time
from collections.abc import Sequence

from ...schema.launch import WorkerSlot
from .failures import Failure
from .heartbeat import Watch
from .history import History, LastGeneration
from .hosts import Hosts, Together
from .supervisor import Launched, Tries

# A launch over several hosts that ends with its first failure.


class FirstFailure:
    """This host's part of it: no worker joins or is replaced."""

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        self._launched, self._hosts = launched, hosts
        self._ranks = {str(slot.rank): slot.rank for slot in launched.slots}
        self.history = History()

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure, here or on another host."""
        failure = self._launched.cause(self._launched.config, self._ranks)
        if failure is not None:
            return failure
        time.sleep(wait_seconds)
        return self._hosts.failure_elsewhere()

    def finish(self) -> None:
        """There is nothing left to take in."""

    @property
    def last(self) -> LastGeneration:
        """The first generation is the last."""
        return LastGeneration(world_size=self._launched.config.world_size)


class Regroup:
    """This host's part of a launch that starts again."""

    def __init__(self, launched: Launched, hosts: Together) -> None:
        config = launched.config
        self._launched, self._workers, self._hosts = launched, launched.workers, hosts
        self._config, self._slots = config, launched.slots
        self._watch, self._tries = Watch(launched.workers, launched.limits), Tries(hosts)
        self._number = 0
        self._ranks = self._named(launched.slots)
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
        self._workers.hear()
        self._watch.look(self._ranks)
        failure = self._launched.cause(self._config, self._ranks) or self._hosts.failure_elsewhere()
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
        may, watch = lambda: self._tries.take(self._number), self._launched.check_signals
        if not self._hosts.starts_again(may, watch):
            return self._hosts.why_not(cause)
        left = tuple(self._named(self._config.workers))
        self._number += 1
        self._ranks, everybody = self._named(self._slots), self._named(self._config.workers)
        self._launched.starter.restart(self._config, self._number, self._ranks)
        for name, rank in self._ranks.items():
            if rank == 0:
                self._workers.show(name)
        self._launched.warn(f"{cause.sentence()}; starting again from the last checkpoint")
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

    def finish(self) -> None:
        """There is nothing left to take in."""

    @property
    def last(self) -> LastGeneration:
        """Where the workers of the last generation report."""
        return LastGeneration(
            world_size=self._config.world_size, number=self._number, restarted_at=self._number
        )
