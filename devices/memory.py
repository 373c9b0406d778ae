"""Memory of a process on Linux: its limit and its peak.

A ``cpu`` device is one core with its share of the machine's memory. The share is enforced with
RLIMIT_DATA, so an allocation past it fails inside the process. The kernel's OOM killer, which might
choose any process of the user's, stays out of it.
"""

import os
import resource
from pathlib import Path

# Resident memory of a process, as if it had been started by itself (Linux).
#
# A forked process does not count the pages of libraries that only the preloaded process has touched
# (some 60 MB of torch's). What is predicted, and what a plan is held to, must not depend on how a
# process was started, so they are counted for it too.

_STATUS = Path("/proc/self/status")


class _Preloaded:
    """What the preloaded process had of files when it was forked; 0 in a fresh process."""

    file_bytes = 0


def remember_preloaded() -> None:
    """In a preloaded process with all imports done: those forked from here on count its files."""
    _Preloaded.file_bytes = status_bytes("RssFile") or 0


def resident_memory_bytes() -> int | None:
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


_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_memory_bytes() -> int:
    """Memory that this machine, or the container around us, may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _CGROUP_LIMITS:
        try:
            text = Path(name).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total


def free_memory_bytes() -> int | None:
    """Memory that programs may still take of this machine; None where the kernel does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = next((int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:")), None)
    return None if free is None else min(free, machine_memory_bytes())


def limit_memory(limit_bytes: int) -> None:
    """Let this process's own memory grow to ``limit_bytes`` in all and no further.

    File mappings (the libraries themselves) do not count; private writable memory does.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    ceiling = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (ceiling, hard))


def reset_peak() -> bool:
    """Start a new peak for ``peak_memory_bytes``; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak_memory_bytes() -> int:
    """Peak resident memory of this process since ``reset_peak``, else since its start."""
    peak = _with_untouched("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak
