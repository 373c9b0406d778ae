"""Keep freed host memory in the process: a pass takes as long whatever the process did before.

glibc gives large blocks back to the kernel as soon as they are free, above thresholds that follow
the sizes it has seen. A pass on a CPU frees all its activations, so the next one may fault every
page in again: thousands of faults a pass, or none, depending on what the process has allocated
before. Kept, a ResNet-18 pass takes a fifth less time, and profiles and launches the same time. The
price is memory in pieces: where few large blocks are most of what a pass needs, as in a pipeline of
wide linear layers, the peak grows over the first steps (docs/benchmarks.md).
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
    """Have malloc reuse what is freed instead of giving it back and asking for it again.

    Returns:
        Whether it was done: not where another C library has no such options, nor where the
        environment states its own (``MALLOC_..._``, ``GLIBC_TUNABLES``).
    """
    if any(name in os.environ for name in _STATED) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
