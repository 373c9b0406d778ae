"""The generations of a launch: requested resizes, and failures that other workers survive.

A generation is a mapping of virtual nodes to workers. The next one is announced only when its
joining workers are ready; workers go over between two steps. If a worker dies or hangs, the
controller aborts the generation: it kills that worker, the survivors report how far they are, and a
new generation goes on from there without it.
"""

import select
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from ...schema.errors import HetflowError, LaunchError, ProblemError
from ...schema.launch import LaunchConfig, ResizeAnswer
from ...schema.options import option, told
from ..protocol import handover
from ..protocol.control import INSTEAD
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
    Recover,
    Resize,
)
from .failures import Failure
from .hosts import Hosts, OneHost
from .mapping import devices_of, renumbered, seated, without
from .supervisor import Change, Launched, Supervisor, cause_among, parted

# How long a worker that lost its connections waits for a death to be seen.
CAUSE_SECONDS = 1.0
MAX_TRIES = 3  # at one step


@dataclass(slots=True)
class LostWorkers:
    """The dead and their causes by name, and the operation that each of the others is in.

    ``first_sign`` is what the first of them to lose another says of it, ``last_sign`` what the
    first says of the last time.
    """

    dead: list[str] = field(default_factory=list)
    causes: dict[str, str] = field(default_factory=dict)
    operations: dict[str, int] = field(default_factory=dict)
    began: float = 0.0
    first_sign: str = ""
    last_sign: str = ""
    _since: float = 0.0
    _last: tuple[int, int] = (-1, 0)

    def begin(self, *, is_again: bool) -> None:
        """A generation is broken off; ``is_again`` where the one before never came together."""
        self._since = time.monotonic()
        if not is_again:
            self.began = self._since
            self.first_sign = ""
        self.last_sign = ""
        self.operations = {}

    def hear(self, why: str) -> None:
        """A worker says how it noticed."""
        self.first_sign, self.last_sign = self.first_sign or why, self.last_sign or why

    def bury(self, name: str, cause: str) -> None:
        """A worker is dead."""
        self.causes.setdefault(name, cause)
        self.dead.append(name)

    def forget(self) -> None:
        """The others have met again."""
        self.dead, self.causes = [], {}

    @property
    def sentence(self) -> str:
        """What happened."""
        return "; ".join(self.causes.values()) or "connections were lost"

    def are_known(self, alive: Sequence[str]) -> bool:
        """Whether all who are left have said how far they are, and a death had time to be seen."""
        all_said = bool(alive) and all(name in self.operations for name in alive)
        return all_said and (bool(self.dead) or time.monotonic() - self._since > CAUSE_SECONDS)

    def unheard(self, alive: Sequence[str], limit_seconds: float) -> list[str]:
        """Who has not said how far it is, that long after the generation was broken off."""
        is_late = time.monotonic() - self._since > limit_seconds
        return [name for name in alive if is_late and name not in self.operations]

    def check(self, alive: Sequence[str]) -> dict[str, int]:
        """The operation of each remaining worker.

        Raises:
            LaunchError: They cannot go on.
        """
        found = {name: self.operations[name] for name in alive}
        top = max(found.values())
        tries = self._last[1] + 1 if self._last[0] == top else 1
        self._last = (top, tries)
        if tries > MAX_TRIES:
            raise LaunchError(
                f"{self.sentence}; the others could not meet again in {tries - 1} tries: "
                f"{self.last_sign}"
                if self.dead
                else f"the workers lost each other {tries} times at the same step, though none has "
                f"ended: {self.first_sign}"
            )
        # The leading workers keep the result of their last operation only (elastic/member.py).
        if min(found.values()) < top - 1:
            raise LaunchError("the workers are more than one step apart")
        return found


def recovery(
    config: LaunchConfig,
    ranks: Mapping[str, int],
    operations: Mapping[str, int],
    generation: int,
) -> Recover:
    """The mapping without the dead, as it is told to the others. Pure."""
    lost = [rank for name, rank in ranks.items() if name not in operations]
    order = sorted(operations, key=ranks.__getitem__)
    changed, top = without(config, lost), max(operations.values())
    return Recover(
        generation=generation,
        config=changed,
        ranks={name: rank for rank, name in enumerate(order)},
        behind=tuple(name for name in order if operations[name] < top),
        donor=next(name for name in order if operations[name] == top),
    )


_WITH_CHECKPOINTS = (
    "with {checkpoint} and {checkpoint_every} all would start again from the last one"
)


class Generations(Supervisor):
    """Decides the mapping of each generation, and tells the workers."""

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        super().__init__(launched, hosts)
        self._on_failure, self._fragile = launched.request.policy, ""
        self._has_checkpoints = launched.request.checkpoint is not None
        self._phase: Literal["starting", "running", "changing", "switching", "breaking", "forming"]
        self._phase = "starting"
        self._joined: set[str] = set()
        self._pauses: list[float] = []
        self._left: set[str] = set()
        self._unanswered: list[tuple[Change, ResizeAnswer]] = []
        self._losses = LostWorkers()
        self._closed: str | None = None
        self._wanted: LaunchConfig | None = None
        self._inbox.show(self.config)

    # What happens

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, for at most so long; a failure that ends the launch."""
        failure = self._take_in(wait_seconds)
        if failure is not None:
            if failure.sentence_of_ours or failure.why:
                return failure
            return self._cause() or failure
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
            # One of a generation that was broken off meanwhile matches no case, and is dropped.
            case Joined(generation=self._highest):
                self._joined.add(name)
                self._pauses.append(message.pause_seconds)
                # All workers of the new mapping have to come, leaving ones do not: they may be gone
                # by then.
                switching = change is not None and self._phase == "switching"
                if self._joined >= (change.ranks if change and switching else self._ranks).keys():
                    self._all_joined()
            case Paused(generation=self._highest):
                self._pauses.append(message.pause_seconds)
            case Ready() if change is not None and name in change.joining:
                change.ready.add(name)
                if change.ready >= set(change.joining):
                    self._announce(change)
            case Lost() if message.generation >= self.number:
                self._break_off()
                self._losses.hear(message.why)
                if message.generation == self._highest:  # else it will say so of this one, too
                    self._losses.operations[name] = message.operation
            case Fragile():
                self._fragile = message.why
            case Closed():
                self._closed = message.why
                if change is not None:
                    self._cancel(f"{self._closed}; such a job cannot be resized")
                    self._phase = "running"

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

    def _change_to(self, config: LaunchConfig, path: Path) -> None:
        if self._closed is not None:
            raise ProblemError(f"{self._closed}; such a job cannot be resized")
        detail = f"asked for {devices_of(config)}"
        self._begin(renumbered(self.config, config), path, detail, "resize")
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
        config, ranks = seated(config, types, self._fresh)
        joining = tuple(name for name in ranks if name not in self._ranks)
        leaving = tuple(name for name in self._ranks if name not in ranks)
        stay = [name for name in ranks if name in self._ranks]
        before = [self.config.workers[self._ranks[name]] for name in stay]
        # Workers stay only where they can: a worker whose share of the states or whose way of
        # keeping activations changes is told so, even if its virtual nodes are the same.
        same = all(
            (slot.virtual_nodes, slot.state_share_bytes, slot.activations)
            == (now.virtual_nodes, now.state_share_bytes, now.activations)
            for slot, now in zip((config.workers[ranks[n]] for n in stay), before, strict=True)
        )
        if not joining and not leaving and same:
            if path is not None:
                answer = ResizeAnswer(status="done", detail="nothing to change", pause_seconds=0.0)
                self._inbox.answer(path, answer)
            return
        change = Change(
            config=config,
            number=self._highest + 1,
            ranks=ranks,
            joining=joining,
            leaving=leaving,
            request=path,
            detail=detail,
            kind=kind,
        )
        # The joining workers start and import while the job trains. Only when all are ready are the
        # others told, so training pauses for the exchange of states alone.
        self._starter.start(
            "join", config, change.number, ranks, joining=joining, restarted_at=self.restarted_at
        )
        self._change, self._phase = change, "changing"
        if not joining:
            self._announce(change)

    def _announce(self, change: Change) -> None:
        """Tell all workers, running and joining ones, of the next mapping."""
        # The point of no return: until here a change can be given up, and no running worker has
        # heard of it. From here on a failure breaks the generation off, because some workers may
        # have changed already.
        self._highest = change.number
        self._phase, self._joined, self._pauses = "switching", set(), []
        change.start_seconds = time.monotonic() - change.began if change.joining else None
        staying = [name for name in change.ranks if name in self._ranks]
        shares = change.config.shard is not None
        givers = staying or [min(self._ranks, key=self._ranks.__getitem__)]
        message = Resize(
            generation=change.number,
            config=change.config,
            ranks=change.ranks,
            # In turn, so that no giver's link carries the state more often than it must.
            donors={name: givers[n % len(givers)] for n, name in enumerate(change.joining)},
            # Who leaves meets the joining ones once: all of them where each holds a share of the
            # states, else one where nobody stays to give them.
            guests=change.leaving if shares else () if staying else tuple(givers),
        )
        self._tell([*self._ranks, *change.joining], message)

    def _arrive(self, change: Change) -> None:
        self._tell(change.leaving, Leave())
        self._left |= set(change.leaving)
        for name in self._workers.lines().keys() & set(change.leaving):
            self._workers.lines()[name].is_finished = True
        self._show_first(change.ranks)
        self._phase = "running"
        answer = self._arrived(change, max(self._pauses, default=0.0))
        self._unanswered.append((change, answer))

    def _answer_when_gone(self) -> None:
        """Answer resizes whose leaving workers have ended: from then on their devices are free."""
        waiting, self._unanswered = self._unanswered, []
        for change, answer in waiting:
            gone = (
                not self._workers.is_held(n) or self._workers.is_done(n) for n in change.leaving
            )
            if not all(gone):
                self._unanswered.append((change, answer))
            elif change.request is not None:
                self._inbox.answer(change.request, answer)

    def _cancel(self, why: str) -> None:
        self._give_up(why)
        if self._phase == "changing":
            self._phase = "running"

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
        if self._phase == "breaking":  # who is held by the broken exchange: all may, and wait alike
            # Heartbeats come from a thread, so a worker that hangs in a broken exchange still
            # beats. While a generation is broken off the limit is on coming out of it.
            limit, lines = self._launched.request.timeout_seconds, self._workers.lines()
            for name in self._losses.unheard(self._alive(), limit):
                if name in lines and lines[name].is_waiting:
                    why = f"did not come out of a broken exchange for {limit:g} s and was killed"
                    self._workers.kill(name, why)

    @property
    def _survives(self) -> bool:
        """Whether the others go on when a worker dies in a step."""
        return self._on_failure != "stop" and self._closed is None and not self._fragile

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
                cause = self._cause() or failure
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
        if not self._losses.dead and self._fragile and failure.by_signal and self.config.redundancy:
            said = f"{failure.sentence()}; the others cannot go on without it: {self._fragile}"
            return replace(failure, sentence_of_ours=said, hint=told(_WITH_CHECKPOINTS))
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
        # Before the first step nobody holds a state worth keeping, and what killed a worker then
        # (too little memory) would kill the next. Where one is done, the others' last step can have
        # no partner.
        has_trained = self._phase != "starting"
        return self._survives and failure.by_signal and has_trained and bool(alive) and not done

    def _can_restart(self, failure: Failure) -> bool:
        """Whether a worker died, or could not do without one that did, and there are tries left."""
        is_lost = failure.by_signal or (failure.is_echo and bool(self._losses.dead))
        return self._restarts and is_lost and self._tries.take(self.restarted_at)

    def _restart_all(self, cause: str) -> None:
        self._cancel("a worker was lost meanwhile")
        self._losses = LostWorkers()
        self._phase, self._joined = "starting", set()
        # What workers said of themselves ended with them; the new ones say it again.
        self._closed, self._fragile = None, ""
        wanted, self._wanted = self._wanted or self.config, None
        left = self._start_again(wanted)
        self._remember("restart", cause, tuple(self._ranks), left)
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
            message = recovery(self.config, self._ranks, operations, self._highest + 1)
        except (LaunchError, ProblemError) as error:
            if self._restarts and self._tries.take(self.restarted_at):
                self._restart_all(error.message)
                return None
            return Failure(
                exit_code=1,
                error=error.message,
                sentence_of_ours=error.message if self._losses.dead else None,
                hint=None if self._has_checkpoints else told(_WITH_CHECKPOINTS),
            )
        self._wanted = self._wanted or self.config
        self._highest += 1
        self.config, self._ranks = message.config, message.ranks
        self._phase, self._joined, self._pauses = "forming", set(), []
        self._tell(list(self._ranks), message)
        self._show_first(self._ranks)
        return None

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

    def _tell(self, names: Sequence[str], message: FromController) -> None:
        lines = self._workers.lines()
        for name in names:
            if name in lines:
                lines[name].send(message)

    def finish(self) -> None:
        """All workers have ended, those that a resize left out too."""
        self._answer_when_gone()


# The generations of a pipeline: its plan changes, or it starts again from a checkpoint.
#
# Stages cannot move one by one, so all workers change together. Those of the new plan start beside
# the running job; when all are ready, the running ones write their parts after the same step and
# leave, and the new ones go on from the parts (runtime/protocol/handover.py). If the new ones fail,
# the previous plan goes on from the same parts.


class Repartitions(Supervisor):
    """Decides which plan's workers run; they say in the store how far they are."""

    def __init__(self, launched: Launched, hosts: Hosts) -> None:
        super().__init__(launched, hosts)
        policy = launched.request.policy
        self._restarts, self._kills = policy == "replace", policy != "stop"
        self._parts = launched.request.handover_folder
        self._phase: Literal["starting", "running", "coming", "saving", "joining"] = "starting"
        self._restarted: tuple[str, tuple[str, ...], float] | None = None
        self._inbox.show(self.config)

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure that ends the launch."""
        time.sleep(wait_seconds)
        self._workers.hear()
        if self._kills:  # a launch that ends with any failure leaves a worker that hangs as it is
            self._watch.look(self._ranks)
            self._watch.look(self._change.ranks if self._change is not None else ())
        failure = self._bury()
        if failure is not None:
            return failure
        self._go_on()
        if self._phase != "starting":
            self._serve()
        if all(self._workers.is_done(name) for name in self._ranks):
            self._cancel("the run ended before the new plan's workers could take over")
        return None

    def _all(self, number: int, config: LaunchConfig, said: str) -> bool:
        """Whether all workers of a generation have come so far."""
        return int(self._store.read(handover.key(number, said)) or 0) >= config.world_size

    def _go_on(self) -> None:
        """Go from state to state, as far as workers have come."""
        if self._phase == "starting" and self._all(self.number, self.config, handover.TRAINING):
            self._phase = "running"
            self._inbox.show(self.config)
            if self._restarted is not None:
                detail, left, lost_at = self._restarted
                self._restarted = None
                self._drop_parts()
                pause = time.monotonic() - lost_at
                self._remember("restart", detail, tuple(self._ranks), left, pause)
        change = self._change
        if change is None:
            return
        if self._phase == "coming" and self._all(change.number, change.config, handover.READY):
            change.start_seconds = time.monotonic() - change.began
            for name in self._ranks:
                self._workers.signal(name, handover.SIGNAL)
            self._phase = "saving"
        if self._phase == "saving" and change.ready >= self._ranks.keys():
            cast(OneHost, self._store).write(handover.key(change.number, handover.GO), "1")
            self._show_first(change.ranks)
            self._phase = "joining"
        if self._phase == "joining" and self._all(change.number, change.config, handover.TRAINING):
            stopped = self._store.read(handover.key(self.number, handover.STOPPED_AT))
            pause_seconds = time.monotonic() - float(stopped) if stopped else None
            self._tries.forget()
            self._drop_parts()
            self._phase, self.restarted_at = "running", change.number
            answer = self._arrived(change, pause_seconds)
            assert change.request is not None
            self._inbox.answer(change.request, answer)

    def _change_to(self, config: LaunchConfig, path: Path) -> None:
        """Start the workers of another plan beside the running ones."""
        check_same_job(self.config, config)
        if self._store.read(handover.key(self.number, f"job1/{handover.TRAINING}")):
            raise ProblemError("the script prepares several models; such a job cannot be resized")
        work, determinism = self.config.pipeline, self.config.determinism
        assert work is not None
        if determinism != "none" and not work.traits.flushes:
            raise ProblemError(
                f"{work.schedule} has no flush to change its plan at without changing the bits "
                f"that {option('determinism', determinism)} promises",
                hint=f"launch with {option('determinism', 'none')}, or with a schedule that "
                "flushes",
            )
        self._highest += 1
        ranks = self._named(config)
        change = Change(
            config=config,
            number=self._highest,
            ranks=ranks,
            joining=tuple(ranks),
            leaving=tuple(self._ranks),
            request=path,
            detail=f"asked for {devices_of(config)}",
        )
        self._starter.start("follow", config, change.number, ranks)
        self._change, self._phase = change, "coming"

    def _cancel(self, why: str) -> None:
        self._give_up(why)
        if self._phase != "starting":
            self._phase = "running"

    # Failures

    def _bury(self) -> Failure | None:
        """Take note of those who left; a failure that the launch cannot survive."""
        change, failed = self._change, set[str]()
        for failure in self._workers.failures():
            name = str(failure.rank)
            has_saved = failure.exit_code == handover.STOPPED_EXIT_CODE
            if change and self._phase == "saving" and name in self._ranks and has_saved:
                change.ready.add(name)
                self._workers.forget(name)
            else:
                failed.add(name)
        if not failed:
            return None
        if change is None or failed & self._ranks.keys():
            return self._recover()
        cause = cause_among(self._workers, change.config, change.ranks)
        why = f"the new plan's workers failed: {cause.sentence() if cause else 'no cause known'}"
        has_begun = self._phase != "coming"
        self._cancel(why)
        if has_begun:  # the workers before are gone, but their parts are there
            said = f"back to the plan before: {why}"
            self._again(said)
            self._warn(said)
        return None

    def _recover(self) -> Failure | None:
        cause = self._cause()
        # Nothing in the script stopped the worker, and there are tries left.
        can = cause is not None and self._restarts and (cause.by_signal or cause.lost_peer)
        if cause is None or not can or not self._tries.take(self.number):
            return cause
        self._cancel("a worker was lost meanwhile")
        self._again(cause.sentence())
        self._warn(f"{cause.sentence()}; starting again from the last checkpoint")
        return None

    def _again(self, detail: str) -> None:
        lost_at = time.monotonic()
        if self._restarted is not None:  # it had not come back from the loss before
            lost_at = self._restarted[2]
        left = self._start_again(self.config)
        self._phase, self._restarted = "starting", (detail, left, lost_at)

    def _drop_parts(self) -> None:
        """All workers have read the parts."""
        if self._parts is not None:
            shutil.rmtree(self._parts, ignore_errors=True)

    def finish(self) -> None:
        """The last to take a plan up may be done before they were seen to."""
        self.tick(0.0)


def check_same_job(config: LaunchConfig, other: LaunchConfig) -> None:
    """Refuse a plan that a running pipeline cannot change to.

    Raises:
        ProblemError: Of another model, batch or microbatches, no pipeline, or a parallel plan.
    """
    if config.pipeline is None or other.pipeline is None:
        raise ProblemError("a pipeline changes to a pipeline plan only")
    for each in (config, other):
        check_not_parallel(each)
    if other.model != config.model:
        raise ProblemError(f"the plan is of {other.model}, the run trains {config.model}")
    own, theirs = _microbatches(config), _microbatches(other)
    if own != theirs:
        raise ProblemError(
            f"the new plan has {len(theirs)} microbatches of {max(theirs.values())} samples, the "
            f"job has {len(own)} of {max(own.values())}",
            hint="a resize keeps the microbatches; solve with the same ones",
        )


def check_not_parallel(config: LaunchConfig) -> None:
    """Refuse a parallel plan: its workers cannot hand over while the job runs.

    Raises:
        ProblemError: The config was lowered from a parallel plan.
    """
    if config.pipeline is not None and config.pipeline.is_tensor_parallel:
        raise ProblemError("a parallel plan cannot be changed while it runs", hint=told(INSTEAD))


def _microbatches(config: LaunchConfig) -> dict[int, int]:
    """Samples of each microbatch of a batch."""
    return {node.index: node.batch_size for slot in config.workers for node in slot.virtual_nodes}
