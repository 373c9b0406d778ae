"""One controller a host: starts the workers, watches them, and writes what happened."""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..preload import VARIABLE, Preload
from ..protocol.pins import pins
from ..protocol.record import Status, WorkerReport, assemble
from ..schema import files
from ..schema.errors import TargetError
from ..schema.launch import LaunchConfig, WorkerSlot
from ..schema.masking import mask
from ..schema.run import Generation, RunEvent, RunRecord
from .devices import Seat, imagined_seats, remarks, seat_workers
from .failures import Failure, first_cause, interruption, silence, tail_of
from .generations import Generations
from .heartbeat import Limits
from .hosts import Alone, Together
from .inbox import Inbox
from .regroup import Regroup
from .repartition import Repartitions
from .request import (
    HANDOVER,
    LaunchRequest,
    check_checkpoints,
    check_folder,
    check_script,
    make_folder,
)
from .spawn import Meeting, NewGeneration, WorkerCommand, worker_commands
from .supervise import Signals, Workers

POLL_SECONDS = 0.02
# How long a worker that only lost its peers waits for the one that failed first to be seen.
CAUSE_SECONDS = 2.0

Warn = Callable[[str], None]
_log = logging.getLogger("hetflow")


class _Interrupted(Exception):
    """A signal came while this host was waiting for others."""


def plan_commands(request: LaunchRequest) -> list[WorkerCommand]:
    """What a launch on this host would run, without running it (``--dry-run``).

    Where the machine has too few devices for the plan, it is shown as on one that has them all,
    and the logger ``hetflow`` is told so.

    Raises:
        HetflowError: As ``launch``, before anything starts; but devices may be missing.
    """
    check_script(request.script)
    check_checkpoints(request)
    place = request.rendezvous
    meeting = Meeting(
        address=place.host if place else "127.0.0.1",
        port=place.port if place else 0,
        interface="lo",
    )
    slots = request.config.workers
    try:
        seats = seat_workers(slots, request.config)
    except TargetError as error:
        _log.warning(f"{error.message}: shown as on a machine that has all of them")
        seats = imagined_seats(slots, request.config)
    return _commands(request, seats, meeting)


def launch(request: LaunchRequest, *, warn: Warn) -> RunRecord | None:
    """Train under a plan.

    Workers are started at once; the first one's output is shown, all output is kept under
    ``logs``. Whatever ends this process, no worker outlives it. The record is written to
    ``run.json`` also when the launch fails.

    Args:
        request: The plan, the script and where things go.
        warn: Tells the user something that does not end the launch.

    Returns:
        The run record; None on hosts other than node 0, which has it.

    Raises:
        LaunchError: A worker failed (with its own error and exit code), a signal came, or the
            hosts did not meet.
        HetflowError: The script, the folder or the devices do not fit the plan.
    """
    check_script(request.script)
    check_checkpoints(request)
    check_folder(request.folder, force=request.force)
    if request.rendezvous is None:
        seat_workers(request.config.workers, request.config)
    began = time.monotonic()
    with Signals() as signals, Preload(os.environ.get(VARIABLE, "")) as preload:
        inherited = dict(os.environ)  # the store's thread changes ours for a while
        if request.rendezvous is None:
            for command in plan_commands(request):
                # It imports while this process sets up.
                preload.prepare({**inherited, **command.environment})
        hosts = (
            Together(request.config, request.rendezvous, request.policy)
            if request.rendezvous
            else Alone(request.config)
        )
        workers = Workers(
            request.folder,
            stdout_to_stderr=request.stdout_to_stderr,
            has_lines=request.is_elastic or request.hands_over or request.regroups,
            changes=request.is_elastic,
            survives=request.survives,
            token=hosts.token,
            inherited=inherited,
            preload=preload,
        )
        run = _Run(request, hosts, workers, signals, warn)
        failure = run.train()
        last = run.generations
        reports = []
        if failure is None and hosts.is_first:
            reports = hosts.reports(*last.where) if last else hosts.reports()
        hosts.leave()
    history = last.history.entries if last else []
    record = _record(request, failure, reports, time.monotonic() - began, history)
    if hosts.is_first and request.folder.is_dir():
        files.write(request.folder / "run.json", record, force=True)
    if failure is not None:
        _show_tail(failure)
        raise failure.as_error()
    if hosts.is_first:
        _warn_about(record, warn)
    return record if hosts.is_first else None


def _fill_folder(request: LaunchRequest) -> None:
    make_folder(request.folder)
    files.write(request.folder / "plan.json", request.plan, force=True)
    files.write(request.folder / "launch.json", request.config, force=True)


class _Run:
    """The workers of one launch, from their start to their end."""

    def __init__(
        self,
        request: LaunchRequest,
        hosts: Alone | Together,
        workers: Workers,
        signals: Signals,
        warn: Warn,
    ) -> None:
        self._request, self._hosts, self._workers = request, hosts, workers
        self._signals, self._warn = signals, warn
        self._inbox: Inbox | None = None
        self._seats: dict[str, Seat] = {}
        self.generations: Generations | Repartitions | Regroup | None = None

    def train(self) -> Failure | None:
        """Start the workers and see them through; None when all of them succeeded."""
        request, hosts, workers = self._request, self._hosts, self._workers
        try:
            slots, self._meeting = hosts.join(self._watch)
            seats = seat_workers(slots, request.config)
            for remark in remarks(
                slots, request.config, {**os.environ, **pins(request.config.determinism)}
            ):
                self._warn(remark)
            _fill_folder(request)
            self._inbox = Inbox(request.folder)
            commands = _commands(request, seats, self._meeting)
            hosts.starting()
            workers.wait_until_ready(commands, self._watch)
            workers.start(commands)
            if request.is_elastic:
                self._seats = {str(seat.slot.rank): seat for seat in seats}
                self.generations = self._make_generations(self._inbox, hosts)
            elif request.hands_over:
                self.generations = self._make_repartitions(self._inbox, hosts)
            elif request.regroups:
                self.generations = self._make_regroup(slots, hosts)
            failure = self._supervise() or hosts.wait_for_others(self._watch)
        except _Interrupted:
            failure = interruption(self._signals.received or 2)
        except BaseException:
            workers.stop(self._signals)
            hosts.leave()
            self._close()
            raise
        if failure is not None:
            failure = hosts.tell_failure(failure)
        workers.stop(self._signals)
        self._close()
        return failure

    def _watch(self) -> None:
        if self._signals.received is not None:
            raise _Interrupted

    def _close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()

    @property
    def _limits(self) -> Limits:
        return Limits(self._request.heartbeat_seconds, self._request.timeout_seconds)

    def _make_generations(self, inbox: Inbox, hosts: Alone | Together) -> Generations:
        request = self._request
        assert isinstance(hosts, Alone)
        return Generations(
            request.config,
            self._workers,
            inbox,
            hosts,
            self._start_newcomers,
            on_failure=request.policy,
            limits=self._limits,
            restart=self._restart if request.checkpoint is not None else None,
            warn=self._warn,
        )

    def _make_repartitions(self, inbox: Inbox, hosts: Alone | Together) -> Repartitions:
        request = self._request
        assert isinstance(hosts, Alone)
        return Repartitions(
            request.config,
            self._workers,
            inbox,
            hosts,
            self._start_generation,
            cause=lambda config, ranks: _cause(self._workers, config, ranks),
            restarts=request.policy == "replace",
            limits=self._limits if request.policy != "stop" else None,
            parts=request.folder / HANDOVER,
            warn=self._warn,
        )

    def _make_regroup(self, slots: Sequence[WorkerSlot], hosts: Alone | Together) -> Regroup:
        assert isinstance(hosts, Together)
        return Regroup(
            self._request.config,
            slots,
            self._workers,
            hosts,
            self._restart,
            cause=lambda config, ranks: _cause(self._workers, config, ranks),
            limits=self._limits,
            interrupted=self._watch,
            warn=self._warn,
        )

    def _start_generation(
        self, config: LaunchConfig, number: int, ranks: dict[str, int], follows: bool
    ) -> None:
        self._start_newcomers(config, number, ranks, list(ranks), joins=False, follows=follows)

    def _start_newcomers(
        self,
        config: LaunchConfig,
        number: int,
        ranks: dict[str, int],
        joining: Sequence[str],
        *,
        joins: bool = True,
        follows: bool = False,
    ) -> None:
        assert self._inbox is not None
        slots = [config.workers[ranks[name]] for name in joining]
        alive = [seat for name, seat in self._seats.items() if name in self._workers.lines()]
        seats = seat_workers(slots, config, [seat.device for seat in alive])
        path = self._inbox.folder / f"generation-{number}.json"
        files.write(path, config, force=True)
        names = {ranks[name]: name for name in joining}
        self._seats |= {names[seat.slot.rank]: seat for seat in seats}
        assert self.generations is not None
        coming = NewGeneration(
            number=number,
            config=path.resolve(),
            names=names,
            joins=joins,
            # Those who join nobody start anew.
            restarted_at=self.generations.where[2] if joins else number,
            follows=follows,
        )
        request = replace(self._request, config=config)
        self._workers.start(_commands(request, seats, self._meeting, coming))

    def _restart(self, config: LaunchConfig, number: int, ranks: dict[str, int]) -> None:
        self._start_newcomers(config, number, ranks, list(ranks), joins=False)

    def _supervise(self) -> Failure | None:
        while not self._workers.all_done():
            number = self._signals.received or self._hosts.stop_elsewhere()
            if number is not None:
                return self._stop(number)
            failure = self._look_after()
            if failure is not None:
                asked = self._hosts.stop_behind(failure)
                return failure if asked is None else self._stop(asked)
        if isinstance(self.generations, Repartitions):
            self.generations.tick(0.0)  # the last to come may be done before they were seen
        return None

    def _stop(self, number: int) -> Failure:
        """End for a signal, here or on another host; after a checkpoint, if it leaves the time."""
        request, signals = self._request, self._signals
        if number == signal.SIGTERM and request.checkpoint is not None:
            if signals.received is not None:
                self._hosts.tell_stop(number)
            count, until = signals.count, time.monotonic() + request.grace_seconds
            self._workers.let_save(signals, request.grace_seconds)
            detail = self._workers.left_badly()
            self._hosts.wait_until_saved(lambda: signals.count == count, until)
            return interruption(number, detail)
        return interruption(number)

    def _look_after(self) -> Failure | None:
        """Wait a little, and take in what has happened meanwhile."""
        if self.generations is not None:
            failure = self.generations.tick(POLL_SECONDS)
            if failure is not None:
                is_known = failure.sentence_of_ours or failure.why
                if is_known or not isinstance(self.generations, Generations):
                    return failure
                return _cause(self._workers, self._request.config) or failure
            if self.generations.only_newcomers_left:
                self.generations.settle()
            return None
        if self._workers.failures():
            return _cause(self._workers, self._request.config)
        time.sleep(POLL_SECONDS)
        return self._hosts.failure_elsewhere()


def _commands(
    request: LaunchRequest,
    seats: Sequence[Seat],
    meeting: Meeting,
    generation: NewGeneration | None = None,
) -> list[WorkerCommand]:
    return worker_commands(
        seats,
        request.script,
        folder=request.folder.resolve(),
        meeting=meeting,
        world_size=request.config.world_size,
        timeout_seconds=request.timeout_seconds,
        inherited=os.environ,
        determinism=request.config.determinism,
        seed=request.config.seed,
        checkpoint=request.checkpoint.resolve() if request.checkpoint else None,
        checkpoint_every=request.checkpoint_every,
        from_scratch=request.from_scratch,
        compare_every=request.compare_every,
        handover=(request.folder / HANDOVER).resolve() if request.hands_over else None,
        generation=generation,
    )


def _cause(
    workers: Workers, config: LaunchConfig, ranks: dict[str, int] | None = None
) -> Failure | None:
    """The first cause among this host's failures, given a moment to be seen.

    Args:
        workers: The workers.
        config: What they run.
        ranks: The rank of each worker, where names are none.
    """
    deadline = time.monotonic() + CAUSE_SECONDS
    if not workers.failures():
        return None
    cause = first_cause(workers.failures())
    while cause.is_echo and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        cause = first_cause(workers.failures())
    cause = _staged(cause, config, ranks)
    silent = workers.running() if cause.timed_out else []
    if silent:
        return silence(cause, [_staged(worker, config, ranks) for worker in silent])
    return cause


def _staged(failure: Failure, config: LaunchConfig, ranks: dict[str, int] | None = None) -> Failure:
    """With the stages of the worker, under a pipeline."""
    if config.pipeline is None or failure.rank is None:
        return failure
    rank = failure.rank if ranks is None else ranks.get(str(failure.rank), -1)
    return replace(failure, stages=tuple(config.pipeline.stages_of_rank.get(rank, ())))


def _record(
    request: LaunchRequest,
    failure: Failure | None,
    reports: list[WorkerReport],
    seconds: float,
    history: Sequence[Generation],
) -> RunRecord:
    status: Status = "done"
    events = []
    if failure is not None:
        status = "interrupted" if failure.interrupted else "failed"
        kind = "stop" if failure.interrupted else "failure"
        events = [RunEvent(kind=kind, at_seconds=seconds, detail=failure.sentence())]  # type: ignore[arg-type]
    provenance: dict[str, Any] = {"script": mask(request.script), "seed": request.config.seed}
    return assemble(
        request.plan,
        reports,
        status=status,
        exit_code=failure.exit_code if failure else 0,
        wall_seconds=seconds,
        events=events,
        generations=history,
        provenance=provenance,
    )


def _show_tail(failure: Failure) -> None:
    """The failing worker's own last words; the first worker's were shown as they came."""
    if failure.rank and failure.log:
        tail = tail_of(Path(failure.log))
        if tail:
            sys.stderr.write(f"{tail}\n")


def _warn_about(record: RunRecord, warn: Warn) -> None:
    if not record.devices:
        warn("the script never called hf.prepare, so each worker ran it alone")
    for event in record.events:
        warn(event.detail)
    overruns = ((record.provenance or {}).get("emulation") or {}).get("overruns", 0)
    if overruns:
        total = (record.provenance or {})["emulation"]["passes"]
        warn(f"{overruns} of {total} emulated passes took longer than their table time")
