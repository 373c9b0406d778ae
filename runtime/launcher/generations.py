"""The generations of a launch: requested resizes, and failures that other workers survive.

A generation is a mapping of virtual nodes to workers. The next one is announced only when its
joining workers are ready; workers go over between two steps. If a worker dies or hangs, the
controller aborts the generation: it kills that worker, the survivors report how far they are, and a
new generation goes on from there without it.
"""

import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

from ...schema.errors import HetflowError, LaunchError
from ...schema.launch import LaunchConfig
from ...schema.options import told
from ...schema.resize import ResizeAnswer, ResizeRequest
from ...schema.run import GenerationKind
from ..protocol.messages import (
    Abort,
    Closed,
    Fragile,
    FromController,
    FromWorker,
    Joined,
    Leave,
    Lost,
    Paused,
    Ready,
    Resize,
)
from .failures import Failure
from .heartbeat import Watch, parted
from .history import History, LastGeneration, devices_of
from .losses import Losses, recovery
from .mapping import renumbered, seated
from .supervisor import Launched, Readable, Tries

# A resize in progress: joining and leaving workers, and the messages to all workers.


@dataclass(slots=True, kw_only=True)
class Change:
    """The next mapping of virtual nodes, until all workers have changed to it.

    ``ranks`` has the workers of the next generation by name; ``request`` is None where the
    controller asked by itself.
    """

    config: LaunchConfig
    ranks: dict[str, int]
    joining: list[str]
    leaving: list[str]
    request: Path | None
    detail: str
    kind: Literal["resize", "replace"] = "resize"
    began: float = field(default_factory=time.monotonic)
    ready: set[str] = field(default_factory=set)
    start_seconds: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether every joining worker waits at its first batch."""
        return self.ready >= set(self.joining)

    def announcement(self, now: Mapping[str, int], generation: int) -> Resize:
        """The message to all workers, running and joining ones.

        Each joining worker gets the state from a donor, the staying workers in turn. If no worker
        stays, the first one is the guest: it meets the joining workers once, and leaves.
        """
        self.start_seconds = time.monotonic() - self.began if self.joining else None
        staying = [name for name in self.ranks if name in now]
        first = min(now, key=now.__getitem__)
        givers = staying or [first]
        return Resize(
            generation=generation,
            config=self.config,
            ranks=self.ranks,
            donors={name: givers[n % len(givers)] for n, name in enumerate(self.joining)},
            guest=None if staying else first,
        )

    def answer(self, generation: int, pause_seconds: float) -> ResizeAnswer:
        """The answer to send when all workers have met."""
        return ResizeAnswer(
            status="done",
            detail=f"{devices_of(self.config)} from now on",
            generation=generation,
            joined=tuple(self.joining),
            left=tuple(self.leaving),
            start_seconds=self.start_seconds,
            pause_seconds=pause_seconds,
        )


_WITH_CHECKPOINTS = (
    "with {checkpoint} and {checkpoint_every} all would start again from the last one"
)


class Generations:
    """Decides the mapping of each generation, and tells the workers."""

    def __init__(self, launched: Launched, store: Readable) -> None:
        config, request = launched.config, launched.request
        self._launched, self._workers, self._inbox = launched, launched.workers, launched.inbox
        self._starter, self._warn = launched.starter, launched.warn
        self._on_failure, self._is_fragile = request.policy, False
        self._has_checkpoints = request.checkpoint is not None
        self._watch, self._tries = Watch(launched.workers, launched.limits), Tries(store)
        self.number, self.config = 0, config
        self.restarted_at = 0
        self._highest = 0
        self._ranks = {str(slot.rank): slot.rank for slot in config.workers}
        self._phase: Literal["starting", "running", "changing", "switching", "breaking", "forming"]
        self._phase = "starting"
        self._joined: set[str] = set()
        self._pauses: list[float] = []
        self._change: Change | None = None
        self._left: set[str] = set()
        self._unanswered: list[tuple[Change, ResizeAnswer]] = []
        self._names = (str(number) for number in count(config.world_size))
        self._losses = Losses()
        self._closed: str | None = None
        self._wanted: LaunchConfig | None = None
        self._inbox.show(config)
        self.history = History()
        self._remember("start", "the launch", joined=tuple(self._ranks))

    # What happens

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, for at most so long; a failure that ends the launch."""
        failure = self._take_in(wait_seconds)
        if failure is not None:
            if failure.sentence_of_ours or failure.why:
                return failure
            return self._launched.cause(self.config, self._ranks) or failure
        if all(self._workers.is_done(name) for name in self._ranks):
            self._cancel("the run ended before the joining workers could join")
        return None

    def _take_in(self, wait_seconds: float) -> Failure | None:
        lines = self._workers.lines()
        select.select([line for line in lines.values() if line.is_open], [], [], wait_seconds)
        for name, message in self._workers.hear():
            self._hear(name, message)
        self._kill_hung()
        failure = self._bury() or self._parted()
        self._answer_when_gone()
        if failure is not None:
            return failure
        if self._phase == "breaking":
            return self._recover_if_known()
        if self._phase == "running" or self._change is not None:
            self._serve()
        return None

    def _hear(self, name: str, message: FromWorker) -> None:
        change = self._change
        match message:
            case Joined(generation=self._highest):
                self._joined.add(name)
                self._pauses.append(message.pause_seconds)
                if self._joined >= self._ranks_in_the_making().keys():
                    self._all_joined()
            case Paused(generation=self._highest):
                self._pauses.append(message.pause_seconds)
            case Ready() if change is not None and name in change.joining:
                change.ready.add(name)
                if change.is_ready:
                    self._announce(change)
            case Lost() if message.generation >= self.number:
                self._break_off()
                self._losses.hear(message.why)
                if message.generation == self._highest:  # else it will say so of this one, too
                    self._losses.operations[name] = message.operation
            case Fragile():
                self._is_fragile = True
            case Closed():
                self._closed = message.why
                if change is not None:
                    self._cancel(f"{self._closed}; such a job cannot be resized")
                    self._phase = "running"

    def _ranks_in_the_making(self) -> dict[str, int]:
        switching = self._phase == "switching" and self._change is not None
        return self._change.ranks if switching and self._change else self._ranks

    def _all_joined(self) -> None:
        if self._phase == "switching" and self._change is not None:
            self._arrive(self._change)
        elif self._phase == "forming":
            self._phase = "running"
            self.number = self._highest
            pause, detail = time.monotonic() - self._losses.began, self._losses.sentence
            left = tuple(self._losses.dead)
            self._remember("failure", detail, left=left, pause_seconds=pause)
            self._warn(f"{detail}; going on with {len(self._ranks)} worker(s)")
            self._losses.forget()
            self._inbox.show(self.config)
            self._replace()
        elif self._phase == "starting":
            self._phase = "running"
            self._inbox.show(self.config)

    # Resizes

    def _serve(self) -> None:
        waiting = self._inbox.next()
        if waiting is None:
            return
        path, request = waiting
        try:
            self._resize(path, request)
        except HetflowError as error:
            self._refuse(path, error.message, error.hint)

    def _refuse(self, path: Path, detail: str, hint: str | None = None) -> None:
        self._inbox.answer(path, ResizeAnswer(status="refused", detail=detail, hint=hint))

    def _resize(self, path: Path, request: ResizeRequest) -> None:
        if self._change is not None:
            self._refuse(path, "a resize is in progress already", "ask again when it is done")
            return
        if self._closed is not None:
            self._refuse(path, f"{self._closed}; such a job cannot be resized")
            return
        detail = f"asked for {devices_of(request.config)}"
        self._begin(renumbered(self.config, request.config), path, detail, "resize")
        self._wanted = None

    def _begin(
        self,
        config: LaunchConfig,
        path: Path | None,
        detail: str,
        kind: Literal["resize", "replace"],
    ) -> None:
        """Start the joining workers of a mapping beside the running job."""
        types = {name: self.config.workers[rank].device_type for name, rank in self._ranks.items()}
        config, ranks = seated(config, types, self._names)
        joining = [name for name in ranks if name not in self._ranks]
        leaving = [name for name in self._ranks if name not in ranks]
        same = all(
            config.workers[rank].virtual_nodes
            == self.config.workers[self._ranks[name]].virtual_nodes
            for name, rank in ranks.items()
            if name in self._ranks
        )
        if not joining and not leaving and same:
            if path is not None:
                answer = ResizeAnswer(status="done", detail="nothing to change", pause_seconds=0.0)
                self._inbox.answer(path, answer)
            return
        change = Change(
            config=config,
            ranks=ranks,
            joining=joining,
            leaving=leaving,
            request=path,
            detail=detail,
            kind=kind,
        )
        self._starter.join(config, self._highest + 1, ranks, joining, self.restarted_at)
        self._change, self._phase = change, "changing"
        if not joining:
            self._announce(change)

    def _announce(self, change: Change) -> None:
        self._highest += 1
        self._phase, self._joined, self._pauses = "switching", set(), []
        names = [*self._ranks, *change.joining]
        self._tell(names, change.announcement(self._ranks, self._highest))

    def _arrive(self, change: Change) -> None:
        self.number, self._change, self._phase = self._highest, None, "running"
        self.config, self._ranks = change.config, change.ranks
        self._tell(change.leaving, Leave())
        self._left |= set(change.leaving)
        for name in self._workers.lines().keys() & change.leaving:
            self._workers.lines()[name].is_finished = True
        self._workers.show(_first(self._ranks))
        self._inbox.show(self.config)
        pause = max(self._pauses, default=0.0)
        joined, left = tuple(change.joining), tuple(change.leaving)
        self._remember(change.kind, change.detail, joined=joined, left=left, pause_seconds=pause)
        self._unanswered.append((change, change.answer(self.number, pause)))

    def _answer_when_gone(self) -> None:
        """Answer resizes whose leaving workers have ended: from then on their devices are free."""
        waiting, self._unanswered = self._unanswered, []
        for change, answer in waiting:
            if any(self._is_there(name) for name in change.leaving):
                self._unanswered.append((change, answer))
            elif change.request is not None:
                self._inbox.answer(change.request, answer)

    def _is_there(self, name: str) -> bool:
        return self._workers.is_held(name) and not self._workers.is_done(name)

    def _cancel(self, why: str) -> None:
        """Give a resize up; the job continues unchanged."""
        change, self._change = self._change, None
        if change is None:
            return
        for name in change.joining:
            self._workers.kill(name)
            self._workers.forget(name)
        if self._phase == "changing":
            self._phase = "running"
        if change.request is not None:
            self._inbox.answer(change.request, ResizeAnswer(status="failed", detail=why))
        elif change.kind == "replace":
            self._warn(f"no replacement: {why}")

    # Failures

    def _parted(self) -> Failure | None:
        """A worker has left the loop in which another waits for it: neither can go on."""
        lines = self._workers.lines()
        own = {name: lines[name] for name in self._ranks if name in lines}
        found = parted(own, time.monotonic()) if self._phase == "running" else None
        if found is None:
            return None
        left, waits = found
        sentence = (
            f"{self._who(left)} left the loop at step {own[left].left_at}, and {self._who(waits)} "
            f"waits for it there"
        )
        return Failure(
            exit_code=2,
            error=sentence,
            sentence_of_ours=sentence,
            hint="let all workers leave together: decide by what is equal on all of them, such as "
            "a loss of job.backward, or an evaluation inside of job.evaluation()",
        )

    def _kill_hung(self) -> None:
        if not (self._survives or self._restarts):
            return
        self._watch.look(self._ranks)
        self._watch.look(self._left)
        if self._change is not None:
            self._watch.look(self._change.joining)
        if self._phase == "breaking":
            self._kill_held()

    def _kill_held(self) -> None:
        """End who is held by an exchange that was broken off: all may be, and so wait alike."""
        limit, lines = self._launched.limits.progress_seconds, self._workers.lines()
        for name in self._losses.unheard(self._alive(), limit):
            if name in lines and lines[name].is_waiting:
                why = f"did not come out of a broken exchange for {limit:g} s and was killed"
                self._workers.kill(name, why)

    @property
    def _survives(self) -> bool:
        """Whether the others go on when a worker dies in a step."""
        return self._on_failure != "stop" and self._closed is None and not self._is_fragile

    @property
    def _restarts(self) -> bool:
        """Whether all start again where the others cannot go on."""
        return self._on_failure != "stop" and self._has_checkpoints

    def _who(self, name: str) -> str:
        return f"worker {name} ({self.config.workers[self._ranks[name]].device_type})"

    def _bury(self) -> Failure | None:
        """Record dead workers; returns the first failure that the launch cannot survive."""
        # Who died comes before who only lost it.
        for failure in sorted(self._workers.failures(), key=lambda failure: failure.precedence):
            name = str(failure.rank)
            if name not in self._workers.lines():  # given up together with another
                continue
            cause = failure
            # It followed from another, whose end may be told a moment later.
            is_alone = failure.is_echo and not self._losses.dead
            if is_alone or (failure.by_signal and failure.lost_peer):
                cause = self._launched.cause(self.config, self._ranks) or failure
                if not cause.is_echo:
                    return None  # which comes first at the next look
            if name in self._left:
                self._workers.forget(name)
            elif self._change is not None and name in self._change.joining:
                if self._phase == "changing":
                    self._cancel(f"a joining worker failed: {failure.sentence()}")
                elif not self._survives:
                    return failure
                else:
                    self._losses.causes.setdefault(name, failure.sentence())
                    self._break_off()
            elif self._can_survive(failure):
                self._losses.bury(name, failure.sentence())
                self._workers.forget(name)
                self._break_off()
            elif self._can_restart(failure):
                self._losses.bury(name, cause.sentence())
                self._restart_all(self._losses.sentence)
            else:
                return self._explained(failure, name)
        return None

    def _explained(self, failure: Failure, name: str) -> Failure:
        """With whose loss it did not survive."""
        if not self._losses.dead:
            return failure
        if not failure.is_echo:
            # Its own error, or an exchange of the script's that cannot be told from one.
            sentence = f"{self._losses.sentence}; then {failure.sentence()}"
            return replace(failure, sentence_of_ours=sentence)
        outside = f"{self._who(name)} could not go on without it outside of a step"
        return replace(
            failure,
            sentence_of_ours=f"{self._losses.sentence}; {outside}",
            hint=failure.hint if self._has_checkpoints else told(_WITH_CHECKPOINTS),
        )

    def _can_survive(self, failure: Failure) -> bool:
        """Whether a worker died that nothing in the script stopped, and others hold the state."""
        alive = [name for name in self._alive() if name != str(failure.rank)]
        done = any(self._workers.is_done(name) for name in alive)
        has_trained = self._phase != "starting"
        return self._survives and failure.by_signal and has_trained and bool(alive) and not done

    def _can_restart(self, failure: Failure) -> bool:
        """Whether a worker died, or could not do without one that did, and there are tries left."""
        is_lost = failure.by_signal or (failure.is_echo and bool(self._losses.dead))
        return self._restarts and is_lost and self._tries.take(self.restarted_at)

    def _restart_all(self, cause: str) -> None:
        self._cancel("a worker was lost meanwhile")
        left = tuple(self._ranks)
        for name in filter(self._workers.is_held, left):
            self._workers.forget(name)
        self._losses = Losses()
        self._highest += 1
        self.number, self.restarted_at = self._highest, self._highest
        self._phase, self._joined = "starting", set()
        self._closed, self._is_fragile = None, False
        self.config, self._wanted = self._wanted or self.config, None
        self._ranks = {next(self._names): slot.rank for slot in self.config.workers}
        self._starter.restart(self.config, self.number, self._ranks)
        self._workers.show(_first(self._ranks))
        self._remember("restart", cause, joined=tuple(self._ranks), left=left)
        self._warn(f"{cause}; starting again from the last checkpoint")

    def _alive(self) -> list[str]:
        return [name for name in self._ranks if name not in self._losses.dead]

    def _break_off(self) -> None:
        """End the generation; the surviving workers report their positions."""
        if self._phase != "breaking":
            self._losses.begin(is_again=self._phase == "forming")
            self._phase = "breaking"
            self._cancel("; ".join(self._losses.causes.values()) or "a worker was lost meanwhile")
            self._tell(self._alive(), Abort(generation=self._highest))

    def _recover_if_known(self) -> Failure | None:
        """Send the survivors their new mapping, as soon as all have reported their positions."""
        alive = self._alive()
        if any(self._workers.is_done(name) for name in alive):
            said = f"{self._losses.sentence} while others were done"
            return self._workers.left_early() or Failure(exit_code=1, error=said)
        if not self._losses.are_known(alive):
            return None
        try:
            operations = self._losses.check(alive)
        except LaunchError as error:
            return self._restart_or_end(error)
        self._wanted = self._wanted or self.config
        self._highest += 1
        message = recovery(self.config, self._ranks, operations, self._highest)
        self.config, self._ranks = message.config, message.ranks
        self._phase, self._joined, self._pauses = "forming", set(), []
        self._tell(list(self._ranks), message)
        self._workers.show(_first(self._ranks))
        return None

    def _restart_or_end(self, error: LaunchError) -> Failure | None:
        """What follows where the others cannot go on together, though they are there."""
        if self._restarts and self._tries.take(self.restarted_at):
            self._restart_all(error.message)
            return None
        return Failure(
            exit_code=1,
            error=error.message,
            sentence_of_ours=error.message if self._losses.dead else None,
            hint=None if self._has_checkpoints else told(_WITH_CHECKPOINTS),
        )

    def _replace(self) -> None:
        """Start a replacement for the lost worker, beside the others."""
        wanted, self._wanted = self._wanted, None
        if self._on_failure != "replace" or not self._survives or wanted is None:
            return
        try:
            self._begin(wanted, None, "replaces who was lost", "replace")
        except HetflowError as error:
            self._warn(f"no replacement: {error.message}")

    # Common

    def _remember(self, kind: GenerationKind, detail: str, **more: Any) -> None:
        self.history.add(self.number, kind, detail, self.config, self._ranks, **more)

    def _tell(self, names: Sequence[str], message: FromController) -> None:
        lines = self._workers.lines()
        for name in names:
            if name in lines:
                lines[name].send(message)

    def finish(self) -> None:
        """All workers have ended, those that a resize left out too."""
        self._answer_when_gone()

    @property
    def last(self) -> LastGeneration:
        """Where the workers of the last generation report."""
        return LastGeneration(
            world_size=self.config.world_size, number=self.number, restarted_at=self.restarted_at
        )


def _first(ranks: dict[str, int]) -> str:
    return min(ranks, key=ranks.__getitem__)
