"""Serve the page and its data over HTTP, on one address, to those who know the token.

Only GET and HEAD are answered. The token is the first part of each path and is compared in constant
time. A connection that has not shown it is closed after some seconds, and sooner for a newer one
where there are too many. So slow strangers do not keep the owner out. A request whose Host is a
name that is not ours is refused. So no other site can point its own name at this address and read
the answers (DNS rebinding). No answer allows another origin.
"""

import hmac
import ipaddress
import json
import logging
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ...schema.errors import HetflowError, ProblemError
from ..scheduler.store import ClusterStore
from .snapshot import snapshot

WINDOWS = {"600": 600.0, "3600": 3600.0, "21600": 21600.0, "86400": 86400.0, "604800": 604800.0,
           "all": None}  # fmt: skip
"""Lengths of the time axis that can be asked for, in seconds."""
_PAGE = {
    "": ("index.html", "text/html; charset=utf-8"),
    "page.css": ("page.css", "text/css; charset=utf-8"),
    "page.js": ("page.js", "text/javascript; charset=utf-8"),
    "icon.svg": ("icon.svg", "image/svg+xml"),
}
_STATE = "state.json"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HOST = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[0-9a-z.-]+))(?::[0-9]*)?")
_FRESH_SECONDS = 0.5
_IDLE_SECONDS = 15.0
_END_SECONDS = 1.0  # for the thread of a connection that was closed; it takes milliseconds
_MOST_CONNECTIONS = 32
_log = logging.getLogger("hetflow")


@dataclass(frozen=True, slots=True)
class Address:
    """An IP address and a port; port 0 is any that is free."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read ``127.0.0.1:8080``, ``[::1]:8080`` or ``localhost:8080``.

        Raises:
            ProblemError: It is none of these.
        """
        name, colon, port = text.rpartition(":")
        host = "127.0.0.1" if name == "localhost" else name.removeprefix("[").removesuffix("]")
        is_port = port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 65536
        try:
            is_host = (ipaddress.ip_address(host).version == 6) == name.startswith("[")
        except ValueError:
            is_host = False
        if not (colon and is_port and is_host):
            raise ProblemError(
                f"{text!r} is no address to listen on",
                hint="give an IP address and a port, such as 127.0.0.1:8080 or [::1]:8080",
            )
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this host reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Dashboard:
    """The page of one state folder, bound to its address; ``answering`` answers requests."""

    def __init__(self, folder: Path, address: Address) -> None:
        """Listen on an address; nothing is answered before ``answering``.

        Raises:
            ProblemError: The address is in use, or not one of this host.
        """
        self._token = secrets.token_urlsafe(24)
        self._states = _States(folder)
        try:
            self._server = _Server(address, self._token, self._states)
        except OSError as error:
            raise ProblemError(
                f"the dashboard cannot listen on {address}: {error.strerror}",
                hint="take another port; port 0 takes a free one",
            ) from None
        self.address = Address(address.host, self._server.server_address[1])

    @property
    def url(self) -> str:
        """What to open in a browser; whoever has it can read the page."""
        return f"http://{self.address}/{self._token}/"

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer requests in threads of their own."""
        thread = threading.Thread(
            target=self._server.serve_forever, name="dashboard", daemon=True,
            kwargs={"poll_interval": 0.2},
        )  # fmt: skip
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self.close()

    def close(self) -> None:
        """Stop listening."""
        self._server.server_close()


@contextmanager
def serving(listen: str, folder: Path) -> Iterator[Dashboard]:
    """Serve the page of a state folder, which need not be there yet.

    Raises:
        ProblemError: The address is none, or cannot be listened on.
    """
    address = Address.parse(listen)
    dashboard = Dashboard(folder, address)
    if not address.is_loopback:
        _log.warning(
            f"other hosts can reach {address}, and http is not encrypted; a tunnel (`ssh -L`) to "
            "127.0.0.1 is safer"
        )
    with dashboard.answering():
        yield dashboard


class _States:
    """Snapshots as JSON; those who ask within half a second get the same one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def json(self, window: str) -> bytes:
        """The state for one of ``WINDOWS``."""
        with self._lock:
            made, text = self._made.get(window, (-1e9, b""))
            if time.monotonic() - made > _FRESH_SECONDS:
                with closing(ClusterStore.read(self._folder)) as store, store.one_moment():
                    found = snapshot(store, now=time.time(), window_seconds=WINDOWS[window])
                text = json.dumps(found.to_plain(), separators=(",", ":")).encode()
                self._made[window] = (time.monotonic(), text)
            return text


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: Address, token: str, states: _States) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self.names = {address.host, "localhost"}
        self.token, self.states = token, states
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._lock = threading.Lock()
        self._strangers: dict[Any, float] = {}  # their sockets, and when they came: oldest first
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server for this host's name, as the base class does."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. Beyond the limit the oldest stranger is closed, else who comes."""
        is_free = self._free.acquire(blocking=False) or (
            self._close_strangers(1) and self._free.acquire(timeout=_END_SECONDS)
        )
        if not is_free:
            self.shutdown_request(request)
            return
        with self._lock:
            self._strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.know(request)
            self._free.release()

    def know(self, request: Any) -> None:
        """This connection has shown the token, or is over: it is no stranger's."""
        with self._lock:
            self._strangers.pop(request, None)

    def service_actions(self) -> None:
        """Several times a second: close strangers that are slow, also those that send bytes."""
        before = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            slow = sum(came < before for came in self._strangers.values())
        self._close_strangers(slow)

    def _close_strangers(self, number: int) -> int:
        """Close the oldest ones, so that their threads end; how many there were."""
        with self._lock:
            oldest = list(self._strangers)[:number]
            for request in oldest:
                del self._strangers[request]
                with suppress(OSError):  # it is over already
                    request.shutdown(socket.SHUT_RDWR)
        return len(oldest)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who goes away is no error; anything else is said in one line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            _log.warning(f"the dashboard could not answer: {error!r}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer a request for the page, one of its files or the state."""
        if not _is_ours(self.headers.get_all("Host") or [], self.server.names):
            self._refuse(HTTPStatus.FORBIDDEN, "this address is not the dashboard's")
            return
        path, _, query = self.path.partition("?")
        token, _, name = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "the token is missing or wrong")
            return
        self.server.know(self.request)
        if name == _STATE:
            self._answer_state(parse_qs(query).get("window", ["3600"])[-1])
        elif name in _PAGE:
            file, kind = _PAGE[name]
            self._answer(HTTPStatus.OK, kind, _file(file))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET

    def _not_allowed(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "the dashboard only reads", allow="GET, HEAD")

    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _not_allowed

    def _answer_state(self, window: str) -> None:
        if window not in WINDOWS:
            self._refuse(HTTPStatus.BAD_REQUEST, f"window is one of {', '.join(WINDOWS)}")
            return
        try:
            text = self.server.states.json(window)
        except HetflowError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, error.message)
            return
        self._answer(HTTPStatus.OK, "application/json", text)

    def _answer(
        self, status: HTTPStatus, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind, "Content-Length": str(len(body)), **_HEADERS, **(headers or {}),
        }.items():  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str, *, allow: str | None = None) -> None:
        """Answer with an error, and close: what else was sent is not read."""
        headers = {"Connection": "close"} | ({"Allow": allow} if allow else {})
        self._answer(status, "text/plain; charset=utf-8", f"{why}\n".encode(), headers)

    def version_string(self) -> str:
        """The header ``Server``."""
        return "hetflow"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: a request's path holds the token."""


def _is_ours(hosts: list[str], names: set[str]) -> bool:
    """Whether a request's Host is this address by its own name or as an IP address."""
    # A name of somebody else's can point here; an IP address cannot point anywhere else. The port
    # may differ: that of a tunnel.
    found = _HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
    if found is None:
        return False
    name = found["six"] or found["name"]
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@cache
def _file(name: str) -> bytes:
    return (files("hetflow.clusters.dashboard") / "page" / name).read_bytes()
