"""The batches of a script that is measured: a profiler chooses their sizes.

The loader that the script trains on never ends. Other loaders give a few samples of each batch, so
that what a script does before its loop is short.
"""

from collections.abc import Iterator
from typing import Any

_MANY = 1_000_000  # batches: no scheduler or loop ends


class Sized:
    """A batch sampler that gives the samples of another one in batches of other sizes.

    Args:
        batches: The script's batch sampler.
        few_samples: Samples of a batch before the script trains on it.

    Attributes:
        batch_sampler: The script's batch sampler.
        num_samples: Samples of the next batch.
        is_trained_on: Whether the script trains on its batches; then it never ends.
    """

    batch_size, drop_last = None, False

    def __init__(self, batches: Any, few_samples: int) -> None:
        self.batch_sampler, self.num_samples = batches, few_samples
        self.is_trained_on = False

    @property
    def sampler(self) -> Any:
        """The order of the script's samples."""
        return self.batch_sampler.sampler

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    def __len__(self) -> int:
        return _MANY

    def __iter__(self) -> Iterator[list[Any]]:
        waiting: list[Any] = []
        while True:
            drawn = 0
            for indices in self.batch_sampler:
                drawn += len(indices)
                if not self.is_trained_on:
                    yield list(indices[: self.num_samples])
                    continue
                waiting += indices
                while len(waiting) >= self.num_samples:
                    batch, waiting = waiting[: self.num_samples], waiting[self.num_samples :]
                    yield batch
            if not drawn or not self.is_trained_on:
                return
