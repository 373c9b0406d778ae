"""Memory of a process on Linux: its limit and its peak.

A ``cpu`` device is one core with its share of the machine's memory. The share is enforced with
RLIMIT_DATA, so an allocation past it fails inside the process and the kernel's OOM killer, which
might choose any process of the user's, stays out of it.
"""

import os
import resource
from pathlib import Path

from .resident import peak_bytes, resident_bytes

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
    peak = peak_bytes()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def resident_memory_bytes() -> int | None:
    """Resident memory of this process now; None where the kernel does not tell."""
    return resident_bytes()
