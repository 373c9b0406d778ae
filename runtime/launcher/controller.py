"""One controller a host: starts the workers, watches them, and writes what happened."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from ...schema import files
from ...schema.errors import HetflowError, TargetError
from ...schema.launch import WorkerSlot
from ...schema.masking import mask
from ...schema.run import Generation, RunEvent, RunRecord
from ..preload import VARIABLE, Preload
from ..protocol.environment import Channel, pins
from ..protocol.record import Status, WorkerReport, assemble
from .failures import Failure, interruption, tail_of
from .generations import Generations, Repartitions
from .hosts import Hosts, OneHost, SeveralHosts, expected_slots
from .request import (
    Fence,
    LaunchRequest,
    check_checkpoints,
    check_folder,
    check_idle,
    check_script,
    make_folder,
)
from .spawn import (
    MeetingPoint,
    WorkerCommand,
    check_memory,
    commands_of,
    imagined_seats,
    remarks,
    seat_workers,
)
from .store import LastGeneration
from .supervisor import Inbox, Launched, Regroup, Supervisor
from .workers import OutputLines, Signals, Starter, Workers

# Which way a launch is looked after: chosen once, from what was asked.


class Supervision(NamedTuple):
    """A way to look after a launch.

    ``channel`` is what workers and their controller tell each other; None where they have no
    control channel. ``supervisor`` makes the supervisor when the workers were started.
    """

    hosts: Hosts
    channel: Channel | None
    supervisor: type[Supervisor]


def supervision_of(request: LaunchRequest) -> Supervision:
    """The way that fits a launch.

    Raises:
        HetflowError: The store has no socket to listen on, or the token is none.
    """
    if request.rendezvous is not None:
        together = SeveralHosts(request, request.rendezvous)
        return Supervision(together, "heartbeats" if request.policy == "replace" else None, Regroup)
    alone = OneHost(request.config)
    if request.config.pipeline is not None:
        return Supervision(alone, "heartbeats", Repartitions)
    channel: Channel = "changes" if request.policy == "stop" else "losses"
    if channel == "losses" and request.on_failure is not None:  # asked for, so worth a wait a step
        channel = "device-losses"
    return Supervision(alone, channel, Generations)


POLL_SECONDS = 0.02

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
    check_script(request.command)
    check_checkpoints(request)
    place = request.rendezvous
    meeting = MeetingPoint(
        address=place.host if place else "127.0.0.1",
        port=place.port if place else 0,
        interface="lo",
    )
    slots: Sequence[WorkerSlot] = request.config.workers
    if place is not None:
        slots = expected_slots(request.config, place)
        _log.warning("shown as if the other hosts gave the rest of the plan's devices")
    try:
        seats = seat_workers(slots, request.config)
    except TargetError as error:
        _log.warning(f"{error.message}: shown as on a machine that has all of them")
        seats = imagined_seats(slots, request.config)
    check_memory(slots, request.config)
    return commands_of(request, seats, meeting)


def launch(request: LaunchRequest, *, warn: Warn) -> RunRecord | None:
    """Train under a plan.

    Workers are started at once; the first one's output is shown, all output is kept under
    ``logs``. Whatever ends this process, no worker outlives it. The record is written to
    ``run.json`` also when the launch fails.

    Returns:
        The run record; None on hosts other than node 0, which has it.

    Raises:
        LaunchError: A worker failed (with its own error and exit code), a signal came, or the
            hosts did not meet.
        HetflowError: The script, the folder or the devices do not fit the plan.
    """
    check_script(request.command)
    check_checkpoints(request)
    check_folder(request.folder, force=request.force)
    if request.rendezvous is None:
        check_idle(request.folder)
        seat_workers(request.config.workers, request.config)
        check_memory(request.config.workers, request.config)
    with Signals(ends_process=request.ends_process) as signals:
        record, failure = _train(request, signals, warn)
        if failure is not None:
            tail = tail_of(Path(failure.log)) if failure.rank and failure.log else ""
            if tail:  # its own last words; the first worker's were shown as they came
                OutputLines(sys.stderr).add(f"{tail}\n".encode())
            raise failure.as_error()
    return record


def _train(
    request: LaunchRequest, signals: Signals, warn: Warn
) -> tuple[RunRecord | None, Failure | None]:
    """Train, and write the record; both are done when this returns, whatever signal comes."""
    began = time.monotonic()
    node_rank = 0 if request.rendezvous is None else request.rendezvous.node_rank
    # In this order: all that was forked has ended before another launch may use the folder.
    with (
        Fence(request.checkpoint, node_rank) as fence,
        Preload(os.environ.get(VARIABLE, "")) as preload,
    ):
        inherited = dict(os.environ)  # the store's thread changes ours for a while
        if request.rendezvous is None:
            for command in plan_commands(request):
                # It imports while this process sets up.
                preload.prepare({**inherited, **command.environment})
        supervision = supervision_of(request)
        hosts = supervision.hosts
        workers = Workers(
            request.folder,
            stdout_to_stderr=request.stdout_to_stderr,
            channel=supervision.channel,
            token=hosts.token,
            inherited=inherited,
            preload=preload,
            fence=fence,
        )
        # From here on every way out goes through ``train``, which ends the workers. Nothing above
        # starts a worker.
        run = _Run(request, supervision, workers, fence, signals, warn)
        failure, supervisor = run.train()
        reports: list[WorkerReport] = []
        # The store goes with ``leave``, so reports are read before. Only a training that came to
        # its end is waited for: a worker that died has written none.
        if hosts.is_first and (failure is None or failure.interrupted):
            last = LastGeneration(world_size=request.config.world_size)
            last = supervisor.last if supervisor is not None else last
            reports = hosts.reports(last, wait=failure is None)
        hosts.leave()
    generations = supervisor.generations if supervisor is not None else ()
    record = _record(request, failure, reports, time.monotonic() - began, generations)
    if hosts.is_first and request.folder.is_dir():
        files.write(request.folder / "run.json", record, force=True)
    if hosts.is_first and failure is None:
        _warn_about(record, warn)
    return (record if hosts.is_first else None), failure


class _Run:
    """The workers of one launch, from their start to their end."""

    def __init__(
        self,
        request: LaunchRequest,
        supervision: Supervision,
        workers: Workers,
        fence: Fence,
        signals: Signals,
        warn: Warn,
    ) -> None:
        self._fence = fence
        self._ended_after: float | None = None
        self._request, self._supervision, self._workers = request, supervision, workers
        self._hosts = supervision.hosts
        self._signals, self._warn = signals, warn

    def train(self) -> tuple[Failure | None, Supervisor | None]:
        """Start the workers and see them through; how they failed, and the supervisor if any."""
        hosts, workers = self._hosts, self._workers
        supervisor: Supervisor | None = None
        with ExitStack() as opened:
            try:
                supervisor = self._start(opened)
                failure = self._see_through(supervisor) or hosts.wait_for_others(self._watch_end)
            except _Interrupted:
                failure = interruption(self._signals.received or 2)
            except BaseException as error:
                # The hosts may have met: the others have workers that wait for this one's.
                if isinstance(error, Exception):
                    hosts.tell_failure(_refusal(self._request, error))
                workers.stop(self._signals)
                hosts.leave()
                raise
            if failure is not None:
                # First told, then stopped: the others end for the cause that is told here. If
                # workers were stopped first, their ends would be seen elsewhere as failures of
                # their own.
                failure = hosts.tell_failure(failure)
                if failure.interrupted:
                    workers.let_report(self._signals)
                # Only after Ctrl-C do scripts handle a KeyboardInterrupt, as under plain python;
                # SIGTERM ends them, after a checkpoint where there is a folder (``_stop``).
                if failure.exit_code == 128 + signal.SIGINT and failure.interrupted:
                    workers.interrupt(self._signals, self._request.grace_seconds, self._warn)
            workers.stop(self._signals)
        return failure, supervisor

    def _start(self, opened: ExitStack) -> Supervisor:
        """Meet the other hosts and start this one's workers; ``opened`` closes the inbox."""
        request, hosts = self._request, self._hosts
        # The order matters: the fence comes before anything is read from the folder of checkpoints;
        # hosts meet before devices are taken, as they decide the slots; all that can be refused is
        # refused before the first file of an earlier run is removed (``make_folder``).
        self._fence.close_behind(request.timeout_seconds, self._watch, self._warn)
        slots, meeting = hosts.join(self._watch)
        seats = seat_workers(slots, request.config)
        check_memory(slots, request.config)
        environment = os.environ | pins(request.config.determinism)
        for remark in remarks(slots, request.config, environment):
            self._warn(remark)
        make_folder(request.folder)
        files.write(request.folder / "plan.json", request.plan, force=True)
        files.write(request.folder / "launch.json", request.config, force=True)
        inbox = Inbox(request.folder)
        opened.callback(inbox.close)
        starter = Starter(request, self._workers, meeting, inbox.folder)
        # The store is made by a thread while workers start: importing torch takes a second, and
        # workers need the store only when they have imported it too.
        hosts.starting()
        starter.first(seats, self._watch)
        launched = Launched(
            request=request,
            slots=slots,
            workers=self._workers,
            inbox=inbox,
            starter=starter,
            check_signals=self._watch,
            warn=self._warn,
        )
        return self._supervision.supervisor(launched, hosts)

    def _watch(self) -> None:
        if self._signals.received is not None:
            raise _Interrupted

    def _watch_end(self) -> None:
        """The scripts of this host have ended: a signal asks the other hosts, and is over here."""
        if self._signals.received is None:
            return
        if self._ended_after is None:
            self._ended_after = time.monotonic()
            self._hosts.tell_stop(self._signals.received)
        # The end itself may hang; so after a signal it has the grace time, too.
        if time.monotonic() - self._ended_after > self._request.grace_seconds:
            raise _Interrupted

    def _see_through(self, supervisor: Supervisor) -> Failure | None:
        while not self._workers.all_done():
            # Signals come before failures: workers that were told to leave look like failed ones.
            number = self._signals.received or self._hosts.stop_elsewhere()
            if self._workers.have_ended():
                self._watch_end()
            elif number is not None:
                stopped = self._stop(number)
                if stopped is not None:
                    return stopped
                continue
            failure = supervisor.tick(POLL_SECONDS)
            if failure is not None:
                asked = self._hosts.stop_behind(failure)
                return failure if asked is None else self._stop(asked)
        supervisor.finish()
        return None

    def _stop(self, number: int) -> Failure | None:
        """End for a signal, here or on another host; after a checkpoint, if it leaves the time."""
        request, signals = self._request, self._signals
        if number == signal.SIGTERM and request.checkpoint is not None:
            if signals.received is not None:
                self._hosts.tell_stop(number)
            # The other hosts hear of it first. All workers stop after one step together, and a host
            # that was not told would take their leaving for a failure.
            count, until = signals.count, time.monotonic() + request.grace_seconds
            self._workers.let_save(signals, request.grace_seconds)
            if self._workers.have_ended():  # before they could obey: the launch is done
                return None
            detail = self._workers.left_badly()
            self._hosts.wait_until_saved(lambda: signals.count == count, until)
            return interruption(number, detail)
        return interruption(number)


def _refusal(request: LaunchRequest, error: Exception) -> Failure:
    """What the other hosts are told where this one cannot start."""
    number = 0 if request.rendezvous is None else request.rendezvous.node_rank
    return Failure(
        exit_code=error.exit_code if isinstance(error, HetflowError) else 1,
        error=f"host {number} ({socket.gethostname()}) did not start: {error}",
        hint=error.hint if isinstance(error, HetflowError) else None,
    )


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
    provenance: dict[str, Any] = {"script": mask(request.command), "seed": request.config.seed}
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


def _warn_about(record: RunRecord, warn: Warn) -> None:
    if not record.devices:
        warn(
            "the script never called hf.prepare: every worker ran all of it, and nothing was "
            "trained under the plan"
        )
    for event in record.events:
        warn(event.detail)
    overruns = ((record.provenance or {}).get("emulation") or {}).get("overruns", 0)
    if overruns:
        total = (record.provenance or {})["emulation"]["passes"]
        warn(f"{overruns} of {total} emulated passes took longer than their table time")
