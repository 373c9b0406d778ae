"""End a worker: report, leave the group, stop when asked; neither hang nor crash on exit."""

import atexit
import contextlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, ClassVar, NoReturn, Protocol

import torch.distributed as dist

from ..schema import files
from ..schema.errors import FileError, HetflowError, TargetError
from ..schema.files import to_json
from ..schema.run import DeviceRun
from .group import Place, complete
from .group import leave as leave_group
from .log import log
from .measurements import peak_memory_bytes, reference_seconds
from .protocol import handover
from .protocol.ended import explained
from .protocol.handover import STOPPED_EXIT_CODE
from .protocol.messages import Finished
from .protocol.record import WorkerReport, assemble, parse_report
from .session import Session
from .worker import ScriptRun, fail_at_exit, leave_now

_STARTED = time.monotonic()


class ScriptEnd:
    """How this process's script is ending; set by the excepthook or by runtime/worker.py."""

    failed = False
    hooked = False
    code: int | None = None  # the exit code of an error of hetflow's, which Python would make 1


class Ending(Protocol):
    """The methods of a job that the end of the process uses."""

    @property
    def world_size(self) -> int:
        """The number of workers."""

    def finish(self, *, whole: bool) -> None:
        """End the job; ``whole`` says whether the script can still use the model."""

    def abandon(self) -> None:
        """Leave the job at once, without the other workers."""


def at_exit(job: Ending) -> None:
    """Finish a job when the interpreter ends, unless the script failed."""
    atexit.register(_end, job)


def say_errors_in_one_line() -> None:
    """Let errors of hetflow's that end the script be one line and an exit code of their own."""
    if ScriptEnd.hooked:
        return
    ScriptEnd.hooked = True
    atexit.register(_leave_with_code)
    before = sys.excepthook

    def failed(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        ScriptEnd.failed, told = True, explained(error)
        if isinstance(told, HetflowError) and not ScriptRun.active:
            ScriptEnd.code = fail_at_exit(told)
        else:
            before(kind, error, traceback)

    sys.excepthook = failed


def _leave_with_code() -> None:
    if ScriptEnd.code is not None:
        leave_now(ScriptEnd.code)


def _end(job: Ending) -> None:
    if not ScriptEnd.failed and ScriptRun.interrupted:
        job.abandon()
    elif not ScriptEnd.failed:
        try:
            job.finish(whole=False)
        except BaseException as error:
            # Raised from here, it would be printed and the exit code would be 0.
            leave_now(fail_at_exit(error))
    elif ScriptEnd.code is not None:
        _leave_with_code()
    elif job.world_size > 1 and not ScriptRun.active:
        # Collectives in flight would keep the interpreter alive until their time limit.
        leave_now(1)


def meet_all(session: Session, run: Callable[[Callable[[], None]], None]) -> None:
    """Wait until every worker is at the end of its script.

    Raises:
        TargetError: This cannot be known, because the script destroyed the process group.
    """
    session.clock.end_step()
    if session.place.distributed and not dist.is_initialized():
        raise TargetError(
            "the script destroyed the process group before the job was finished",
            hint="leave destroy_process_group out, or call job.finish() before it",
        )
    if session.place.store is None:
        return
    control = session.place.control
    if control is not None:  # so that the controller can tell who left the others in a step
        control.left_at = session.num_steps
    run(lambda: _meet(session.place))
    if control is not None:
        control.left_at = None


def report(session: Session, digest: Callable[[], str]) -> None:
    """Report the measurements, and the digest of the trained tensors, to the controller.

    ``digest`` is called on all workers, or on none.
    """
    place = session.place
    if place.start.config is None:
        return
    own = _report_of(session, digest())
    if place.store is not None:
        _write_report(place, own)
    if place.start.run_folder is None or place.rank != 0 or place.start.plan is None:
        return
    # Without a controller, rank 0 writes the run record.
    reports = [own]
    for rank in range(1, place.world_size):
        assert place.store is not None
        reports.append(parse_report(place.store.get(f"report/{rank}")))
    record = assemble(
        place.start.plan,
        reports,
        status="done",
        exit_code=0,
        wall_seconds=time.monotonic() - _STARTED,
    )
    try:
        place.start.run_folder.mkdir(parents=True, exist_ok=True)
        files.write(place.start.run_folder / "run.json", record, force=True)
    except (FileError, OSError) as error:
        log.warning(f"the run record was not written: {error}")


def report_when_asked(session: Session) -> None:
    """Let the control channel report this job's measurements so far, in the middle of training.

    The launcher asks when it ends its workers without letting them save. They may be anywhere,
    also in a collective that never ends. So the channel's thread reports, and waits for no device.
    """
    control = session.place.control
    if control is None or control.num_jobs > 1:  # the launcher reads the reports of the first job
        return

    def report_now() -> None:
        place = session.place
        if place.store is None or session.is_finished:  # not joined yet; or it reports by itself
            return
        with contextlib.suppress(Exception):  # of any kind: the launcher ends this worker anyway
            _write_report(place, _report_of(session, None, at_rest=False))

    control.report = report_now


def part(session: Session) -> None:
    """Leave the other workers; the last job of this process also closes the process group."""
    place = session.place
    if place.control is not None:
        place.control.send(Finished())
    if place.start.config is not None:
        leave_group()


def _meet(place: Place) -> None:
    """Wait in the store until all workers are done."""
    # A collective is safe only then, because a worker may have left early. The store is asked and
    # not the group, since a worker that is in another collective would answer that one.
    assert place.store is not None
    signs = [f"finished/{rank}" for rank in range(place.world_size)]
    place.store.set(signs[place.rank], "1")
    place.store.wait(signs, timedelta(seconds=place.start.timeout_seconds))


def _report_of(session: Session, digest: str | None, *, at_rest: bool = True) -> WorkerReport:
    """This worker's report; unless it is ``at_rest``, nothing waits for the device."""
    timings, place, holder = session.clock.timings(wait=at_rest), session.place, session.holder
    num_steps, num_samples = session.clock.done
    loss = float("nan") if session.last_loss is None or not at_rest else float(session.last_loss)
    assert place.slot is not None
    return WorkerReport(
        device=DeviceRun(
            rank=place.rank,
            device_type=place.slot.device_type,
            host=socket.gethostname(),
            num_samples=num_samples,
            num_steps=num_steps,
            predicted_compute_seconds=None,
            peak_memory_bytes=peak_memory_bytes(place.device),
            reference_seconds=reference_seconds(place.device) if at_rest else None,
            **timings._asdict(),
        ),
        final_loss=loss if abs(loss) < float("inf") else None,
        parameters_digest=digest,
        emulated_passes=holder.num_passes if holder else 0,
        emulated_overruns=holder.num_overruns if holder else 0,
        worst_overrun_seconds=holder.worst_overrun_seconds if holder else 0.0,
    )


def _write_report(place: Place, own: WorkerReport) -> None:
    assert place.store is not None
    place.store.set(f"report/{place.rank}", to_json(own))


# The signals that ask a job to save and leave, from its start to its end.
#
# The script's own handlers are kept: an earlier handler is called when a job has saved, and is
# installed again when the last job is over. A signal after that acts as without hetflow. One that
# came too late for a job to save and leave is raised again.


class StopRequests:
    """The requests to one job. Only the main thread of a process can receive signals."""

    _open: ClassVar[list["StopRequests"]] = []
    _before: ClassVar[dict[int, Any]] = {}
    _received: ClassVar[list[int]] = []

    def __init__(self, numbers: Sequence[signal.Signals], ask: Callable[[], None]) -> None:
        self._ask, self._numbers = ask, numbers
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            before = signal.signal(number, _noted)
            if before is not _noted:
                self._before[number] = before
        if numbers:
            self._open.append(self)

    @classmethod
    def pass_on(cls) -> None:
        """Call the handlers installed before any job, for the signals that came."""
        for number in cls._received:
            handler = cls._before[number]
            if callable(handler):
                handler(number, None)

    def close(self) -> None:
        """End this job's requests; the last job restores the earlier handlers.

        A handler that the script set since stays. A signal that no job obeyed is raised again.
        """
        if self not in self._open:
            return
        self._open.remove(self)
        if self._open:
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) is _noted:
                after = signal.SIG_DFL if handler is None else handler
                if number == handover.SIGNAL and after == signal.SIG_DFL:
                    after = signal.SIG_IGN  # a request that comes too late must not end the process
                signal.signal(number, after)
        late = [number for number in self._received if number != handover.SIGNAL]
        self._before.clear()
        self._received.clear()
        for number in late:
            sys.stdout.flush()
            signal.raise_signal(number)

    @classmethod
    def note(cls, number: int) -> None:
        """Record a signal, and ask all open jobs that want it to stop."""
        cls._received.append(number)
        for requests in cls._open:
            if number in requests._numbers:
                requests._ask()


def _noted(number: int, frame: FrameType | None) -> None:
    StopRequests.note(number)


def leave(session: Session) -> NoReturn:
    """Report and stop as asked, after the script's own handlers of the signal have run.

    There is no digest, because training is not over. A worker that cannot report leaves as well.
    """
    place = session.place
    complete(place.device)
    if place.start.config is not None and place.store is not None:
        with contextlib.suppress(HetflowError):  # the launcher may be gone
            _write_report(place, _report_of(session, None))
    session.is_finished = True  # the exit of the interpreter has nothing left to do
    StopRequests.pass_on()
    sys.exit(STOPPED_EXIT_CODE)
