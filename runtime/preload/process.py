"""A forked process: the request for it, and how it becomes what that says, like a fresh Python."""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any

from ...devices.backend import DEVICES

# What a preloaded process and those who ask it for forks have in common: messages, settings.
#
# Messages are JSON with its length, and descriptors. Nothing is ever unpickled. Both ends belong to
# one user, which both check (``peer_is_ours``).

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 16 << 20
MAX_DESCRIPTORS = 32

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What a forked process is to become; a fresh one would inherit all but the first three."""

    command: list[str]  # the whole line, the interpreter first
    environment: dict[str, str]
    descriptors: list[int]  # numbers that those sent along get in the new process
    folder: str
    umask: int
    niceness: int
    affinity: list[int]
    limits: dict[str, list[int]]  # soft and hard, by name (``RLIMIT_DATA``)
    ignored_signals: list[int]
    blocked_signals: list[int]


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message.

    Raises:
        OSError: The other end is gone.
    """
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """Wait for one message and the descriptors with it; None once the other end is gone.

    Raises:
        ValueError: What came is no message.
    """
    try:
        head, descriptors, _, _ = socket.recv_fds(
            connection, _LENGTH.size, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        head += _read(connection, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(_read(connection, length))
    except (ConnectionError, EOFError):
        return None
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {message!r}")
    return message, descriptors


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def peer_is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())


# Which settings act before or during the imports, so that a fork comes too late for them.
#
# A preloaded process serves only those whose settings of this kind are its own; for others another
# preloaded process is started. All other variables are read when they are used, so a forked process
# takes them over from its request. A driver's choice of devices is read at its first use, a
# collective library's when a group is made, hetflow's own when a worker starts.

_PREFIXES = {
    "PYTHON": "the interpreter's own: hash seed, path, encoding, buffering, warnings",
    "LD_": "the dynamic linker reads them before main",
    "OMP_": "libgomp reads them when it is loaded",
    "GOMP_": "as OMP_",
    "KMP_": "as OMP_, for Intel's and LLVM's libraries",
    "MKL_": "MKL's code path and threads",
    "OPENBLAS_": "numpy's BLAS reads them when it is loaded",
    "GOTO_": "as OPENBLAS_",
    "BLIS_": "as OPENBLAS_",
    "NUMEXPR_": "read when it is imported",
    "NPY_": "numpy chooses its kernels when it is imported",
    "NUMPY_": "as NPY_",
    "ATEN_": "torch's kernels for a CPU capability",
    "ONEDNN_": "oneDNN's kernels for an instruction set",
    "DNNL_": "as ONEDNN_",
    "TORCH": "torch's logging and the compiler's configuration are read at import",
    "PYTORCH_": "torch's allocators read theirs when the library is loaded",
    "MALLOC_": "malloc reads them before main",
    "LC_": "Python chooses its encodings before main",
}
_NAMES = {
    "GLIBC_TUNABLES": "the C library reads them before main",
    "LANG": "as LC_",
    "LANGUAGE": "as LC_",
}
_LATER = {
    "PYTHONBREAKPOINT": "read when a breakpoint is reached; Ray sets it",
    "TORCHELASTIC_USE_AGENT_STORE": "read when a group is made",
    "TORCHELASTIC_RESTART_COUNT": "read when a worker joins its group",
    "TORCHINDUCTOR_CACHE_DIR": "read when a model is compiled",
}


def import_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that a preloaded process must have been started with."""
    prefixes, later = set(_PREFIXES), set(_LATER)
    for backend in DEVICES.registered:
        prefixes |= set(backend.early_variables)
        later |= set(backend.late_variables)
    return {
        name: value
        for name, value in environment.items()
        if name not in later and (name in _NAMES or name.startswith(tuple(prefixes)))
    }


def identity() -> dict[str, object]:
    """What two processes must have in common for one to be forked for the other.

    The interpreter, this package, and the hard limits, which a process can lower only.
    """
    limits = {name: resource.getrlimit(number)[1] for name, number in resources().items()}
    package = Path(__file__).resolve().parents[2]
    # One Python has several names: python and python3, or a path through a link.
    python = {name: os.path.realpath(getattr(sys, name)) for name in ("executable", "prefix")}
    return {**python, "package": str(package), "hard_limits": limits}


def resources() -> dict[str, int]:
    """Every resource with a limit, by name."""
    return {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def current_umask() -> int:
    """This process's umask, which can only be read by setting it; from /proc where it is there."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        (line,) = [line for line in status.splitlines() if line.startswith("Umask:")]
    except (OSError, ValueError):
        found = os.umask(0o077)
        os.umask(found)
        return found
    return int(line.split()[1], 8)


_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# What Python ignores from its start on (and subprocess sets back before that).
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
_UNTOUCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_HIGH = 512
BOUND_BY_NANOBIND = "triton._C.libtriton"
"""Prints pages about what is alive when a process ends."""


def dying_with(parent: int) -> Callable[[], None]:
    """What a new process calls to be killed when ``parent`` ends, however that ends (Linux).

    To be made before the fork: loading a library after it may hang.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return bind


def become(request: ForkRequest, descriptors: list[int], parent: int, told: int) -> None:
    """Take over all that a fresh process would have by its command, its caller and Python's start.

    Args:
        request: What to become.
        descriptors: Received with it, in the order of their numbers in ``request``.
        parent: The process that has forked this one, with which it dies.
        told: Where ``parent`` reads what went wrong; closed without a word when all is done.
    """
    # A group of its own: the launch ends a worker and all that it started by one signal to the
    # group.
    os.setsid()
    dying_with(parent)()
    try:
        # Descriptors first: what goes wrong later is then said to the right place.
        told = _place(descriptors, request.descriptors, told)
        _take_over(request)
    except Exception as error:
        os.write(told, str(error).encode())
        os._exit(1)
    os.close(told)


def _take_over(request: ForkRequest) -> None:
    os.chdir(request.folder)
    os.umask(request.umask)
    for name, number in resources().items():
        if name in request.limits:
            soft, hard = request.limits[name]
            resource.setrlimit(number, (soft, hard))
    if request.niceness != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    os.sched_setaffinity(0, request.affinity)
    # Through ``os.environ`` and not by a new mapping: it passes each variable on to the C library,
    # where libraries read theirs.
    os.environ.clear()
    os.environ.update(request.environment)
    # The C library has read TZ already.
    time.tzset()
    _open_streams()
    _seed_anew()
    sys.orig_argv = list(request.command)
    set_title(request.command)
    _set_signals(request)
    _leave_inherited_libraries()
    _leave_inherited_modules()


def _place(descriptors: list[int], numbers: list[int], kept: int) -> int:
    """Give each descriptor its number, and close all others but one, which gets a new number."""
    # Two moves: a descriptor may stand where another has to go, so all leave the low numbers first.
    lowest = max(_HIGH, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest) for fd in (*descriptors, kept)]
    os.closerange(0, lowest)
    for source, number in zip(moved[:-1], numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    os.closerange(moved[-1] + 1, os.sysconf("SC_OPEN_MAX"))
    return moved[-1]


def _leave_inherited_libraries() -> None:
    """Let the process end without the exit handlers of libraries that it was forked with."""
    # They give back memory that goes with the process anyway: torch's take longer than a short
    # program, as each page is copied first. Libraries that the program itself loads register their
    # handlers later than this, so these run, before it. What C has buffered is written.
    libc = ctypes.CDLL(None)
    # Where one was put before all others, as tools that measure are, it writes its results then.
    if os.environ.get("LD_PRELOAD") or not hasattr(libc, "on_exit"):
        return
    libc.on_exit(libc._exit, None)  # with the exit code
    libc.on_exit(libc.fcloseall, None)  # the last one registered is the first to run


class _Kept:
    """Stands in for a module that outlives the interpreter; imports may still ask for it."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _leave_inherited_modules() -> None:
    """Let the process end without taking apart the modules that it was forked with."""
    # It would copy each of their pages first, which takes longer than a short program. The
    # program's own modules, ``__main__`` first, are taken apart as ever.
    if BOUND_BY_NANOBIND in sys.modules:
        return
    _leave_inherited_finalizers()
    kept = {name: m for name, m in sys.modules.items() if name not in ("sys", "builtins")}
    atexit.register(_keep, kept, _num_loaded())


def _leave_inherited_finalizers() -> None:
    """Let the process end without finalizers that it was forked with: they are its parent's to run.

    torch has one for each library of operators, and to unregister these took 0.04 CPU seconds.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        finalizer.atexit = False


class _Library(ctypes.Structure):
    """What glibc's ``dl_iterate_phdr`` tells of a library; the last field is of all."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("headers", ctypes.c_void_p),
        ("num_headers", ctypes.c_uint16),
        ("num_loaded", ctypes.c_ulonglong),
    )


def _num_loaded() -> int:
    """How many libraries this process has loaded so far, by imports or otherwise."""
    found: list[int] = []

    def look(library: Any, size: int, data: object) -> int:
        found.append(library.contents.num_loaded)
        return 1  # no further one

    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p
    )
    ctypes.CDLL(None).dl_iterate_phdr(kind(look), None)
    return found[0]


def _keep(inherited: dict[str, ModuleType], num_loaded: int) -> None:
    """The last exit function. What is no module in ``sys.modules``, Python leaves alone."""
    # An inherited module may hold what holds an open file of the program's. A weak proxy, such as
    # inductor leaves, must not be asked for its class.
    are_written = True
    for found in gc.get_objects():
        if issubclass(type(found), (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)):
            try:
                found.flush()
            except (OSError, ValueError):  # a broken pipe, or a closed file
                are_written = False
    # Never given back: with the dictionary alive, no module in it is taken apart.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    modules: dict[str, Any] = sys.modules
    for name, module in inherited.items():
        if modules.get(name) is module:
            modules[name] = _Kept(module)
    # A library that the program has loaded may expect at its end that there is no interpreter.
    if are_written and _exit_codes and _num_loaded() == num_loaded:
        sys._last_of_fork = _Last(*_exit_codes)  # type: ignore[attr-defined]


_exit_codes: list[int] = []  # of a program that has ended by itself


class _Last:
    """Ends the process when it is deleted with ``sys``, the last module to go.

    Python would then take itself apart. That copies each page of strings and types that the process
    was forked with, and took 0.03 CPU seconds. What C runs at the end, such as destructors of a
    thread's own objects, meets an interpreter that is whole and locked.
    """

    def __init__(self, code: int) -> None:
        self._code, self._end = code, ctypes.PyDLL(None).exit

    def __del__(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # modules may have printed as they went
            sys.stdout.flush()
        self._end(self._code)


def _set_signals(request: ForkRequest) -> None:
    # The preloaded process's own, if an import had set one, is closed by now.
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - _UNTOUCHABLE:
        if number in request.ignored_signals or number in _IGNORED_BY_PYTHON:
            handler: Any = signal.SIG_IGN
        elif number == signal.SIGINT:
            handler = signal.default_int_handler
        else:
            handler = signal.SIG_DFL
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked_signals)


def _open_streams() -> None:
    """stdin, stdout and stderr as Python opens them at its start, on the new descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        # The encoding stays: what decides it (PYTHONIOENCODING, LC_*) is an import setting, so the
        # preloaded process has chosen alike.
        stream = _open_stream(number, name, before.encoding, before.errors)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _open_stream(number: int, name: str, encoding: str, errors: str) -> IO[str]:
    writes, is_unbuffered = number > 0, bool(os.environ.get("PYTHONUNBUFFERED"))
    is_buffered = not (writes and is_unbuffered)
    buffer: Any = open(  # noqa: SIM115
        number, "wb" if writes else "rb", buffering=-1 if is_buffered else 0, closefd=False
    )
    (buffer.raw if is_buffered else buffer).name = f"<{name}>"
    stream = io.TextIOWrapper(
        buffer,
        encoding=encoding,
        errors=errors,
        newline="\n" if writes else None,
        line_buffering=not is_unbuffered and (number == 2 or os.isatty(number)),
        write_through=is_unbuffered,
    )
    stream.mode = "w" if writes else "r"  # type: ignore[misc]
    return stream


def _seed_anew() -> None:
    """Draw what a fresh process draws at its start or import; ``random`` does so by itself."""
    modules: dict[str, Any] = sys.modules
    if "numpy.random" in modules:
        # All forks would draw the same numbers otherwise, as the generators were seeded at the
        # import.
        modules["numpy.random"].seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()  # the CPU's; CUDA's are made at its first use
    if "tempfile" in modules:
        modules["tempfile"].tempdir = None  # TMPDIR may be another
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def set_title(command: list[str]) -> None:
    """What ``ps`` shows: as much of a command as this process's own had room for."""
    name = Path(command[0]).name
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        start, end = map(int, fields.rpartition(")")[2].split()[45:47])
    except (OSError, ValueError):
        return
    # Where the own command line lies, which ``ps`` reads; zeros where /proc hides it.
    if not 0 < start < end:
        return
    text = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run(command: list[str]) -> None:
    """Run a Python program as ``__main__``: what follows the interpreter on its command line.

    As ``python`` does it. ``runpy`` would put another ``__main__`` back before the end, and warn of
    modules that are imported already.
    """
    is_safe, program = _program(command)
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if program[0] == "-m":
        if not is_safe:
            sys.path.insert(0, os.getcwd())
        spec, code = _module(program[1])
        main.__spec__, main.__loader__ = spec, spec.loader
        main.__package__, main.__file__ = spec.parent, spec.origin
        main.__cached__ = spec.cached  # type: ignore[attr-defined]
        sys.argv = [str(spec.origin), *program[2:]]
    else:
        if not is_safe:
            sys.path.insert(0, str(Path(program[0]).resolve().parent))
        main.__file__ = program[0]
        sys.argv = list(program)
        code = compile(Path(program[0]).read_bytes(), program[0], "exec", dont_inherit=True)
    try:
        exec(code, main.__dict__)
    except KeyboardInterrupt:
        if program[0] == "-m":
            raise  # Python itself ends with exit code 1 then
        _end_by_interrupt()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            _exit_codes.append(end.code or 0)
        raise
    else:
        _exit_codes.append(0)


def _end_by_interrupt() -> None:
    """End as Python ends a script that does not catch KeyboardInterrupt: by the signal."""
    sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # So that a shell sees a process that was interrupted, and ends its own loop too.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _module(name: str) -> tuple[ModuleSpec, CodeType]:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = spec and spec.loader
    if spec is None or not hasattr(loader, "get_code"):
        sys.exit(f"{sys.executable}: No module named {name}")
    return spec, loader.get_code(spec.name)


def can_run(command: list[str]) -> bool:
    """Whether ``run`` knows this command: this Python's, of a module or a script, ``-P`` or not."""
    if not command or command[0] != sys.executable:
        return False
    _, program = _program(command)
    if program[:1] == ["-m"]:
        return len(program) > 1
    return bool(program) and not program[0].startswith("-")


def _program(command: list[str]) -> tuple[bool, list[str]]:
    is_safe = command[1:2] == ["-P"]
    return is_safe, list(command[2 if is_safe else 1 :])
