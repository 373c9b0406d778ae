"""The store of a launch, and the sockets under it.

The first host's controller holds the store on a socket it bound itself: on loopback for a launch
on one host, on the rendezvous address otherwise. (A TCPStore that binds by itself listens on
every interface, without authentication.) Every key of ours stands behind a prefix that is drawn
from the launch's token; that does not keep out who connects and lists the keys (docs/training.md).
"""

import contextlib
import fcntl
import os
import queue
import re
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ...schema.errors import LaunchError, ProblemError, TargetError
from ..protocol.environment import TOKEN, prefix_of
from ..protocol.record import WorkerReport, parse_report

_SIOCGIFADDR = 0x8915


def shared_token(environment: Mapping[str, str]) -> str:
    """The token that the user has given every host; empty where there is none.

    Raises:
        TargetError: One that is too short to be a secret, or could not be random.
    """
    token = environment.get(TOKEN, "")
    if token and not re.fullmatch(r"[\x21-\x7e]{16,}", token):
        raise TargetError(
            f"{TOKEN} must be at least 16 printable characters without blanks",
            hint=f"export {TOKEN}=$(openssl rand -hex 16), and give every host the same",
        )
    return token


def listen(host: str, port: int) -> socket.socket:
    """Bind the store's socket.

    Raises:
        LaunchError: The address is not this host's, or the port is taken.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(512)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="node 0 needs an address of its own host and a free port",
        ) from None
    return listening


def hold_store(listening: socket.socket) -> Any:
    """Make the store on a socket bound before; it takes the socket over."""
    store_class = _tcp_store_class()
    host, port = listening.getsockname()[:2]
    return store_class(
        host,
        port,
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=300),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def behind(token: str, store: Any) -> Any:
    """The part of a store that a launch with this token uses."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix_of(token), store)


def _tcp_store_class() -> Any:
    """Import torch with its C++ messages off: a lost connection is ours to report."""
    before = os.environ.get("TORCH_CPP_LOG_LEVEL")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
    finally:
        if before is None:
            del os.environ["TORCH_CPP_LOG_LEVEL"]
    return TCPStore


def join_store(host: str, port: int, timeout_seconds: float, join_seconds: float) -> Any:
    """Join a store held elsewhere.

    Raises:
        RuntimeError: It has not answered in time; torch's.
    """
    store_class = _tcp_store_class()
    limit = timedelta(seconds=min(timeout_seconds, join_seconds))
    store = store_class(host, port, None, False, timeout=limit, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=timeout_seconds))
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class LastGeneration:
    """Where a launch's last workers report: how many, which generation, and its last restart."""

    world_size: int
    number: int = 0
    restarted_at: int = 0


def read_reports(store: Any, last: LastGeneration) -> list[WorkerReport]:
    """What the workers of the last generation measured, of those that said so."""
    reports = []
    prefix = f"hetflow/{last.restarted_at}"
    prefix += f"/generation/{last.number}" if last.number != last.restarted_at else ""
    for rank in range(last.world_size):
        key = f"{prefix}/report/{rank}"
        if store.check([key]):
            with contextlib.suppress(ProblemError, ValueError):
                reports.append(parse_report(store.get(key)))
    return reports


def interface_towards(host: str, port: int) -> str | None:
    """The network interface that leads to node 0, for collectives; None where unknown."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Of a datagram socket this sends nothing: the kernel chooses a route, and so an address.
        probe.connect((host, port))
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == own:
                    return name
    return None


# The store of another host, asked with a time limit.
#
# Torch's client waits forever for the answer of a host that has disappeared (frozen, or the network
# is gone). So a thread of its own asks, and the caller waits for that thread with a time limit.


Answer = TypeVar("Answer")


class Unreachable(RuntimeError):
    """The store does not answer; its message says how that was seen."""


class PatientStore:
    """Keys and values of a launch. Once it did not answer it is never asked again."""

    def __init__(self, store: Any, limit_seconds: float) -> None:
        self._store, self._limit_seconds = store, limit_seconds
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._gone: str | None = None
        threading.Thread(target=self._serve, daemon=True).start()

    def under(self, prefix: str) -> "StorePart":
        """The part of it whose keys begin with a prefix."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return StorePart(self, PrefixStore(prefix, self._store))

    @property
    def whole(self) -> "StorePart":
        """All of it."""
        return StorePart(self, self._store)

    def ask(self, question: Callable[[], Answer]) -> Answer:
        """Have the thread ask, and wait for the answer.

        Raises:
            Unreachable: None came.
        """
        # Once it did not answer, its thread may hang in that question for ever: later ones would
        # queue behind it, and each would wait for the whole limit.
        if self._gone is None:
            reply: Future[Answer] = Future()
            self._asked.put((question, reply))
            try:
                return reply.result(self._limit_seconds)
            except TimeoutError:
                self._gone = f"its launcher did not answer for {self._limit_seconds:g} s"
            except RuntimeError:
                self._gone = "its launcher is gone, and the store with it"
        raise Unreachable(self._gone)

    def _serve(self) -> None:
        while True:
            question, reply = self._asked.get()
            try:
                reply.set_result(question())
            except RuntimeError as error:
                reply.set_exception(error)


class StorePart:
    """Some keys of a store; each method as torch's."""

    def __init__(self, through: PatientStore, store: Any) -> None:
        self._through, self._store = through, store

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._through.ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> bytes:
        """A value that is there."""
        found: bytes = self._through.ask(lambda: self._store.get(key))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all these keys are there."""
        return bool(self._through.ask(lambda: self._store.check(list(keys))))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write a value where another stands; what stands there then."""
        found: bytes = self._through.ask(lambda: self._store.compare_set(key, expected, value))
        return found
