"""Devices that are a part of the host: arithmetic by its processors, memory of the process."""

import ctypes
import gc
import platform
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import memory
from .backend import DeviceBackend, Mark, Stream

if TYPE_CHECKING:
    import torch

    from ..schema.launch import Determinism

COLLECTIVE = "gloo"
"""What carries collectives between hosts' memories."""
TORCH_DEVICE = "cpu"
# oneDNN, ATen and MKL choose code by what the CPU has; these are on every x86 server since 2013.
_SAME_KERNELS = {
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "ATEN_CPU_CAPABILITY": "avx2",
    # The only mode that MKL promises to be equal on Intel's and others' CPUs.
    "MKL_CBWR": "COMPATIBLE",
}


class HostBackend(DeviceBackend):
    """What all kinds share whose devices are a part of the host."""

    is_host = True
    collective = COLLECTIVE
    # Buckets of 4 MB cost no more processor time than of 25 MB (benchmarks/reduction.py), and bound
    # the room for the others' subtrees (runtime/invariant.py).
    bucket_bytes = 4 << 20

    def visibility(self, devices: Sequence[str]) -> dict[str, str]:
        """Nothing: every process sees its host."""
        return {}

    def worker_environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The number of threads: more threads than cores is many times slower and changes bits."""
        threads = str(self.num_threads)
        return {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def pins(self, level: "Determinism") -> dict[str, str]:
        """Pin kernels that are the same on every x86 CPU, where types are unlike."""
        return dict(_SAME_KERNELS) if level == "heterogeneous" else {}

    def fix_kernels(self, level: "Determinism") -> None:
        """Round square roots alike on every CPU, where types are unlike."""
        if level == "heterogeneous":
            make_exact()

    def is_initialized(self) -> bool:
        """Never: a host's processors survive a fork."""
        return False

    def set_current(self, device: "torch.device") -> None:
        """Nothing: torch has one such device."""

    def identity(self, device: "torch.device") -> str | None:
        """None: workers share their host."""
        return None

    def arithmetic(self, device: "torch.device") -> str:
        """The processor, the kernels that torch chose for it, and the number of threads."""
        import torch

        capability = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_name()} {capability} {torch.get_num_threads()}"

    def synchronize(self, device: "torch.device") -> None:
        """Nothing: work is done when the call returns."""

    def mark(self, device: "torch.device") -> Mark:
        """Now."""
        return time.perf_counter()

    def marker(self, device: "torch.device") -> Callable[[], Mark]:
        """The clock itself."""
        return time.perf_counter

    def has_passed(self, mark: Mark) -> bool:
        """Always."""
        return True

    def wait_for(self, mark: Mark) -> None:
        """Nothing."""

    def seconds_between(self, start: Mark, end: Mark) -> float:
        """By the clock on the wall."""
        return max(float(end - start), 0.0)

    def side_stream(self, device: "torch.device") -> Stream | None:
        """None: the calling thread does all work."""
        return None

    def current_stream(self, device: "torch.device") -> Stream | None:
        """None."""
        return None

    def on_stream(self, stream: Stream) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def allocated_bytes(self, device: "torch.device") -> int | None:
        """Resident memory of this process."""
        return memory.resident_memory_bytes()

    def peak_bytes(self, device: "torch.device") -> int | None:
        """Peak resident memory of this process."""
        return memory.peak_memory_bytes()

    def reset_peak(self, device: "torch.device") -> None:
        """Reset the kernel's count, where the kernel allows it."""
        memory.reset_peak()

    def release_unused(self) -> None:
        """Return freed blocks of all sizes, so that later measurements do not count them."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def limit_memory(self, limit_bytes: int) -> None:
        """Set the kernel's limit, so that allocations fail before its OOM killer acts."""
        memory.limit_memory(limit_bytes)

    def seed(self, key: int) -> None:
        """Nothing: the host's streams are seeded apart, whatever the device."""

    def random_states(self) -> Any:
        """Nothing, as ``seed``."""
        return None

    def restore_random_states(self, states: Any) -> None:
        """Nothing, as ``seed``."""

    def out_of_memory_words(self) -> tuple[str, ...]:
        """The C library's, the C++ runtime's and oneDNN's."""
        return (
            "can't allocate memory",
            "cannot allocate memory",
            "bad_alloc",
            "could not (create a memory|allocate|create a primitive)",
        )


@cache
def cpu_name() -> str:
    """The processor's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


if TYPE_CHECKING:
    from torch import Tensor


@cache
def make_exact() -> Any:
    """Let ``torch.sqrt`` of CPU tensors round correctly in this process, from now on.

    Returns:
        What torch has to keep, which ``cache`` holds: the kernels go with it.
    """
    import torch

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are replaced is the intention
        library.impl("sqrt", _sqrt, "CPU")
        library.impl("sqrt_", lambda values: values.copy_(_sqrt(values)), "CPU")
        library.impl("sqrt.out", _sqrt_out, "CPU")
    return library


def _sqrt(values: "Tensor") -> "Tensor":
    import numpy as np
    import torch

    kind = values.dtype
    if kind in (torch.float32, torch.float64) or kind.is_complex:
        found = torch.empty_like(values)
        with np.errstate(invalid="ignore"):  # nan of a negative number is no news
            np.sqrt(values.detach().resolve_conj().resolve_neg().numpy(), out=found.numpy())
        return found
    if kind.is_floating_point:  # float16 and bfloat16: rounded from float32, as torch does
        return _sqrt(values.float()).to(kind)
    return _sqrt(values.to(torch.get_default_dtype()))


def _sqrt_out(values: "Tensor", *, out: "Tensor") -> "Tensor":
    found = _sqrt(values)
    return out.resize_(found.shape).copy_(found)
