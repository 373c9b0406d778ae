"""Requests to a running launch: files in its folder, each written whole, each with an answer.

``control/`` holds a lock that the launch's controller keeps while it runs, the mapping as it is
(``current.json``), requests and answers. Every user who may write to the run's folder may ask.
Nothing is unpickled, and it works from another host that sees the folder. The controller's side is
runtime/launcher/supervisor.py.
"""

import contextlib
import fcntl
import time
import uuid
from pathlib import Path

from ...schema import files
from ...schema.errors import LaunchError, TargetError
from ...schema.launch import LaunchConfig, ResizeAnswer, ResizeRequest
from ...schema.options import option, told

FOLDER = "control"
LOCK = "lock"
CURRENT = "current.json"
REQUEST = "request-"
POLL_SECONDS = 0.05
INSTEAD = (
    "stop it with SIGTERM under {checkpoint}, and launch the new plan with the same folder: it "
    "continues if the virtual nodes or microbatches are the same"
)
"""What to do where a launch cannot be resized while it runs."""


def is_running(folder: Path) -> bool:
    """Whether a controller holds the run."""
    try:
        with (folder / FOLDER / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def current(folder: Path) -> LaunchConfig:
    """The mapping of a running launch.

    Raises:
        TargetError: There is no such run, or it has ended.
    """
    if not folder.is_dir():
        raise TargetError(f"{folder}: no such run", hint="name the folder of a `hetflow launch`")
    path = folder / FOLDER / CURRENT
    if not is_running(folder):
        ended = "has ended" if (folder / "run.json").is_file() else "is not running"
        raise TargetError(f"{folder}: the run {ended}")
    if not path.is_file():
        raise TargetError(
            f"{folder}: its workers have not started yet, or are on several hosts (only launches "
            "on one host can be resized while they run)",
            hint=f"try again when it trains; over several hosts {told(INSTEAD)}",
        )
    return files.read(path, LaunchConfig)


def request_named(folder: Path, name: str) -> Path:
    """The path of a request to a run; requests are served in the order of their names."""
    return folder / FOLDER / f"{REQUEST}{name}.json"


def ask(
    folder: Path, config: LaunchConfig, *, wants_answer: bool = True, name: str | None = None
) -> Path:
    """Leave a request; returns its path.

    Args:
        folder: The run's.
        config: The mapping that is asked for.
        wants_answer: Whether somebody waits for the answer, and takes both away.
        name: The request's, by which it can be found again: one that was left before stays as it
            is. None: a new one.

    Raises:
        FileError: It cannot be written.
    """
    path = request_named(folder, name or f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}")
    if name is None or not path.exists():
        files.write(path, ResizeRequest(config=config, wants_answer=wants_answer))
    return path


def answer_to(request: Path) -> Path:
    """Where the answer to a request is, or will be."""
    return request.with_name(request.name.replace(REQUEST, "answer-", 1))


def answered(request: Path) -> ResizeAnswer | None:
    """The answer to a request; None where there is none yet."""
    path = answer_to(request)
    return files.read(path, ResizeAnswer) if path.is_file() else None


def wait_for(folder: Path, request: Path, timeout_seconds: float) -> ResizeAnswer:
    """Wait for the answer, and take both files away.

    Raises:
        LaunchError: The run ended without an answer, or none came in time; the request may still
            be carried out then.
    """
    deadline = time.monotonic() + timeout_seconds
    try:
        while (answer := answered(request)) is None:
            if not is_running(folder) and not answer_to(request).is_file():
                raise LaunchError(f"{folder}: the run ended before it was resized")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no answer within {timeout_seconds:g} s; the resize continues",
                    hint=f"run.json lists it when it is done; {option('timeout_seconds')} waits "
                    "longer",
                )
            time.sleep(POLL_SECONDS)
        return answer
    finally:
        take_away(folder, request)


def take_away(folder: Path, request: Path) -> None:
    """Take a request and its answer away, and the folder of a run that is over."""
    request.unlink(missing_ok=True)
    answer_to(request).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if not is_running(folder):
            request.parent.rmdir()
