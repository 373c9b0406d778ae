"""A lease's folder: what to run, who has it, what was asked, and how it ended.

Scheduler, engine and keeper are processes of their own, perhaps on several hosts; any of them may
be killed. They find each other again by these files. A lease that an engine hands on runs at most
once: whichever process creates ``claim`` first decides, the one that runs it, or the engine, so
that it never runs.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from .protocol import FIRST_STEP, Fate, Work

WORK = "work.json"
SUBMITTED = "submitted.json"
STARTED = "started.json"
ASKED = "asked.json"
ENDED = "ended.json"
LOCK = "lock"
CLAIM = "claim"
ENGINE = "engine"
"""Who claims a lease so that it never runs."""
STOPPED = 143
"""A launch's exit code after SIGTERM: also of one that was asked to end before it began."""


def private(path: str, flags: int) -> int:
    """Open a file that no other user can (``opener``): who can open a lock can hold it."""
    return os.open(path, flags, 0o600)


def write_atomically(path: Path, document: Any) -> None:
    """Write JSON so that a reader, or a crash, never sees half of it, and its owner alone reads it.

    A job's environment is in it.
    """
    making = path.with_name(f".{path.name}.{os.getpid()}")
    making.unlink(missing_ok=True)
    handle = os.open(making, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "w", encoding="utf-8") as stream:
        json.dump(document, stream)
        stream.flush()
        os.fsync(stream.fileno())
    making.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A document that ``write_atomically`` wrote; None where it was not written yet."""
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return document


def document_of(work: Work) -> dict[str, object]:
    """What a keeper reads of a lease."""
    return {
        "command": list(work.command),
        "directory": str(work.directory),
        "environment": dict(work.environment),
        "devices": [device.name for device in work.devices],
        "user": work.user,
    }


def digest_of(folder: Path) -> str:
    """A name of a lease: the same for whoever knows its folder, and no other's."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]


def claim(folder: Path, by: str) -> bool:
    """Take a lease for good, to run it or so that nobody ever does; False where it was taken."""
    try:
        with (folder / CLAIM).open("x", encoding="utf-8") as stream:
            stream.write(by)
    except FileExistsError:
        return False
    return True


def claimed_by(folder: Path) -> str:
    """Who has a lease that was claimed; empty where that process was killed as it wrote this."""
    return (folder / CLAIM).read_text(encoding="utf-8")


def revoke(folder: Path) -> bool:
    """See that a lease that has not begun never does; False where somebody runs it, or ran it."""
    if not claim(folder, ENGINE):
        return False
    write_atomically(folder / ENDED, {"exit_code": STOPPED})
    return True


def progress(folder: Path) -> Fate:
    """The fate of a lease that an engine has, and that is not over, by how far its launch is."""
    if os.path.lexists(folder / FIRST_STEP):  # another user's link is not followed
        return Fate("training")
    return Fate("running" if (folder / STARTED).exists() else "waiting")


def fate_of_lost(folder: Path) -> Fate:
    """The fate of a lease that runs nowhere any more, and of which no keeper wrote how it ended."""
    claim(folder, ENGINE)  # it may have been lost before it began
    return Fate("ended", has_begun=claimed_by(folder) != ENGINE)
