"""How a pipeline's workers hand over to those of another plan, by keys in the launch's store.

Those of the next plan are started beside the running job and wait before they take a device.
Asked by ``SIGNAL``, the running ones write their parts after the step they are in and leave; then
the others go on from the parts. Nothing here imports torch.
"""

import signal
import time
from datetime import timedelta
from typing import Protocol

SIGNAL = signal.SIGUSR1
STOPPED_EXIT_CODE = 128 + signal.SIGTERM  # of a worker that was asked to save and leave
READY = "ready"  # how many workers wait for their turn
GO = "go"
TRAINING = "training"  # how many workers have come to where their state is from
STOPPED_AT = "stopped at"  # monotonic seconds of the end of the last step
FOUND = "checkpoint"  # what the generation goes on from
_FOREVER = timedelta(days=365)  # the launcher ends a worker that waits in vain


class Store(Protocol):
    """The launch's store, as a worker sees it."""

    def add(self, key: str, amount: int) -> int:
        """Count up; returns the sum."""

    def set(self, key: str, value: str) -> None:
        """Leave something for others."""

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """Return when all keys are there."""


def key(generation: int, name: str) -> str:
    """A key of a generation's workers in the store as the launcher sees it."""
    return f"hetflow/{generation}/{name}"


def wait_for_turn(store: Store) -> None:
    """Wait until the workers before have written their parts and left."""
    store.add(READY, 1)
    store.wait([GO], _FOREVER)


def tell_stopped(store: Store) -> None:
    """The last step before a handover is over."""
    store.set(STOPPED_AT, str(time.monotonic()))


def tell_training(store: Store) -> None:
    """This worker stands where its state is from."""
    store.add(TRAINING, 1)
