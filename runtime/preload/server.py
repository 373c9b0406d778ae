"""The preloaded process itself, and the listener that keeps several for many launches.

Three kinds of process, each of which dies with the one above it:

- The listener (``python -m hetflow.runtime.preload SOCKET``) imports nothing. It starts one
  preloaded process for each set of import settings that is asked for, and hands connections over.
- A preloaded process imports, and forks a host for every connection.
- A host holds one connection: it forks processes on request and tells how they end. When the
  connection is closed, because its client is gone or is done, it ends, and they with it.

A launch's own preloaded process is the host of its one connection.
"""

import atexit
import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...devices import memory
from ...devices.backend import initialized
from ...schema.errors import LaunchError
from .process import (
    BOUND_BY_NANOBIND,
    ForkRequest,
    Message,
    become,
    dying_with,
    identity,
    import_settings,
    peer_is_ours,
    receive,
    send,
    set_title,
)

MODULE = "hetflow.runtime.preload"
# What a worker would import until it has made its first optimizer, with which _dynamo comes, and
# records that it would build: the first one looks for pydantic's plugins in all that is installed.
_MODULES = (
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo",
    "hetflow.runtime",
    "hetflow.runtime.worker",
    "hetflow.runtime.start",
    "hetflow.runtime.pipeline.engine",
    "hetflow.runtime.adapters.ddp",
    "hetflow.schema.plan:Plan",
    "hetflow.schema.launch:LaunchConfig",
    "hetflow.runtime.protocol.messages:Beat",
    "hetflow.runtime.protocol.record:WorkerReport",
)
_TITLE_ROOM = 240
_LOOK_SECONDS = 1.0
_HELLO_SECONDS = 5.0
_MOST_PRELOADED = 6


class Unfit(Exception):
    """A process that must not be forked; ``str`` says why."""


def start_preloaded(
    option: str, channel: socket.socket, environment: dict[str, str], modules: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a preloaded process that dies with this one.

    Args:
        option: ``--connection`` for the host of one connection, ``--connections`` for a process
            that gets a connection with each message.
        channel: Its end of it.
        environment: Its whole environment.
        modules: What it imports beside what workers need; ``module:Record`` builds that record too.
    """
    number = str(channel.fileno())
    # Where a forked process writes its own command, for ps.
    room = "." * _TITLE_ROOM
    command = [sys.executable, "-P", "-m", MODULE, option, number, *modules, room]
    return subprocess.Popen(
        command,
        # Its own session, so that Ctrl-C on the launch's terminal reaches the controller alone,
        # which decides what its workers are told.
        env=environment,
        pass_fds=(channel.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=dying_with(os.getpid()),
    )


def main(arguments: Sequence[str]) -> list[str] | None:
    """What ``python -m hetflow.runtime.preload`` does with its arguments.

    Returns:
        The command to run, in a process that was forked; else None, and this one has ended its
        work.
    """
    if arguments[:1] == ["--connection"] or arguments[:1] == ["--connections"]:
        set_title(["hetflow preloaded"])
        channel = socket.socket(fileno=int(arguments[1]))
        # Else each forked worker would hold the channel open, and its end would not be seen.
        channel.set_inheritable(False)
        return _preloaded(channel, arguments[2:-1], is_host=arguments[0] == "--connection")
    if arguments and not arguments[0].startswith("-"):
        listen(Path(arguments[0]), arguments[1:])
        return None
    sys.stderr.write(f"usage: python -m {MODULE} SOCKET [MODULE ...]\n")
    sys.exit(2)


def _preloaded(channel: socket.socket, modules: Sequence[str], *, is_host: bool) -> list[str]:
    from ...schema.records import adapter_of  # not in the listener

    trouble = None
    gc.disable()  # imports leave next to no garbage, and looking for it took a fifth of their time
    try:
        for name in (*_MODULES, *modules):
            module, _, built = name.partition(":")
            found = importlib.import_module(module)
            if built:
                adapter_of(getattr(found, built)).rebuild()
        # Only the forking thread lives on in a child. A lock that another thread held at that
        # moment stays shut for ever, and a CUDA context does not work behind a fork.
        check_forkable()
        memory.remember_preloaded()
        freeze()
    except Exception as error:
        # Kept for the first connection: nobody listens yet, and stderr leads nowhere.
        trouble = str(error) or type(error).__name__
    connection = channel if is_host else _next_connection(channel)
    if trouble is not None:
        _tell(connection, {"refused": trouble})
        sys.exit(1)
    command = _Host(connection).serve()
    if command is None:
        os._exit(0)  # nothing to tidy up, and its processes are to end now
    return command


def check_forkable() -> None:
    """Refuse a process whose fork could hang or could not use its devices.

    Raises:
        Unfit: It has threads, or has initialised a device.
    """
    # numpy's BLAS may have started threads, which it stops before a fork and starts on demand.
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 1.0
    while (number := len(os.listdir("/proc/self/task"))) > 1:
        if time.monotonic() > deadline:
            raise Unfit(f"the imports have started {number - 1} thread(s)")
        time.sleep(0.01)
    for backend in initialized():
        raise Unfit(f"the imports have initialised {backend.kind.upper()}")


def freeze() -> None:
    """Keep the collector from what is imported: it would copy every page, if only at the end.

    But nanobind prints pages about what is alive when a process ends. A triton bound by it (of CUDA
    builds of torch from 2.15 on) comes with the imports: then the end pays for the collection.
    """
    gc.freeze()
    gc.enable()
    if BOUND_BY_NANOBIND in sys.modules:
        atexit.register(gc.unfreeze)


def _next_connection(channel: socket.socket) -> socket.socket:
    """Fork for every connection that comes; returns in the forked processes alone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    bind = dying_with(os.getpid())
    while True:
        found = receive(channel)
        if found is None:
            os._exit(0)
        # The listener sends one descriptor with each message: the client's connection.
        (number,) = found[1]
        if os.fork() == 0:
            # At once: if the preloaded process died between fork and here, ``bind`` ends this
            # process too.
            bind()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            return socket.socket(fileno=number)
        os.close(number)


def _tell(connection: socket.socket, message: Message) -> bool:
    try:
        send(connection, message)
    except OSError:
        return False
    return True


class _Host:
    """Forks processes for one connection, and says how they end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)

    def serve(self) -> list[str] | None:
        """Serve until the connection is closed: None. In a forked process: its command."""
        # The command is returned up to ``__main__``, so that a program runs on an almost empty
        # stack: its tracebacks do not show the loop that forked it.
        is_open = _tell(self._connection, {"ready": os.getpid()})
        while is_open:
            for key, _ in self._selector.select():
                if key.fileobj is not self._connection:
                    is_open = self._bury(key.fd, key.data)
                    continue
                found = receive(self._connection)
                if found is None:
                    return None
                command = self._fork(*found)
                if command is not None:
                    return command
        return None

    def _bury(self, number: int, pid: int) -> bool:
        self._selector.unregister(number)
        os.close(number)
        _, status = os.waitpid(pid, 0)
        # Negative for a signal, as subprocess counts.
        code = os.waitstatus_to_exitcode(status)
        return _tell(self._connection, {"exited": pid, "exit_code": code})

    def _fork(self, message: Message, descriptors: list[int]) -> list[str] | None:
        """Fork once, and say so; in the forked process, the command to run."""
        own = os.getpid()
        # What the child writes here is its trouble; nothing, and the end of the pipe, is success.
        # So the fork is answered only when the child has become what was asked for.
        read, write = os.pipe()
        try:
            request = ForkRequest(**message)
            pid = os.fork()
        except (OSError, TypeError) as error:
            _tell(self._connection, {"refused": str(error)})
            pid = -1
        if pid == 0:
            self._selector.close()
            become(request, descriptors, own, write)
            return request.command
        # The child has its own. With this copy of ``write`` open the read below would never end.
        for number in (write, *descriptors):
            os.close(number)
        if pid > 0:
            with open(read, "rb", closefd=False) as stream:
                self._answer(pid, stream.read().decode("utf-8", "replace"))
        os.close(read)
        return None

    def _answer(self, pid: int, trouble: str) -> None:
        if trouble:
            os.waitpid(pid, 0)
            _tell(self._connection, {"refused": trouble})
            return
        # Ends and requests are then waited for in one place, without SIGCHLD and its races.
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        _tell(self._connection, {"forked": pid})


def listen(path: Path, modules: Sequence[str]) -> None:
    """Serve all launches of this user that name a socket, until a signal ends this process.

    Args:
        path: The socket; in a folder that is the user's alone, which is made where it is missing.
        modules: What preloaded processes import beside what workers need.

    Raises:
        LaunchError: The folder is open to others, or another process serves the socket.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # A signal as soon as the socket is there must not leave it behind.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with contextlib.suppress(KeyboardInterrupt), _bind(path) as listening:
        listener = _Listener(modules)
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            listener.serve(listening)
        finally:
            path.unlink(missing_ok=True)
            listener.close()


def _bind(path: Path) -> socket.socket:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"{folder} is open to other users",
            hint=f"put the socket into a folder of your own (chmod 700 {folder})",
        )
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise LaunchError(f"{path} is served by another process")
        # Else it was left by one that was killed.
    elif path.exists():
        raise LaunchError(f"{path} is there already, and no socket")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The socket is nobody else's from its first moment: a chmod after ``bind`` would come too late.
    before, new = os.umask(0o177), path.with_name(f"{path.name}.new")
    try:
        new.unlink(missing_ok=True)
        listening.bind(str(new))
        listening.listen(128)
        new.rename(path)  # who sees it can connect
    except OSError as error:
        raise LaunchError(f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(before)
    return listening


class _Listener:
    """Hands connections over to preloaded processes, by the settings they ask for."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._preloaded: dict[frozenset[tuple[str, str]], _Preloaded] = {}

    def serve(self, listening: socket.socket) -> None:
        listening.settimeout(_LOOK_SECONDS)
        while True:
            try:
                connection, _ = listening.accept()
            except TimeoutError:  # a signal may have come just before the wait
                continue
            # Closed here in any case. A preloaded process that took the connection over has a copy
            # of it.
            with connection:
                # One that connects and says nothing must not keep all others waiting.
                connection.settimeout(_HELLO_SECONDS)
                try:
                    trouble = self._take(connection)
                except (OSError, ValueError, KeyError, TypeError) as error:
                    trouble = str(error)
                if trouble is not None:
                    _tell(connection, {"refused": trouble})

    def close(self) -> None:
        """End the preloaded processes, and with them all that was forked."""
        for preloaded in self._preloaded.values():
            preloaded.process.kill()
            preloaded.process.wait()

    def _take(self, connection: socket.socket) -> str | None:
        """Hand a connection over; else why not."""
        found = receive(connection) if peer_is_ours(connection) else None
        if found is None:
            return "not this user"
        if found[0]["identity"] != identity():
            return "another Python, hetflow or limits"
        settings = dict(found[0]["settings"])
        key = frozenset(settings.items())
        preloaded = self._preloaded.get(key)
        if preloaded is None or preloaded.process.poll() is not None:
            if preloaded is None and len(self._preloaded) == _MOST_PRELOADED:
                return f"{_MOST_PRELOADED} other environments are preloaded"
            # A new one also in the place of one that died, say of too little memory.
            preloaded = self._preloaded[key] = _Preloaded(settings, self._modules)
        connection.settimeout(None)
        send(preloaded.channel, {}, [connection.fileno()])
        return None


class _Preloaded:
    """A preloaded process of the listener."""

    def __init__(self, settings: dict[str, str], modules: Sequence[str]) -> None:
        self.channel, theirs = socket.socketpair()
        environment = {**os.environ}
        # The listener's own settings of this kind go, also those that the client does not have.
        for name in import_settings(environment):
            del environment[name]
        environment |= import_settings(settings)
        with theirs:
            self.process = start_preloaded("--connections", theirs, environment, modules)
