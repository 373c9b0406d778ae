"""The connections of one generation of workers, so that they can be closed at once.

A collective waits for peers that may never answer. Shutting down its connections from another
thread makes it fail within milliseconds, here and in the peers, whose streams break. gloo's own
``abort`` may hang. Destroying a group with closed streams nearly always takes milliseconds;
``group.release_apart`` handles the other cases.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """The sockets that were opened while a generation's workers connected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[tuple[int, int]] = set()
        self._opened: set[tuple[int, int]] = set()
        self._is_opening = False

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Count every socket that is opened inside the context as the new generation's."""
        with self._lock:
            self._before, self._opened, self._is_opening = _sockets(), set(), True
        try:
            yield
        finally:
            with self._lock:
                self._opened = _sockets() - self._before
                self._is_opening = False

    def cut(self) -> None:
        """Shut down the generation's connections, also while it connects; from any thread."""
        with self._lock:
            opened = _sockets() - self._before if self._is_opening else self._opened
            for number, inode in opened:
                with contextlib.suppress(OSError):
                    _cut(number, inode)


def _sockets() -> set[tuple[int, int]]:
    """The (descriptor, inode) of every socket of this process."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:["):
                    found.add((int(name), int(target[8:-1])))
    return found


def _cut(number: int, inode: int) -> None:
    duplicate = os.dup(number)
    if os.fstat(duplicate).st_ino != inode:  # closed since; the number belongs to another file
        os.close(duplicate)
        return
    with socket.socket(fileno=duplicate) as connection:
        # A listening socket has no peer; gloo aborts the process if its own is shut down.
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
