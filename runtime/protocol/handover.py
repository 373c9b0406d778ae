"""Hand over a pipeline from its workers to those of another plan, by keys in the launch's store.

The new workers are started while the job runs, and wait before they use a device. On ``SIGNAL``,
the running workers finish their step, save their parts and exit. Then the new workers continue
from the parts. Nothing here imports torch.
"""

import signal
from datetime import timedelta

SIGNAL = signal.SIGUSR1
STOPPED_EXIT_CODE = 128 + signal.SIGTERM  # of a worker that was asked to save and leave
READY = "ready"  # number of workers that wait for their turn
GO = "go"
TRAINING = "training"  # number of workers that have reached the saved position
STOPPED_AT = "stopped at"  # monotonic seconds of the end of the last step
FOUND = "checkpoint"  # what the generation continues from
FOREVER = timedelta(days=365)  # the launcher ends a worker that waits in vain


def key(generation: int, name: str) -> str:
    """Return a key of a generation's workers, in the store as the launcher sees it."""
    return f"hetflow/{generation}/{name}"
