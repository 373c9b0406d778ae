"""What every way of looking after a launch's workers has in common.

There are three, and a launch has one of them from its start to its end (controller.py):

================  ======================  ========================================================
class             for                     when a worker dies
================  ======================  ========================================================
``Generations``   a split on one host     the others go on, or all start again from a checkpoint
``Repartitions``  a pipeline on one host  all start again from a checkpoint, or the launch ends
``Regroup``       several hosts           all hosts start again from a checkpoint, or all end
================  ======================  ========================================================

Each is a machine of states; docs/architecture.md draws them.
"""

import contextlib
import fcntl
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import IO, Literal, cast

from ...schema import files
from ...schema.errors import FileError, HetflowError, ProblemError
from ...schema.launch import LaunchConfig, ResizeAnswer, ResizeRequest, WorkerSlot
from ...schema.run import Generation, GenerationKind, GenerationWorker
from ..protocol import handover
from ..protocol.control import CURRENT, FOLDER, LOCK, REQUEST, answer_to
from .failures import Failure, first_cause, silence
from .hosts import Hosts, SeveralHosts
from .mapping import devices_of
from .request import LaunchRequest
from .spawn import check_memory
from .store import LastGeneration
from .workers import Starter, WorkerLine, Workers

# Find hanging workers: those without heartbeats, and those that others wait for too long.

_PARTED_SECONDS = 3.0  # in which neither moves: an exchange that ends takes milliseconds
_HEARD_SECONDS = 1.5


class Watch:
    """Ends workers that hang; their failures say so."""

    def __init__(self, workers: Workers, request: LaunchRequest) -> None:
        self._workers, self._request = workers, request
        self._stopped_since: dict[str, float] = {}

    def look(self, names: Iterable[str]) -> None:
        """End those of some workers that hang.

        There is no limit on a worker's start while it sends heartbeats. Imports may delay
        heartbeats, so during the start only a worker that a signal has stopped is ended soon. The
        same holds for a worker that has finished: its interpreter may take any time to end.
        """
        lines = self._workers.lines()
        watched = {name: lines[name] for name in names if name in lines}
        now = time.monotonic()
        found = dict(_hung(watched, self._request, now))
        for name, line in watched.items():
            if line.is_finished:
                why = self._stopped(name, now, "left")
            else:
                why = None if line.is_prepared else self._stuck(name, line, now)
            if why is not None:
                # Last: what a start or an end explains is more exact than that a worker hangs.
                found[name] = why
        for name, why in found.items():
            self._workers.kill(name, f"{why} and was killed")

    def _stopped(self, name: str, now: float, doing: str) -> str | None:
        """The message about a worker that a signal has stopped for too long."""
        since = self._stopped_since.setdefault(name, now)
        if not self._workers.is_stopped(name):
            del self._stopped_since[name]
        elif now - since > self._request.heartbeat_seconds:
            return f"was stopped for {now - since:.1f} s while it {doing}"
        return None

    def _stuck(self, name: str, line: WorkerLine, now: float) -> str | None:
        """The message about a worker that has not reached ``hf.prepare`` and makes no progress."""
        if why := self._stopped(name, now, "started"):
            return why
        # A worker that has never been heard counts from when it was started.
        quiet = now - (line.began if line.heard_at is None else line.heard_at)
        if quiet > self._request.timeout_seconds:
            return f"gave no sign of life for {quiet:.1f} s while it started"
        return None


def _hung(
    lines: Mapping[str, WorkerLine], request: LaunchRequest, now: float
) -> Iterator[tuple[str, str]]:
    """The workers that hang, each with what to say of it.

    A frozen or stopped process falls silent. One that hangs in its own code beats on, but gets no
    further while at least one other waits in an exchange. One that has not come to ``hf.prepare``,
    or has finished, does neither.
    """
    # Without anybody who waits for it a worker may compute for as long as it likes: a first step
    # that compiles takes minutes.
    others_wait = any(line.is_waiting for line in lines.values())
    for name, line in lines.items():
        if line.heard_at is None or not line.is_prepared or line.is_finished:
            continue
        silent = now - line.heard_at
        if silent > request.heartbeat_seconds:
            yield name, f"gave no sign of life for {silent:.1f} s"
        elif others_wait and not line.is_waiting and now - line.moved_at > request.timeout_seconds:
            yield name, f"got no further for {request.timeout_seconds:g} s"


def parted(lines: Mapping[str, WorkerLine], now: float) -> tuple[str, str] | None:
    """A worker whose script has ended, and one that waits for it in its loop; None as a rule."""
    # Recently heard and long unmoved: a worker that is silent as well is frozen, which ``_hung``
    # tells.
    still = {
        name: line
        for name, line in lines.items()
        if line.heard_at is not None
        and not line.is_finished
        and now - line.heard_at < _HEARD_SECONDS
        and now - line.moved_at > _PARTED_SECONDS
    }
    left = [name for name, line in still.items() if line.left_at is not None]
    waits = [name for name, line in still.items() if line.is_waiting and line.left_at is None]
    return (left[0], waits[0]) if left and waits else None


# The controller's side of requests to a running launch (protocol/control.py has the other).


class Inbox:
    """Requests to one launch, and their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        for old in self.folder.glob("*"):
            old.unlink(missing_ok=True)
        self.folder.mkdir(exist_ok=True)
        # Clients see by this lock whether a launch still answers here: the system lets go of it
        # however the process ends.
        self._lock: IO[bytes] = (self.folder / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._seen: set[str] = set()

    def show(self, config: LaunchConfig) -> None:
        """Say what the mapping is now."""
        files.write(self.folder / CURRENT, config, force=True)

    def next(self) -> tuple[Path, ResizeRequest] | None:
        """The oldest request that was not handed out before; broken ones are answered here."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder)):
                if not name.startswith(REQUEST) or name in self._seen:
                    continue
                # Noted before it is read, so that a broken request is answered once and not at
                # every look.
                self._seen.add(name)
                path = self.folder / name
                try:
                    request = files.read(path, ResizeRequest)
                    if not request.wants_answer:
                        path.unlink(missing_ok=True)
                    return path, request
                except HetflowError as error:
                    self.answer(path, ResizeAnswer(status="refused", detail=error.message))
        return None

    def answer(self, request: Path, answer: ResizeAnswer) -> None:
        """Answer a request, unless who asked has gone and taken it along."""
        with contextlib.suppress(OSError, FileError):
            if request.exists():
                files.write(answer_to(request), answer, force=True)

    def close(self) -> None:
        """The launch is over: remove all files but answers that a client still waits for."""
        # Before the files go: a client that asked just now would wait for its answer in vain.
        while (waiting := self.next()) is not None:
            self.answer(waiting[0], ResizeAnswer(status="refused", detail="the run has ended"))
        for path in [*self.folder.glob("*.json"), self.folder / LOCK]:
            if not path.name.startswith(("answer-", REQUEST)):
                path.unlink(missing_ok=True)
        self._lock.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


# How often a launch starts again from a checkpoint.

MAX_TRIES = 3


class Tries:
    """Three restarts from one checkpoint; one that comes as far as a newer one counts anew."""

    def __init__(self, store: Hosts) -> None:
        self._store = store
        self._place: str | None = None
        self._number = 0

    def take(self, generation: int) -> bool:
        """Whether there may be one more restart.

        Args:
            generation: The one that has started last, from nothing or from a checkpoint.
        """
        # Tries count by the checkpoint that the generation went on from. A run that comes further
        # each time makes progress, however often it is broken; one that does not would try for
        # ever.
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
    # The first failure that is seen need not be the first that happened: a worker that waited on a
    # socket sees its peer's death at once, the controller by its next look.
    while cause.is_echo and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        cause = first_cause(workers.failures())
    # Nobody failed but a worker left with exit code 0: then that is why the others wait in vain.
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


@dataclass(slots=True, kw_only=True)
class Change:
    """The next mapping of work to workers, until all of them have changed to it.

    ``number`` is its generation, and ``ranks`` has its workers by name; ``request`` is None where
    the controller asked by itself. ``ready`` are the workers that it waits for and that have come.
    """

    config: LaunchConfig
    number: int
    ranks: dict[str, int]
    joining: tuple[str, ...]
    leaving: tuple[str, ...]
    request: Path | None
    detail: str
    kind: Literal["resize", "replace"] = "resize"
    began: float = field(default_factory=time.monotonic)
    ready: set[str] = field(default_factory=set)
    start_seconds: float | None = None


class Supervisor(ABC):
    """Decides what follows when workers fail, hang, or are to change.

    Attributes:
        config: What the workers of the newest generation run.
        number: Its number, from 0. One that is announced may be higher.
        restarted_at: The generation that last started from nothing or from a checkpoint.
        generations: Those so far, for the run record.
    """

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        self._launched, self._workers, self._inbox = launched, launched.workers, launched.inbox
        self._starter, self._warn, self._store = launched.starter, launched.warn, hosts
        self._watch, self._tries = Watch(launched.workers, launched.request), Tries(hosts)
        self.config, self.number, self.restarted_at = launched.config, 0, 0
        # The highest number that was announced; ``number`` follows it once all workers have
        # changed.
        self._highest = 0
        # Names are never used again, so that nothing a worker has left is taken for another's.
        self._fresh = map(str, count())
        self._ranks = self._named(self.config)
        self._change: Change | None = None
        self._began = time.monotonic()
        self.generations: list[Generation] = []
        self._remember("start", "the launch", joined=tuple(self._ranks))

    @abstractmethod
    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, for about so long; a failure that ends the launch."""

    def finish(self) -> None:
        """All workers have left well: take in what happened last."""
        return None

    @property
    def last(self) -> LastGeneration:
        """Where the workers of the last generation report."""
        return LastGeneration(
            world_size=self.config.world_size, number=self.number, restarted_at=self.restarted_at
        )

    def _named(self, config: LaunchConfig) -> dict[str, int]:
        return {next(self._fresh): slot.rank for slot in config.workers}

    def _here(self) -> dict[str, int]:
        if self._launched.request.rendezvous is None:
            return self._ranks
        own = {slot.rank for slot in self._launched.slots}
        return {name: rank for name, rank in self._ranks.items() if rank in own}

    def _cause(self) -> Failure | None:
        """The first cause among this host's failures, given a moment to be seen."""
        return cause_among(self._workers, self.config, self._here())

    def _serve(self) -> None:
        """Begin the change that somebody asks for, or say why not."""
        waiting = self._inbox.next()
        if waiting is None:
            return
        path, request = waiting
        try:
            if self._change is not None:
                raise ProblemError(
                    "a resize is in progress already", hint="ask again when it is done"
                )
            # Before any process starts: what does not fit is refused while the job trains on
            # undisturbed.
            check_memory(request.config.workers, request.config)
            self._change_to(request.config, path)
        except HetflowError as error:
            answer = ResizeAnswer(status="refused", detail=error.message, hint=error.hint)
            self._inbox.answer(path, answer)

    def _change_to(self, config: LaunchConfig, path: Path) -> None:
        raise NotImplementedError  # several hosts show no mapping, so nobody asks for another

    def _arrived(self, change: Change, pause_seconds: float | None) -> ResizeAnswer:
        """All workers have changed; the answer for who asked."""
        self.config, self._ranks, self.number = change.config, change.ranks, change.number
        self._change = None
        # Shown before it is answered: who gets the answer may read the mapping at once.
        self._inbox.show(self.config)
        joined, left = change.joining, change.leaving
        self._remember(change.kind, change.detail, joined, left, pause_seconds)
        return ResizeAnswer(
            status="done",
            detail=f"{devices_of(self.config)} from now on",
            generation=self.number,
            joined=joined,
            left=left,
            start_seconds=change.start_seconds,
            pause_seconds=pause_seconds,
        )

    def _give_up(self, why: str) -> None:
        """Give a change up; the job continues unchanged."""
        change, self._change = self._change, None
        if change is None:
            return
        # Only workers that joined are ended. Those of before have lost nothing, and keep training.
        self._end(change.joining)
        if change.request is not None:
            self._inbox.answer(change.request, ResizeAnswer(status="failed", detail=why))
        elif change.kind == "replace":
            self._warn(f"no replacement: {why}")

    def _start_again(self, config: LaunchConfig) -> tuple[str, ...]:
        """End all workers, and start others from the last checkpoint; those before."""
        left = tuple(self._ranks)
        # All of the old workers are gone before any new one starts: they hold the devices' memory,
        # and a late write of one of them would reach the folder of checkpoints.
        self._end(left)
        # Not ``number + 1``: a generation that was announced and then broken off has used its
        # number, and its workers may still speak of it.
        self._highest += 1
        self.config, self.number, self.restarted_at = config, self._highest, self._highest
        self._ranks = self._named(config)
        self._starter.start("restart", config, self.number, self._here())
        self._show_first(self._ranks)
        return left

    def _end(self, names: Iterable[str]) -> None:
        for name in filter(self._workers.is_held, names):
            self._workers.forget(name)

    def _show_first(self, ranks: Mapping[str, int]) -> None:
        first = min(ranks, key=ranks.__getitem__)
        if self._workers.is_held(first):
            self._workers.show(first)

    def _remember(
        self,
        kind: GenerationKind,
        detail: str,
        joined: tuple[str, ...] = (),
        left: tuple[str, ...] = (),
        pause_seconds: float | None = None,
    ) -> None:
        by_rank = {rank: name for name, rank in self._ranks.items()}
        workers = tuple(
            GenerationWorker(
                name=by_rank[slot.rank],
                device_type=slot.device_type,
                virtual_nodes=tuple(node.index for node in slot.virtual_nodes),
            )
            for slot in self.config.workers
        )
        self.generations.append(
            Generation(
                number=self.number,
                kind=kind,
                at_seconds=time.monotonic() - self._began,
                detail=detail,
                workers=workers,
                joined=joined,
                left=left,
                pause_seconds=pause_seconds,
            )
        )


class Regroup(Supervisor):
    """This host's part of a launch over several: no worker joins or is replaced.

    Each host's controller supervises its own workers. If one of them dies, all hosts stop theirs.
    When the last worker is gone, node 0 decides whether all start again.
    """

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        super().__init__(launched, hosts)
        self._hosts = cast(SeveralHosts, hosts)

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure that ends the launch."""
        # By the clock and not by the workers' lines: hosts hear of each other through the store
        # alone.
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
