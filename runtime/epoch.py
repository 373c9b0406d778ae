"""The script's data on this worker: loaders cut into passes, and one epoch after another."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..schema.errors import TargetError
from . import peers
from .checkpoints.saving import Checkpoints
from .data import (
    Batch,
    Key,
    Loop,
    PassSampler,
    epoch_order,
    feed,
    is_batched,
    is_drawn,
    pass_loader,
    to_device,
)
from .engine import Runner
from .session import Position, Session
from .streaming import StreamReader
from .streams import seed_streams

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class Epochs:
    """The loaders that the script gave to a job, each cut into this worker's passes.

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
            batched, sizes = is_batched(loader), session.batch_sizes
            sampler = PassSampler(
                sizes or (loader.batch_size or 1,),
                session.local_nodes,
                loader.drop_last and not predicts,
                is_batched=batched,
                is_planned=bool(sizes) or not batched,
            )
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


class IndexReader:
    """Reads an epoch of the script's loader by the indices of samples: this worker's own only."""

    def __init__(
        self, session: Session, epochs: Epochs, loop: Loop, loader: "DataLoader[Any]"
    ) -> None:
        self._session, self._epochs, self._loop, self._loader = session, epochs, loop, loader
        self._sampler, self._passes = epochs.passes_of(loader)
        self._source: Iterator[Any] = iter(())
        self.epoch, self.is_drawn = self._sampler.epoch, is_drawn(loader)

    def __len__(self) -> int:
        return self._sampler.num_steps

    @property
    def num_steps(self) -> int:
        """Global batches in the epoch."""
        return self._sampler.num_steps

    @property
    def length(self) -> int:
        """The samples of the epoch."""
        return len(self._sampler.order)

    @property
    def order(self) -> Sequence[int]:
        """The indices of the epoch's samples, in order, as a sampler of the script's is sent."""
        return self._sampler.drawn

    @property
    def last_batch_samples(self) -> int:
        """The number of samples in its last global batch."""
        return self._sampler.cut(len(self) - 1).num_samples

    def check(self) -> None:
        """Refuse an epoch whose loader has begun another one."""
        if self._sampler.epoch != self.epoch:
            raise TargetError("job.batches was called again for this loader; iterate the new one")

    def start(self, step: int) -> None:
        """Read from a step on."""
        self._sampler.first_step = step
        self._source = feed(iter(self._passes), self._session.device)

    def skip(self) -> None:
        """Leave out the epoch, which was trained on before a restart: nothing was read."""

    def take(self, step: int) -> Batch | None:
        """The batch of a step."""
        epochs, loader = self._epochs, self._loader
        num_samples, is_full, passes, keys_of = self._sampler.cut(step)
        # The batch refers to no epoch, which refers to it: data workers end with the epoch.
        return Batch(
            epoch=self.epoch,
            step=step,
            num_samples=num_samples,
            is_full=is_full,
            passes=passes,
            _feed=self._source,
            first_samples=lambda ranges: epochs.read(loader, keys_of(ranges)),
            _loop=self._loop,
        )

    def move(self, batch: Batch) -> None:
        """Continue with other virtual nodes: with this batch, or the next one if it is done."""
        self.start(batch.step + int(batch.is_done))
        if not batch.is_done:
            batch.renew(self._sampler.cut(batch.step).passes, self._source)


class Epoch:
    """The global batches of one epoch, made by ``job.batches``; ``epoch`` is its number."""

    def __init__(
        self,
        session: Session,
        epochs: Epochs,
        runner: Runner,
        checkpoints: Checkpoints,
        reader: IndexReader | StreamReader,
        *,
        call: int,
    ) -> None:
        self._session, self._epochs = session, epochs
        self._runner, self._checkpoints = runner, checkpoints
        self._call, self._reader = call, reader
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._reader)

    @property
    def epoch(self) -> int:
        """Its number."""
        return self._reader.epoch

    @property
    def drawn(self) -> Sequence[int] | None:
        """The order that a sampler of the script's has drawn; None where any worker knows it."""
        return self._reader.order if self._reader.is_drawn else None

    def __iter__(self) -> Iterator[Batch]:
        session, reader, call = self._session, self._reader, self._call
        reader.check()
        checkpoints = self._checkpoints
        num_steps = reader.num_steps
        first = checkpoints.first_step(call, num_steps, reader.length)
        if first == num_steps:
            reader.skip()
            return
        self._epochs.open = self
        reader.start(first)
        for step in range(first, num_steps):
            session.clock.asked = session.clock.mark()
            session.position = Position(call, step, session.num_steps)
            self._batch = batch = reader.take(step)
            if batch is None:
                break
            # Seed the random draws of the loop's body: they are equal where a worker joins here.
            seed_streams(session.seed, "batch", session.num_steps)
            yield batch
            batch.discard()
            session.clock.end_step()
            session.position = Position(call, step + 1, session.num_steps)
            # State first: who joins in the runner's boundary goes on from it.
            if checkpoints.has_folder:
                checkpoints.boundary()
            if self._runner.changes:
                self._runner.boundary()
        self._epochs.open = None
        session.position = Position(call + 1, 0, session.num_steps)

    def move(self) -> None:
        """Continue with other virtual nodes."""
        if self._batch is not None:
            self._reader.move(self._batch)
