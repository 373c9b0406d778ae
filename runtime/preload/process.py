"""Make a forked process what its request says, and run its program as a fresh Python would."""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib.util
import io
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import IO, Any

from .messages import ForkRequest, resources

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
    os.setsid()
    dying_with(parent)()
    try:
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
    os.environ.clear()
    os.environ.update(request.environment)
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
    lowest = max(_HIGH, *numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest) for fd in (*descriptors, kept)]
    os.closerange(0, lowest)
    for source, number in zip(moved[:-1], numbers, strict=True):
        os.dup2(source, number, inheritable=True)
        os.close(source)
    os.closerange(moved[-1] + 1, os.sysconf("SC_OPEN_MAX"))
    return moved[-1]


def _leave_inherited_libraries() -> None:
    """Let the process end without the exit handlers of libraries that it was forked with.

    They give back memory that goes with the process anyway: torch's take longer than a short
    program, as each page is copied first. Libraries that the program itself loads registered their
    handlers later than this, so these run, before it. What C has buffered is written.
    """
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
    """Let the process end without taking apart the modules that it was forked with.

    It would copy each of their pages first, which takes longer than a short program. The program's
    own modules, ``__main__`` first, are taken apart as ever.
    """
    if BOUND_BY_NANOBIND in sys.modules:
        return
    kept = {name: m for name, m in sys.modules.items() if name not in ("sys", "builtins")}
    atexit.register(_keep, kept)


def _keep(inherited: dict[str, ModuleType]) -> None:
    """The last exit function. What is no module in ``sys.modules``, Python leaves alone."""
    # An inherited module may hold what holds an open file of the program's. A weak proxy, such as
    # inductor leaves, must not be asked for its class.
    for found in gc.get_objects():
        if issubclass(type(found), (io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)):
            with contextlib.suppress(OSError, ValueError):  # a broken pipe, or a closed file
                found.flush()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    modules: dict[str, Any] = sys.modules
    for name, module in inherited.items():
        if modules.get(name) is module:
            modules[name] = _Kept(module)


def _set_signals(request: ForkRequest) -> None:
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


def _end_by_interrupt() -> None:
    """End as Python ends a script that does not catch KeyboardInterrupt: by the signal."""
    sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
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
