"""The rendezvous of one measurement's processes: a file, so no port is opened."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from ..devices.backend import backend_of
from ..schema.errors import TargetError

if TYPE_CHECKING:
    from ..runtime.peers import SharedStore

TIMEOUT = timedelta(seconds=120)
LOOPBACK_ADDRESS = "127.0.0.1"
_LOOK_SECONDS = 0.0005
_FAILED = "failed"


@contextmanager
def process_group(
    path: str, *, rank: int, world_size: int, backend: str, device: str
) -> Iterator["SharedStore"]:
    """Join the other workers' process group, and leave it; gives the store they share.

    Args:
        path: The file of the store, of this meeting only.
        rank: Of this worker.
        world_size: Of all workers.
        backend: The library for collectives.
        device: A torch device.
    """
    import torch
    import torch.distributed as dist

    from ..runtime.peers import SharedStore

    store = dist.FileStore(path, world_size)  # type: ignore[attr-defined]
    backend_of(device).set_current(torch.device(device))
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
        """Tell the other processes that this one has done something."""
        with open(os.path.join(self._folder, f"{what}-{self._index}"), "wb"):
            pass

    def have_all(self, what: str) -> bool:
        """Whether every process has said it."""
        return all(self._has_said(what, index) for index in range(self._number))

    def _has_said(self, what: str, index: int) -> bool:
        return os.path.exists(os.path.join(self._folder, f"{what}-{index}"))

    @contextmanager
    def told_of_failure(self) -> Iterator[None]:
        """Tell the other processes when this one fails, so that they stop waiting."""
        try:
            yield
        except BaseException:
            self.say(_FAILED)
            raise

    def wait(self, what: str) -> None:
        """Call ``say``, and wait until all processes have.

        Raises:
            TargetError: One has failed, or did not come within two minutes.
        """
        self.say(what)
        end = time.monotonic() + TIMEOUT.total_seconds()
        while not self.have_all(what):
            failed = any(self._has_said(_FAILED, index) for index in range(self._number))
            if failed or time.monotonic() > end:
                raise TargetError("another measuring process failed")
            time.sleep(_LOOK_SECONDS)


_STORES: list[object] = []  # they live as long as the process


def hold_store(_: object) -> dict[str, int]:
    """Hold a store in which the workers of a script meet; its ``port`` on this host."""
    import torch.distributed as dist

    with socket.socket() as listening:
        listening.bind((LOOPBACK_ADDRESS, 0))
        listening.listen()
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            LOOPBACK_ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    _STORES.append(store)
    return {"port": port}
