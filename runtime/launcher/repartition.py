"""The generations of a pipeline: its plan changes, or it starts again from a checkpoint.

Stages cannot move one by one, so all workers change together. Those of the new plan start beside
the running job; when all are ready, the running ones write their parts after the same step and
leave, and the new ones go on from the parts (runtime/protocol/handover.py). If the new ones fail,
the previous plan goes on from the same parts.
"""

import shutil
import time
from pathlib import Path
from typing import Literal, cast

from ...schema.errors import ProblemError
from ...schema.launch import LaunchConfig
from ...schema.options import option, told
from ..protocol import handover
from ..protocol.control import INSTEAD
from .failures import Failure
from .hosts import Hosts, OneHost
from .mapping import devices_of
from .supervisor import Change, Launched, Supervisor, cause_among


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
        self._starter.follow(config, change.number, ranks)
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
