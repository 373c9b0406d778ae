"""Plain DistributedDataParallel under a plan, in scripts that torchrun starts as they are.

A DataLoader with a DistributedSampler has a batch size for each worker; all of them together are
the global batch, and each worker takes the plan's share of it. DistributedDataParallel's gradients
get the weight of the share. accelerate and Trainer wrap their models by it too.
"""

from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from .losses import check_loss
from .patching import around
from .training import Cuts, Training, begun, training

_CUT: WeakSet[Any] = WeakSet()


def adapt() -> None:
    """Change torch's classes in this process."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    # hetflow's own call of init_process_group is bound in runtime/peers.py, which is imported.
    around(dist, "init_process_group", _join)
    around(DistributedDataParallel, "__init__", _wrap)
    around(DistributedSampler, "__init__", _take_whole_order)
    around(DataLoader, "__init__", _cut_batches)
    around(DataLoader, "__iter__", _deliver)
    around(Tensor, "backward", _backward)


class _Script:
    """What the script has done by itself."""

    made_group = False


def _join(original: Any, *values: Any, **options: Any) -> None:
    """Let the script make its group; hetflow joins it where DistributedDataParallel is used.

    Not before: a script may make a group and then call ``hf.prepare``.
    """
    original(*values, **options)
    _Script.made_group = True


def _training() -> Training | None:
    """This process's training; None where the script has made no process group."""
    return training() if _Script.made_group else begun()


def _wrap(original: Any, self: Any, module: nn.Module, *values: Any, **options: Any) -> None:
    current = _training()
    if current is not None and options.get("process_group") not in (
        None,
        torch.distributed.group.WORLD,
    ):
        raise TargetError(
            "DistributedDataParallel has a process group of its own, and a plan's shares are of "
            "all workers",
            hint="leave process_group out",
        )
    original(self, module, *values, **options)
    if current is not None:
        current.train(module)
        self.register_forward_pre_hook(_begin_pass)


def _begin_pass(module: nn.Module, _: Any) -> None:
    if module.training and torch.is_grad_enabled():
        training().begin_pass()


def _backward(original: Any, self: Tensor, *values: Any, **options: Any) -> None:
    current = begun()
    if current is None:
        original(self, *values, **options)
        return
    if current.is_own_pass:
        check_loss(self)
    original(self, *values, **options)
    current.end_pass()


def _take_whole_order(
    original: Any,
    self: Any,
    dataset: Any,
    num_replicas: int | None = None,
    rank: int | None = None,
    *values: Any,
    **options: Any,
) -> None:
    """Give every worker the order of all samples, without the copies that fill it up."""
    current = _training()
    if current is None:
        original(self, dataset, num_replicas, rank, *values, **options)
        return
    if num_replicas not in (None, current.world_size):
        raise TargetError(
            f"DistributedSampler has num_replicas={num_replicas}, and the plan has "
            f"{current.world_size} workers",
            hint="leave num_replicas and rank out",
        )
    original(self, dataset, 1, 0, *values, **options)


def _cut_batches(original: Any, self: Any, *values: Any, **options: Any) -> None:
    from torch.utils.data import BatchSampler
    from torch.utils.data.distributed import DistributedSampler

    original(self, *values, **options)
    current = begun()
    if current is None or not isinstance(self.sampler, DistributedSampler):
        return
    if self.batch_size is None:
        raise TargetError(
            "a DataLoader with a DistributedSampler and no batch_size gives single samples, which "
            "cannot be shared out",
            hint="give it a batch_size",
        )
    global_batch = self.batch_size * current.world_size
    last = len(self.sampler) % global_batch
    if last and not self.drop_last and not current.smallest_share(last):
        raise TargetError(
            f"the last batch of {last} samples leaves a worker of the plan without any",
            hint="give the DataLoader drop_last=True, or another batch_size",
        )
    batches = BatchSampler(self.sampler, global_batch, self.drop_last)
    # A DataLoader refuses other batches once it is made; only its iterators read them.
    object.__setattr__(self, "batch_sampler", Cuts(current, batches))
    _CUT.add(self)


def _deliver(original: Any, self: Any) -> Iterator[Any]:
    return _taken(original(self), self) if self in _CUT else original(self)


def _taken(batches: Iterator[Any], loader: Any) -> Iterator[Any]:
    for batch in batches:
        training().take(loader.batch_sampler.pieces.popleft())
        yield batch
