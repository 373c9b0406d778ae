"""The script's data on this worker: loaders cut into passes, and one epoch after another."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..schema.errors import TargetError
from . import peers
from .data import (
    Batch,
    Key,
    Loop,
    PassSampler,
    epoch_order,
    feed,
    is_drawn,
    pass_loader,
    to_device,
)
from .progress import Progress
from .runner import Runner
from .saving import Checkpoints
from .session import Session
from .streams import seed_streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Epochs:
    """The loaders that the script gave to a job, each cut into this worker's passes.

    Args:
        session: The state that the parts of the job share.

    Attributes:
        open: The epoch that the script is reading; None outside of one.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loaders: dict[
            tuple[int, bool], tuple[DataLoader[Any], PassSampler, Iterable[Any]]
        ] = {}
        self.open: Epoch | None = None

    def passes_of(
        self, loader: "DataLoader[Any]", *, predicts: bool = False
    ) -> tuple[PassSampler, Iterable[Any]]:
        """Cut the script's loader into this worker's passes; the result is kept for later calls."""
        session = self._session
        known = self._loaders.get((id(loader), predicts))
        if known is None or known[0] is not loader:
            assert loader.batch_size is not None
            sizes = session.batch_sizes or (loader.batch_size,)
            sampler = PassSampler(sizes, session.local_nodes, loader.drop_last and not predicts)
            passes = pass_loader(loader, sampler, session.seed, session.device)
            known = (loader, sampler, passes)
            self._loaders[id(loader), predicts] = known
        return known[1], known[2]

    def read(self, loader: "DataLoader[Any]", keys: Sequence[list[Key]]) -> list[Any]:
        """Collate samples as in training, on this worker's device, apart from its passes."""
        session = self._session
        once = pass_loader(loader, keys, session.seed, session.device, is_lasting=False)
        return [to_device(item, session.device) for item in once]

    def draw(self, loader: "DataLoader[Any]", epoch: int) -> list[int]:
        """The order of an epoch, equal on every worker; this may take a collective."""
        return epoch_order(loader, self._session.seed, epoch, self._broadcast)

    def _broadcast(self, order: list[int]) -> list[int]:
        """Send the first worker's order to all, as plain numbers: nothing is unpickled."""
        session = self._session
        if not session.place.distributed:
            return order
        length = torch.tensor(len(order), device=session.device)
        peers.broadcast(length, src=0)
        drawn = torch.zeros(int(length), dtype=torch.int64, device=session.device)
        if session.is_main:
            drawn.copy_(torch.tensor(order))
        peers.broadcast(drawn, src=0)
        found: list[int] = drawn.tolist()
        return found

    def move(self, local: Sequence[int]) -> None:
        """Continue with other virtual nodes."""
        for _, sampler, _ in self._loaders.values():
            sampler.move(local)
        if self.open is not None:
            self.open.move()


class Epoch:
    """The global batches of one epoch, made by ``job.batches``; ``epoch`` is its number."""

    def __init__(
        self,
        session: Session,
        epochs: Epochs,
        runner: Runner,
        progress: Progress,
        checkpoints: Checkpoints,
        loop: Loop,
        loader: "DataLoader[Any]",
        *,
        call: int,
    ) -> None:
        self._session, self._epochs = session, epochs
        self._runner, self._progress, self._checkpoints = runner, progress, checkpoints
        self._call, self._loader, self._loop = call, loader, loop
        self._sampler, self._passes = epochs.passes_of(loader)
        self._source: Iterator[Any] = iter(())
        self._batch: Batch | None = None
        self.epoch, self.is_drawn = self._sampler.epoch, is_drawn(loader)

    def __len__(self) -> int:
        return self._sampler.num_steps

    @property
    def order(self) -> Sequence[int]:
        """The indices of the epoch's samples, in order."""
        return self._sampler.order

    @property
    def last_batch_samples(self) -> int:
        """The number of samples in its last global batch."""
        return self._sampler.passes(len(self) - 1)[0]

    def __iter__(self) -> Iterator[Batch]:
        session, sampler, call = self._session, self._sampler, self._call
        if sampler.epoch != self.epoch:
            raise TargetError("job.batches was called again for this loader; iterate the new one")
        checkpoints = self._checkpoints
        first = checkpoints.first_step(call, sampler.num_steps, len(sampler.order))
        if first == sampler.num_steps:
            return
        self._epochs.open = self
        self._read_from(first)
        for step in range(first, sampler.num_steps):
            session.clock.ask()
            self._progress.entered(call, step)
            self._batch = batch = self._make(step)
            # Seed the random draws of the loop's body: they are equal where a worker joins here.
            seed_streams(session.seed, "batch", session.num_steps)
            yield batch
            batch.discard()
            session.clock.end_step()
            checkpoints.boundary(call, step + 1)
            self._runner.boundary()
        self._epochs.open = None
        self._progress.epoch_done(call)

    def _make(self, step: int) -> Batch:
        epochs, loader, sampler = self._epochs, self._loader, self._sampler
        num_samples, passes = sampler.passes(step)
        # The batch refers to no epoch, which refers to it: data workers end with the epoch.
        return Batch(
            epoch=self.epoch,
            step=step,
            num_samples=num_samples,
            is_full=num_samples == self._sampler.global_batch_size,
            passes=passes,
            _feed=self._source,
            first_samples=lambda ranges: epochs.read(loader, sampler.keys_of(step, ranges)),
            _loop=self._loop,
        )

    def _read_from(self, step: int) -> None:
        self._sampler.first_step = step
        self._source = feed(iter(self._passes), self._session.device)

    def move(self) -> None:
        """Continue with other virtual nodes: with this batch, or the next one if it is done."""
        batch = self._batch
        if batch is None:
            return
        self._read_from(batch.step + int(batch.is_done))
        if not batch.is_done:
            batch.renew(self._sampler.passes(batch.step)[1], self._source)
