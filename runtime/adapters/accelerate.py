"""accelerate under a plan: its loaders draw global batches and keep this worker's share."""

import functools
import os
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from ...schema.options import option
from ..log import log
from ..nested_tensors import mapped, tensors_in
from ..sharding.precision import precision_of
from .losses import Known
from .patching import ScriptReads, around, be_one_process, check_version
from .training import (
    Share,
    ShareSampler,
    checksum,
    note_split,
    training,
    warn_of_workers,
    with_scalars,
)

# Data without an index: each worker reads all samples, and keeps its share of each batch.

# (samples of the global batch, checksum of some of them, this worker's part)
Read = tuple[int, int, Any]


def _note_split(original: Any, dataset: Any, rank: int, world_size: int, **options: Any) -> Any:
    if world_size == 1:  # as a script is told that is no more than one process
        return dataset
    note_split()
    return original(dataset, rank, world_size, **options)


@dataclass(frozen=True, slots=True)
class Shared:
    """A collator that is given a global batch's samples and collates this worker's.

    Attributes:
        collate: The script's collator.
        batch_size: The loader's; None where the dataset gives whole batches.
        share: This worker's share.
    """

    collate: Callable[[Any], Any]
    batch_size: int | None
    share: Share

    def __call__(self, samples: Any) -> Read:
        """Collate this worker's samples of a global batch."""
        if self.batch_size is None:
            batch = self.collate(samples)
            num_samples = _num_rows(batch)
            piece = self.share.of(num_samples, None)
            own = slice(piece.start, piece.start + piece.own_samples)
            own = own if piece.own_samples else slice(1)  # which counts nothing
            return num_samples, checksum(samples), mapped(lambda rows: rows[own], batch)
        piece = self.share.of(len(samples), self.batch_size)
        ends = (samples[0], samples[-1])
        return len(samples), checksum(ends), self.collate(piece.of(samples))


def _num_rows(batch: Any) -> int:
    """The samples of a batch that is made already: the rows of its first tensor; 0 without one."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim() and len(tensor)), 0)


VERSIONS = ((1, 10), (1, 15))  # the oldest and the newest that were tested


def adapt(module: Any) -> None:
    """Change accelerate's classes, or ``datasets.distributed``, in this process."""
    if module.__name__ == "datasets.distributed":
        around(module, "split_dataset_by_node", _note_split)
        return
    import accelerate.accelerator as accelerators
    import accelerate.data_loader as loaders
    from accelerate import Accelerator, PartialState
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import AcceleratorState
    from accelerate.utils import operations

    around(PartialState, "__init__", _join)
    for kind in (Accelerator, AcceleratorState, PartialState):
        be_one_process(kind, "num_processes")
    loaders.BatchSamplerShard = lambda batches, *_, **__: ShareSampler(training(), batches)
    for module in (accelerators, loaders):
        around(module, "prepare_data_loader", _prepare_loader)
    around(loaders.DataLoaderShard, "__iter__", _deliver)
    around(loaders.DataLoaderDispatcher, "__init__", _dispatch_shares)
    around(loaders.DataLoaderDispatcher, "__iter__", _deliver_dispatched)
    around(Accelerator, "__init__", _make)
    around(Accelerator, "prepare_model", _prepare_model)
    around(Accelerator, "backward", _backward)
    around(AcceleratedOptimizer, "step", _step)
    around(Accelerator, "reduce", _reduce)
    around(Accelerator, "log", _log)
    around(accelerators, "load_accelerator_state", _load_state)
    around(AcceleratedScheduler, "__init__", _once_a_step)
    operations._gpu_gather = functools.partial(
        operations.recursively_apply, _gathered, error_on_other_type=True
    )


def _gathered(tensor: Tensor) -> Tensor:
    return training().gathered(tensor)


def _join(original: Any, self: Any, cpu: bool = False, **options: Any) -> None:
    """Join the other workers first, on the plan's device: accelerate takes the group it finds."""
    # Once it has, accelerate makes such an object several times a step, to read what all of them
    # share. Then nothing is left to do, and reading a package's version takes a millisecond.
    if self.initialized:
        original(self, cpu, **options)
        return
    check_version("accelerate", VERSIONS)
    warn_of_workers()
    is_host = backend_of(training().place.device).is_host
    if is_host:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    original(self, cpu or is_host, **options)
    if is_host:
        self.device = training().place.device  # older ones add a number, and torch.load fails


# Data


def _prepare_loader(original: Any, loader: Any, *values: Any, **options: Any) -> Any:
    """Prepare a loader of the script's whole batches, of which each worker has a share."""
    options["split_batches"] = False  # accelerate refuses uneven shares of it
    # One worker reads a batch for all, or each reads it and keeps its share: the script's choice,
    # with accelerate's defaults.
    is_stream = isinstance(loader.dataset, IterableDataset)
    is_read_once = options.get("dispatch_batches")
    if is_read_once is None:
        is_read_once = is_stream and options.get("put_on_device", False)
    if getattr(loader.dataset, "_distributed", None) is not None:
        raise TargetError(
            "split_dataset_by_node gives each worker other samples, and a plan's shares are cut "
            "from global batches",
            hint="leave it out; accelerator.prepare cuts the batches",
        )
    if options.get("use_stateful_dataloader"):
        raise TargetError(
            "a StatefulDataLoader goes back to a position that is not known to be the plan's",
            hint="leave use_stateful_dataloader out, and call accelerator.skip_first_batches",
        )
    if training().watcher is not None and (is_read_once or is_stream):
        options["dispatch_batches"] = False
        return _cut(original(loader, *values, **options))
    if is_read_once:
        return original(loader, *values, **options)
    if is_stream:
        options["num_processes"] = 1  # each worker reads all samples
        made = original(loader, *values, **options)
        made.base_dataloader.collate_fn = Shared(
            made.base_dataloader.collate_fn, loader.batch_size, training().share
        )
        return made
    sampler = getattr(loader, "sampler", None)
    had = getattr(sampler, "generator", None)
    drawn = torch.random.get_rng_state()
    made = original(loader, *values, **options)
    if had is None and getattr(made, "synchronized_generator", None) is not None:
        # Then accelerate has drawn a seed, and every epoch's order would come from it: leave the
        # order to the process's own stream, as one process does, taken from the first worker.
        torch.random.set_rng_state(drawn)
        assert sampler is not None
        sampler.generator = None
        made.synchronized_generator, made.rng_types = None, ["torch"]
    cuts, _ = _cuts_of(made)
    if cuts is not None:
        cuts.dataset = loader.dataset
    return _cut(made) if training().world_size == 1 else made


def _cut(loader: Any) -> Any:
    """A loader of the only worker, whose batches may be given other sizes while it is measured."""
    # Also of a stream then: its loader reads as many samples as it has indices.
    if training().world_size > 1 or loader.batch_sampler is None:
        raise TargetError(
            "a DataLoader has no batches to cut: a stream is measured on one worker only, and each "
            "needs a batch_size"
        )
    # A DataLoader refuses other batches once it is made; only its iterators read them.
    cuts = ShareSampler(training(), loader.batch_sampler)
    object.__setattr__(loader.base_dataloader, "batch_sampler", cuts)
    return loader


def _deliver(original: Any, self: Any) -> Iterator[Any]:
    if isinstance(self.collate_fn, Shared):
        yield from _read(original(self), self.collate_fn.batch_size)
        return
    cuts, skipped = _cuts_of(self)
    if cuts is None:
        yield from original(self)
        return
    for batch in training().asking(iter(original(self)), cuts):
        for _ in range(skipped):
            cuts.pieces.popleft()
        skipped = 0
        training().take(cuts.pieces.popleft())
        yield batch


def _read(batches: Iterator[Read], batch_size: int | None) -> Iterator[Any]:
    """Take batches that each worker has read by itself."""
    current = training()
    for number, (num_samples, told, batch) in enumerate(current.asking(batches)):
        if number == 0:
            current.check_equal(
                told,
                "each worker reads other samples from the script's IterableDataset",
                hint="give its order one seed on all workers, or let one worker read for all: "
                "dispatch_batches=True",
            )
        current.take(current.cut(num_samples, batch_size))
        yield batch


def _cuts_of(loader: Any) -> tuple[ShareSampler | None, int]:
    """The cut batches below a loader's samplers, and how many of them are skipped."""
    skipped, sampler = 0, loader.batch_sampler
    if sampler is None:
        sampler = loader.sampler
    while sampler is not None and not isinstance(sampler, ShareSampler):
        skipped += int(getattr(sampler, "skip_batches", 0))
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler, skipped


def _dispatch_shares(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Let the first worker read each batch of the script's; it is cut once it was sent to all."""
    original(self, *values, **options)
    self.split_batches, self._drop_last = True, True  # one batch at a time, and never filled up
    cut = self.slice_fn

    def share_of(batch: Any, _: slice, **others: Any) -> Any:
        self.piece = training().cut(_num_rows(batch), _batch_size_of(self))
        start, own = self.piece.start, self.piece.own_samples
        return cut(batch, slice(start, start + own) if own else slice(0, 1), **others)

    self.slice_fn = share_of


def _batch_size_of(loader: Any) -> int | None:
    sampler = loader.batch_sampler
    while sampler is not None and getattr(sampler, "batch_size", None) is None:
        sampler = getattr(sampler, "batch_sampler", None)
    found: int | None = loader.batch_size if sampler is None else sampler.batch_size
    return found


def _deliver_dispatched(original: Any, self: Any) -> Iterator[Any]:
    for batch in training().asking(original(self)):
        training().take(self.piece)
        yield batch


# Training


def _load_state(original: Any, folder: Any, *values: Any, **options: Any) -> Any:
    """Load the first worker's random state where this worker was not there when it was saved."""
    *objects, rank = values[:5]
    if not Path(folder, f"random_states_{rank}.pkl").is_file():
        rank = 0
    return original(folder, *objects, rank, *values[5:], **options)


_LOADING = ("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES")


def _make(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Let the plan share the states where the script or its configuration asks for FSDP."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin, sharing = None, training().sharing
    if training().may_share:
        plugin, options["fsdp_plugin"] = options.get("fsdp_plugin"), None
        if os.environ.pop("ACCELERATE_USE_FSDP", "").lower() in ("1", "true") and plugin is None:
            # As the environment says, but for how models are loaded, which would need a GPU.
            os.environ |= dict.fromkeys(_LOADING, "false")
            plugin = FullyShardedDataParallelPlugin()
    original(self, *values, **options)
    if plugin is not None and sharing is not None:
        sharing.lists = functools.partial(_wrapped_by, plugin)
        casts = self.mixed_precision != "no"
        if casts:  # as accelerate's own state does
            plugin.set_mixed_precision(self.mixed_precision)
        # Beside it, accelerate keeps trained weights in 32 bits that were loaded in fewer.
        masters = torch.float32 if casts else None
        precision = precision_of(plugin.mixed_precision_policy, masters=masters)
        sharing.precision = lambda _: precision


def _wrapped_by(plugin: Any, model: Any) -> Any:
    plugin = copy(plugin)
    plugin.set_auto_wrap_policy(model)
    return plugin.auto_wrap_policy or ()


def _prepare_model(original: Any, self: Any, model: Any, *values: Any, **options: Any) -> Any:
    kind = self.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise TargetError(
            f"accelerate is set to {kind}, and under a plan it trains by DistributedDataParallel",
            hint="for FSDP, solve with "
            + option("shard", "all")
            + "; leave DeepSpeed and Megatron out of the script and its configuration",
        )
    prepared = original(self, model, *values, **options)
    current = training()
    if current.world_size == 1 and not isinstance(prepared, DistributedDataParallel):
        current.train_alone(prepared)
    if prepared is not model:
        prepared.register_forward_hook(_weigh_output)
    return prepared


def _weigh_output(model: Any, _: Any, output: Any) -> None:
    """Make a loss that a model returns the global batch's: scripts add it up before they train."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if isinstance(loss, Tensor) and loss.requires_grad and loss.numel() == 1:
        current = training()
        if model.training and current.is_own_pass and not current.runs_whole:
            output["loss"] = Known.of(loss, *current.losses.weighed(loss))


def _backward(original: Any, self: Any, loss: Tensor, **options: Any) -> None:
    current = training()
    if current.is_in_loop:
        current.begin_pass()  # its model may be in evaluation mode
    with current.weighing([loss]):  # and not what accelerate makes of it
        original(self, loss, **options)


def _step(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Update; schedules wait where the step was left out for an overflow on another worker."""
    current = training()
    current.has_skipped = False
    original(self, *values, **options)
    if self.scaler is None:
        self._is_overflow = current.has_skipped


def _once_a_step(original: Any, self: Any, *values: Any, **options: Any) -> None:
    original(self, *values, **options)
    self.split_batches = True


# Results


def _log(original: Any, self: Any, values: Any, *others: Any, **options: Any) -> None:
    original(self, with_scalars(values, training()), *others, **options)


def _reduce(
    original: Any, self: Any, tensor: Any, reduction: str = "sum", *values: Any, **options: Any
) -> Any:
    """Reduce results: the mean over workers is that of the batch, in which samples count alike."""
    from accelerate.utils.operations import recursively_apply

    if reduction == "mean":
        return recursively_apply(training().mean_of, tensor, error_on_other_type=True)
    training().check_no_idle()
    if (
        ScriptReads.number
        and not training().place.rank
        and isinstance(tensor, Tensor)
        and tensor.is_floating_point()
    ):
        log.warning(
            "the script sums over workers, and has read num_processes, which is 1 under a plan: "
            'where it divides by that, use accelerator.reduce(..., "mean")'
        )
        ScriptReads.number = False
    return original(self, tensor, reduction, *values, **options)
