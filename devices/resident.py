"""Resident memory of a process, as if it had been started by itself (Linux).

A forked process does not count the pages of libraries that only the preloaded process has touched
(some 60 MB of torch's). What is predicted, and what a plan is held to, must not depend on how a
process was started, so they are counted for it too.
"""

from pathlib import Path

_STATUS = Path("/proc/self/status")


class _Preloaded:
    """What the preloaded process had of files when it was forked; 0 in a fresh process."""

    file_bytes = 0


def remember_preloaded() -> None:
    """In a preloaded process with all imports done: those forked from here on count its files."""
    _Preloaded.file_bytes = status_bytes("RssFile") or 0


def peak_bytes() -> int | None:
    """The most memory this process held, in bytes; None where the kernel does not tell."""
    return _with_untouched("VmHWM")


def resident_bytes() -> int | None:
    """What this process holds now, in bytes; None where the kernel does not tell."""
    return _with_untouched("VmRSS")


def _with_untouched(key: str) -> int | None:
    found = status_bytes(key)
    if found is None or not _Preloaded.file_bytes:
        return found
    return found + max(0, _Preloaded.file_bytes - (status_bytes("RssFile") or 0))


def status_bytes(key: str) -> int | None:
    """One of the kernel's sizes of this process, in bytes; None where there is none."""
    try:
        text = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None
