"""Where the measuring processes of one measurement meet: a file, so that no port is opened."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..runtime.peers import SharedStore

TIMEOUT = timedelta(seconds=120)
_LOOK_SECONDS = 0.0005


@contextmanager
def process_group(
    path: str, *, rank: int, world_size: int, backend: str, device: str
) -> Iterator["SharedStore"]:
    """Join the other workers' process group, and leave it; gives the store they share.

    Args:
        path: The file of the store, of this meeting only.
        rank: Of this worker.
        world_size: Of all workers.
        backend: ``gloo`` or ``nccl``.
        device: A torch device, ``cpu`` or ``cuda:N``.
    """
    import torch
    import torch.distributed as dist

    from ..runtime.peers import SharedStore

    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        yield SharedStore(store).under("hetflow")
    finally:
        dist.destroy_process_group()


class StartingLine:
    """Where processes that exchange nothing wait for each other: each leaves a file in a folder.

    Args:
        folder: Of this meeting only.
        index: Of this process.
        number: Of all processes.
    """

    def __init__(self, folder: str, index: int, number: int) -> None:
        self._folder, self._index, self._number = folder, index, number

    def say(self, what: str) -> None:
        """Tell the others that something is done here."""
        with open(os.path.join(self._folder, f"{what}-{self._index}"), "wb"):
            pass

    def have_all(self, what: str) -> bool:
        """Whether every process has said it."""
        names = (f"{what}-{index}" for index in range(self._number))
        return all(os.path.exists(os.path.join(self._folder, name)) for name in names)

    def wait(self, what: str) -> None:
        """Say it, and wait until all have.

        Raises:
            TimeoutError: Some did not within two minutes.
        """
        self.say(what)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while not self.have_all(what):
            if time.monotonic() > end:
                raise TimeoutError(f"another measuring process did not get as far as {what!r}")
            time.sleep(_LOOK_SECONDS)
