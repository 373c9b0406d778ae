"""Hold the workers of this host: start, stream, watch, stop."""

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from ...schema import files
from ...schema.errors import ProblemError
from ...schema.launch import LaunchConfig
from ...schema.options import option, speaks_flags
from ..preload import Preload
from ..preload.process import dying_with
from ..protocol.ended import ended_path, left_path
from ..protocol.environment import CHANNEL, CONTROL, FLAGS, TOKEN, Channel
from ..protocol.handover import STOPPED_EXIT_CODE
from ..protocol.messages import (
    Beat,
    Finished,
    FromController,
    FromWorker,
    Report,
    Reported,
    Unreadable,
    encode,
    from_worker,
)
from .failures import Failure, failure_of, first_cause
from .request import Fence, LaunchRequest
from .spawn import (
    Entry,
    MeetingPoint,
    NewGeneration,
    Process,
    Seat,
    WorkerCommand,
    commands_of,
    failure_path,
    seat_workers,
    signal_group,
)

# Show workers' output on our own streams, whole lines at a time, so that lines never mix.

FOLLOW_SECONDS = 0.05
PARTIAL_SECONDS = 0.2  # after which the beginning of a line is shown, such as a prompt
_CHUNK_BYTES = 1 << 16
_writing = threading.Lock()
_log = logging.getLogger("hetflow")


class OutputLines:
    """What goes to one of our streams; a line is written at once.

    Args:
        console: The stream. ``is_open`` says whether it is still there (a closed pipe is no error).
    """

    def __init__(self, console: IO[str]) -> None:
        self._console, self.is_open = console, True
        self._rest, self._since = b"", 0.0

    @property
    def is_partial(self) -> bool:
        """Whether the beginning of a line waits for its end."""
        return bool(self._rest)

    def add(self, chunk: bytes) -> None:
        """Show the lines that are whole now; a progress bar's end with a carriage return."""
        if not self._rest:
            self._since = time.monotonic()
        # Only whole lines are shown, because stdout, stderr and our own messages share a terminal.
        # A beginning waits, but not for long: a prompt has no end of line.
        whole = self._rest + chunk
        end = max(whole.rfind(b"\n"), whole.rfind(b"\r")) + 1
        self._rest = whole[end:]
        self._show(whole[:end])
        self.settle()

    def settle(self) -> None:
        """Show the beginning of a line that has waited for too long."""
        if time.monotonic() - self._since >= PARTIAL_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Show all."""
        rest, self._rest = self._rest, b""
        self._show(rest)

    def _show(self, data: bytes) -> None:
        if not data or not self.is_open:
            return
        try:
            with _writing:
                binary = getattr(self._console, "buffer", None)
                if binary is not None:
                    binary.write(data)
                else:
                    self._console.write(data.decode("utf-8", errors="replace"))
                self._console.flush()
        except (OSError, ValueError):
            self.is_open = False


def tee(read: int, log: Path, console: IO[str]) -> None:
    """Copy a pipe to a log and to the console, until its writers are gone."""
    lines, is_kept = OutputLines(console), True
    with os.fdopen(read, "rb", buffering=0) as pipe, log.open("ab", buffering=0) as kept:
        while True:
            if lines.is_partial and not select.select([pipe], [], [], PARTIAL_SECONDS)[0]:
                lines.flush()
                continue
            chunk = pipe.read(_CHUNK_BYTES)
            if not chunk:
                break
            if is_kept:
                try:
                    kept.write(chunk)
                except OSError as error:  # the disk is full, say: the worker must not end for that
                    is_kept = False
                    _log.warning(f"{log}: {error.strerror}; what follows is shown, not kept")
            lines.add(chunk)
    lines.flush()


def follow(
    log: Path, console: IO[str], is_over: Callable[[], bool], goes_on: Callable[[], bool]
) -> None:
    """Show what is added to a log, until its worker is gone or another is shown."""
    lines = OutputLines(console)
    with log.open("rb", buffering=0) as kept:
        kept.seek(0, os.SEEK_END)
        while lines.is_open and goes_on():
            # Asked before the read: a worker that ends in between has written all before it, so one
            # more turn reads the rest. Asked after it, the last lines could be lost.
            was_over = is_over()
            chunk = kept.read(_CHUNK_BYTES)
            if chunk:
                lines.add(chunk)
            elif was_over:
                break
            else:
                lines.settle()
                time.sleep(FOLLOW_SECONDS)
    lines.flush()


# The controller's end of a worker's control channel: JSON lines over a socket pair.


MAX_LINE_BYTES = 64 << 20


class WorkerLine:
    """One worker's line. ``heard_at`` and ``moved_at`` are monotonic seconds.

    ``operation``, ``is_waiting`` and ``left_at`` are what the last heartbeat said; ``moved_at`` is
    when that changed. ``is_prepared`` says that the script has come to ``hf.prepare``,
    ``is_finished`` that its interpreter is about to end, and its heartbeat with it.
    """

    def __init__(self) -> None:
        self._own, self.theirs = socket.socketpair()
        self._own.setblocking(False)
        self._rest = b""
        self.is_open = True
        self.is_prepared, self.is_finished = False, False
        self.began = time.monotonic()
        self.heard_at: float | None = None
        self.moved_at = 0.0
        self.operation, self.is_waiting = -1, False
        self.left_at: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the worker has prepared a model, and has not finished."""
        return self.is_open and self.is_prepared and not self.is_finished

    def started(self) -> None:
        """The worker has its end now."""
        self.theirs.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._own.fileno()

    def send(self, message: FromController) -> None:
        """Tell the worker; one that is gone or stopped is found out by other means."""
        data = encode(message)
        if not self.is_open:
            return
        with contextlib.suppress(OSError):
            # A worker that a debugger or SIGSTOP holds reads nothing. After a second the
            # controller, which serves all others too, goes on without it; the heartbeats tell.
            self._own.settimeout(1.0)
            self._own.sendall(data)
        with contextlib.suppress(OSError):
            self._own.setblocking(False)

    def receive(self) -> list[FromWorker]:
        """What the worker has said since the last call; heartbeats are noted, not returned.

        Raises:
            ProblemError: It said what no worker says.
        """
        with contextlib.suppress(OSError):
            while self.is_open:
                data = self._own.recv(1 << 16)
                self.is_open = bool(data)
                self._rest += data
                # A worker that sends no end of line must not fill the controller's memory.
                if len(self._rest) > MAX_LINE_BYTES:
                    self._rest = b""
        *lines, self._rest = self._rest.split(b"\n")
        messages: list[FromWorker] = []
        for line in lines:
            message = from_worker(line)
            self._note(message)
            if not isinstance(message, Beat):
                messages.append(message)
        return messages

    def _note(self, message: FromWorker) -> None:
        self.heard_at = time.monotonic()
        self.is_finished = self.is_finished or isinstance(message, Finished)
        if not isinstance(message, Beat):
            return
        self.is_prepared = message.prepared
        found = (message.operation, message.waiting, message.left_at)
        if found != (self.operation, self.is_waiting, self.left_at):
            self.operation, self.is_waiting, self.left_at = found
            self.moved_at = self.heard_at

    def close(self) -> None:
        """The worker is gone."""
        self.is_open = False
        self._own.close()


GRACE_SECONDS = 5.0
HANDLING_SECONDS = 1.5
"""How long a script may handle an interruption without a word to the user."""
REPORT_SECONDS = 1.0
"""How long workers that are about to be ended may take to report what they have measured."""


class Signals:
    """While it is open, SIGINT, SIGTERM and SIGHUP are noted instead of ending the process.

    Args:
        ends_process: Whether the process ends afterwards, and ignores these signals until then.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self._ends_process = ends_process
        self.received: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._ends_process else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first decides how the launch ends; each further one only makes waiting shorter
        # (``count``).
        self.received = self.received or number
        self.count += 1


class Workers:
    """The workers of this host. One's output is shown; all of it is kept in logs."""

    def __init__(
        self,
        folder: Path,
        *,
        stdout_to_stderr: bool,
        channel: Channel | None = None,
        token: str = "",
        inherited: Mapping[str, str],
        preload: Preload,
        fence: Fence,
    ) -> None:
        self._folder, self._fence = folder, fence
        self._inherited, self._preload = inherited, preload
        self._stdout_to_stderr = stdout_to_stderr
        self._channel, self._token = channel, token
        self._processes: dict[str, Process] = {}
        self._lines: dict[str, WorkerLine] = {}
        self._types: dict[str, str] = {}
        self._killed: dict[str, str] = {}
        self._shown = "0"
        self._tees: list[threading.Thread] = []

    def wait_until_ready(
        self, commands: Sequence[WorkerCommand], watch: Callable[[], None]
    ) -> None:
        """Wait until workers can be forked, or never will be; ``watch`` may raise meanwhile."""
        for command in commands:
            self._preload.wait({**self._inherited, **command.environment}, watch)

    def start(self, commands: Sequence[WorkerCommand]) -> None:
        """Start them all. Call from the main thread: their lives hang on the starting thread."""
        for command in commands:
            # What an earlier launch left in this folder under that name would pass for this
            # worker's.
            failure = self._failure_path(command.name)
            for old in (failure, ended_path(failure), left_path(failure)):
                old.unlink(missing_ok=True)
            self._types[command.name] = command.device_type
            self._processes[command.name] = self._start(command)

    def _start(self, command: WorkerCommand) -> Process:
        out, err = self.logs(command.name)
        with out.open("wb") as out_stream, err.open("wb") as err_stream:
            # Only worker 0 is shown, so only its output goes through a pipe that a thread copies.
            # The others write to their logs themselves, which costs this process nothing.
            if command.name != "0":
                return self._start_on(command, out_stream, err_stream)
        reads, writes = zip(os.pipe(), os.pipe(), strict=True)
        process = self._start_on(command, writes[0], writes[1])
        for read, write, log, console in zip(
            reads, writes, (out, err), self._consoles, strict=True
        ):
            # The copy in this process: while it is open, the pipe has a writer and its reader no
            # end.
            os.close(write)
            self._begin(tee, read, log, console)
        return process

    def _start_on(
        self, command: WorkerCommand, out: int | IO[bytes], err: int | IO[bytes]
    ) -> Process:
        """Start one worker in its own session; it dies with this process, however that dies.

        It is forked where a preloaded process is ready for its environment, and fresh elsewhere. It
        holds the fence till it ends. The token goes by the environment, which only this user and
        root can read, and is no part of the command, which is shown.
        """
        passed = [] if self._fence.descriptor is None else [self._fence.descriptor]
        extra = {TOKEN: self._token} if self._token else {}
        extra |= {FLAGS: "1"} if speaks_flags() else {}
        line = None
        if self._channel is not None:
            line = self._lines[command.name] = WorkerLine()
            passed.append(line.theirs.fileno())
            extra |= {CONTROL: str(line.theirs.fileno()), CHANNEL: self._channel}
        environment = {**self._inherited, **command.environment, **extra}
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
        given["pass_fds"] = tuple(passed)
        process: Process | None = self._preload.start(command.arguments, environment, **given)
        if process is None:
            is_linux = sys.platform.startswith("linux")
            process = subprocess.Popen(
                command.arguments,
                env=environment,
                start_new_session=True,
                preexec_fn=dying_with(os.getpid()) if is_linux else None,
                **given,
            )
        if line is not None:
            # Closed here once the worker has it, so that the worker's end is seen as the end of the
            # line.
            line.started()
        return process

    @property
    def _consoles(self) -> tuple[IO[str], IO[str]]:
        return sys.stderr if self._stdout_to_stderr else sys.stdout, sys.stderr

    def _begin(self, function: Callable[..., None], *arguments: Any) -> None:
        tee = threading.Thread(target=function, args=arguments, daemon=True)
        tee.start()
        self._tees.append(tee)

    def show(self, name: str) -> None:
        """Show this worker's output from now on; the one before is gone, or no longer first."""
        if name == self._shown:
            return
        self._shown, process = name, self._processes[name]
        for log, console in zip(self.logs(name), self._consoles, strict=True):
            is_over = lambda: process.poll() is not None  # noqa: E731
            self._begin(follow, log, console, is_over, lambda: self._shown == name)

    def lines(self) -> dict[str, WorkerLine]:
        """The lines to the workers."""
        return self._lines

    def hear(self) -> list[tuple[str, FromWorker]]:
        """What workers have said since the last call, each with who said it.

        A worker and its controller that cannot read each other are of unlike installations, such as
        where the package was changed while the launch ran. Such a worker is killed.
        """
        heard: list[tuple[str, FromWorker]] = []
        for name, line in self._lines.items():
            try:
                heard += [(name, message) for message in line.receive()]
            except ProblemError as error:
                self._kill_unlike(name, f"sent its launcher what that cannot read: {error.message}")
        for name, message in heard:
            if isinstance(message, Unreadable):
                self._kill_unlike(name, f"cannot read what its launcher sends: {message.why}")
        return heard

    def _kill_unlike(self, name: str, why: str) -> None:
        self.kill(name, f"{why} (was hetflow changed while the launch ran?) and was killed")

    def kill(self, name: str, why: str = "") -> None:
        """End a worker and what it started, at once; it may be stopped.

        Its failure says ``why``, the first that was given.
        """
        # Before the signal: its death must not be seen without the reason.
        self._killed.setdefault(name, why)
        signal_group(self._processes[name], signal.SIGKILL)

    def is_stopped(self, name: str) -> bool:
        """Whether a signal has stopped it."""
        return _is_stopped(self._processes[name].pid)

    def signal(self, name: str, number: int) -> None:
        """Send a worker a signal, unless it is gone."""
        if self._processes[name].poll() is None:
            self._processes[name].send_signal(number)

    def forget(self, name: str) -> None:
        """A worker that is gone no longer counts."""
        # The whole group is killed: data loaders of a worker that is gone would keep their memory,
        # and the fence of its checkpoints shut.
        process = self._processes.pop(name)
        signal_group(process, signal.SIGKILL)  # what it started
        process.wait()
        line = self._lines.pop(name, None)
        if line is not None:
            line.close()

    def is_held(self, name: str) -> bool:
        """Whether it was started and not forgotten."""
        return name in self._processes

    def is_done(self, name: str) -> bool:
        """Whether it has left with exit code 0."""
        return name in self._processes and self._code(name) == 0

    def _code(self, name: str) -> int | None:
        """A worker's exit code; None while it is there."""
        code = self._processes[name].poll()
        # Between its last act and its exit a worker may still be killed (by a scheduler that ends
        # the job, say). Everything was saved by then, so the launch has not failed.
        was_done = code is not None and code < 0 and left_path(self._failure_path(name)).exists()
        return 0 if was_done else code

    def _failure_path(self, name: str) -> Path:
        return failure_path(self._folder, name)

    def logs(self, name: str) -> tuple[Path, Path]:
        """Where a worker's stdout and stderr are kept."""
        return self._folder / "logs" / f"rank{name}.out", self._folder / "logs" / f"rank{name}.err"

    def has_ended(self, name: str) -> bool:
        """Whether its script has ended well; its process may still be there."""
        return self.is_done(name) or ended_path(self._failure_path(name)).exists()

    def have_ended(self) -> bool:
        """Whether every worker's script has ended well: no later signal undoes that."""
        return bool(self._processes) and all(map(self.has_ended, self._processes))

    def all_done(self) -> bool:
        """Whether every worker has left with exit code 0."""
        return all(map(self.is_done, self._processes))

    def failures(self) -> list[Failure]:
        """The workers that have failed so far."""
        return [
            failure_of(
                int(name),
                self._types[name],
                code,
                self._failure_path(name),
                self.logs(name)[1],
                why=self._killed.get(name, ""),
            )
            for name in self._processes
            if (code := self._code(name))
        ]

    def left_early(self) -> Failure | None:
        """A worker whose process has ended with exit code 0, and whose script has not."""
        for name in self._processes:
            note = self._failure_path(name)
            has_said = any(path.exists() for path in (ended_path(note), left_path(note)))
            if self._code(name) == 0 and not has_said:
                return Failure(
                    exit_code=1,
                    error="",
                    rank=int(name),
                    device_type=self._types[name],
                    why="ended its process in the middle of the script, with exit code 0, and the "
                    "others wait for it (os._exit, or an exec)",
                    hint="end the script on all workers alike, by its last line or sys.exit(); its "
                    f"whole output: {self.logs(name)[1]}",
                )
        return None

    def running(self) -> list[Failure]:
        """The workers that are still there, stopped ones only where some are, as failures."""
        pids = {r: process.pid for r, process in self._processes.items() if process.poll() is None}
        stopped = [rank for rank, pid in pids.items() if _is_stopped(pid)]
        return [
            Failure(
                exit_code=1,
                error="",
                rank=int(rank),
                device_type=self._types[rank],
                log=str(self.logs(rank)[1]),
            )
            for rank in stopped or pids
        ]

    def let_save(self, signals: Signals, grace_seconds: float) -> None:
        """Ask the workers to write a checkpoint after the step they are in, and leave.

        Waits until they are gone, the grace is over, or another signal comes.
        """
        self._ask(signal.SIGTERM, list(self._processes), signals, grace_seconds)

    def interrupt(
        self, signals: Signals, grace_seconds: float, warn: Callable[[str], None]
    ) -> None:
        """Let scripts have the KeyboardInterrupt that Ctrl-C is under plain ``python``.

        Waits until they are gone, the grace is over, or another signal comes; those that have ended
        their scripts only wait for the others. ``warn`` tells the user if it takes longer.
        """
        names = [name for name in self._processes if not self.has_ended(name)]
        first = min(grace_seconds, HANDLING_SECONDS)
        # Most scripts do nothing about it and are gone at once; only who waits longer reads why.
        if self._ask(signal.SIGINT, names, signals, first) or grace_seconds <= first:
            return
        warn(
            f"the script handles the interruption, for up to {grace_seconds:g} s "
            f"({option('grace_seconds')}); Ctrl-C again ends it at once"
        )
        self._wait_for(names, signals, grace_seconds - first)

    def _ask(self, number: int, names: Sequence[str], signals: Signals, seconds: float) -> bool:
        """Send these workers a signal, and wait until they are gone; False where some are not."""
        for name in names:
            self.signal(name, number)
        return self._wait_for(names, signals, seconds)

    def _wait_for(self, names: Sequence[str], signals: Signals, seconds: float) -> bool:
        """Wait until workers are gone; False where the time is over or another signal comes."""
        asked, deadline = signals.count, time.monotonic() + seconds
        while any(self._processes[name].poll() is None for name in names):
            if time.monotonic() > deadline or signals.count > asked:
                return False
            time.sleep(0.02)
        return True

    def let_report(self, signals: Signals) -> None:
        """Ask the workers that train what they have measured so far.

        Waits until they have reported or are gone, the time is over, or another signal comes. A
        worker answers in milliseconds, in the middle of a step too.
        """
        # The measurements of a launch that fails are worth having, but not worth waiting for: a
        # worker that hangs never answers.
        asked, deadline = signals.count, time.monotonic() + REPORT_SECONDS
        # A worker that a signal has stopped would not answer, so it is not waited for.
        waiting = {name for name, line in self._lines.items() if line.trains and self._runs(name)}
        for name in waiting:
            self._lines[name].send(Report())
        while waiting and time.monotonic() < deadline and signals.count == asked:
            time.sleep(0.01)
            heard = {name for name, message in self.hear() if isinstance(message, Reported)}
            waiting = {name for name in waiting - heard if self._runs(name)}

    def _runs(self, name: str) -> bool:
        return self._processes[name].poll() is None and not self.is_stopped(name)

    def left_badly(self) -> str | None:
        """What kept a worker from saving and leaving, where something did."""
        running = self.running()
        if running:
            return f"worker {running[0].rank} had not saved and left when it was ended"
        own = [f for f in self.failures() if f.exit_code != STOPPED_EXIT_CODE]
        return first_cause(own).sentence() if own else None

    def stop(self, signals: Signals | None = None) -> None:
        """End every worker and what it started: SIGTERM, a grace, SIGKILL. No orphan stays."""
        asked = signals.count if signals else 0
        for name, process in self._processes.items():
            if process.poll() is None:
                # At its end a worker ignores SIGTERM, and only waits for the others.
                number = signal.SIGKILL if self.has_ended(name) else signal.SIGTERM
                signal_group(process, number)
                signal_group(process, signal.SIGCONT)  # a stopped one takes the signal when it runs
        deadline = time.monotonic() + GRACE_SECONDS
        while any(process.poll() is None for process in self._processes.values()):
            impatient = signals is not None and signals.count > asked
            if time.monotonic() > deadline or impatient:
                break
            time.sleep(0.02)
        # SIGKILL comes for the groups of all workers, also of those that left well: children that
        # they forgot would outlive the launch.
        for process in self._processes.values():
            signal_group(process, signal.SIGKILL)
            process.wait()
        # After the processes: the pipes close with their last writer, so the threads have shown
        # all.
        for thread in self._tees:
            # Not for ever: a process that left the worker's group may hold the pipe open.
            thread.join(timeout=2)
        for line in self._lines.values():
            line.close()


class Starter:
    """Starts this host's workers, and knows which devices they hold."""

    def __init__(
        self, request: LaunchRequest, workers: Workers, meeting: MeetingPoint, folder: Path
    ) -> None:
        self._request, self._workers = request, workers
        self._meeting, self._folder = meeting, folder
        self._seats: dict[str, Seat] = {}

    def first(self, seats: Sequence[Seat], watch: Callable[[], None]) -> None:
        """Start the workers of the plan."""
        commands = commands_of(self._request, seats, self._meeting)
        self._workers.wait_until_ready(commands, watch)
        self._workers.start(commands)
        self._seats = {str(seat.slot.rank): seat for seat in seats}

    def start(
        self,
        entry: Entry,
        config: LaunchConfig,
        number: int,
        ranks: Mapping[str, int],
        *,
        joining: Sequence[str] | None = None,
        restarted_at: int | None = None,
    ) -> None:
        """Start the workers of another generation: ``joining``, or all of it where that is None.

        Those that ``join`` go to free devices, beside the running ones. Those that ``follow`` wait
        for their turn, and then take over the devices of all others. Those that ``restart`` go on
        from the last checkpoint, and those before are gone.

        Raises:
            HetflowError: The machine lacks the devices.
        """
        names, there = list(ranks) if joining is None else joining, self._workers.lines()
        follows = entry == "follow"
        held = [] if follows else [s.device for name, s in self._seats.items() if name in there]
        slots = [config.workers[ranks[name]] for name in names]
        # The devices are checked before the file is written and any process started: a request that
        # cannot be served leaves nothing behind.
        seats = seat_workers(slots, config, held)
        path = self._folder / f"generation-{number}.json"
        files.write(path, config, force=True)
        by_rank = {ranks[name]: name for name in names}
        self._seats |= {by_rank[seat.slot.rank]: seat for seat in seats}
        generation = NewGeneration(
            number=number,
            config=path.resolve(),
            names=by_rank,
            entry=entry,
            restarted_at=number if restarted_at is None else restarted_at,
        )
        request = replace(self._request, config=config)
        self._workers.start(commands_of(request, seats, self._meeting, generation))


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process (Linux)."""
    try:
        # Behind the last bracket: a program's name may hold blanks and brackets of its own.
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"
