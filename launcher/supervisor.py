"""What every way of looking after a launch's workers has in common.

There are four, and a launch has one of them from its start to its end (supervision.py):

========================  ==========================  ===========================================
class                     for                         when a worker dies
========================  ==========================  ===========================================
``Generations``           a split on one host         the others go on, or all start again
``Repartitions``          a pipeline on one host      all start again, or the launch ends
``Regroup``               several hosts that restart  all hosts start again from a checkpoint
``FirstFailure``          several hosts that do not   the launch ends
========================  ==========================  ===========================================
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..schema.launch import LaunchConfig, WorkerSlot
from .cause import cause_among
from .failures import Failure
from .heartbeat import Limits
from .history import History, LastGeneration
from .inbox import Inbox
from .request import LaunchRequest
from .starting import Starter
from .workers import Workers


class Supervisor(Protocol):
    """Decides what follows when workers fail, hang, or are to change."""

    @property
    def history(self) -> History:
        """The generations so far."""

    @property
    def last(self) -> LastGeneration:
        """Where the workers of the last generation report."""

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, for about so long; a failure that ends the launch."""

    def finish(self) -> None:
        """All workers have left well: take in what happened last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launch whose workers were started, as a supervisor finds it.

    ``slots`` are those of this host. ``check_signals`` raises where a signal came, for who waits
    for other hosts. ``warn`` tells the user something that does not end the launch.
    """

    request: LaunchRequest
    slots: Sequence[WorkerSlot]
    workers: Workers
    inbox: Inbox
    starter: Starter
    check_signals: Callable[[], None]
    warn: Callable[[str], None]

    @property
    def config(self) -> LaunchConfig:
        """The plan at the start, lowered."""
        return self.request.config

    @property
    def limits(self) -> Limits:
        """When a worker counts as hung."""
        return Limits(self.request.heartbeat_seconds, self.request.timeout_seconds)

    def cause(self, config: LaunchConfig, ranks: dict[str, int]) -> Failure | None:
        """The first cause among this host's failures, given a moment to be seen."""
        return cause_among(self.workers, config, ranks)
