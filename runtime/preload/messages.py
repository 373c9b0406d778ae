"""Messages over the socket of a preloaded process: JSON with its length, and descriptors.

Nothing is ever unpickled. Both ends belong to one user, which both check (``peer_is_ours``).
"""

import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
MAX_MESSAGE_BYTES = 16 << 20
MAX_DESCRIPTORS = 32

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What a forked process is to become; a fresh one would inherit all but the first three.

    Attributes:
        command: The whole command line of a Python program, the interpreter first.
        environment: Its whole environment.
        descriptors: Numbers that the descriptors sent along get in the new process.
        folder: The working directory.
        umask: Permissions that new files lack.
        niceness: As ``nice`` counts it.
        affinity: The cores it may run on.
        limits: Soft and hard limit of each resource, by name (``RLIMIT_DATA``).
        ignored_signals: Those that are ignored at its start.
        blocked_signals: Those that are blocked at its start.
    """

    command: list[str]
    environment: dict[str, str]
    descriptors: list[int]
    folder: str
    umask: int
    niceness: int
    affinity: list[int]
    limits: dict[str, list[int]]
    ignored_signals: list[int]
    blocked_signals: list[int]


def send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message.

    Raises:
        OSError: The other end is gone.
    """
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    if descriptors:
        socket.send_fds(connection, [head], list(descriptors))
    else:
        connection.sendall(head)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """Wait for one message and the descriptors with it; None once the other end is gone.

    Raises:
        ValueError: What came is no message.
    """
    try:
        head, descriptors, _, _ = socket.recv_fds(
            connection, _LENGTH.size, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        head += _read(connection, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        message = json.loads(_read(connection, length))
    except (ConnectionError, EOFError):
        return None
    if not isinstance(message, dict):
        raise ValueError(f"not a message: {message!r}")
    return message, descriptors


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return data


def peer_is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return bool(user == os.geteuid())
