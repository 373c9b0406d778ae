"""The controller's side of requests to a running launch (protocol/control.py has the other)."""

import contextlib
import fcntl
import os
from pathlib import Path
from typing import IO

from ...schema import files
from ...schema.errors import FileError, HetflowError
from ...schema.launch import LaunchConfig, ResizeAnswer, ResizeRequest
from ..protocol.control import CURRENT, FOLDER, LOCK, REQUEST, answer_to


class Inbox:
    """Requests to one launch, and their answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        for old in self.folder.glob("*"):
            old.unlink(missing_ok=True)
        self.folder.mkdir(exist_ok=True)
        self._lock: IO[bytes] = (self.folder / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._seen: set[str] = set()

    def show(self, config: LaunchConfig) -> None:
        """Say what the mapping is now."""
        files.write(self.folder / CURRENT, config, force=True)

    def next(self) -> tuple[Path, ResizeRequest] | None:
        """The oldest request that was not handed out before; broken ones are answered here."""
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder)):
                if not name.startswith(REQUEST) or name in self._seen:
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
                files.write(answer_to(request), answer, force=True)

    def close(self) -> None:
        """The launch is over: remove all files but answers that a client still waits for."""
        while (waiting := self.next()) is not None:
            self.answer(waiting[0], ResizeAnswer(status="refused", detail="the run has ended"))
        for path in [*self.folder.glob("*.json"), self.folder / LOCK]:
            if not path.name.startswith(("answer-", REQUEST)):
                path.unlink(missing_ok=True)
        self._lock.close()
        with contextlib.suppress(OSError):
            self.folder.rmdir()
