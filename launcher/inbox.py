"""Requests to a running launch: files in its folder, each written whole, each with an answer.

``control/`` holds a lock that the controller keeps while it runs, the mapping as it is
(``current.json``), requests and answers. Every user who may write to the run's folder may ask.
Nothing is unpickled, and it works from another host that sees the folder.
"""

import contextlib
import fcntl
import os
import time
import uuid
from pathlib import Path
from typing import IO

from ..schema import files
from ..schema.errors import FileError, HetflowError, LaunchError, TargetError
from ..schema.launch import LaunchConfig
from ..schema.resize import ResizeAnswer, ResizeRequest

FOLDER = "control"
POLL_SECONDS = 0.05


class Inbox:
    """The controller's side.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        for old in self.folder.glob("*"):
            old.unlink(missing_ok=True)
        self.folder.mkdir(exist_ok=True)
        self._lock: IO[bytes] = (self.folder / "lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._seen: set[str] = set()

    def show(self, config: LaunchConfig) -> None:
        """Say what the mapping is now."""
        files.write(self.folder / "current.json", config, force=True)

    def next(self) -> tuple[Path, ResizeRequest] | None:
        """The oldest request that was not handed out before; broken ones are answered here."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder)):
                if not name.startswith("request-") or name in self._seen:
                    continue
                self._seen.add(name)
                path = self.folder / name
                try:
                    request = files.read(path, ResizeRequest)
                    if not request.wants_answer:
                        path.unlink(missing_ok=True)
                    return path, request
                except HetflowError as error:
                    self.answer(path, ResizeAnswer(status="refused", detail=error.message))
        return None

    def answer(self, request: Path, answer: ResizeAnswer) -> None:
        """Answer a request, unless who asked has gone and taken it along."""
        with contextlib.suppress(OSError, FileError):
            if request.exists():
                files.write(_answer_to(request), answer, force=True)

    def close(self) -> None:
        """The launch is over: remove all files but answers that a client still waits for."""
        while (waiting := self.next()) is not None:
            self.answer(waiting[0], ResizeAnswer(status="refused", detail="the run has ended"))
        for path in [*self.folder.glob("*.json"), self.folder / "lock"]:
            if not path.name.startswith(("answer-", "request-")):
                path.unlink(missing_ok=True)
        self._lock.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def _answer_to(request: Path) -> Path:
    return request.with_name(request.name.replace("request-", "answer-", 1))


def is_running(folder: Path) -> bool:
    """Whether a controller holds the run."""
    try:
        with (folder / FOLDER / "lock").open("rb") as lock:
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
    path = folder / FOLDER / "current.json"
    if not is_running(folder):
        ended = "has ended" if (folder / "run.json").is_file() else "is not running"
        raise TargetError(f"{folder}: the run {ended}")
    if not path.is_file():
        raise TargetError(
            f"{folder}: only launches on one host can be resized while they run",
            hint="stop it with SIGTERM under --checkpoint, and launch the new plan: it goes on",
        )
    return files.read(path, LaunchConfig)


def ask(folder: Path, config: LaunchConfig, *, wants_answer: bool = True) -> Path:
    """Leave a request; returns its path."""
    name = f"request-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}.json"
    path = folder / FOLDER / name
    files.write(path, ResizeRequest(config=config, wants_answer=wants_answer))
    return path


def wait_for(folder: Path, request: Path, timeout_seconds: float) -> ResizeAnswer:
    """Wait for the answer, and take both files away.

    Raises:
        LaunchError: The run ended without an answer, or none came in time; the request may still
            be carried out then.
    """
    answer, deadline = _answer_to(request), time.monotonic() + timeout_seconds
    try:
        while not answer.is_file():
            if not is_running(folder) and not answer.is_file():
                raise LaunchError(f"{folder}: the run ended before it was resized")
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"no answer within {timeout_seconds:g} s; the resize continues",
                    hint="run.json lists it when it is done; --timeout waits longer",
                )
            time.sleep(POLL_SECONDS)
        return files.read(answer, ResizeAnswer)
    finally:
        _tidy(folder, request)


def _tidy(folder: Path, request: Path) -> None:
    """Take a request and its answer away, and the folder of a run that is over."""
    request.unlink(missing_ok=True)
    _answer_to(request).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if not is_running(folder):
            request.parent.rmdir()
