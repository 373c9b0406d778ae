"""The sums of a step: the loss, the weights, and which parameters any worker used.

Each pass's mean loss is scaled by its share before backward, so the summed gradients are the mean
over the global batch (VirtualFlow 5.2). Where the script gives weights (tokens), their total is
not known until all workers are done: shares are then of a power of two near the last step's
total, and the gradients are scaled once at the end.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..schema.errors import TargetError
from .gradients import GradientReducer
from .group import Place

_LOSS, _WEIGHT, _WEIGHTED, _NUM_SUMS = 0, 1, 2, 3


class StepTotals:
    """Weigh the passes of a step and combine them over the workers."""

    def __init__(self, reducer: GradientReducer, place: Place) -> None:
        self._reducer, self._place = reducer, place
        self._num_samples = 0
        self._share_of = 1.0
        self._weighted: bool | None = None
        self._last_weight: Tensor | None = None
        self._loss = torch.zeros((), dtype=torch.float64)
        self._weight = 0.0

    def begin(self, num_samples: int) -> None:
        """Start a step over ``num_samples`` samples in all."""
        self._num_samples = num_samples
        self._weighted = None
        self._loss = torch.zeros((), dtype=torch.float64, device=self._place.device)
        self._weight = 0.0
        # The sum that shares are taken of: equal on all workers before any weight is known.
        guess = float(self._last_weight) if self._last_weight is not None else float(num_samples)
        self._share_of = 2.0 ** round(math.log2(guess)) if guess > 0 else 1.0

    def add(self, answer: Any, num_samples: int) -> Tensor | None:
        """Take a pass's loss; return what to call backward on, or None for a pass of weight 0."""
        loss, weight = _loss_and_weight(answer)
        weighted = weight is not None
        if self._weighted not in (None, weighted):
            raise TargetError("the loss function must give a weight for every batch, or for none")
        self._weighted = weighted
        own = float(num_samples) if weight is None else weight
        if own == 0:
            return None
        self._weight += own
        self._loss = self._loss + loss.detach().double() * own
        if weighted and self._reducer.carried:
            raise TargetError(
                "gradients of an earlier step are still there, and this loss has weights",
                hint="call optimizer.zero_grad() in every step",
            )
        share = own / self._share_of if weighted else own / self._num_samples
        return loss if share == 1 else loss * share

    def finish(self) -> Tensor:
        """Wait for all gradients; make them the mean; return the mean loss of the step."""
        unused = self._reducer.unused()
        if not self._place.distributed:
            sums = self._own_sums(())
            self._reducer.drop(unused)
        else:
            sums = self._own_sums(unused)
            work = dist.all_reduce(sums, async_op=True)
            self._reducer.wait()
            work.wait()
            self._drop_unused_anywhere(unused, sums)
        return self._mean(sums)

    def _own_sums(self, unused: "list[int] | tuple[()]") -> Tensor:
        """(loss * weight, weight, weighted?, then per parameter whether a pass used it)."""
        number = self._reducer.num_parameters if self._place.distributed else 0
        flags = torch.ones(_NUM_SUMS + number, dtype=torch.float64)
        flags[_WEIGHT], flags[_WEIGHTED] = self._weight, float(bool(self._weighted))
        for index in unused:
            flags[_NUM_SUMS + index] = 0.0
        sums = flags.to(self._place.device, non_blocking=True)
        sums[_LOSS] = self._loss
        return sums

    def _drop_unused_anywhere(self, unused: list[int], sums: Tensor) -> None:
        """Plain PyTorch leaves gradients of unused parameters at None, so optimizers skip them."""
        if unused:
            used = sums[_NUM_SUMS:].tolist()
            self._reducer.drop(index for index in unused if not used[index])

    def _mean(self, sums: Tensor) -> Tensor:
        # A worker without samples does not know whether the others gave weights; it asks.
        weighted = bool(sums[_WEIGHTED] > 0) if self._weighted is None else self._weighted
        if weighted:
            self._last_weight = sums[_WEIGHT].clone()
            self._reducer.scale(self._share_of / sums[_WEIGHT])
        return sums[_LOSS] / sums[_WEIGHT]

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor in place over the workers."""
        dist.all_reduce(tensor)

    def check_same_length(self, length: int) -> None:
        """Refuse an epoch whose length differs between workers: it would hang.

        Raises:
            TargetError: Another worker's dataset has another length.
        """
        if not self._place.distributed:
            return
        ends = torch.tensor([length, -length], dtype=torch.int64, device=self._place.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        most, least = int(ends[0]), -int(ends[1])
        if most != least:
            raise TargetError(
                f"the dataset has {length} samples here, and {least} to {most} on the workers",
                hint="give every worker the same whole dataset; hetflow shares it out",
            )


def _loss_and_weight(answer: Any) -> tuple[Tensor, float | None]:
    loss, weight = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TargetError(
            f"the loss function must return a scalar mean loss, got {_shown(loss)}",
            hint="return loss.mean(), or (mean loss, weight)",
        )
    if weight is None:
        return loss, None
    number = float(weight)
    if not 0 <= number < math.inf:
        raise TargetError(f"the weight of a loss must be finite and >= 0, got {number}")
    return loss, number


def _shown(value: object) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
    return f"{type(value).__name__}{shape}"
