"""A launch over several hosts: all workers start again from a checkpoint, or all end.

Each host's controller supervises its own workers. If one of them dies, all hosts stop theirs. When
the last worker is gone, node 0 decides whether all start again.
"""

import time
from typing import cast

from .failures import Failure
from .hosts import Hosts, Together
from .supervisor import Launched, Supervisor


class Regroup(Supervisor):
    """This host's part of it: no worker joins or is replaced."""

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        super().__init__(launched, hosts)
        self._hosts = cast(Together, hosts)

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure that ends the launch."""
        time.sleep(wait_seconds)
        self._workers.hear()
        self._watch.look(self._here())  # nobody, where workers have no line to their controller
        failure = self._cause() or self._hosts.failure_elsewhere()
        if failure is None or self._launched.request.policy == "stop":
            return failure
        return failure if self._hosts.stop_behind(failure) is not None else self._again(failure)

    def _again(self, failure: Failure) -> Failure | None:
        """Start anew with all other hosts; the failure where that is not to be."""
        cause = self._hosts.tell_failure(failure)
        if cause.interrupted or not (cause.by_signal or cause.lost_peer):
            return cause
        self._end(self._ranks)  # before the others are told that they are gone
        may, watch = lambda: self._tries.take(self.number), self._launched.check_signals
        if not self._hosts.starts_again(may, watch):
            return self._hosts.why_not(cause)
        left = self._start_again(self.config)
        self._warn(f"{cause.sentence()}; starting again from the last checkpoint")
        self._remember("restart", cause.sentence(), tuple(self._ranks), left)
        return None
