"""accelerate under a plan: its loaders draw global batches and keep this worker's share."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from .losses import check_loss
from .patching import around, check_version
from .training import Cuts, training

VERSIONS = ((1, 15), (1, 15))  # the oldest and the newest that were tested


def adapt() -> None:
    """Change accelerate's classes in this process."""
    import accelerate.data_loader as loaders
    from accelerate import Accelerator, PartialState
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.utils import operations

    around(PartialState, "__init__", _join)
    loaders.BatchSamplerShard = lambda batches, *_, **__: Cuts(training(), batches)
    around(loaders.DataLoaderShard, "__iter__", _deliver)
    around(Accelerator, "prepare_data_loader", _prepare_loader)
    around(Accelerator, "prepare_model", _prepare_model)
    around(Accelerator, "backward", _backward)
    around(AcceleratedScheduler, "__init__", _once_a_step)
    operations._gpu_gather = functools.partial(
        operations.recursively_apply, _gathered, error_on_other_type=True
    )


def _gathered(tensor: Tensor) -> Tensor:
    return training().gathered(tensor)


def _join(original: Any, self: Any, cpu: bool = False, **options: Any) -> None:
    """Join the other workers first, on the plan's device: accelerate takes the group it finds."""
    check_version("accelerate", VERSIONS)
    is_host = backend_of(training().place.device).is_host
    if is_host:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    original(self, cpu or is_host, **options)


def _prepare_loader(original: Any, self: Any, loader: Any, *values: Any, **options: Any) -> Any:
    if getattr(loader, "_is_accelerate_prepared", False):
        return original(self, loader, *values, **options)
    if isinstance(loader.dataset, IterableDataset) or self.dispatch_batches:
        raise TargetError(
            "an IterableDataset or dispatch_batches=True has no order of samples that a plan's "
            "shares can be cut from",
            hint="use a dataset with an index and dispatch_batches=False, or hf.prepare",
        )
    sampler = getattr(loader, "sampler", None)
    had = getattr(sampler, "generator", None)
    drawn = torch.random.get_rng_state()
    with _whole_batches(self):
        made = original(self, loader, *values, **options)
    if had is None and getattr(made, "synchronized_generator", None) is not None:
        # Then accelerate has drawn a seed, and every epoch's order would come from it: leave the
        # order to the process's own stream, as one process does, taken from the first worker.
        torch.random.set_rng_state(drawn)
        assert sampler is not None
        sampler.generator = None
        made.synchronized_generator, made.rng_types = None, ["torch"]
    return made


class _whole_batches:
    """A context without ``split_batches``, under which accelerate refuses uneven shares."""

    def __init__(self, accelerator: Any) -> None:
        self._settings = accelerator.dataloader_config

    def __enter__(self) -> None:
        self._asked, self._settings.split_batches = self._settings.split_batches, False

    def __exit__(self, *_: object) -> None:
        self._settings.split_batches = self._asked


def _deliver(original: Any, self: Any) -> Iterator[Any]:
    cuts, skipped = _cuts_of(self)
    if cuts is None:
        yield from original(self)
        return
    for batch in original(self):
        for _ in range(skipped):
            cuts.pieces.popleft()
        skipped = 0
        training().take(cuts.pieces.popleft())
        yield batch


def _cuts_of(loader: Any) -> tuple[Cuts | None, int]:
    """The cut batches below a loader's samplers, and how many of them are skipped."""
    sampler, skipped = loader.batch_sampler, 0
    while sampler is not None and not isinstance(sampler, Cuts):
        skipped += int(getattr(sampler, "skip_batches", 0))
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler, skipped


def _prepare_model(original: Any, self: Any, model: Any, *values: Any, **options: Any) -> Any:
    kind = self.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise TargetError(
            f"accelerate is set to {kind}, and under a plan it trains by DistributedDataParallel",
            hint="leave DeepSpeed, FSDP and Megatron out of the script and its configuration",
        )
    return original(self, model, *values, **options)


def _backward(original: Any, self: Any, loss: Tensor, **options: Any) -> None:
    if training().is_own_pass:
        check_loss(loss)  # accelerate divides it, and a quotient may be of a sum
    original(self, loss, **options)


def _once_a_step(original: Any, self: Any, *values: Any, **options: Any) -> None:
    original(self, *values, **options)
    self.split_batches = True
