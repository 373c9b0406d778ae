"""Hand over a pipeline from its workers to those of another plan, by keys in the launch's store.

The new workers are started while the job runs, and wait before they use a device. On ``SIGNAL``,
the running workers finish their step, save their parts and exit. Then the new workers continue
from the parts. Nothing here imports torch.
"""

import signal
import time
from datetime import timedelta
from typing import Protocol

SIGNAL = signal.SIGUSR1
STOPPED_EXIT_CODE = 128 + signal.SIGTERM  # of a worker that was asked to save and leave
READY = "ready"  # number of workers that wait for their turn
GO = "go"
TRAINING = "training"  # number of workers that have reached the saved position
STOPPED_AT = "stopped at"  # monotonic seconds of the end of the last step
FOUND = "checkpoint"  # what the generation continues from
_FOREVER = timedelta(days=365)  # the launcher ends a worker that waits in vain


class LaunchStore(Protocol):
    """The launch's store, as a worker sees it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return the sum."""

    def set(self, key: str, value: str) -> None:
        """Set a value for other workers."""

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """Wait until all keys exist."""


def key(generation: int, name: str) -> str:
    """Return a key of a generation's workers, in the store as the launcher sees it."""
    return f"hetflow/{generation}/{name}"


def wait_for_turn(store: LaunchStore) -> None:
    """Wait until the former workers have saved their parts and exited."""
    store.add(READY, 1)
    store.wait([GO], _FOREVER)


def tell_stopped(store: LaunchStore) -> None:
    """Record the time at which the last step before a handover ended."""
    store.set(STOPPED_AT, str(time.monotonic()))


def tell_training(store: LaunchStore) -> None:
    """Record that this worker has reached the position of the saved state."""
    store.add(TRAINING, 1)
