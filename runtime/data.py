"""Exactly-once data for virtual nodes from the script's own DataLoader.

The order of an epoch, the cut of each global batch, and the random numbers a sample's
transforms draw depend on (seed, epoch, sample) only: not on the number of workers, of devices,
or of data-loading processes.
"""

import copy
import dataclasses
import logging
import multiprocessing
import os
import select
import signal
from array import array
from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing import popen_fork, util
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from ..devices.backend import Stream, backend_of
from ..schema.errors import TargetError
from ..schema.options import option
from .determinism import generator_of, seed_host_streams
from .virtual_nodes import slices

# Gather the samples of a pass at once, where the dataset consists of tensors.
#
# A DataLoader indexes each tensor of a TensorDataset once a sample and stacks the results: for 32
# samples of two tensors, 64 calls into torch and two copies. One index for each tensor copies the
# same rows once. Where no process loads and nothing is pinned, the loader itself would only pass
# the rows on, and is left out.


class RowLoader(Dataset[Any]):
    """Passes of a dataset that consists of tensors, collated."""

    def __init__(self, dataset: TensorDataset, subsets: "Sequence[Subset[Any]]") -> None:
        self._dataset, self._subsets = dataset, tuple(subsets)

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> "RowLoader | None":
        """The rows of a loader's dataset; None where they are not what the loader would give.

        Processes that load data put it into shared memory sample by sample, so they keep to the
        loader's way.
        """
        dataset: Any = loader.dataset
        subsets: list[Subset[Any]] = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        is_plain = (
            type(dataset) is TensorDataset
            and loader.num_workers == 0
            and loader.collate_fn is default_collate
            and default_collate_fn_map.get(Tensor) is collate_tensor_fn
            and all(_is_plain(tensor) for tensor in dataset.tensors)
        )
        return cls(dataset, subsets) if is_plain else None

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """The samples of a pass; a key is (epoch, sample, how often it was drawn before)."""
        samples = [sample for _, sample, _ in keys]
        for subset in self._subsets:
            samples = [subset.indices[sample] for sample in samples]
        # Between two passes ``torch.tensor`` of a list takes several times as long.
        index = torch.frombuffer(array("q", samples), dtype=torch.int64)
        return [tensor[index] for tensor in self._dataset.tensors]


class RowPasses:
    """Passes over rows, an epoch for each iteration, as a DataLoader gives them."""

    def __init__(
        self, rows: RowLoader, sampler: "Iterable[Sequence[tuple[int, int, int]]]"
    ) -> None:
        self._rows, self._sampler = rows, sampler

    def __iter__(self) -> Iterator[list[Tensor]]:
        return map(self._rows.__getitems__, self._sampler)


def _is_plain(tensor: Tensor) -> bool:
    """Whether rows by an index have the values and strides of single rows, stacked."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )


Broadcast = Callable[[list[int]], list[int]]
END = -1
"""Stands after each batch in the order that a batch sampler of the script's has drawn."""
FirstSamples = Callable[["Sequence[tuple[int, int]]"], list[Any]]
"""Collates ranges (start, end) of a global batch's samples, on this worker's device."""
Key = tuple[int, int, int]  # epoch, sample index, how often it was drawn before in the epoch


@dataclass(frozen=True, slots=True)
class Pass:
    """One virtual node's share of one global batch; ``num_samples`` of it, which may be short."""

    virtual_node: int
    num_samples: int
    is_full: bool


def passes_of(
    cuts: Sequence[tuple[int, int]], local: Sequence[int], *, is_full: bool
) -> tuple[Pass, ...]:
    """The passes of a worker's virtual nodes, by the (start, end) of each one's samples."""
    sizes = ((node, cuts[node][1] - cuts[node][0]) for node in local)
    return tuple(Pass(node, size, is_full) for node, size in sizes if size > 0)


class Loop(Protocol):
    """Lets a loop of the script's own run passes; see rounds.py."""

    def samples(self, batch: "Batch") -> Any:
        """A batch's samples, where every worker has one part of it: its pass begins."""

    def leave(self) -> None:
        """Leave a batch."""


@dataclass(slots=True)
class Batch:
    """One global batch, as this worker sees it: the handle that ``job.backward`` takes.

    Where every device has one virtual node, it can also be used as the samples of this worker:
    unpacked, indexed, given as keyword arguments. ``samples`` are they as the loader gave them.
    """

    epoch: int
    step: int
    num_samples: int
    is_full: bool
    passes: tuple[Pass, ...]
    _feed: Iterator[Any] = field(repr=False)
    first_samples: FirstSamples | None = field(default=None, repr=False)
    _loop: Loop | None = field(default=None, repr=False)
    _taken: bool = field(default=False, repr=False)
    is_done: bool = False  # all workers have its gradient, or skipped it
    is_over: bool = False  # the script has gone on to the next one
    is_open: bool = False  # a loop of the script's has begun a round that has not ended
    num_rounds: int = 0  # how often a loop of the script's has gone over its parts
    _held: list[tuple[Pass, Any]] = field(default_factory=list, repr=False)
    _reading: Iterator[tuple[Pass, Any]] | None = field(default=None, repr=False)
    _samples: list[Any] = field(default_factory=list, repr=False)

    def inputs(self) -> Iterator[tuple[Pass, Any]]:
        """Yield each pass with its collated samples on the device.

        Raises:
            TargetError: It was called before: a batch can be used once.
        """
        if self._taken:
            raise TargetError(
                "this batch was used already: job.backward takes each batch once",
                hint="add the losses up in one function; or loop over the batch's parts for each "
                "backward pass (a GAN, SAM, LBFGS): for x, y in job.parts(batch): "
                "job.backward(loss(model(x), y))",
            )
        self._taken = True
        for item in self.passes:
            yield item, next(self._feed)

    def again(self) -> Iterator[tuple[Pass, Any]]:
        """Yield what ``inputs`` does, any number of times: what was read is held."""
        if self._reading is None:
            self._reading = self.inputs()
        number = 0
        while True:
            if number == len(self._held):
                found = next(self._reading, None)
                if found is None:
                    return
                self._held.append(found)
            yield self._held[number]
            number += 1

    @property
    def samples(self) -> Any:
        """This worker's samples, as the loader's collate function gave them, on the device.

        Raises:
            TargetError: A device of the plan has several virtual nodes, or it is a pipeline.
        """
        if not self._samples:
            assert self._loop is not None
            self._samples.append(self._loop.samples(self))
        return self._samples[0]

    def __iter__(self) -> Iterator[Any]:
        """Unpack the samples: ``for x, y in job.batches(loader)``."""
        return iter(self.samples)

    def __getitem__(self, key: Any) -> Any:
        """Index the samples: ``batch["x"]``."""
        return self.samples[key]

    def __getattr__(self, name: str) -> Any:
        """Give what else the samples have: ``batch.keys()``, ``batch.input_ids``."""
        if name.startswith("_"):  # what Python asks of any object
            raise AttributeError(name)
        return getattr(self.samples, name)

    def discard(self) -> None:
        """Skip passes that were not used, so that the next batch gets its own samples."""
        if self.is_open and self._loop is not None:
            self._loop.leave()
        if not self._taken:
            self._reading = self.inputs()
        for _ in self._reading or ():
            pass
        self._held.clear()
        self._samples.clear()
        self.is_done = self.is_over = True

    def renew(self, passes: tuple[Pass, ...], feed: Iterator[Any]) -> None:
        """Start again with other passes over the same samples."""
        self.passes, self._feed, self._taken = passes, feed, False


def has_index(source: object) -> bool:
    """Whether a source is a loader that reads samples by their index."""
    return (
        isinstance(source, DataLoader)
        and not isinstance(source.dataset, IterableDataset)
        and source.batch_sampler is not None
    )


def check_loader(loader: object, global_batch_size: int | None, *, predicts: bool = False) -> None:
    """Refuse a loader that cannot be cut into virtual nodes exactly, and say what to change.

    Raises:
        TargetError: A sampler that shards by itself, a shuffle by a generator of the script's, a
            batch size other than the plan's, or a batch sampler without an end. For predictions
            also what has no index, and batch samplers.
    """
    if not isinstance(loader, DataLoader) or not has_index(loader):
        raise TargetError(
            "job.predict needs a DataLoader with a batch_size over a dataset with an index",
            hint="give a map-style dataset (__len__ and __getitem__)",
        )
    sampler: Any = loader.sampler
    batches: Any = loader.batch_sampler
    if is_batched(loader):
        if predicts:
            raise TargetError(
                "job.predict cuts batches by itself, and this loader has a batch_sampler",
                hint="give DataLoader a batch_size and shuffle=False",
            )
        if not hasattr(batches, "__len__"):
            raise TargetError(
                f"the batch_sampler ({type(batches).__name__}) has no length: it may never end, "
                f"and an epoch's order is drawn as a whole",
                hint="define its __len__, or give job.batches(iterable of batches, steps=...)",
            )
    if isinstance(sampler, DistributedSampler):
        raise TargetError(
            "a DistributedSampler shards the data, and hetflow would shard it again",
            hint="give DataLoader shuffle=True instead",
        )
    if _is_plain_shuffle(sampler) and sampler.generator is not None:
        raise TargetError(
            "the loader shuffles by a generator of its own, whose state a joining worker or a "
            "restart does not have",
            hint="leave generator= out: the order is keyed by hf.prepare(seed=...) and the epoch",
        )
    size = batches.batch_size if hasattr(batches, "batch_size") else loader.batch_size
    if None not in (global_batch_size, size) and size != global_batch_size:
        raise other_size(size, global_batch_size)


def other_size(size: object, global_batch_size: object) -> TargetError:
    """The error where a loader's batch is not the plan's."""
    return TargetError(
        f"the loader's batch_size is {size}, the plan's global batch is {global_batch_size}",
        hint=f"set DataLoader(batch_size={global_batch_size}); hetflow cuts it into shares",
    )


def check_in_order(loader: "DataLoader[Any]") -> None:
    """Refuse a loader whose order is random: outputs must come in order of the samples."""
    if isinstance(loader.sampler, RandomSampler | WeightedRandomSampler | SubsetRandomSampler):
        raise TargetError(
            "job.predict gives outputs in order, and this loader shuffles",
            hint="give DataLoader shuffle=False",
        )


def epoch_order(
    loader: "DataLoader[Any]", seed: int, epoch: int, broadcast: Broadcast
) -> list[int]:
    """The samples of an epoch, in order, equal on every worker.

    The order of sequential and shuffled loaders is computed on every worker. Any other sampler
    draws on the first worker, with streams keyed by seed and epoch; the order is then broadcast.
    """
    sampler = loader.sampler
    if is_batched(loader):
        seed_host_streams(seed, "sampler", epoch)
        drawn: list[int] = []
        for batch in loader.batch_sampler or ():
            drawn += [*map(int, batch), END]
        return broadcast(drawn)
    if type(sampler) is SequentialSampler:
        return list(range(len(sampler)))
    if _is_plain_shuffle(sampler):
        generator = generator_of(seed, "order", epoch)
        number = len(loader.dataset)  # type: ignore[arg-type]
        order: list[int] = torch.randperm(number, generator=generator).tolist()
        return order
    seed_host_streams(seed, "sampler", epoch)
    return broadcast([int(index) for index in sampler])


def is_drawn(loader: "DataLoader[Any]") -> bool:
    """Whether the order comes from a sampler that the script wrote."""
    is_usual = type(loader.sampler) is SequentialSampler or _is_plain_shuffle(loader.sampler)
    return is_batched(loader) or not is_usual


def is_batched(loader: "DataLoader[Any]") -> bool:
    """Whether a batch sampler that the script wrote cuts the order into batches."""
    return type(loader.batch_sampler) is not BatchSampler


def _is_plain_shuffle(sampler: object) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


# Start data-loading workers, and replace one that does not start.
#
# A data worker is forked from a process that has other threads: gloo's, autograd's, the control
# channel's. Under load, a child may never return from ``os.fork``: CPython 3.11 takes the lock of
# its thread list there, and another thread may have held it when the process was copied. The loader
# would then wait for ever. So each child reports that Python code runs in it. A child that does not
# report is replaced, which is safe: no code of the script has run in it yet.

PATIENCE_SECONDS = 5.0
ATTEMPTS = 6
_log = logging.getLogger("hetflow")


def context_of(num_workers: int, wanted: Any) -> Any:
    """Choose how a loader starts its workers.

    It is ``wanted`` (None: the default of the process), or a context that forks workers and checks
    that they start.
    """
    if num_workers == 0:
        return wanted
    if wanted is None:
        method = multiprocessing.get_start_method(allow_none=True)
        method = method or multiprocessing.get_all_start_methods()[0]
    else:
        method = wanted.get_start_method() if isinstance(wanted, BaseContext) else wanted
    return _SeenContext() if method == "fork" else wanted


class _SeenPopen(popen_fork.Popen):
    def _launch(self, process_obj: Any) -> None:
        """Do what the standard library's method does, with ``_fork`` in place of ``os.fork``."""
        code = 1
        parent_r, child_w = os.pipe()
        child_r, parent_w = os.pipe()
        self.pid = _fork()
        if self.pid == 0:
            try:
                os.close(parent_r)
                os.close(parent_w)
                code = process_obj._bootstrap(parent_sentinel=child_r)
            finally:
                os._exit(code)
        os.close(child_w)
        os.close(child_r)
        self.finalizer = util.Finalize(self, _close, (parent_r, parent_w))
        self.sentinel = parent_r


class _SeenProcess(ForkProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> popen_fork.Popen:
        return _SeenPopen(process_obj)


class _SeenContext(ForkContext):
    Process = _SeenProcess


def _fork() -> int:
    """Call ``os.fork``; fork again where a child does not report in time."""
    for _ in range(ATTEMPTS):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, b".")
            os.close(writing)
            os.close(reading)
            return 0
        os.close(writing)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        try:
            # A child that dies at once closes the pipe; the loader itself reports such a death.
            if poll.poll(PATIENCE_SECONDS * 1000):
                return pid
        finally:
            os.close(reading)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        _log.warning(
            "data worker %d did not start within %g s; starting another", pid, PATIENCE_SECONDS
        )
    raise OSError(
        f"no data worker started within {ATTEMPTS * PATIENCE_SECONDS:g} s; is this host out of"
        " memory or processes?"
    )


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class KeyedDataset(Dataset[Any]):
    """A dataset whose items draw their random numbers from (seed, epoch, sample)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed
        while type(dataset) is Subset:
            dataset = dataset.dataset
        self._draws = type(dataset) is not TensorDataset

    def __getitem__(self, key: Key) -> Any:
        if self._draws:
            seed_host_streams(self._seed, "sample", *key)
        return self.dataset[key[1]]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """Fetch the samples of one pass, in one call where the dataset supports it."""
        whole = getattr(self.dataset, "__getitems__", None)
        if whole is None or not keys:
            if not self._draws:
                return [self.dataset[index] for _, index, _ in keys]
            return [self[key] for key in keys]
        # One call draws for all samples of a pass, so the first one's key stands for all. Passes
        # are cut alike on every mapping.
        if self._draws:
            seed_host_streams(self._seed, "samples", *keys[0])
        items: list[Any] = whole([key[1] for key in keys])
        return items

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet while the object is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


class BatchCut(NamedTuple):
    """A global batch as a worker sees it: its samples, whether it is full, the worker's passes.

    ``keys_of`` gives the keys of ranges (start, end) of the batch's samples, after its epoch too.
    """

    num_samples: int
    is_full: bool
    passes: tuple[Pass, ...]
    keys_of: Callable[[Sequence[tuple[int, int]]], list[list[Key]]]


class PassSampler(Sampler[list[Key]]):
    """The passes of this worker in one epoch, as lists of keys.

    Args:
        batch_sizes: [virtual nodes of the job] samples of each in a full batch.
        local: The virtual nodes of this worker.
        drop_last: Whether a last batch that is short is left out.
        is_batched: Whether orders say where each batch ends.
        is_planned: Whether a batch has at most all nodes' samples.

    Attributes:
        drawn: The order as it was drawn; with ``END`` after each batch if it ``is_batched``.
        order: The samples of the epoch.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        local: Sequence[int],
        drop_last: bool,
        *,
        is_batched: bool = False,
        is_planned: bool = True,
    ) -> None:
        self.batch_sizes = tuple(batch_sizes)
        self._local = tuple(local)
        self._drop_last = drop_last
        self._is_batched, self._is_planned = is_batched, is_planned
        self.global_batch_size = sum(batch_sizes)
        self._full_cuts = slices(self.global_batch_size, self.batch_sizes)
        self.order: Sequence[int] = []
        self.drawn: Sequence[int] = []
        self.first_step = 0
        self._repeats: list[int] | None = None
        self._starts: list[int] = []
        self.epoch = 0

    def move(self, local: Sequence[int]) -> None:
        """Cut passes for other virtual nodes from now on."""
        self._local = tuple(local)

    def set_epoch(self, epoch: int, order: Sequence[int]) -> None:
        """Take the order of the next epoch, as it was drawn.

        Raises:
            TargetError: A batch has more samples than the plan's.
        """
        self.epoch, self.drawn, self.order = epoch, order, order
        if self._is_batched:
            self._take_batches(order)
        self._repeats = _repeats(self.order)

    def _take_batches(self, drawn: Sequence[int]) -> None:
        starts, order = [0], list[int]()
        for index in drawn:
            if index == END:
                starts.append(len(order))
            else:
                order.append(index)
        self._starts, self.order = starts, order
        most = max((b - a for a, b in pairwise(starts)), default=0)
        if self._is_planned and most > self.global_batch_size:
            raise TargetError(
                f"the batch_sampler draws a batch of {most} samples, the plan's global batch is "
                f"{self.global_batch_size}",
                hint=f"let it draw at most {self.global_batch_size}, or solve with "
                f"{option('batch_size')} "
                f"{most}",
            )

    @property
    def num_steps(self) -> int:
        """Global batches in the epoch."""
        if self._is_batched:
            return len(self._starts) - 1
        full, rest = divmod(len(self.order), self.global_batch_size)
        return full + int(rest > 0 and not self._drop_last)

    def _bounds(self, step: int) -> tuple[int, int]:
        """Where a global batch begins in the order, and where it ends."""
        if self._is_batched:
            return self._starts[step], self._starts[step + 1]
        begin = step * self.global_batch_size
        return begin, min(begin + self.global_batch_size, len(self.order))

    def cut(self, step: int) -> BatchCut:
        """Cut a global batch into this worker's passes."""
        begin, end = self._bounds(step)
        num_samples = end - begin
        cuts, keys = self._cuts(num_samples), self._keys()
        is_full = num_samples == self.global_batch_size or not self._is_planned
        return BatchCut(
            num_samples,
            is_full,
            passes_of(cuts, self._local, is_full=is_full),
            lambda ranges: [keys(begin + start, begin + end) for start, end in ranges],
        )

    def _cuts(self, num_samples: int) -> list[tuple[int, int]]:
        is_full = num_samples == self.global_batch_size
        return self._full_cuts if is_full else slices(num_samples, self.batch_sizes)

    def __iter__(self) -> Iterator[list[Key]]:
        keys = self._keys()
        for step in range(self.first_step, self.num_steps):
            begin, stop = self._bounds(step)
            cuts = self._cuts(stop - begin)
            for node in self._local:
                start, end = cuts[node]
                if end > start:
                    yield keys(begin + start, begin + end)

    def _keys(self) -> Callable[[int, int], list[Key]]:
        epoch, order, repeats = self.epoch, self.order, self._repeats

        def keys(start: int, end: int) -> list[Key]:
            if repeats is None:
                return [(epoch, index, 0) for index in order[start:end]]
            pairs = zip(order[start:end], repeats[start:end], strict=True)
            return [(epoch, *pair) for pair in pairs]

        return keys


def _repeats(order: Sequence[int]) -> list[int] | None:
    """[samples] how often each entry was drawn before; None where no entry is drawn twice."""
    if isinstance(order, range) or len(set(order)) == len(order):
        return None
    # A sample that is drawn twice in an epoch is so augmented in two ways.
    seen: Counter[int] = Counter()
    repeats = []
    for index in order:
        repeats.append(seen[index])
        seen[index] += 1
    return repeats


def pass_loader(
    loader: "DataLoader[Any]",
    sampler: Iterable[list[Key]],
    seed: int,
    device: torch.device,
    *,
    is_lasting: bool = True,
) -> Iterable[Any]:
    """The script's DataLoader, with passes as its batches and samples keyed for random streams.

    One that is not ``is_lasting`` reads a few passes once, with one process where the script's
    loader has some: a dataset may not be readable in more processes than those.
    """
    num_workers = loader.num_workers if is_lasting else min(loader.num_workers, 1)
    dataset: Dataset[Any] = KeyedDataset(loader.dataset, seed)
    collate: Callable[[Any], Any] = loader.collate_fn
    pins = loader.pin_memory and not backend_of(device).is_host
    rows = RowLoader.of(loader)
    if rows is not None:
        if not pins:
            return RowPasses(rows, sampler)
        dataset, collate = rows, lambda passed: passed  # collated already
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pins,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=context_of(num_workers, loader.multiprocessing_context),
        generator=generator_of(seed, "loader"),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers and is_lasting,
    )


def feed(items: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Move collated passes to the device; each copy is issued one pass ahead, on a side stream."""
    backend = backend_of(device)
    stream = backend.side_stream(device)
    if stream is None:
        for item in items:
            yield to_device(item, device)
        return

    def copy_ahead() -> Any:
        item = next(items, None)
        # A pass may hold memory that ``_record`` does not see (graphs in C++), and this copy may
        # take it. The pass before is not asked for yet, so the copy goes on beside that one.
        stream.wait_stream(backend.current_stream(device))
        with backend.on_stream(stream):
            return to_device(item, device)

    ahead = copy_ahead()
    while ahead is not None:
        computing: Any = backend.current_stream(device)
        computing.wait_stream(stream)
        current = ahead
        _record(current, computing)
        ahead = copy_ahead()
        yield current


def _record(item: Any, stream: Stream) -> None:
    """Tell the allocator that the compute stream uses tensors made on the copy stream."""

    def mark(holder: Any) -> Any:
        if isinstance(holder, Tensor) and holder.is_cpu:  # sizes of a PackedSequence
            pass
        elif hasattr(holder, "record_stream"):  # a tensor, or a batch of graphs of PyG
            holder.record_stream(stream)
        elif isinstance(holder, tuple):  # a PackedSequence
            _record(tuple(holder), stream)
        else:
            _record(list(getattr(holder, "__dict__", {}).values()), stream)
        return holder

    _map_tensors(item, mark, mark)


def called(function: Callable[..., Any], inputs: Any) -> Any:
    """A script's function of a collated batch: its parts are the arguments where there are some.

    A PackedSequence has none, though it is a tuple.
    """
    has_parts = isinstance(inputs, tuple | list) and not hasattr(inputs, "to")
    return function(*inputs) if has_parts else function(inputs)


def to_device(item: Any, device: torch.device) -> Any:
    """A collated batch with its tensors, and all else that has a method ``to``, on ``device``."""
    if type(item) is list and {*map(type, item)} == {Tensor}:  # as a rule
        return [tensor.to(device, non_blocking=True) for tensor in item]

    def moved(holder: Any) -> Any:
        try:
            return holder.to(device, non_blocking=True)
        except TypeError:  # as of a graph of DGL
            return holder.to(device)

    return _map_tensors(item, moved, moved)


def copied(item: Any) -> Any:
    """A collated batch with copies of its tensors, and of all else that has a method ``to``."""

    def duplicate(holder: Any) -> Any:
        if isinstance(holder, tuple):  # a PackedSequence
            return type(holder)(*map(copied, holder))
        return holder.clone() if hasattr(holder, "clone") else copy.deepcopy(holder)

    return _map_tensors(item, Tensor.clone, duplicate)


def _map_tensors(
    item: Any, change: Callable[[Tensor], Tensor], change_holder: Callable[[Any], Any]
) -> Any:
    def mapped(entry: Any) -> Any:
        return _map_tensors(entry, change, change_holder)

    if isinstance(item, Tensor):
        return change(item)
    if type(item) is dict:
        return {key: mapped(entry) for key, entry in item.items()}
    if isinstance(item, dict):  # of the same type, such as OrderedDict
        made: Any = copy.copy(item)
        for key, entry in item.items():
            made[key] = mapped(entry)
        return made
    if isinstance(item, UserDict):  # also transformers' BatchEncoding, which would move in place
        made = copy.copy(item)
        made.data = mapped(item.data)
        return made
    if hasattr(item, "to"):  # a PackedSequence, a batch of graphs; accelerate's rule
        return change_holder(item)
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(mapped, item))
    if isinstance(item, list | tuple):
        return type(item)(map(mapped, item))
    return item


# Rows of collated batches.

PLAIN = (str, bytes, bool, int, float, complex, type(None))


def rows_of(batch: Any, num_samples: int, start: int, end: int) -> Any:
    """Samples ``start`` to ``end`` of a batch, in its own structure.

    The batch is tensors, arrays and lists with an entry for each sample, in dicts, tuples and
    dataclasses. Single numbers and texts are for all samples. ``end`` is excluded.

    Raises:
        TargetError: Something in it has no entry for each sample.
    """

    def part(value: Any) -> Any:
        return rows_of(value, num_samples, start, end)

    if isinstance(value := batch, Tensor | np.ndarray) and value.ndim:
        if len(value) == num_samples:
            return value[start:end]
    elif isinstance(batch, (*PLAIN, Tensor, np.generic)):
        return batch
    elif isinstance(batch, Mapping):
        found = copy.copy(batch)
        for key, entry in batch.items():
            found[key] = part(entry)  # type: ignore[index]
        return found
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return dataclasses.replace(
            batch, **{f.name: part(getattr(batch, f.name)) for f in dataclasses.fields(batch)}
        )
    elif isinstance(batch, list | tuple):
        return _of_list(batch, num_samples, start, end)
    raise TargetError(
        f"the batch has a {type(batch).__name__} without an entry for each of its {num_samples} "
        "samples, so it cannot be cut into parts",
        hint="let the loader's collate_fn give tensors with a row for each sample; or train with "
        "hf.prepare",
    )


def _of_list(batch: Sequence[Any], num_samples: int, start: int, end: int) -> Any:
    """A list of columns (inputs, targets), or else of samples."""
    is_of_samples = len(batch) == num_samples and all(isinstance(v, PLAIN) for v in batch)
    if not is_of_samples:
        try:
            found = [rows_of(entry, num_samples, start, end) for entry in batch]
        except TargetError:
            if len(batch) != num_samples:
                raise
        else:
            is_named = hasattr(batch, "_fields")
            return type(batch)(*found) if is_named else type(batch)(found)  # type: ignore[call-arg]
    return batch[start:end]
