"""Run a training script as one worker: ``python -m hetflow.runtime.worker SCRIPT ARGS``.

The script runs as ``__main__``, as under plain ``python``. If it fails, it leaves its error where
the controller finds it before any other worker can notice, and exits at once with its own exit
code. It does not wait for collectives that will never end.
"""

import atexit
import builtins
import contextlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from types import FrameType, ModuleType
from typing import ClassVar, NoReturn

from ..schema.errors import HetflowError, PeerLostError
from ..schema.options import speak
from ..schema.requests import flag_of
from .elastic.control import Control
from .protocol.ended import (
    FailureNote,
    ended_path,
    explained,
    is_lost_peer,
    left_path,
    may_be_echo,
    touch,
)
from .protocol.environment import DETERMINISM, DEVICE, FAILURE, FLAGS, PLAN, SEED, take_token
from .unplanned import Unplanned, install


class ScriptRun:
    """Whether this module runs the script and sets the exit code."""

    active = False
    told = False  # whether a failure was reported to the launcher
    interrupted = False  # whether the launch was, so that the other workers cannot be met
    skipped_epochs = False  # whether epochs that are done gave the script no batches
    code: ClassVar[list[int]] = [0]  # the exit code


def main(arguments: list[str]) -> None:
    """Run ``SCRIPT ARGS`` or ``-m MODULE ARGS`` and leave with its exit code."""
    ScriptRun.active, code = True, ScriptRun.code
    if os.environ.get(FLAGS):
        speak(flag_of)
    signal.signal(signal.SIGINT, _interrupted)
    # Registered first, so it runs last: after all exit functions of the script.
    atexit.register(_leave, code, os.getpid())
    take_token()
    Control.of_process()  # heartbeats start here, however long the script takes to prepare
    if os.environ.get(DETERMINISM):  # else the script's own draws are left to chance
        from .determinism import seed_streams

        seed_streams(int(os.environ.get(SEED) or 0), "script")
    unplanned = Unplanned()
    unplanned.watch()
    if os.environ.get(PLAN):
        install()
    try:
        name = os.environ.get(DEVICE)
        if name:  # the worker's own accelerator, for scripts that say ``.cuda()``
            import torch

            from ..devices.backend import backend_of

            backend_of(name).set_current(torch.device(name))
        run_script(arguments)
        unplanned.check_end()
    except SystemExit as stop:
        code[0] = _code_of(stop)
        if code[0]:
            _mark_failed(stop, code[0])
    except BaseException as error:
        fail(error)
    if code[0]:
        sys.exit(code[0])
    if ScriptRun.interrupted:  # the script has handled it
        return
    _end_well()
    group = sys.modules.get("hetflow.runtime.group")
    if group is not None:
        group.tell_left()


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    ScriptRun.interrupted = True
    raise KeyboardInterrupt


def _end_well() -> None:
    """Let no signal undo that the script has ended; the launcher ends a worker that hangs."""
    path = os.environ.get(FAILURE)
    if path:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        touch(ended_path(Path(path)))


def fail(error: BaseException) -> None:
    """Record and print an error, then exit with the error's own exit code."""
    error = explained(error)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, HetflowError):
        code = error.exit_code
    ScriptRun.code[0] = code
    _mark_failed(error, code)
    _print(error)


def fail_at_exit(error: BaseException) -> int:
    """Record an error that no script can catch any more; return the exit code."""
    if isinstance(error, SystemExit):
        ScriptRun.code[0] = _code_of(error)
        if ScriptRun.code[0]:
            _mark_failed(error, ScriptRun.code[0])
    elif isinstance(error, HetflowError) and not os.environ.get(FAILURE):
        ScriptRun.code[0] = error.exit_code
        hint = f"hint: {error.hint}\n" if error.hint else ""
        sys.stderr.write(f"hetflow: {error.message}{_where(error)}\n{hint}")
    else:
        fail(error)
    return ScriptRun.code[0]


def run_script(arguments: list[str]) -> None:
    """Run ``SCRIPT ARGS`` or ``-m MODULE ARGS`` as ``__main__``."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        _run_file(arguments)


def _run_file(arguments: list[str]) -> None:
    path = Path(arguments[0])
    sys.argv = arguments
    sys.path.insert(0, str(path.resolve().parent))
    module = ModuleType("__main__")
    module.__file__ = str(path)
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), module.__dict__)


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _mark_failed(error: BaseException, code: int) -> None:
    """Record the failure before the sockets close and the others fail for lack of this worker."""
    finish = sys.modules.get("hetflow.runtime.finish")
    if finish is not None:
        finish.ScriptEnd.failed = True
    path = os.environ.get(FAILURE)
    if path:
        note = FailureNote(
            at_seconds=time.monotonic(),
            error=_described(error),
            traceback="".join(traceback.format_exception(error)),
            exit_code=code,
            hint=_hint(error),
            lost_peer=is_lost_peer(error),
            may_be_echo=may_be_echo(error),
            timed_out=isinstance(error, PeerLostError) and error.timed_out,
        )
        described = asdict(note)
        with contextlib.suppress(OSError):  # such as a full disk
            Path(path).write_text(json.dumps(described), encoding="utf-8")
            ScriptRun.told = True


def _hint(error: BaseException) -> str | None:
    """How to fix it: an error's own hint, or that of a name that only a skipped loop would set."""
    if isinstance(error, HetflowError):
        return error.hint
    if isinstance(error, NameError) and ScriptRun.skipped_epochs:
        return (
            "epochs that are done gave no batches here: what is read after a loop over batches "
            "must be set before it, such as loss = None"
        )
    return None


def _described(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, str) else f"sys.exit({error.code})"
    if isinstance(error, HetflowError):
        return f"{error.message}{_where(error)}"
    return "".join(traceback.format_exception_only(error)).strip()


def _where(error: HetflowError) -> str:
    """The line of the script that led to one of hetflow's errors."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    theirs = [str(Path(file).parent) for file in (__file__, torch) if file]
    python = Path(runpy.__file__).parent  # also contextlib, where a context manager of ours fails
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(folder in frame.filename for folder in theirs)
        and Path(frame.filename).parent != python
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _print(error: BaseException) -> None:
    """Print the script's own traceback as Python does, without the frames of this module."""
    # A worker that only lost its peers prints one line: the failed worker tells the cause.
    if os.environ.get(FAILURE) and is_lost_peer(error):
        rank = os.environ.get("RANK")
        sys.stderr.write(f"hetflow: worker {rank} stops: it lost another worker\n")
        return
    if os.environ.get(FAILURE) and isinstance(error, HetflowError):
        if not ScriptRun.told:
            sys.stderr.write(f"hint: {error.hint}\n{error.message}\n")
        return  # the launcher prints it, in one line
    if os.environ.get(FAILURE) and isinstance(error, KeyboardInterrupt):
        return  # the launcher says that it was interrupted
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def leave_now(code: int) -> NoReturn:
    """End this process at once, with all that was printed, and without what runs at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _leave(code: list[int], worker: int) -> None:
    """The last exit function, also of processes that the script forked from the worker's."""
    if code[0]:
        leave_now(code[0])
    path = os.environ.get(FAILURE)
    if path and os.getpid() == worker:
        touch(left_path(Path(path)))


if __name__ == "__main__":
    # The imported copy of this module runs, so the script's names cannot clash with this one's.
    from .worker import main as imported_main

    imported_main(sys.argv[1:])
