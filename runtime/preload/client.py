"""Ask preloaded processes to fork workers, and follow how these end."""

import contextlib
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from .process import (
    ForkRequest,
    Message,
    can_run,
    current_umask,
    dying_with,
    identity,
    import_settings,
    peer_is_ours,
    receive,
    resources,
    send,
)
from .server import MODULE, start_preloaded

VARIABLE = "HETFLOW_PRELOAD"
"""The socket of a preloaded process to use; ``off`` for fresh processes; else each launch has
preloaded processes of its own."""
OFF = "off"

_READY_SECONDS = 120.0
_POLL_SECONDS = 0.05
_log = logging.getLogger("hetflow")


class PreloadError(Exception):
    """No process was forked, and none will be; ``str`` says why. Start a fresh one."""


class Forked:
    """A forked process, as ``subprocess.Popen`` shows one. It leads a session of its own.

    Attributes:
        pid: Its process id, and that of its group and session.
        returncode: None while it runs; its exit code; less than 0 for the signal that ended it.
        stdin, stdout, stderr: Our ends of its pipes, where pipes were asked for.
    """

    def __init__(self, connection: "Connection", pid: int, pipes: "_Pipes") -> None:
        self._connection, self.pid = connection, pid
        self.stdin, self.stdout, self.stderr = pipes.ours
        self.returncode: int | None = None

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        """Close our ends of its pipes, and wait for its end."""
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        self.wait()

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None:
            self.returncode = self._connection.exit_code(self.pid, seconds=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and give its exit code.

        Raises:
            subprocess.TimeoutExpired: It still runs after ``timeout`` seconds.
        """
        if self.returncode is None:
            self.returncode = self._connection.exit_code(self.pid, seconds=timeout)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Pipes:
    """The descriptors that a new process gets as 0, 1 and 2, and our ends of pipes."""

    def __init__(self, wanted: Sequence[int | IO[Any] | None]) -> None:
        self.theirs: list[int] = []
        self.ours: list[IO[bytes] | None] = []
        self._opened: list[int] = []
        for number, target in enumerate(wanted):
            self._add(number, target)

    def _add(self, number: int, target: int | IO[Any] | None) -> None:
        ours: IO[bytes] | None = None
        if target is None:
            theirs = number
        elif target == subprocess.DEVNULL:
            theirs = self._keep(os.open(os.devnull, os.O_RDWR))
        elif target == subprocess.STDOUT:
            theirs = self.theirs[1]
        elif target == subprocess.PIPE:
            read, write = os.pipe()
            theirs, own = (read, write) if number == 0 else (write, read)
            ours = os.fdopen(own, "wb" if number == 0 else "rb")
            self._keep(theirs)
        else:
            theirs = target if isinstance(target, int) else target.fileno()
        self.theirs.append(theirs)
        self.ours.append(ours)

    def _keep(self, number: int) -> int:
        self._opened.append(number)
        return number

    def close_theirs(self) -> None:
        for number in self._opened:
            os.close(number)

    def close(self) -> None:
        self.close_theirs()
        for stream in self.ours:
            if stream is not None:
                stream.close()


class Connection:
    """One connection to a preloaded process; may be used by several threads."""

    def __init__(
        self, channel: socket.socket, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self._channel, self._process = channel, process
        self._lock = threading.RLock()
        self._codes: dict[int, int] = {}
        self._answers: list[Message] = []
        self.is_ready = False
        self.trouble: str | None = None

    def look(self, seconds: float | None) -> bool:
        """Handle the messages that have come, waiting for one at most so long; whether any came."""
        with self._lock:
            if self.trouble is not None:
                return False
            if not _is_readable(self._channel, seconds):
                return False
            try:
                found = receive(self._channel)
            except (OSError, ValueError) as error:
                found, self.trouble = None, str(error)
            if found is None:
                self.trouble = self.trouble or "it has ended"
                return False
            self._take(found[0])
            return True

    def _take(self, message: Message) -> None:
        if "ready" in message:
            self.is_ready = True
        elif "exited" in message:
            self._codes[message["exited"]] = message["exit_code"]
        elif "refused" in message and not self.is_ready:
            self.trouble = message["refused"]
        else:
            self._answers.append(message)

    def wait_until_ready(self, watch: Callable[[], None] = lambda: None) -> bool:
        """Wait until it can fork; False if it never will. ``watch`` is called meanwhile."""
        deadline = time.monotonic() + _READY_SECONDS
        while not self.is_ready and self.trouble is None:
            watch()
            if time.monotonic() > deadline:
                self.trouble = f"it was not ready within {_READY_SECONDS:.0f} s"
            self.look(_POLL_SECONDS)
        return self.is_ready and self.trouble is None

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> int:
        """Fork a process; its id.

        Raises:
            PreloadError: It was not forked.
        """
        # Under the lock from request to answer: answers carry no number, so the next is ours.
        with self._lock:
            if not self.wait_until_ready():
                raise PreloadError(self.trouble)
            try:
                send(self._channel, asdict(request), descriptors)
            except OSError as error:
                self.trouble = str(error)
                raise PreloadError(self.trouble) from None
            while not self._answers:
                self.look(None)
                if self.trouble is not None:
                    raise PreloadError(self.trouble)
            answer = self._answers.pop()
            if "refused" in answer:
                raise PreloadError(answer["refused"])
            pid: int = answer["forked"]
            return pid

    def exit_code(self, pid: int, seconds: float | None) -> int | None:
        """How a forked process has ended; waits for that at most so long (None: for ever)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            with self._lock:
                # All that has come, also of other processes: their threads find it in ``_codes``.
                while self.look(0.0):
                    pass
                if pid in self._codes:
                    return self._codes[pid]
                if self.trouble is not None:
                    # The kernel kills those whose host has ended.
                    return -signal.SIGKILL
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return None
            # Without the lock, so that other threads can ask meanwhile.
            with contextlib.suppress(ValueError, OSError):  # it has been closed meanwhile
                wait = _POLL_SECONDS if left is None else min(_POLL_SECONDS, left)
                _is_readable(self._channel, wait)

    def close(self) -> None:
        """End the host of this connection, and all that it has forked."""
        with self._lock:
            self.trouble = self.trouble or "it was closed"
            self._channel.close()
        if self._process is not None:
            self._process.kill()  # it may still be importing
            self._process.wait()


def _is_readable(channel: socket.socket, seconds: float | None) -> bool:
    poller = select.poll()  # unlike select, for any number of open files
    poller.register(channel, select.POLLIN)
    return bool(poller.poll(None if seconds is None else seconds * 1000))


def _shared_connection(path: str, environment: Mapping[str, str]) -> Connection:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        channel.connect(path)
        if not peer_is_ours(channel):
            raise OSError("served by another user")
        send(channel, {"identity": identity(), "settings": import_settings(environment)})
    except OSError as error:
        channel.close()
        raise PreloadError(f"{path}: {error.strerror or error}") from None
    return Connection(channel)


class Preload:
    """The preloaded processes of one launch: one for each set of import settings.

    Where none can be had, one line is logged, and ``start`` gives None: start a fresh process.
    """

    def __init__(self, place: str) -> None:
        self._place = OFF if not sys.platform.startswith("linux") else place
        self._connections: dict[frozenset[tuple[str, str]], Connection] = {}
        self._has_told = False

    def __enter__(self) -> "Preload":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start a preloaded process for processes with this environment, in the background.

        Call from the main thread: its life hangs on the starting thread.
        """
        key = frozenset(import_settings(environment).items())
        if self._place == OFF or key in self._connections:
            return
        try:
            if self._place:
                self._connections[key] = _shared_connection(self._place, environment)
            else:
                ours, theirs = socket.socketpair()
                with theirs:
                    process = start_preloaded("--connection", theirs, dict(environment))
                self._connections[key] = Connection(ours, process)
        except (OSError, PreloadError) as error:
            self._tell(str(error))
            self._place = OFF

    def wait(self, environment: Mapping[str, str], watch: Callable[[], None]) -> None:
        """Wait until processes with this environment can be forked, or never will be."""
        self.prepare(environment)
        connection = self._connections.get(frozenset(import_settings(environment).items()))
        if connection is not None:
            connection.wait_until_ready(watch)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int | IO[Any] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Forked | None:
        """Fork a process where a preloaded one is ready for it; else None, at once."""
        connection = self._connections.get(frozenset(import_settings(environment).items()))
        if connection is None or not can_run(list(command)):
            return None
        connection.look(0.0)
        if not connection.is_ready and connection.trouble is None:
            return None
        try:
            return _fork_on(
                connection, command, environment, (stdin, stdout, stderr), pass_fds, os.getcwd()
            )
        except PreloadError as error:
            self._tell(str(error))
            return None

    def _tell(self, why: str) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning("workers start as fresh processes: no preloaded process (%s)", why)

    def close(self) -> None:
        """End the preloaded processes, and with them all that they have forked."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _fork_on(
    connection: Connection,
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Sequence[int | IO[Any] | None],
    pass_fds: Sequence[int],
    folder: str,
) -> Forked:
    pipes = _Pipes(streams)
    try:
        request = ForkRequest(
            command=list(command),
            environment=dict(environment),
            descriptors=[0, 1, 2, *pass_fds],
            folder=folder,
            umask=current_umask(),
            niceness=os.getpriority(os.PRIO_PROCESS, 0),
            affinity=sorted(os.sched_getaffinity(0)),
            limits={name: list(resource.getrlimit(n)) for name, n in resources().items()},
            ignored_signals=[
                number
                for number in signal.valid_signals()
                if signal.getsignal(number) is signal.SIG_IGN
            ],
            blocked_signals=sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        )
        pid = connection.fork(request, [*pipes.theirs, *pass_fds])
    except BaseException:
        pipes.close()
        raise
    pipes.close_theirs()
    return Forked(connection, pid, pipes)


class _OfProcess:
    """The connections of this process for ``fork``, by socket and import settings."""

    lock = threading.Lock()
    connections: dict[object, Connection] = {}

    @classmethod
    def connection(cls, path: str, environment: Mapping[str, str]) -> Connection:
        key = (os.getpid(), path, frozenset(import_settings(environment).items()))
        with cls.lock:
            found = cls.connections.get(key)
            if found is not None and found.trouble is not None:
                found.close()
                found = None
            if found is None:
                found = cls.connections[key] = _shared_connection(path, environment)
            return found


def fork(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
) -> Forked:
    """Start a Python program as ``subprocess.Popen`` does, by a fork of a preloaded process.

    The preloaded process is the one whose socket ``HETFLOW_PRELOAD`` names, in our environment.
    The new process leads a session of its own and is killed when this process ends.

    Args:
        argv: ``[sys.executable, "-m", module, ...]`` or ``[sys.executable, script, ...]``, also
            with ``-P`` after the interpreter.
        env: The whole environment; None for ours.
        cwd: The working directory; None for ours.
        stdin: As for ``Popen``: None, a file, a descriptor, ``DEVNULL`` or ``PIPE`` (binary).
        stdout: As ``stdin``.
        stderr: As ``stdin``, or ``STDOUT``.
        pass_fds: Descriptors that the process has under the same numbers.

    Raises:
        PreloadError: There is no preloaded process, or it cannot run this command.
    """
    path = os.environ.get(VARIABLE, "")
    if path in ("", OFF):
        raise PreloadError(f"{VARIABLE} names no socket")
    if not can_run(list(argv)):
        raise PreloadError(f"not a program of this Python: {' '.join(argv[:3])}")
    environment = os.environ if env is None else env
    folder = os.path.abspath(cwd) if cwd is not None else os.getcwd()
    connection = _OfProcess.connection(path, environment)
    return _fork_on(connection, argv, environment, (stdin, stdout, stderr), pass_fds, folder)


@contextmanager
def serving(folder: Path, modules: Sequence[str] = ()) -> Iterator[Path]:
    """Keep a preloaded process for many launches; gives the socket for ``HETFLOW_PRELOAD``.

    It dies with this process, and everything forked from it dies with it.

    Args:
        folder: A folder of this user alone; made where it is missing.
        modules: What to import beside what workers need, such as ``hetflow.cli.main``.
    """
    path = folder / "preload.sock"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE, str(path), *modules],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=dying_with(os.getpid()),
    )
    try:
        while not path.is_socket() and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is not None:
            raise PreloadError(f"{MODULE} {path} has ended")
        yield path
    finally:
        process.terminate()
        process.wait()
