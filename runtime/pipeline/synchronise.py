"""The sums over a pipeline's workers in a step: loss, gradients, norms.

Every worker's gradients are partial sums: over its own microbatches, and over its own use of a tied
weight. One rule covers both: a parameter's gradient is summed over the workers that hold it.
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.backend import backend_of
from ...schema.errors import TargetError
from ...schema.launch import PipelineWork
from .. import peers
from ..group import Place, subgroup
from ..tensor.gradients import plain
from ..totals import loss_and_weight
from .exchange import Exchange
from .norms import NORMS, NUM_ROWS, Columns, Table, ToldNorms, norms_of
from .ownership import Holders, Ownership
from .pieces import in_buckets
from .standins import PartNorms, StandIns
from .transport import Transport

BUCKET_BYTES = 25 << 20
"""Bytes of gradients that one collective sums over the replicas."""
_LOSS, _WEIGHT, _WEIGHTED, _STOP, _NUM_SUMS = 0, 1, 2, 3, 4
# For schedules that flush: number of workers, their optimizers' settings number, its square.
_WORKERS, _SETTINGS, _SQUARED, _NUM_TOLD = 4, 5, 6, 7
# Only if workers lack parameters: whether gradients add to earlier ones, which norms were asked.
_ADDS, _ASKED = _NUM_TOLD, _NUM_TOLD + 1
_HEAD = _ASKED + len(NORMS)


class Synchroniser:
    """Sums loss, gradients and norms over the workers of a pipeline.

    Args:
        ownership: The parameters, and which ranks hold each.
        place: This worker among the others.
        work: The stages.
        transport: Sends small numbers between the hosts; None for one worker.
        shares_updates: Whether workers with equal parameters need a process group of their own.
    """

    def __init__(
        self,
        ownership: Ownership,
        place: Place,
        work: PipelineWork,
        transport: Transport | None,
        *,
        shares_updates: bool = False,
    ) -> None:
        self._ownership, self._place = ownership, place
        self._parameters = list(ownership.parameters.items())
        apart = [
            [i for i, (name, _) in enumerate(self._parameters) if rank not in self._holders(name)]
            for rank in range(place.world_size)
        ]
        self._columns = Columns(
            [(name, ownership.holders[name][0]) for name, _ in self._parameters], ownership.lanes
        )
        # Norms that a worker asks for: of parameters elsewhere, and of those held in parts.
        self._asks_of = [
            apart[rank]
            + [
                i
                for i, (name, _) in enumerate(self._parameters)
                if rank in self._holders(name)
                and ownership.lanes.is_told_by_parts(name, self._holders(name))
            ]
            for rank in range(place.world_size)
        ]
        self._tells = any(self._asks_of)
        length = _HEAD + NUM_ROWS * len(self._columns) if self._tells else _NUM_TOLD
        self._exchange = Exchange(transport, place.world_size, length)
        self._transport = transport
        self._told = [
            (column, self._parameters[i][1]) for column, i in self._columns.of_rank(place.rank)
        ]
        self._norms = ToldNorms(lambda: self._tell(NORMS), place)
        here = [(i, self._parameters[i][1]) for i in apart[place.rank]]
        self._stand_ins = StandIns(here, self._norms)
        parts = [
            (i, p)
            for i, (name, p) in enumerate(self._parameters)
            if name in ownership.own and ownership.lanes.is_told_by_parts(name, self._holders(name))
        ]
        self._parts = PartNorms(parts, self._norms)
        self._own = [(n, p) for n, p in self._parameters if n in ownership.own]
        self._groups: dict[Holders, dist.ProcessGroup] = {}
        self._stage_ranks = [tuple(sorted(stage.ranks)) for stage in work.stages]
        sums = {ranks for found in ownership.sums.values() for ranks in found}
        self._sum_of = {
            name: next(ranks for ranks in ownership.sums[name] if place.rank in ranks)
            for name in ownership.own
        }
        alike = ownership.alike_sets if shares_updates else set()
        for holders in sorted(sums | set(self._stage_ranks) | alike):
            if len(holders) > 1 and place.distributed:
                self._groups[holders] = subgroup(place, holders)
        self._carried: dict[str, Tensor] = {}
        self._late: tuple[peers.Transfer | None, Tensor] | None = None
        # All workers of a tensor-parallel group have the same losses; the first one sends them.
        self._tells_loss = ownership.lanes.lane(place.rank) == 0
        self.wants_stop = False
        self.stops = torch.zeros(())
        self.settings_number = 0
        self.settings_sums: list[float] = []
        self.loss_scale = 1.0
        self.checks_overflow = False
        self.is_finite = True
        self._num_samples = 0
        self._losses: list[tuple[Tensor, float, bool]] = []

    def group_of(self, ranks: Holders) -> dist.ProcessGroup:
        """The process group of a set of workers that exchange gradients or parameters."""
        return self._groups[ranks]

    def begin(self, num_samples: int) -> None:
        """Start a step over ``num_samples`` samples on all workers together."""
        self._num_samples = num_samples
        self._losses = []
        self._carried = {}
        for name, parameter in self._own:
            if parameter.grad is not None:
                self._carried[name] = plain(parameter.grad)
                parameter.grad = None

    def expect(self) -> None:
        """Post the receives for what the others send to ``finish``."""
        self._exchange.expect()

    def add(self, answer: Any, num_samples: int, *, scales: bool) -> Tensor | None:
        """Take a microbatch's loss on the last stage.

        Args:
            answer: The result of the script's function; see ``totals.loss_and_weight``.
            num_samples: Samples of the microbatch.
            scales: Whether to scale the loss by its share of the global batch (flushes only).

        Returns:
            The tensor [] to differentiate; None for a loss of weight 0.

        Raises:
            TargetError: The loss has a weight, and the schedule does not flush.
        """
        loss, weight = loss_and_weight(answer)
        if weight is not None and not scales:
            raise TargetError("losses with weights need a schedule that flushes")
        own = float(num_samples) if weight is None else weight
        self._losses.append((loss.detach(), own, weight is not None))
        if own == 0:
            return None
        share = own / self._num_samples if scales else 1.0
        return loss if share == 1 else loss * share

    def finish(self) -> Tensor:
        """Make gradients the mean over the global batch; return its mean loss [], equal on all."""
        for holders, group in self._groups.items():
            if self._place.rank in holders:
                self._sum_over(holders, group)
        known = self._norms_to_tell()
        self._write_own(known)
        sums = self._exchange.sum()
        self.stops = sums[_STOP]
        head = sums[:_HEAD].tolist()
        self.settings_sums = head[_WORKERS : _SQUARED + 1]
        scale = self._num_samples / head[_WEIGHT] if head[_WEIGHTED] > 0 else 1.0
        gradients = [p.grad for _, p in self._own if p.grad is not None]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, scale)
        for name in self._carried:
            self._add_carried(name)
        if self._tells:
            self._norms.wanted = {2.0} | {
                norm for norm, asked in zip(NORMS, head[_ASKED:], strict=True) if asked
            }
            table = self._columns.joined(sums.numpy()[_HEAD:].reshape(NUM_ROWS, -1))
            # The largest entry shows an overflow; other norms may overflow although no entry does.
            if self.checks_overflow:
                self.is_finite = bool(np.isfinite(table[1 + NORMS.index(math.inf)]).all())
            table[1:] *= scale
            self._stand_in(table, known, adds=head[_ADDS] > 0)
        return sums[_LOSS] / sums[_WEIGHT]

    def _norms_to_tell(self) -> set[float]:
        """The norms in this step's table, equal on all workers."""
        return self._norms.wanted | ({math.inf} if self.checks_overflow else set())

    def _stand_in(self, table: Table, known: set[float], *, adds: bool) -> None:
        """Put stand-ins with the norms of other workers' gradients in place.

        Args:
            table: The sum of all workers' tables.
            known: The norms that it contains.
            adds: Whether gradients were added to earlier ones after the table was made.
        """
        used = table[0] > 0
        # All workers answer later questions together, so each needs a stand-in.
        all_ask = all(any(used[index] for index in asks) for asks in self._asks_of)
        if not all_ask and known != set(NORMS):
            table, known = self._tell(NORMS), set(NORMS)
        elif adds:
            table = self._tell(known)
        if not all_ask:
            self._norms.wanted = set(NORMS)
        # Under a GradScaler the optimizer unscales gradients; it does not have the stand-ins.
        table[1:] /= self.loss_scale
        self._norms.take(table, known)
        self._stand_ins.show(table)
        self._parts.show(table, self.loss_scale)

    def _add_carried(self, name: str) -> None:
        parameter, carried = self._ownership.parameters[name], self._carried.get(name)
        if carried is not None:
            parameter.grad = carried if parameter.grad is None else parameter.grad + carried

    def _holders(self, name: str) -> Holders:
        return self._ownership.holders[name]

    def _sum_over(self, holders: Holders, group: dist.ProcessGroup) -> None:
        """Sum the gradients of a set of workers: each dtype separately, a bucket at a time.

        A buffer for all of them at once would be one more copy of the stage's gradients.
        """
        named = [n for n, _ in self._parameters if self._sum_of.get(n) == holders]
        for dtype in sorted({self._ownership.parameters[n].dtype for n in named}, key=str):
            of_type = [n for n in named if self._ownership.parameters[n].dtype == dtype]
            for bucket in in_buckets(of_type, self._summed_bytes, BUCKET_BYTES):
                self._sum_flat(bucket, group)

    def _sum_flat(self, names: list[str], group: dist.ProcessGroup) -> None:
        parameters = [self._ownership.parameters[name] for name in names]
        used = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
        given = [self._given(name) for name in names]
        flat = torch.cat([gradient.reshape(-1) for gradient in given] + [used])
        peers.all_reduce(flat, group=group)
        start = 0
        # Whoever has a gradient itself knows that one exists, and need not wait for the sum.
        asks = any(parameter.grad is None for parameter in parameters)
        flags = flat[-len(parameters) :].tolist() if asks else [1.0] * len(parameters)
        for name, parameter, own, flag in zip(names, parameters, given, flags, strict=True):
            part = self._taken(name, flat[start : start + own.numel()].view(own.shape))
            start += own.numel()
            if not flag:
                continue
            if parameter.grad is None:
                parameter.grad = part.clone()
            else:
                parameter.grad.copy_(part)

    def _summed_bytes(self, name: str) -> int:
        """The bytes of a parameter's sum, equal on all workers of the sum."""
        parameter = self._ownership.parameters[name]
        if self._ownership.lanes.adds_whole(name, self._holders(name)):
            return self._ownership.whole_shape(name).numel() * parameter.element_size()
        return parameter.nbytes

    def _given(self, name: str) -> Tensor:
        """This worker's contribution to a parameter's sum."""
        ownership, parameter = self._ownership, self._ownership.parameters[name]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if not ownership.lanes.adds_whole(name, self._holders(name)):
            return gradient
        whole = ownership.whole_shape(name)
        return ownership.lanes.expanded(name, gradient, whole, self._place.rank)

    def _taken(self, name: str, total: Tensor) -> Tensor:
        """This worker's part of a sum."""
        lanes, rank = self._ownership.lanes, self._place.rank
        if lanes.adds_whole(name, self._holders(name)) and lanes.is_cut(name, rank):
            return lanes.part(name, total, rank)
        return total

    def _write_own(self, known: set[float]) -> None:
        """Write losses and weights; if workers lack parameters, also its part of the table."""
        own = self._exchange.own.zero_().numpy()
        own[:_NUM_SUMS] = self._loss_sums()
        own[_WORKERS], own[_SETTINGS] = 1.0, self.settings_number
        own[_SQUARED] = self.settings_number**2
        if self._tells:
            own[_ADDS] = float(bool(self._carried))
            own[_ASKED:_HEAD] = [float(norm in self._norms.asked) for norm in NORMS]
            self._fill(own[_HEAD:].reshape(NUM_ROWS, -1), known)

    def _fill(self, table: Table, norms: Collection[float]) -> None:
        used = [(i, plain(p.grad)) for i, p in self._told if p.grad is not None]
        if used:
            places = [index for index, _ in used]
            rows = [number for number, norm in enumerate(NORMS, start=1) if norm in norms]
            taken = norms_of([gradient for _, gradient in used], [NORMS[r - 1] for r in rows])
            table[0, places] = 1.0
            for row, values in zip(rows, taken.numpy(), strict=True):
                table[row, places] = values

    def _tell(self, norms: Collection[float]) -> Table:
        """A table of these norms, as gradients are now. Call it on all workers."""
        table: Table = np.zeros((NUM_ROWS, len(self._columns)))
        self._fill(table, norms)
        assert self._transport is not None
        peers.all_reduce(torch.from_numpy(table), group=self._transport.up)
        return self._columns.joined(table)

    def _loss_sums(self) -> list[float]:
        """[4] losses * weights, weights, number of losses with a weight, and whether to stop."""
        sums = [0.0] * _NUM_SUMS
        sums[_STOP] = float(self.wants_stop)
        if not self._losses or not self._tells_loss:
            return sums
        losses = [loss.reshape(()) for loss, _, _ in self._losses]
        # Read all with one wait for the device; on the CPU each can be read at once.
        on_device = not backend_of(losses[0].device).is_host
        values = torch.stack(losses).tolist() if on_device else [loss.item() for loss in losses]
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
                peers.all_reduce(total, group=group)
                sums[name] = total

    def share_loss_late(self) -> Tensor:
        """Share this batch's loss and return the previous one's, so no worker waits for it."""
        sums = torch.tensor(self._loss_sums(), dtype=torch.float64, device=self._place.device)
        work = peers.all_reduce(sums, async_op=True) if self._place.distributed else None
        before, self._late = self._late or (work, sums), (work, sums)
        if before[0] is not None:
            before[0].wait()
        known = before[1].cpu()
        self.stops = known[_STOP]
        return known[_LOSS] / known[_WEIGHT]

    @property
    def late_loss(self) -> list[float] | None:
        """The last batch's sums, from which the next call makes its loss; saved in checkpoints."""
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
