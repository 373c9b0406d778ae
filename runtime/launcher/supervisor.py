"""What every way of looking after a launch's workers has in common.

There are four, and a launch has one of them from its start to its end (controller.py):

========================  ==========================  ===========================================
class                     for                         when a worker dies
========================  ==========================  ===========================================
``Generations``           a split on one host         the others go on, or all start again
``Repartitions``          a pipeline on one host      all start again, or the launch ends
``Regroup``               several hosts that restart  all hosts start again from a checkpoint
``FirstFailure``          several hosts that do not   the launch ends
========================  ==========================  ===========================================
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...schema.launch import LaunchConfig, WorkerSlot
from ..protocol import handover
from .failures import Failure, first_cause, silence
from .heartbeat import Limits
from .history import History, LastGeneration
from .inbox import Inbox
from .request import LaunchRequest
from .starting import Starter
from .workers import Workers

# How often a launch starts again from a checkpoint.

MAX_TRIES = 3


class Readable(Protocol):
    """The launch's store, for who only reads it."""

    def read(self, key: str) -> str | None:
        """What workers have left there."""


class Store(Readable, Protocol):
    """The launch's store."""

    def write(self, key: str, value: str) -> None:
        """Leave something for workers."""


class Tries:
    """Three restarts from one checkpoint; one that comes as far as a newer one counts anew."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._place: str | None = None
        self._number = 0

    def take(self, generation: int) -> bool:
        """Whether there may be one more restart.

        Args:
            generation: The one that has started last, from nothing or from a checkpoint.
        """
        found = self._store.read(handover.key(generation, handover.FOUND))
        self._number = self._number + 1 if found == self._place else 1
        self._place = found
        return self._number <= MAX_TRIES

    def forget(self) -> None:
        """All workers have taken up another plan."""
        self._place, self._number = None, 0


# Which failure of this host's workers the others followed from, given a moment to be seen.


# How long a worker that only lost its peers waits for the one that failed first to be seen.
CAUSE_SECONDS = 2.0
POLL_SECONDS = 0.02


def cause_among(workers: Workers, config: LaunchConfig, ranks: Mapping[str, int]) -> Failure | None:
    """The first cause among the failures of this host's workers; None where none has failed."""
    deadline = time.monotonic() + CAUSE_SECONDS
    if not workers.failures():
        return None
    cause = first_cause(workers.failures())
    while cause.is_echo and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        cause = first_cause(workers.failures())
    early = workers.left_early() if cause.is_echo else None
    cause = _staged(early or cause, config, ranks)
    silent = workers.running() if cause.timed_out else []
    if silent:
        return silence(cause, [_staged(worker, config, ranks) for worker in silent])
    return cause


def _staged(failure: Failure, config: LaunchConfig, ranks: Mapping[str, int]) -> Failure:
    """With the stages of the worker, under a pipeline."""
    if config.pipeline is None or failure.rank is None:
        return failure
    rank = ranks.get(str(failure.rank), -1)
    return replace(failure, stages=tuple(config.pipeline.stages_of_rank.get(rank, ())))


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
