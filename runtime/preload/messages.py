"""What a preloaded process and those who ask it for forks have in common: messages, settings.

Messages are JSON with its length, and descriptors. Nothing is ever unpickled. Both ends belong to
one user, which both check (``peer_is_ours``).
"""

import json
import os
import resource
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...devices.backend import DEVICES

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


# Which settings act before or during the imports, so that a fork comes too late for them.
#
# A preloaded process serves only those whose settings of this kind are its own; for others another
# preloaded process is started. All other variables are read when they are used, so a forked process
# takes them over from its request. A driver's choice of devices is read at its first use, a
# collective library's when a group is made, hetflow's own when a worker starts.

_PREFIXES = {
    "PYTHON": "the interpreter's own: hash seed, path, encoding, buffering, warnings",
    "LD_": "the dynamic linker reads them before main",
    "OMP_": "libgomp reads them when it is loaded",
    "GOMP_": "as OMP_",
    "KMP_": "as OMP_, for Intel's and LLVM's libraries",
    "MKL_": "MKL's code path and threads",
    "OPENBLAS_": "numpy's BLAS reads them when it is loaded",
    "GOTO_": "as OPENBLAS_",
    "BLIS_": "as OPENBLAS_",
    "NUMEXPR_": "read when it is imported",
    "NPY_": "numpy chooses its kernels when it is imported",
    "NUMPY_": "as NPY_",
    "ATEN_": "torch's kernels for a CPU capability",
    "ONEDNN_": "oneDNN's kernels for an instruction set",
    "DNNL_": "as ONEDNN_",
    "TORCH": "torch's logging and the compiler's configuration are read at import",
    "PYTORCH_": "torch's allocators read theirs when the library is loaded",
    "MALLOC_": "malloc reads them before main",
    "LC_": "Python chooses its encodings before main",
}
_NAMES = {
    "GLIBC_TUNABLES": "the C library reads them before main",
    "LANG": "as LC_",
    "LANGUAGE": "as LC_",
}
_LATER = {
    "TORCHELASTIC_USE_AGENT_STORE": "read when a group is made",
    "TORCHELASTIC_RESTART_COUNT": "read when a worker joins its group",
    "TORCHINDUCTOR_CACHE_DIR": "read when a model is compiled",
}


def import_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that a preloaded process must have been started with."""
    prefixes, later = set(_PREFIXES), set(_LATER)
    for backend in DEVICES.registered:
        prefixes |= set(backend.early_variables)
        later |= set(backend.late_variables)
    return {
        name: value
        for name, value in environment.items()
        if name not in later and (name in _NAMES or name.startswith(tuple(prefixes)))
    }


def identity() -> dict[str, object]:
    """What two processes must have in common for one to be forked for the other.

    The interpreter, this package, and the hard limits, which a process can lower only.
    """
    limits = {name: resource.getrlimit(number)[1] for name, number in resources().items()}
    package = Path(__file__).resolve().parents[2]
    # One Python has several names: python and python3, or a path through a link.
    python = {name: os.path.realpath(getattr(sys, name)) for name in ("executable", "prefix")}
    return {**python, "package": str(package), "hard_limits": limits}


def resources() -> dict[str, int]:
    """Every resource with a limit, by name."""
    return {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}


def current_umask() -> int:
    """This process's umask, which can only be read by setting it; from /proc where it is there."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        (line,) = [line for line in status.splitlines() if line.startswith("Umask:")]
    except (OSError, ValueError):
        found = os.umask(0o077)
        os.umask(found)
        return found
    return int(line.split()[1], 8)
