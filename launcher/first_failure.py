"""A launch over several hosts that ends with its first failure."""

import time

from .failures import Failure
from .history import History, LastGeneration
from .hosts import Hosts
from .supervisor import Launched


class FirstFailure:
    """This host's part of it: no worker joins or is replaced.

    Args:
        launched: The launch.
        hosts: The other controllers.
    """

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
