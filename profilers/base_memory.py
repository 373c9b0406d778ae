"""The memory of a worker's process without a model: Python, torch, the runtime, the group.

A CPU's memory is that of the whole process, so this part of it is counted once for each worker.
It is read after the model has trained and has been dropped again: by then the libraries have
loaded their kernels and what they set up on first use.
"""

import ctypes
import gc
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..devices import memory
from ..devices.collectives import HOST_COLLECTIVE

if TYPE_CHECKING:
    from .bench import Bench


def load_like_worker() -> None:
    """Import what a worker of a launch imports, so that measured peaks hold it."""
    from ..runtime import start  # noqa: F401
    from ..runtime.pipeline import engine  # noqa: F401


def warm_up(bench: "Bench", batch_size: int) -> None:
    """Train a step, and join a group of one: kernels, a group's threads and buffers are loaded."""
    import torch
    import torch.distributed as dist

    bench.run_step(bench.make_batch(batch_size))
    with tempfile.TemporaryDirectory(prefix="hetflow-base-") as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # type: ignore[attr-defined]
        dist.init_process_group(HOST_COLLECTIVE, store=store, rank=0, world_size=1)
        try:
            dist.all_reduce(torch.zeros(1))
        finally:
            dist.destroy_process_group()


def left_bytes() -> int | None:
    """Resident bytes after all unreferenced memory was returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory.resident_memory_bytes()
