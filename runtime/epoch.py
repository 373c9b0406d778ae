"""The script's data on this worker: loaders cut into passes, and one epoch after another."""

import zlib
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..devices.backend import backend_of
from ..schema.errors import TargetError
from ..schema.options import option
from . import peers
from .checkpoints.saving import Checkpoints
from .data import (
    PLAIN,
    Batch,
    Key,
    Loop,
    Pass,
    PassSampler,
    epoch_order,
    feed,
    is_batched,
    is_drawn,
    other_size,
    pass_loader,
    passes_of,
    rows_of,
    to_device,
)
from .determinism import seed_streams, seed_streams_in_step
from .engine import Runner
from .log import log
from .session import Position, Session
from .virtual_nodes import slices


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
        # The entry holds its loader, so that no later one can have the id.
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


# Data without an index: streams, functions that draw a batch, loaders that cut batches themselves.
#
# Every worker draws the same global batches and keeps the rows of its virtual nodes. The random
# numbers of a draw are keyed by (seed, epoch, step), so all workers draw alike. One may not: a
# stream that shards itself by rank, a generator with a seed of its own. Then the digests of the
# batches differ, and the run ends. After a restart the batches of the epoch's earlier steps are
# drawn again and dropped, unless the source has a state that the script registered.

ENDLESS = 1 << 62
"""Stands for the number of steps of an epoch whose end is not known."""
_LOOKED_AT = 64  # entries of a tensor that its digest is made of
_LOOKED_AT_ON_DEVICE = 8  # batches of an epoch; to read them waits for the device
Cut = tuple[int, int]


class StreamReader:
    """Reads the global batches of one epoch from a source without an index.

    Attributes:
        epoch: Number of the epoch.
        length: Stands for the number of samples, which is not known.
    """

    length, is_drawn, order = 0, False, ()

    def __init__(
        self,
        session: Session,
        source: Any,
        loop: Loop,
        *,
        epoch: int,
        steps: int | None,
        has_state: bool,
        saw: Callable[[int], None],
    ) -> None:
        self._session, self._source, self._loop = session, source, loop
        self.epoch, self._steps = epoch, steps
        self._has_state, self._saw = has_state, saw
        self._draws = is_function(source)
        self._items: Iterator[Any] = iter(())
        self._item: Any = None

    @property
    def num_steps(self) -> int:
        """Steps of the epoch; ``ENDLESS`` where it ends with the source."""
        return ENDLESS if self._steps is None else self._steps

    def __len__(self) -> int:
        if self._steps is None:
            return len(self._source)
        return self._steps

    def check(self) -> None:
        """Accept it; it is this loader's newest epoch where the source can be read again."""

    def start(self, step: int) -> None:
        """Begin at a step: draw the batches of the steps before once more."""
        self._open()
        if self._has_state:
            return
        for number in range(step):
            if self._draw(number) is None:
                raise TargetError(
                    f"the data ended after {number} batches; {step} were trained on before the "
                    f"restart",
                    hint=f"give the same data, or start with an empty {option('checkpoint')} "
                    "folder",
                )

    def skip(self) -> None:
        """Leave out the epoch, which was trained on before a restart."""
        # One that is read on (an iterator, a function with a state) stands where the last epoch
        # ended, so the skipped epoch's batches are drawn and dropped.
        is_read_on = self._draws or isinstance(self._source, Iterator)
        if self._has_state or not is_read_on:
            return  # the next epoch begins by itself where it should
        self._open()
        number = 0
        while number < self.num_steps and self._draw(number) is not None:
            number += 1

    def _open(self) -> None:
        source = self._source
        seed_streams(self._session.seed, "stream", self.epoch)
        self._items = starmap(source, repeat(())) if self._draws else iter(source)

    def _draw(self, step: int) -> Any:
        seed_streams(self._session.seed, "stream", self.epoch, step)
        item = next(self._items, None)
        if item is None and self._draws:
            raise TargetError("the function that draws batches returned None")
        if item is not None:
            self._saw(digest_of(item, on_device=step < _LOOKED_AT_ON_DEVICE))
        return item

    def take(self, step: int) -> Batch | None:
        """The batch of a step; None where the source has ended."""
        self._item = item = self._draw(step)
        if item is None:
            return None
        session, number = self._session, num_rows(item)
        total = sum(session.batch_sizes) or number
        if number > total:
            raise TargetError(
                f"a batch has {number} samples, the plan's global batch is {total}",
                hint=f"draw batches of at most {total}, or solve with "
                f"{option('batch_size', number)}",
            )
        if number < total and step == 0 and session.is_main:
            log.warning(
                f"the first batch has {number} samples, the plan's global batch {total}; it is "
                f"shared out in proportion"
            )
        return Batch(
            epoch=self.epoch,
            step=step,
            num_samples=number,
            is_full=number == total,
            passes=self._passes(number),
            _feed=self._feed(number),
            first_samples=lambda ranges: [
                to_device(rows_of(item, number, *cut), session.device) for cut in ranges
            ],
            _loop=self._loop,
        )

    def _cuts(self, num_samples: int) -> list[Cut]:
        return slices(num_samples, self._session.batch_sizes or (num_samples,))

    def _passes(self, num_samples: int) -> tuple[Pass, ...]:
        sizes, cuts = self._session.batch_sizes, self._cuts(num_samples)
        is_full = not sizes or num_samples == sum(sizes)
        return passes_of(cuts, self._session.local_nodes, is_full=is_full)

    def _feed(self, num_samples: int) -> Iterator[Any]:
        item, cuts = self._item, self._cuts(num_samples)
        own = [cuts[node] for node in self._session.local_nodes]
        rows = (rows_of(item, num_samples, *cut) for cut in own if cut[1] > cut[0])
        return feed(rows, self._session.device)

    def move(self, batch: Batch) -> None:
        """Continue with other virtual nodes: with this batch if it is not done."""
        if not batch.is_done:
            batch.renew(self._passes(batch.num_samples), self._feed(batch.num_samples))


def is_function(source: Any) -> bool:
    """Whether a source draws a batch when it is called."""
    return callable(source) and not isinstance(source, Iterable)


def check_stream(source: Any, steps: int | None, global_batch_size: int | None) -> None:
    """Refuse what gives no whole batches.

    Raises:
        TargetError: It is neither iterable nor a function, has no end, or has another batch size.
    """
    if not callable(source) and not isinstance(source, Iterable):
        raise TargetError(
            f"job.batches needs a torch DataLoader, an iterable of batches or a function that "
            f"draws one, got {type(source).__name__}",
            hint="DataLoader(dataset, batch_size=..., shuffle=True)",
        )
    if is_function(source) and steps is None:
        raise TargetError(
            "a function that draws batches has no end", hint="job.batches(get_batch, steps=1000)"
        )
    size = source.batch_size if isinstance(source, DataLoader) else None
    if global_batch_size is not None and size is not None and size != global_batch_size:
        raise other_size(size, global_batch_size)


# Rows of collated batches


def num_rows(item: Any) -> int:
    """The samples of a collated batch: the rows of its tensors.

    Raises:
        TargetError: It has none, or they differ.

    Example:
        >>> import torch
        >>> num_rows({"x": torch.zeros(4, 2), "names": ["a", "b", "c", "d"]})
        4
    """
    found = {len(leaf) for leaf in _leaves(item)}
    if len(found) != 1:
        raise TargetError(
            f"a batch has parts of {sorted(found) or 'no'} rows, and is cut by rows",
            hint="let each tensor have one row for each sample",
        )
    return found.pop()


def _is_list_of_samples(item: Any) -> bool:
    return (
        isinstance(item, list | tuple)
        and bool(item)
        and not hasattr(item, "_fields")
        and all(isinstance(entry, PLAIN) for entry in item)
    )


def _leaves(item: Any) -> Iterator[Any]:
    """What has a row for each sample: tensors, arrays, lists of plain values."""
    if isinstance(item, Tensor | np.ndarray):
        if not item.ndim:
            raise TargetError(
                "a batch holds a tensor without a row for each sample, which cannot be shared out",
                hint="compute such a number in the loss function, from the samples it gets",
            )
        yield item
    elif _is_list_of_samples(item):
        yield item
    elif isinstance(item, list | tuple | Mapping | UserDict):
        for entry in item.values() if isinstance(item, Mapping | UserDict) else item:
            yield from _leaves(entry)
    elif item is not None and not isinstance(item, str):
        raise TargetError(
            f"a batch holds a {type(item).__name__}, which cannot be shared out by samples",
            hint="let a batch be tensors with one row for each sample, in tuples, lists or dicts",
        )


def digest_of(item: Any, *, on_device: bool = True) -> int:
    """A number that stands for a batch: of its shapes, and of some entries of each tensor."""
    number = 0
    for leaf in _leaves(item):
        if isinstance(leaf, Tensor):
            number = zlib.crc32(repr((tuple(leaf.shape), leaf.dtype)).encode(), number)
            if not on_device and not backend_of(leaf.device).is_host:
                continue
            flat = leaf.detach().reshape(-1)
            # Every n-th entry: tensors of unlike draws differ nearly everywhere.
            seen = flat[:: max(1, flat.numel() // _LOOKED_AT)][:_LOOKED_AT].cpu()
            text = repr(seen.tolist())
        elif isinstance(leaf, np.ndarray):
            text = repr((leaf.shape, leaf.reshape(-1)[:: max(1, leaf.size // _LOOKED_AT)].tolist()))
        else:
            text = repr(leaf[:_LOOKED_AT])
        number = zlib.crc32(text.encode(), number)
    return number


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
        asked = None
        for step in range(first, num_steps):
            session.clock.asked = asked or session.clock.mark()
            session.position = Position(call, step, session.num_steps)
            self._batch = batch = reader.take(step)
            if batch is None:
                break
            # Seed the random draws of the loop's body: they are equal where a worker joins here.
            seed_streams_in_step(session.seed, "batch", session.num_steps)
            yield batch
            batch.discard()
            asked = session.clock.end_step()
            session.position = Position(call, step + 1, session.num_steps)
            # State first: who joins in the runner's boundary goes on from it.
            if checkpoints.has_folder:
                checkpoints.boundary()
                asked = None
            if self._runner.changes:
                self._runner.boundary()
                asked = None
        self._epochs.open = None
        session.position = Position(call + 1, 0, session.num_steps)

    def move(self) -> None:
        """Continue with other virtual nodes."""
        if self._batch is not None:
            self._reader.move(self._batch)
