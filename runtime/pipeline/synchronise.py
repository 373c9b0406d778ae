"""What the workers of a pipeline tell each other in a step: loss, gradients, norms.

Every worker's gradients are partial sums: of its own microbatches, and of its own use of a tied
weight. Both are mended by one rule: a parameter that several workers hold is summed over them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from ...schema.launch import PipelineWork
from ..group import Place, subgroup
from ..totals import _loss_and_weight
from .ownership import Holders, Ownership

_LOSS, _WEIGHT, _WEIGHTED, _STOP, _NUM_SUMS = 0, 1, 2, 3, 4


class Synchroniser:
    """Sums over the workers of a pipeline."""

    def __init__(self, ownership: Ownership, place: Place, work: PipelineWork) -> None:
        self._ownership, self._place = ownership, place
        self._names = list(ownership.parameters)
        self._groups: dict[Holders, dist.ProcessGroup] = {}
        self._stage_ranks = [tuple(sorted(stage.ranks)) for stage in work.stages]
        sets = set(ownership.holders.values()) | set(self._stage_ranks)
        for holders in sorted(sets):
            if len(holders) > 1 and place.distributed:
                self._groups[holders] = subgroup(place, holders)
        self._carried: dict[str, Tensor] = {}
        self._late: tuple[dist.Work | None, Tensor] | None = None
        self.wants_stop = False
        self.stops = torch.zeros(())
        self._num_samples = 0
        self._sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)

    def begin(self, num_samples: int) -> None:
        """Start a step over so many samples in all."""
        self._num_samples = num_samples
        self._sums = torch.zeros(_NUM_SUMS, dtype=torch.float64)
        self._carried = {}
        for name, parameter in self._ownership.parameters.items():
            if name in self._ownership.own and parameter.grad is not None:
                self._carried[name] = parameter.grad
            parameter.grad = None

    def add(self, answer: Any, num_samples: int, *, scales: bool) -> Tensor | None:
        """Take a microbatch's loss on the last stage; return what to differentiate."""
        loss, weight = _loss_and_weight(answer)
        if weight is not None and not scales:
            raise TargetError("losses with weights need a schedule that flushes")
        own = float(num_samples) if weight is None else weight
        self._sums[_LOSS] += loss.detach().double().cpu() * own
        self._sums[_WEIGHT] += own
        self._sums[_WEIGHTED] += float(weight is not None)
        if own == 0:
            return None
        share = own / self._num_samples if scales else 1.0
        return loss if share == 1 else loss * share

    def finish(self) -> Tensor:
        """Make gradients the mean over the global batch; return the mean loss, equal everywhere."""
        for holders, group in self._groups.items():
            if self._place.rank in holders:
                self._sum_over(holders, group)
        sums = self._all_sums()
        self.stops = sums[_STOP]
        scale = self._num_samples / float(sums[_WEIGHT]) if sums[_WEIGHTED] > 0 else 1.0
        number = len(self._names)
        norms, used = sums[_NUM_SUMS : _NUM_SUMS + number], sums[_NUM_SUMS + number :]
        for index, name in enumerate(self._names):
            parameter = self._ownership.parameters[name]
            if name not in self._ownership.own:
                if used[index] > 0:
                    # A stand-in: a single number with the norm of the real gradient.
                    norm = (norms[index] * scale).to(parameter.dtype).reshape(1)
                    parameter.grad = norm.to(parameter.device)
                continue
            if parameter.grad is not None and scale != 1:
                parameter.grad.mul_(scale)
            self._add_carried(name)
        return sums[_LOSS] / sums[_WEIGHT]

    def _add_carried(self, name: str) -> None:
        parameter, carried = self._ownership.parameters[name], self._carried.get(name)
        if carried is not None:
            parameter.grad = carried if parameter.grad is None else parameter.grad + carried

    def _sum_over(self, holders: Holders, group: dist.ProcessGroup) -> None:
        """Sum the gradients that exactly these workers hold, types apart."""
        named = [n for n in self._names if self._ownership.holders[n] == holders]
        for dtype in sorted({self._ownership.parameters[n].dtype for n in named}, key=str):
            of_type = [n for n in named if self._ownership.parameters[n].dtype == dtype]
            self._sum_flat(of_type, group)

    def _sum_flat(self, names: list[str], group: dist.ProcessGroup) -> None:
        parameters = [self._ownership.parameters[name] for name in names]
        used = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
            + [used]
        )
        dist.all_reduce(flat, group=group)
        start = 0
        for parameter, flag in zip(parameters, flat[-len(parameters) :].tolist(), strict=True):
            part = flat[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()
            if flag:
                parameter.grad = part.clone()

    def _all_sums(self) -> Tensor:
        """Loss and weights; then each parameter's gradient norm, and whether it has one."""
        number = len(self._names)
        sums = torch.zeros(_NUM_SUMS + 2 * number, dtype=torch.float64)
        self._sums[_STOP] = float(self.wants_stop)
        sums[:_NUM_SUMS] = self._sums
        for index, name in enumerate(self._names):
            gradient = self._ownership.parameters[name].grad
            first = self._ownership.holders[name][0] == self._place.rank
            if first and gradient is not None:
                sums[_NUM_SUMS + index] = float(torch.linalg.vector_norm(gradient))
                sums[_NUM_SUMS + number + index] = 1.0
        return self._reduced(sums)

    def _reduced(self, sums: Tensor) -> Tensor:
        if not self._place.distributed:
            return sums
        moved = sums.to(self._place.device)
        dist.all_reduce(moved)
        return moved.cpu()

    def sum_round(self, stage: int, parameters: Any, sums: dict[str, Tensor]) -> None:
        """Sum one round's gradients over the replicas of a stage (schedules without flushes)."""
        group = self._groups[self._stage_ranks[stage]]
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                total = sums.get(name)
                total = torch.zeros_like(parameter) if total is None else total.contiguous()
                dist.all_reduce(total, group=group)
                sums[name] = total

    def share_loss_late(self) -> Tensor:
        """The mean loss of the batch before, so that nobody waits for the last stage."""
        self._sums[_STOP] = float(self.wants_stop)
        sums = self._sums.to(self._place.device)
        work = dist.all_reduce(sums, async_op=True) if self._place.distributed else None
        before, self._late = self._late or (work, sums), (work, sums)
        if before[0] is not None:
            before[0].wait()
        known = before[1].cpu()
        self.stops = known[_STOP]
        return known[_LOSS] / known[_WEIGHT]

    @property
    def late_loss(self) -> list[float] | None:
        """The last batch's sums, which the next call returns the loss of; a checkpoint has them."""
        if self._late is None:
            return None
        work, sums = self._late
        if work is not None:
            work.wait()
            self._late = (None, sums)
        return [float(value) for value in sums]

    @late_loss.setter
    def late_loss(self, sums: list[float] | None) -> None:
        known = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        if known is not None:
            known[_STOP] = 0.0
        self._late = None if known is None else (None, known)
