"""Keep two launches of one checkpoint folder apart.

A launch locks a file in the folder, and every worker inherits the descriptor. The kernel releases
the lock when the last process that holds it is gone. So a launcher that was killed does not open
the folder to a new launch while one of its workers still runs.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ...schema.errors import FileError, LaunchError
from ...schema.options import option

POLL_SECONDS = 0.05
TOLD_AFTER_SECONDS = 1.0


class Fence:
    """One host's hold of a checkpoint folder; in a folder that is None there is nothing to hold.

    Args:
        folder: The checkpoint folder.
        node_rank: Rank of this host. The hosts of a launch share the folder, so each has its lock.
    """

    def __init__(self, folder: Path | None, node_rank: int = 0) -> None:
        self._path = None if folder is None else folder / f".launch-{node_rank}.lock"
        self.descriptor: int | None = None

    def close_behind(
        self, timeout_seconds: float, watch: Callable[[], None], warn: Callable[[str], None]
    ) -> None:
        """Wait until every process of the launch before is gone, and keep others out from now on.

        Raises:
            FileError: The folder cannot be written.
            LaunchError: The launch before was still there after the longest wait.
        """
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise FileError(f"{self._path.parent}: cannot be written: {error.strerror}") from None
        began, has_told = time.monotonic(), False
        while not self._is_locked():
            watch()
            waited = time.monotonic() - began
            if waited > timeout_seconds:
                raise LaunchError(
                    f"{self._path.parent}: another launch{self._holder()} still used these "
                    f"checkpoints after {timeout_seconds:g} s",
                    hint=f"end it first, give another {option('checkpoint')}, or wait longer with "
                    f"{option('timeout_seconds')}",
                )
            if waited > TOLD_AFTER_SECONDS and not has_told:
                has_told = True
                warn(
                    f"{self._path.parent}: waiting until the workers of another "
                    f"launch{self._holder()} are gone"
                )
            time.sleep(POLL_SECONDS)
        with suppress(OSError):  # a full disk: then a message names no process
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def _is_locked(self) -> bool:
        assert self.descriptor is not None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def _holder(self) -> str:
        assert self.descriptor is not None
        pid = os.pread(self.descriptor, 20, 0).decode(errors="replace")
        return f" (launcher: process {pid})" if pid.isdigit() else ""

    def __enter__(self) -> "Fence":
        return self

    def __exit__(self, *_: object) -> None:
        """The launch is over: let the next one in once the workers are gone too."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None
