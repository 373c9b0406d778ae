"""The control channel between a worker and its controller: messages over a socket pair.

A separate thread reads it and sends heartbeats, even while the script computes or waits in a
collective. A worker that is stopped or frozen sends no heartbeat; one that hangs in its own code
sends heartbeats but makes no progress.
"""

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, get_args

from ...schema.errors import ProblemError
from ..protocol.environment import CHANNEL, CONTROL, WORKER, Channel
from ..protocol.messages import (
    Abort,
    Beat,
    Closed,
    FromController,
    FromWorker,
    Leave,
    Recover,
    Report,
    Reported,
    Resize,
    Unreadable,
    encode,
    from_controller,
)

# The connections of one generation of workers, so that they can be closed at once.
#
# A collective waits for peers that may never answer. Shutting down its connections from another
# thread makes it fail within milliseconds, here and in the peers, whose streams break. gloo's own
# ``abort`` may hang. Destroying a group with closed streams nearly always takes milliseconds;
# ``group.release_apart`` handles the other cases.
#
# Of two workers that meet in gloo one listens and the other connects. One that listens has no
# connection yet, and waits without end if the other dies before it connects. So each connection
# that may still be missing is made, and closed. gloo reads its number from it first.

_DESCRIPTORS = "/proc/self/fd"


class Connections:
    """The sockets that were opened while a generation's workers connected."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._before: set[tuple[int, int]] = set()
        self._opened: set[tuple[int, int]] = set()
        self._opening = 0

    @contextmanager
    def opening(self, num_workers: int) -> Iterator[None]:
        """Count every socket that is opened inside the context as the new generation's."""
        with self._lock:
            self._before, self._opened, self._opening = _sockets(), set(), num_workers
        try:
            yield
        finally:
            with self._lock:
                self._opened = _sockets() - self._before
                self._opening = 0

    def cut(self) -> None:
        """Shut down the generation's connections, also while it connects; from any thread."""
        with self._lock:
            opened = _sockets() - self._before if self._opening else self._opened
            for number, inode in opened:
                with contextlib.suppress(OSError):
                    _cut(number, inode, self._opening)


def _sockets() -> set[tuple[int, int]]:
    # (descriptor, inode): a number that is closed is soon given to another file.
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_DESCRIPTORS}/{name}")
                if target.startswith("socket:["):
                    found.add((int(name), int(target[8:-1])))
    return found


def _cut(number: int, inode: int, num_missing: int) -> None:
    # Duplicated before it is looked at: between a look and a cut, another thread may close the
    # number and open another file under it. The duplicate stays what it is.
    duplicate = os.dup(number)
    if os.fstat(duplicate).st_ino != inode:  # closed since; the number belongs to another file
        os.close(duplicate)
        return
    with socket.socket(fileno=duplicate) as connection:
        if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            connection.shutdown(socket.SHUT_RDWR)
            return
        # gloo aborts the process if a listening socket of its own is shut down.
        is_of_hosts = connection.family in (socket.AF_INET, socket.AF_INET6)
        for missing in range(num_missing if is_of_hosts else 0):
            with socket.create_connection(connection.getsockname()[:2], timeout=1.0) as last:
                last.sendall(struct.pack("=q", missing))


BEAT_SECONDS = 0.5


class Control:
    """This worker's end of the control channel.

    Args:
        line: The socket, connected to the controller.
        worker: The controller's name for this worker; ranks change, names stay.
        channel: What the channel is used for: ``changes`` says whether workers may join and leave,
            ``survives`` whether the job continues when other workers die, and
            ``survives_on_devices`` whether also where collectives go from device to device.

    Attributes:
        abort: Called, by the channel's thread, when this worker's generation has failed.
        report: Called, by the channel's thread, when the launch ends and asks for measurements.
    """

    _of_process: ClassVar["Control | None"] = None

    def __init__(self, line: socket.socket, worker: str, channel: Channel) -> None:
        self._line, self._sending = line, threading.Lock()
        self.worker, self.changes = worker, channel != "heartbeats"
        self.survives = channel in ("losses", "device-losses")
        self.survives_on_devices = channel == "device-losses"
        self.abort: Callable[[], None] = lambda: None
        self.report: Callable[[], None] = lambda: None
        self.num_jobs = 0
        self.is_closed = False
        self._changed = threading.Condition()
        self.connections = Connections()
        self.generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        self.broken = -1
        self.announced: Resize | None = None
        self.recovery: Recover | None = None
        self.may_leave = False
        self.num_operations = 0
        self.is_waiting = False
        self.left_at: int | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    @classmethod
    def of_process(cls) -> "Control | None":
        """This process's channel; None if hetflow's controller did not start the process."""
        number = os.environ.pop(CONTROL, None)  # processes that the script starts are no workers
        if number is not None:
            os.set_inheritable(int(number), False)
            cls._of_process = cls(
                socket.socket(fileno=int(number)),
                os.environ.get(WORKER, "0"),
                _channel(os.environ.get(CHANNEL)),
            )
        return cls._of_process

    def open_job(self) -> None:
        """Note that the script prepares a model; if it prepares several, workers cannot change."""
        self.num_jobs += 1
        if self.num_jobs > 1:
            self.close("the script prepares several models")
        self._beat()  # from here on the controller also acts when no heartbeat comes

    def send(self, message: FromWorker) -> None:
        """Send a message to the controller; a worker whose controller is gone ends with it."""
        self._send(lambda: message)

    def _send(self, make: Callable[[], FromWorker]) -> None:
        try:
            with self._sending:
                self._line.sendall(encode(make()))
        except OSError:
            return

    def close(self, why: str) -> None:
        """Tell the controller, with a reason, that workers cannot change any more."""
        if not self.is_closed:
            self.is_closed, self.survives = True, False
            self.survives_on_devices = False
            self.send(Closed(why=why))

    @property
    def is_broken(self) -> bool:
        """Whether this worker's generation has ended by a failure."""
        return self.broken >= self.generation

    def is_broken_within(self, seconds: float) -> bool:
        """Whether this worker's generation has ended by a failure, or does within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.is_broken, timeout=seconds)

    def wait(self, is_there: Callable[[], bool], tick: Callable[[], None]) -> None:
        """Wait until a message makes a condition true; ``tick`` runs about every 0.1 s."""
        while True:
            with self._changed:
                if is_there() or self._changed.wait_for(is_there, timeout=0.1):
                    return
            tick()

    def _beat(self) -> None:
        # The state of when it is sent: two threads beat, and the older state must not come last.
        self._send(
            lambda: Beat(
                prepared=self.num_jobs > 0,
                operation=self.num_operations,
                waiting=self.is_waiting,
                left_at=self.left_at,
            )
        )

    def _serve(self) -> None:
        rest, next_beat = b"", 0.0
        while True:
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + BEAT_SECONDS
                self._beat()
            ready, _, _ = select.select([self._line], [], [], BEAT_SECONDS)
            if not ready:
                continue
            try:
                data = self._line.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    self._take(from_controller(line))
                except ProblemError as error:
                    self.send(Unreadable(why=error.message))  # which ends this worker

    def _take(self, message: FromController) -> None:
        with self._changed:
            match message:
                case Resize():
                    self.announced = message
                case Abort():
                    self.broken = max(self.broken, message.generation)
                    # A resize that was announced to a broken generation will not come about.
                    self.announced = None
                case Recover():
                    self.recovery, self.announced = message, None
                case Leave():
                    self.may_leave = True
            self._changed.notify_all()
        # Cut only now that ``broken`` says so: the main thread wakes with an error, and asks
        # whether the error follows from a loss. Outside of the lock, which it then takes.
        if isinstance(message, Abort):
            self.abort()
            self.connections.cut()
        elif isinstance(message, Report):
            self.report()
            self.send(Reported())


def _channel(name: str | None) -> Channel:
    known: dict[str | None, Channel] = {channel: channel for channel in get_args(Channel)}
    return known.get(name, "heartbeats")
