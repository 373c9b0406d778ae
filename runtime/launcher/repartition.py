"""The generations of a pipeline: its plan changes, or it starts again from a checkpoint.

Stages cannot move one by one, so all workers change together. Those of the new plan start beside
the running job; when all are ready, the running ones write their parts after the same step and
leave, and the new ones go on from the parts (runtime/protocol/handover.py). If the new ones fail,
the previous plan goes on from the same parts.
"""

import shutil
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

from ...schema.errors import HetflowError, ProblemError
from ...schema.launch import LaunchConfig
from ...schema.options import option, told
from ...schema.resize import ResizeAnswer, ResizeRequest
from ..protocol import handover
from ..protocol.control import INSTEAD
from .failures import Failure
from .heartbeat import Watch
from .history import History, LastGeneration, devices_of
from .supervisor import Launched, Store, Tries


@dataclass(slots=True)
class _Side:
    """The workers of one generation."""

    config: LaunchConfig
    number: int
    ranks: dict[str, int]
    began: float


@dataclass(slots=True)
class _Change:
    """Another plan on its way. ``saved`` are those before who have written their parts."""

    new: _Side
    request: Path
    detail: str
    saved: set[str]
    start_seconds: float = 0.0


class Repartitions:
    """Decides which plan's workers run."""

    def __init__(self, launched: Launched, store: Store) -> None:
        config, policy = launched.config, launched.request.policy
        self._workers, self._inbox, self._store = launched.workers, launched.inbox, store
        self._starter, self._cause, self._warn = launched.starter, launched.cause, launched.warn
        self._restarts, self._parts = policy == "replace", launched.request.handover_folder
        ranks = {str(slot.rank): slot.rank for slot in config.workers}
        self._now = _Side(config, 0, ranks, time.monotonic())
        self._phase: Literal["starting", "running", "coming", "saving", "joining"] = "starting"
        self._change: _Change | None = None
        self._names = (str(number) for number in count(config.world_size))
        self._highest = 0
        self._tries = Tries(store)
        # A launch that ends with any failure leaves a worker that hangs as it is.
        self._watch = Watch(launched.workers, launched.limits) if policy != "stop" else None
        self._restarted: tuple[str, tuple[str, ...], float] | None = None
        self._inbox.show(config)
        self.history = History()
        self.history.add(0, "start", "the launch", config, ranks, joined=tuple(ranks))

    def tick(self, wait_seconds: float) -> Failure | None:
        """Take in what has happened, after so long; a failure that ends the launch."""
        time.sleep(wait_seconds)
        self._kill_silent()
        failure = self._bury()
        if failure is not None:
            return failure
        if self._phase == "starting":
            self._begun()
        if self._phase == "coming":
            self._ask_to_save()
        if self._phase == "saving":
            self._let_go_on()
        if self._phase == "joining":
            self._arrive()
        if self._phase != "starting":
            self._serve()
        if all(self._workers.is_done(name) for name in self._now.ranks):
            self._cancel("the run ended before the new plan's workers could take over")
        return None

    def _kill_silent(self) -> None:
        """A worker that is stopped or frozen is killed; what follows is as for any death."""
        self._workers.hear()
        if self._watch is not None:
            self._watch.look(self._now.ranks)
            self._watch.look(self._change.new.ranks if self._change is not None else ())

    def _number(self, side: _Side, name: str) -> int:
        return int(self._store.read(handover.key(side.number, name)) or 0)

    def _all(self, side: _Side, name: str) -> bool:
        return self._number(side, name) >= side.config.world_size

    def _begun(self) -> None:
        """All workers train, at the start or again."""
        if not self._all(self._now, handover.TRAINING):
            return
        self._phase = "running"
        self._inbox.show(self._now.config)
        if self._restarted is not None:
            detail, left, lost_at = self._restarted
            self._restarted = None
            self._drop_parts()
            self._remember("restart", detail, left, time.monotonic() - lost_at)

    # Another plan

    def _serve(self) -> None:
        waiting = self._inbox.next()
        if waiting is None:
            return
        path, request = waiting
        try:
            self._check(request)
            self._begin(path, request.config)
        except HetflowError as error:
            answer = ResizeAnswer(status="refused", detail=error.message, hint=error.hint)
            self._inbox.answer(path, answer)

    def _check(self, request: ResizeRequest) -> None:
        config = self._now.config
        if self._change is not None:
            raise ProblemError("a resize is in progress already", hint="ask again when it is done")
        check_same_job(config, request.config)
        if self._store.read(handover.key(self._now.number, f"job1/{handover.TRAINING}")):
            raise ProblemError("the script prepares several models; such a job cannot be resized")
        assert config.pipeline is not None
        if config.determinism != "none" and not config.pipeline.traits.flushes:
            raise ProblemError(
                f"{config.pipeline.schedule} has no flush to change its plan at without changing "
                f"the bits that {option('determinism', config.determinism)} promises",
                hint=f"launch with {option('determinism', 'none')}, or with a schedule that "
                "flushes",
            )

    def _begin(self, path: Path, config: LaunchConfig) -> None:
        """Start the workers of the new plan beside the running ones."""
        new = self._next(config)
        self._starter.follow(new.config, new.number, new.ranks)
        self._change = _Change(new, path, f"asked for {devices_of(config)}", set())
        self._phase = "coming"

    def _next(self, config: LaunchConfig) -> _Side:
        self._highest += 1
        ranks = {next(self._names): slot.rank for slot in config.workers}
        return _Side(config, self._highest, ranks, time.monotonic())

    def _ask_to_save(self) -> None:
        change = self._change
        if change is None or not self._all(change.new, handover.READY):
            return
        change.start_seconds = time.monotonic() - change.new.began
        for name in self._now.ranks:
            self._workers.signal(name, handover.SIGNAL)
        self._phase = "saving"

    def _let_go_on(self) -> None:
        change = self._change
        if change is None or change.saved < set(self._now.ranks):
            return
        self._store.write(handover.key(change.new.number, handover.GO), "1")
        self._workers.show(_first(change.new))
        self._phase = "joining"

    def _arrive(self) -> None:
        change = self._change
        if change is None or not self._all(change.new, handover.TRAINING):
            return
        stopped = self._store.read(handover.key(self._now.number, handover.STOPPED_AT))
        pause = time.monotonic() - float(stopped) if stopped else None
        left = tuple(self._now.ranks)
        self._now, self._change, self._phase = change.new, None, "running"
        self._tries.forget()
        self._drop_parts()
        self._inbox.show(self._now.config)
        self._remember("resize", change.detail, left, pause)
        answer = ResizeAnswer(
            status="done",
            detail=f"{devices_of(self._now.config)} from now on",
            generation=self._now.number,
            joined=tuple(self._now.ranks),
            left=left,
            start_seconds=change.start_seconds,
            pause_seconds=pause,
        )
        self._inbox.answer(change.request, answer)

    def _cancel(self, why: str) -> None:
        change, self._change = self._change, None
        if change is None:
            return
        self._end(change.new)
        self._inbox.answer(change.request, ResizeAnswer(status="failed", detail=why))
        self._phase = "running"

    # Failures

    def _bury(self) -> Failure | None:
        """Take note of those who left; a failure that the launch cannot survive."""
        change, failed = self._change, set[str]()
        for failure in self._workers.failures():
            name = str(failure.rank)
            if self._phase == "saving" and name in self._now.ranks:
                if failure.exit_code == handover.STOPPED_EXIT_CODE and change is not None:
                    change.saved.add(name)
                    self._workers.forget(name)
                    continue
            failed.add(name)
        if not failed:
            return None
        if change is None or failed & self._now.ranks.keys():
            return self._recover()
        cause = self._cause(change.new.config, change.new.ranks)
        why = f"the new plan's workers failed: {cause.sentence() if cause else 'no cause known'}"
        if self._phase == "coming":
            self._cancel(why)
        else:
            self._go_back(why)
        return None

    def _recover(self) -> Failure | None:
        cause = self._cause(self._now.config, self._now.ranks)
        if cause is None or not self._can_restart(cause):
            return cause
        self._cancel("a worker was lost meanwhile")
        again = self._again(cause.sentence())
        self._warn(f"{again}; starting again from the last checkpoint")
        return None

    def _can_restart(self, cause: Failure) -> bool:
        """Whether a worker died that nothing in the script stopped, and there are tries left."""
        mendable = self._restarts and (cause.by_signal or cause.lost_peer)
        return mendable and self._tries.take(self._now.number)

    def _go_back(self, why: str) -> None:
        """The workers before are gone, but their parts are there."""
        self._cancel(why)
        again = self._again(f"back to the plan before: {why}")
        self._warn(again)

    def _again(self, detail: str) -> str:
        """Start the workers of the plan anew, from the newest checkpoint."""
        left, lost_at = tuple(self._now.ranks), time.monotonic()
        if self._restarted is not None:  # it had not come back from the loss before
            lost_at = self._restarted[2]
        self._end(self._now)
        self._now = self._next(self._now.config)
        self._phase, self._restarted = "starting", (detail, left, lost_at)
        self._starter.restart(self._now.config, self._now.number, self._now.ranks)
        self._workers.show(_first(self._now))
        return detail

    def _end(self, side: _Side) -> None:
        for name in side.ranks:
            if self._workers.is_held(name):
                self._workers.forget(name)

    # Common

    def _remember(
        self,
        kind: Literal["resize", "restart"],
        detail: str,
        left: tuple[str, ...],
        pause_seconds: float | None,
    ) -> None:
        now = self._now
        self.history.add(
            now.number,
            kind,
            detail,
            now.config,
            now.ranks,
            joined=tuple(now.ranks),
            left=left,
            pause_seconds=pause_seconds,
        )

    def _drop_parts(self) -> None:
        """All workers have read the parts."""
        if self._parts is not None:
            shutil.rmtree(self._parts, ignore_errors=True)

    def finish(self) -> None:
        """The last to take a plan up may be done before they were seen to."""
        self.tick(0.0)

    @property
    def last(self) -> LastGeneration:
        """Where the workers of the last generation report."""
        now = self._now
        return LastGeneration(
            world_size=now.config.world_size, number=now.number, restarted_at=now.number
        )


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


def _first(side: _Side) -> str:
    return min(side.ranks, key=side.ranks.__getitem__)
