"""Show workers' output on our own streams, whole lines at a time, so that lines never mix."""

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

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
