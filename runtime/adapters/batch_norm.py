"""Batch norm under a plan: the statistics of the whole global batch, as one process has them.

All of PyTorch's layers, and those of libraries, end in ``torch.nn.functional.batch_norm``.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...schema.errors import TargetError
from ..sync_batch_norm import NormCall, gathered, normalised
from .patching import around
from .training import begun


def adapt() -> None:
    """Change torch's functions in this process."""
    around(nn.functional, "batch_norm", _normalise)
    around(nn.SyncBatchNorm, "forward", _forward)
    around(
        nn.parallel.DistributedDataParallel, "_passing_sync_batchnorm_handle", _allow_on_any_device
    )


def _forward(original: Any, self: Any, x: Tensor) -> Tensor:
    """Run torch's SyncBatchNorm as any other layer; by itself it needs a GPU."""
    return original(self, x) if begun() is None else _BatchNorm.forward(self, x)


def _allow_on_any_device(original: Any, self: Any, module: nn.Module) -> None:
    if begun() is None:
        original(self, module)


def _normalise(original: Any, *args: Any, **kwargs: Any) -> Tensor:
    call, current = NormCall(*args, **kwargs), begun()
    x = call.input
    is_one_value = current is not None and current.has_one_sample and x.numel() == x.shape[1]
    # Of one value there is no variance: torch refuses it.
    if not call.training or current is None or not current.meets_others or is_one_value:
        found: Tensor = original(*call)
        return found
    if current.has_parts:
        raise TargetError(
            "the model has batch norm, and the plan gives a device several virtual nodes, which "
            "run one after another: batch norm needs the whole batch at once",
            hint="solve for one virtual node a device, or replace batch norm by group norm",
        )
    current.losses.leave()  # it mixes samples, and its collectives would be run again
    made = normalised(
        x,
        call.running_mean,
        call.running_var,
        call.weight,
        call.bias,
        momentum=call.momentum,
        eps=call.eps,
        gather=partial(gathered, place=current.place),
        counts=current.has_samples,
    )
    if not current.is_going_back:
        current.losses.enter()
    return made
