"""The controller's end of a worker's control channel: JSON lines over a socket pair."""

import contextlib
import socket
import time

from ..protocol.messages import Beat, Finished, FromController, FromWorker, encode, from_worker

MAX_LINE_BYTES = 64 << 20


class Line:
    """One worker's line. ``heard_at`` and ``moved_at`` are monotonic seconds.

    ``operation``, ``is_waiting`` and ``left_at`` are what the last heartbeat said; ``moved_at`` is
    when that changed. ``is_prepared`` says that the script has come to ``hf.prepare``,
    ``is_finished`` that its interpreter is about to end, and its heartbeat with it.
    """

    def __init__(self) -> None:
        self._own, self.theirs = socket.socketpair()
        self._own.setblocking(False)
        self._rest = b""
        self.is_open = True
        self.is_prepared, self.is_finished = False, False
        self.began = time.monotonic()
        self.heard_at: float | None = None
        self.moved_at = 0.0
        self.operation, self.is_waiting = -1, False
        self.left_at: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the worker has prepared a model, and has not finished."""
        return self.is_open and self.is_prepared and not self.is_finished

    def started(self) -> None:
        """The worker has its end now."""
        self.theirs.close()

    def fileno(self) -> int:
        """For ``select``."""
        return self._own.fileno()

    def send(self, message: FromController) -> None:
        """Tell the worker; one that is gone or stopped is found out by other means."""
        data = encode(message)
        if not self.is_open:
            return
        with contextlib.suppress(OSError):
            self._own.settimeout(1.0)
            self._own.sendall(data)
        with contextlib.suppress(OSError):
            self._own.setblocking(False)

    def receive(self) -> list[FromWorker]:
        """What the worker has said since the last call; heartbeats are noted, not returned.

        Raises:
            ProblemError: It said what no worker says.
        """
        with contextlib.suppress(OSError):
            while self.is_open:
                data = self._own.recv(1 << 16)
                self.is_open = bool(data)
                self._rest += data
                if len(self._rest) > MAX_LINE_BYTES:
                    self._rest = b""
        *lines, self._rest = self._rest.split(b"\n")
        messages: list[FromWorker] = []
        for line in lines:
            message = from_worker(line)
            self._note(message)
            if not isinstance(message, Beat):
                messages.append(message)
        return messages

    def _note(self, message: FromWorker) -> None:
        self.heard_at = time.monotonic()
        self.is_finished = self.is_finished or isinstance(message, Finished)
        if not isinstance(message, Beat):
            return
        self.is_prepared = message.prepared
        found = (message.operation, message.waiting, message.left_at)
        if found != (self.operation, self.is_waiting, self.left_at):
            self.operation, self.is_waiting, self.left_at = found
            self.moved_at = self.heard_at

    def close(self) -> None:
        """The worker is gone."""
        self.is_open = False
        self._own.close()
