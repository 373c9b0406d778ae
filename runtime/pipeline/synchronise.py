"""What the workers of a pipeline tell each other in a step: loss, gradients, norms.

Every worker's gradients are partial sums: of its own microbatches, and of its own use of a tied
weight. Both are mended by one rule: a parameter that several workers hold is summed over them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...schema.errors import TargetError
from ...schema.launch import PipelineWork
from ..group import Place, subgroup
from ..totals import _loss_and_weight
from .exchange import Exchange
from .ownership import Holders, Ownership
from .standins import NORMS, NormOnly, norms_of
from .transport import Transport

_LOSS, _WEIGHT, _WEIGHTED, _STOP, _NUM_SUMS = 0, 1, 2, 3, 4


class Synchroniser:
    """Sums over the workers of a pipeline."""

    def __init__(
        self,
        ownership: Ownership,
        place: Place,
        work: PipelineWork,
        transport: Transport | None,
    ) -> None:
        self._ownership, self._place = ownership, place
        self._parameters = list(ownership.parameters.items())
        length = _NUM_SUMS + (1 + len(NORMS)) * len(self._parameters)
        self._exchange = Exchange(transport, place.world_size, length)
        names = enumerate(ownership.parameters)
        # A parameter's norm is told by the first of its holders.
        self._told = [i for i, name in names if ownership.holders[name][0] == place.rank]
        self._apart = [
            (i, p) for i, (n, p) in enumerate(self._parameters) if n not in ownership.own
        ]
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
        self.loss_scale = 1.0
        self.is_finite = True
        self._num_samples = 0
        self._losses: list[tuple[Tensor, float, bool]] = []

    def begin(self, num_samples: int) -> None:
        """Start a step over so many samples in all."""
        self._num_samples = num_samples
        self._losses = []
        self._carried = {}
        for name, parameter in self._ownership.parameters.items():
            if name in self._ownership.own and parameter.grad is not None:
                self._carried[name] = parameter.grad
            parameter.grad = None

    def expect(self) -> None:
        """Be ready for what the others send to ``finish``."""
        self._exchange.expect()

    def add(self, answer: Any, num_samples: int, *, scales: bool) -> Tensor | None:
        """Take a microbatch's loss on the last stage; return what to differentiate."""
        loss, weight = _loss_and_weight(answer)
        if weight is not None and not scales:
            raise TargetError("losses with weights need a schedule that flushes")
        own = float(num_samples) if weight is None else weight
        self._losses.append((loss.detach(), own, weight is not None))
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
        known = sums.tolist()
        scale = self._num_samples / known[_WEIGHT] if known[_WEIGHTED] > 0 else 1.0
        if scale != 1:
            for name in self._ownership.own:
                gradient = self._ownership.parameters[name].grad
                if gradient is not None:
                    gradient.mul_(scale)
        self._stand_in(sums[_NUM_SUMS:].view(1 + len(NORMS), -1), scale)
        for name in self._carried:
            self._add_carried(name)
        return sums[_LOSS] / sums[_WEIGHT]

    def _stand_in(self, sums: Tensor, scale: float) -> None:
        """Parameters of other workers: a single number with the norms of the real gradient.

        Args:
            sums: [used and NORMS, parameters] of all workers.
            scale: What gradients were multiplied with since their norms were taken.
        """
        used, norms = sums[0].tolist(), sums[1:] * scale
        # The largest entry tells it; the other norms may overflow by themselves.
        self.is_finite = bool(norms[NORMS.index(math.inf)].isfinite().all())
        # Under a GradScaler gradients are unscaled by the optimizer, which has no stand-ins.
        norms = norms / self.loss_scale
        by_parameter = norms.t().tolist()
        of_type: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for index, parameter in self._apart:
            if used[index] > 0:
                kind = (parameter.dtype, parameter.device)
                if kind not in of_type:
                    of_type[kind] = norms[0].to(dtype=kind[0], device=kind[1], copy=True)
                number = of_type[kind][index : index + 1]
                parameter.grad = NormOnly.of(number, by_parameter[index])

    def _add_carried(self, name: str) -> None:
        parameter, carried = self._ownership.parameters[name], self._carried.get(name)
        if carried is not None:
            parameter.grad = carried if parameter.grad is None else parameter.grad + carried

    def _sum_over(self, holders: Holders, group: dist.ProcessGroup) -> None:
        """Sum the gradients that exactly these workers hold, types apart."""
        named = [n for n, _ in self._parameters if self._ownership.holders[n] == holders]
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
        """Loss and weights; then whether each parameter has a gradient, and its norms."""
        number = len(self._parameters)
        table = torch.zeros((1 + len(NORMS), number), dtype=torch.float64)
        gradients = [(index, self._parameters[index][1].grad) for index in self._told]
        used = [(index, gradient) for index, gradient in gradients if gradient is not None]
        if used:
            places = [index for index, _ in used]
            table[0, places] = 1.0
            table[1:, places] = norms_of([gradient for _, gradient in used]).cpu()
        sums = torch.tensor(self._loss_sums(), dtype=torch.float64)
        return self._exchange.sum(torch.cat([sums, table.reshape(-1)]))

    def _loss_sums(self) -> list[float]:
        """Losses * weights, weights, how many losses came with one, and whether to stop."""
        sums = [0.0] * _NUM_SUMS
        sums[_STOP] = float(self.wants_stop)
        if not self._losses:
            return sums
        values = torch.stack([loss.reshape(()).double() for loss, _, _ in self._losses]).tolist()
        for value, (_, own, weighted) in zip(values, self._losses, strict=True):
            sums[_LOSS] += value * own
            sums[_WEIGHT] += own
            sums[_WEIGHTED] += weighted
        return sums

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
        sums = torch.tensor(self._loss_sums(), dtype=torch.float64, device=self._place.device)
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
