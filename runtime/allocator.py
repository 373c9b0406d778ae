"""Keep freed host memory in the process, so that the time of a pass does not depend on the past.

glibc returns large blocks to the kernel as soon as they are free. What counts as large depends on
the sizes it has seen. A pass on a CPU frees all its activations, so the next pass may fault every
page in again: thousands of page faults a pass or none, depending on earlier allocations. When
freed memory is kept, a ResNet-18 pass takes a fifth less time, and profiles and launches measure
the same time. The price is fragmentation: where few large blocks are most of what a pass needs, as
in a pipeline of wide linear layers, the peak grows over the first steps
(docs/benchmarks/predictions.md).
"""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_NEVER = 2**31 - 1
_STATED = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
)


def keep_freed_memory() -> bool:
    """Make malloc reuse freed memory instead of returning it to the kernel.

    Returns:
        Whether the options were set. False where the C library has no such options, and where
        the environment sets them itself (``MALLOC_..._``, ``GLIBC_TUNABLES``).
    """
    if any(name in os.environ for name in _STATED) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
