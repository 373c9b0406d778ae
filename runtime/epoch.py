"""One epoch as the script sees it: its global batches, in order, on whatever workers there are."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..schema.errors import TargetError
from .data import Batch, PassSampler, feed
from .streams import seed_streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from .job import Job


class Epoch:
    """The global batches of one epoch. Made by ``job.batches``; ``epoch`` is its number."""

    def __init__(
        self,
        job: "Job",
        sampler: PassSampler,
        passes: "DataLoader[Any]",
        *,
        call: int = 0,
        is_drawn: bool = False,
    ) -> None:
        self._job, self._sampler, self._passes, self._call = job, sampler, passes, call
        self._source: Iterator[Any] = iter(())
        self._batch: Batch | None = None
        self.epoch, self.is_drawn = sampler.epoch, is_drawn

    def __len__(self) -> int:
        return self._sampler.num_steps

    @property
    def order(self) -> Sequence[int]:
        """The samples of the epoch, in order."""
        return self._sampler.order

    def __iter__(self) -> Iterator[Batch]:
        job, sampler = self._job, self._sampler
        if sampler.epoch != self.epoch:
            raise TargetError("job.batches was called again for this loader; iterate the new one")
        saver, first = job._checkpoints, 0
        if saver is not None:
            first = saver.first_step(self._call, sampler.num_steps, len(sampler.order))
            if first == sampler.num_steps:
                return
        job._open_epoch = self
        self._read_from(first)
        for step in range(first, sampler.num_steps):
            job._clock.ask()
            if saver is not None:
                saver.entered(self._call, step)
            self._batch = batch = self._make(step)
            # Draws of the loop's own body: the same where a worker begins here.
            seed_streams(job._seed, "batch", job.num_steps)
            yield batch
            batch.discard()
            job._clock.end_step()
            if saver is not None:
                saver.boundary(self._call, step + 1)
            if job._member is not None:
                job._member.boundary()
        job._open_epoch = None
        if saver is not None:
            saver.epoch_done(self._call)

    def _make(self, step: int) -> Batch:
        num_samples, passes = self._sampler.passes(step)
        return Batch(
            epoch=self.epoch,
            step=step,
            num_samples=num_samples,
            is_full=num_samples == self._sampler.global_batch_size,
            passes=passes,
            _feed=self._source,
        )

    def _read_from(self, step: int) -> None:
        self._sampler.first_step = step
        self._source = feed(iter(self._passes), self._job.device)

    def move(self) -> None:
        """Read on for other virtual nodes: from the batch at hand, or after it where it is done."""
        batch = self._batch
        if batch is None:
            return
        self._read_from(batch.step + int(batch.is_done))
        if not batch.is_done:
            batch.renew(self._sampler.passes(batch.step)[1], self._source)
