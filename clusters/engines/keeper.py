"""``python -m hetflow.clusters.engines.keeper FOLDER [LOCK]``: run a lease, write how it ended.

The keeper is a process of its own, so a lease outlives the scheduler and its exit code is not lost.
Keeper and launch inherit a file descriptor that holds a lock; the lease is over when no process
holds the lock. If the keeper is killed, the kernel sends the launch SIGTERM.

Without a lock it is a step of a Slurm job. A lease runs at most once, also when messages between
hetflow and Slurm are lost: it is the step that claims it, or the engine.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ...schema.errors import ProblemError
from .accounts import Account, account
from .protocol import ENDED, OUTPUT, STARTED, WORK, claim, write_atomically

ASK = signal.SIGURG
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with its id, its name for good.

    None where it is gone.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def keep(folder: Path, lock: int | None) -> int:
    """Run the lease of a folder; its exit code, 128 and the signal's number after a signal.

    Args:
        folder: The lease's.
        lock: What keeper and launch hold. None where a batch system tells when a lease is over:
            its signals reach all processes of a lease, so the keeper does not pass them on. There
            ``ASK``, which all others ignore, asks for one SIGTERM to the launch.
    """
    work = json.loads((folder / WORK).read_text(encoding="utf-8"))
    # Before the launch is there: whoever asks it to stop must not end its keeper instead.
    asked: list[int] = []
    launch: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(signal.SIGTERM if number == ASK else number)
        for process in launch:
            process.send_signal(asked[-1])

    for number in _ENDING:
        signal.signal(number, pass_on if lock is not None else _leave_alone)
    if lock is None:
        signal.signal(ASK, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    with (folder / OUTPUT).open("ab") as output:
        try:
            user = None if work.get("user") is None else account(work["user"])
            inherited = dict(os.environ) if user is None else user.environment(os.environ)
            if user is not None:
                os.fchmod(output.fileno(), 0o600)
                os.fchown(output.fileno(), user.uid, user.gid)
            process = subprocess.Popen(
                work["command"],
                env={**inherited, **work["environment"]},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=() if lock is None else (lock,),
                preexec_fn=_begins_in(work["directory"]),
                **_identity(user),
            )
        except (OSError, ValueError, subprocess.SubprocessError, ProblemError) as error:
            output.write(f"hetflow: {_why(error, work)}\n".encode())
            write_atomically(folder / STARTED, {"pid": None})
            write_atomically(folder / ENDED, {"exit_code": 127})
            return 127
    # With its start time, as the id alone may be another's later.
    write_atomically(folder / STARTED, {"pid": process.pid, "ticks": start_ticks(process.pid)})
    launch.append(process)
    for early in asked:  # before it was there
        process.send_signal(early)
    code = process.wait()
    code = code if code >= 0 else 128 - code
    write_atomically(folder / ENDED, {"exit_code": code})
    return code


def _identity(user: Account | None) -> dict[str, Any]:
    """What lets a new process be a user's before its program starts."""
    if user is None:
        return {}
    return {"user": user.uid, "group": user.gid, "extra_groups": user.groups, "umask": 0o077}


def _begins_in(directory: str) -> Callable[[], None]:
    """What a new process calls when it has its user's rights: by these it enters the directory."""
    bind = stopped_with_parent()

    def begin() -> None:
        bind()
        os.chdir(directory)

    return begin


def _why(error: Exception, work: dict[str, Any]) -> str:
    if isinstance(error, subprocess.SubprocessError):  # it says nothing else
        return f"{work['directory']}: cannot be entered"
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


def _leave_alone(number: int, frame: FrameType | None) -> None:
    """Neither end, nor let the launch ignore a signal, as it would what is ignored here."""


def stopped_with_parent() -> Callable[[], None]:
    """What a new process calls so that the kernel sends it SIGTERM when its parent ends (Linux).

    To be made before the fork: loading a library after it may hang.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def bind() -> None:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != parent:  # it ended before this was said
                os._exit(128 + signal.SIGTERM)

    return bind


def main(folder: Path, lock: int | None) -> int:
    """Run a lease; a step of a Slurm job leaves one alone that was claimed. The exit code."""
    if lock is not None:
        return keep(folder, lock)
    # From the claim on the engine may ask; until ``keep`` listens that must wait, not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    return keep(folder, None) if claim(folder, "step") else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
