"""The sums over a pipeline's workers in a step: loss, gradients, norms.

Every worker's gradients are partial sums: over its own microbatches, and over its own use of a tied
weight. One rule covers both: a parameter's gradient is summed over the workers that hold it.

Losses and norms are results of the devices. Where collectives go from device to device, they are
summed there (``norms.py``), and no host waits for its device. What hosts decide by is known
on the hosts: weights, flags, and which parameters have gradients. The hosts send each other these
numbers while the devices still compute. Elsewhere the hosts send each other everything at once.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...devices.backend import Mark, backend_of
from ...devices.host import TORCH_DEVICE as HOST
from ...schema.errors import TargetError
from ...schema.launch import PipelineWork
from ...schema.schedule import Operation
from .. import peers
from ..gradients import have_no_gradients
from ..group import Place, subgroup
from ..nested_tensors import plain as numbers_of
from ..totals import LateValues, check_has_graph, is_one_number, loss_and_weight, weight_number
from .norms import (
    NORMS,
    NUM_ROWS,
    Columns,
    DeviceSums,
    Loss,
    NormTable,
    PartNorms,
    Rows,
    StandIns,
    ToldNorms,
    is_elsewhere,
    norms_of,
    plain,
    weighted_sum,
)
from .ownership import Holders, Ownership
from .replica_sums import ReplicaSums
from .shares import groups_of
from .transport import Transport, VectorSums

_LOSS, _WEIGHT, _WEIGHTED, _STOP, _NUM_SUMS = 0, 1, 2, 3, 4
# For schedules that flush: number of workers, their optimizers' settings number, its square, how
# many have a GradScaler.
_WORKERS, _SETTINGS, _SQUARED, _SCALERS, _NUM_TOLD = 4, 5, 6, 7, 8
# Only if workers lack parameters: whether gradients add to earlier ones, which norms were asked.
_ADDS, _ASKED = _NUM_TOLD, _NUM_TOLD + 1
# A table follows; or, where norms stay on devices, which parameters have gradients.
_HEAD = _ASKED + len(NORMS)
_Taken = tuple[Tensor | float, float, bool]
"""The loss [] of a microbatch, its weight, and whether the script gave the weight."""


class HostLead:
    """Keeps the host at most one step ahead: what it has asked of the device takes memory there.

    ``LateValues`` does so too, for an engine that reads numbers late.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._backend = device, backend_of(device)
        self._last: Mark | None = None

    def end_step(self) -> None:
        """End a step; wait for the step before, which has usually ended long ago."""
        before, self._last = self._last, self._backend.mark(self._device)
        if before is not None and not self._backend.has_passed(before):
            self._backend.wait_for(before)


class Synchroniser:
    """Sums loss, gradients and norms over the workers of a pipeline.

    Attributes:
        replica_sums: The sums of gradients in schedules that flush.
        stays_on_device: Whether losses and norms stay on the devices.
        loss_scale: The factor of this step's loss; a tensor [] if ``stays_on_device``.
        is_finite: Whether no worker's gradient has overflowed, if that is checked; a tensor [] if
            ``stays_on_device``.
    """

    def __init__(
        self,
        ownership: Ownership,
        place: Place,
        work: PipelineWork,
        transport: Transport | None,
        *,
        overlaps: bool,
        shares_updates: bool = False,
        keepers: Mapping[str, Holders] | None = None,
        shared: Collection[str] = (),
    ) -> None:
        """``keepers``: by name, the ranks that get a gradient; of all others, all that hold it.

        ``shared``: names of the parameters of whose gradients replicas get slices.
        """
        self._ownership, self._place, self._shared = ownership, place, frozenset(shared)
        gets = {name: (keepers or {}).get(name, ranks) for name, ranks in ownership.holders.items()}
        elsewhere = {name for name in ownership.own if place.rank not in gets[name]}
        self._parameters = list(ownership.parameters.items())
        self._index = {name: index for index, (name, _) in enumerate(self._parameters)}
        apart = [
            [i for i, (name, _) in enumerate(self._parameters) if rank not in gets[name]]
            for rank in range(place.world_size)
        ]
        # Collectives may go from device to device, so that no host need wait for its own.
        carrier = place.device if transport is None else transport.device
        self.stays_on_device = not backend_of(carrier).is_host
        self._columns = Columns(
            [self._tellers(name, gets[name][0], work) for name, _ in self._parameters],
            place.device if self.stays_on_device else torch.device(HOST),
        )
        # Norms that a worker asks for: of parameters elsewhere, and of those held in parts.
        self._asks_of = [
            apart[rank]
            + [
                i
                for i, (name, _) in enumerate(self._parameters)
                if rank in gets[name] and self._is_told_by_parts(name)
            ]
            for rank in range(place.world_size)
        ]
        self._tells = any(self._asks_of)
        self._transport = transport
        self._told = [
            (column, self._parameters[i][1]) for column, i in self._columns.of_rank(place.rank)
        ]
        # All workers of a tensor-parallel group have the same losses; the first one sends them.
        tellers = [
            rank for rank in sorted(work.stages[-1].ranks) if ownership.lanes.lane(rank) == 0
        ]
        self._tells_loss = ownership.lanes.lane(place.rank) == 0
        self._on_device: DeviceSums | None = None
        length = _HEAD + NUM_ROWS * len(self._columns) if self._tells else _NUM_TOLD
        if self.stays_on_device:
            self._on_device = DeviceSums(place, tellers, self._columns, self._told)
            length = _HEAD + len(self._parameters)
        self._exchange = VectorSums(transport, place.world_size, length)
        self._summed: Tensor | None = None
        self._norms = ToldNorms(lambda: self._tell(NORMS), place)
        here = [
            (i, self._parameters[i][1])
            for i in apart[place.rank]
            if self._parameters[i][0] not in elsewhere
        ]
        self._stand_ins = StandIns(here, self._norms)
        parts = [
            (i, p)
            for i, (name, p) in enumerate(self._parameters)
            if name in ownership.own - elsewhere and self._is_told_by_parts(name)
        ]
        others = [(i, p) for i, (name, p) in enumerate(self._parameters) if name in elsewhere]
        self._parts = PartNorms(parts, others, self._norms)
        self._own = [(n, p) for n, p in self._parameters if n in ownership.own]
        self._held = [parameter for _, parameter in self._own]
        self._groups: dict[Holders, dist.ProcessGroup] = {}
        self._stage_ranks = [tuple(sorted(stage.ranks)) for stage in work.stages]
        sums = {ranks for found in ownership.sums.values() for ranks in found}
        alike = ownership.alike_sets if shares_updates else set()
        shares = groups_of(ownership, work.stages) if shared else set()
        for holders in sorted(sums | set(self._stage_ranks) | alike | shares):
            if len(holders) > 1 and place.distributed:
                self._groups[holders] = subgroup(place, holders)
        self.replica_sums = ReplicaSums(
            ownership,
            place.rank,
            self._groups,
            None if self._on_device is None else self._told_flags,
            self._owners(keepers or {}),
            overlaps=overlaps,
            left_out=self._shared,
        )
        self._carried: dict[str, Tensor] = {}
        self._late: tuple[peers.Transfer | None, Tensor] | None = None
        self._late_values, self._lead = LateValues(), HostLead(place.device)
        self.wants_stop = False
        self.stops = 0.0
        self.settings_number = 0
        self.settings_differ = False
        self.loss_scale: float | Tensor = 1.0
        self.checks_overflow = False
        self.is_finite: bool | Tensor = True
        self._num_samples = 0
        self._losses: list[_Taken] = []

    def _owners(self, keepers: Mapping[str, Holders]) -> dict[str, int]:
        """Name -> the only rank of this worker's sum of a gradient that gets it."""
        owners = {}
        for name, ranks in keepers.items():
            found = {*ranks} & {*self._ownership.sum_of(name, self._place.rank)}
            if len(found) == 1:
                (owners[name],) = found
        return owners

    def group_of(self, ranks: Holders) -> dist.ProcessGroup:
        """The process group of a set of workers that exchange gradients or parameters."""
        return self._groups[ranks]

    def begin(self, num_samples: int) -> None:
        """Start a step over ``num_samples`` samples on all workers together."""
        self._num_samples = num_samples
        self._losses = []
        self._carried = {}
        self._summed = None
        if have_no_gradients(self._held):
            return
        for name, parameter in self._own:
            if parameter.grad is not None:
                if not is_elsewhere(parameter.grad):
                    self._carried[name] = self.replica_sums.apart(plain(parameter.grad))
                parameter.grad = None

    def expect(self, operations: Sequence[Operation]) -> None:
        """Prepare for ``finish``, before this worker's operations of a step that flushes."""
        self._exchange.expect()
        self.replica_sums.begin(operations)

    def add(self, answer: Any, num_samples: int, *, scales: bool) -> Tensor | None:
        """Take a microbatch's loss on the last stage.

        With ``scales`` the loss is scaled by its share of the global batch (flushes only).

        Returns:
            The tensor [] to differentiate; None for a loss of weight 0.

        Raises:
            TargetError: The loss has a weight, and the schedule does not flush.
        """
        loss, weight = loss_and_weight(answer)
        if weight is not None and not scales:
            raise TargetError("losses with weights need a schedule that flushes")
        own = float(num_samples) if weight is None else weight_number(weight)
        if own == 0:  # a mean over nothing may be no number
            return None
        check_has_graph(loss)
        # On the host a loss can be read at once, while it is in the caches.
        is_on_host = backend_of(loss.device).is_host
        known = loss.item() if is_on_host and self._on_device is None else loss.detach()
        self._losses.append((known, own, weight is not None))
        share = own / self._num_samples if scales else 1.0
        return loss if share == 1 else loss * share

    def finish(self) -> Tensor:
        """Make gradients the mean over the global batch; return its mean loss [], equal on all."""
        known = self._norms.wanted | ({math.inf} if self.checks_overflow else set())
        tell = self._tell_hosts if self._on_device is None else self._tell_devices
        loss, table = tell(known)
        head = self._sums_of_hosts()[:_HEAD].tolist()
        self.stops = head[_STOP]
        self.settings_differ = not is_one_number(*head[_WORKERS : _SQUARED + 1])
        if 0 < head[_SCALERS] < head[_WORKERS]:
            raise TargetError(
                f"{head[_SCALERS]:.0f} of {head[_WORKERS]:.0f} workers gave job.backward a "
                f"GradScaler that is enabled, and a pipeline's gradients have one scale",
                hint="give it on all workers or on none, whatever their devices; bfloat16 needs "
                "none, and also trains with one",
            )
        scale = self._num_samples / head[_WEIGHT] if head[_WEIGHTED] > 0 else 1.0
        if scale != 1:
            gradients = [p.grad for p in self._held if p.grad is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale)
        ownership = self._ownership
        for name in self._carried:
            parameter, carried = ownership.parameters[name], self._carried[name]
            parameter.grad = carried if parameter.grad is None else parameter.grad + carried
        if table is not None:
            self._norms.wanted = {2.0} | {
                norm for norm, asked in zip(NORMS, head[_ASKED:], strict=True) if asked
            }
            # The largest entry shows an overflow; other norms may overflow although no entry does.
            if self.checks_overflow:
                self.is_finite = table.is_finite
            table.multiply(scale)
            # Scaled norms are the norms of scaled gradients but for rounding. A worker's own
            # gradients give the latter, so the stages of a tied weight would clip it unlike.
            is_rounded = scale != 1 and bool(ownership.tied)
            self._stand_in(table, known, has_changed=head[_ADDS] > 0 or is_rounded)
        return loss

    def _tell_hosts(self, known: set[float]) -> tuple[Tensor, NormTable | None]:
        """Sum gradients; then tell all numbers: the mean loss [], and norms if parameters lack."""
        # Gradients first: the norms are of their sums.
        self.replica_sums.finish()
        own = self._write_own()
        if self._tells:
            self._fill(own[_HEAD:].reshape(NUM_ROWS, -1), known)
        sums = self._sums_of_hosts()
        rows = sums.numpy()[_HEAD:].reshape(NUM_ROWS, -1) if self._tells else None
        table = None if rows is None else self._columns.table(rows)
        return sums[_LOSS] / sums[_WEIGHT], table

    def _tell_devices(self, known: set[float]) -> tuple[Tensor, NormTable | None]:
        """Tell as ``_tell_hosts``; losses and norms are summed on devices, and no host waits."""
        assert self._on_device is not None
        self._write_own()[_HEAD:] = self._used_here()
        # The hosts' numbers travel while devices still compute. They say which parameters have a
        # gradient anywhere, without which ``finish`` cannot settle the buckets.
        self._exchange.start()
        self.replica_sums.finish()
        sums = self._sums_of_hosts()
        total, table = self._on_device.sum(
            self._told_losses(), (sums[_HEAD:] > 0).tolist(), known if self._tells else None
        )
        self._lead.end_step()
        return total / torch.full_like(total, float(sums[_WEIGHT])), table

    def _sums_of_hosts(self) -> Tensor:
        """The sums of what the hosts have sent each other in this step."""
        if self._summed is None:
            self._summed = self._exchange.sum()
        return self._summed

    def _stand_in(self, table: NormTable, known: set[float], *, has_changed: bool) -> None:
        """Put stand-ins with the norms of other workers' gradients in place."""
        # All workers answer later questions together, so each needs a stand-in.
        all_ask = all(any(table.used[index] for index in asks) for asks in self._asks_of)
        if not all_ask and known != set(NORMS):
            table, known = self._tell(NORMS), set(NORMS)
        elif has_changed:
            table = self._tell(known)
        if not all_ask:
            self._norms.wanted = set(NORMS)
        # Under a GradScaler the optimizer unscales gradients; it does not have the stand-ins.
        table.divide(self.loss_scale)
        self._norms.take(table, known)
        self._stand_ins.show(table)
        self._parts.show(table, self.loss_scale)

    def _is_told_by_parts(self, name: str) -> bool:
        holders = self._ownership.holders[name]
        return name in self._shared or self._ownership.lanes.is_told_by_parts(name, holders)

    def _tellers(self, name: str, first: int, work: PipelineWork) -> Holders:
        """The ranks that tell the norm of a gradient, or of a part of it each."""
        ownership = self._ownership
        if name in self._shared:
            stage = work.stages[ownership.stages[name][0]].ranks
            return tuple(rank for rank in ownership.holders[name] if rank in stage)
        lanes = ownership.lanes
        return lanes.group(first) if lanes.is_cut(name, first) else (first,)

    def _told_flags(self, names: Sequence[str]) -> list[float]:
        """Of each parameter, a positive number if some worker has a gradient; told by hosts."""
        told = self._sums_of_hosts()
        return [float(told[_HEAD + self._index[name]]) for name in names]

    def _write_own(self) -> Rows:
        """Write what this worker's host sends, up to the table; return all of it."""
        own: Rows = self._exchange.own.zero_().numpy()
        own[:_NUM_SUMS] = self._loss_sums()
        own[_WORKERS], own[_SETTINGS] = 1.0, self.settings_number
        own[_SQUARED] = self.settings_number**2
        own[_SCALERS] = float(self.checks_overflow)
        if self._tells:
            own[_ADDS] = float(bool(self._carried))
            own[_ASKED:_HEAD] = [float(norm in self._norms.asked) for norm in NORMS]
        return own

    def _used_here(self) -> list[float]:
        """[parameters] 1 where this worker has a gradient of its own, else 0."""
        own, given = self._ownership.own, self.replica_sums.given
        return [
            float(name in own and p.grad is not None or name in given)
            for name, p in self._parameters
        ]

    def _fill(self, table: Rows, norms: Collection[float]) -> None:
        used = [(i, plain(p.grad)) for i, p in self._told if p.grad is not None]
        if used:
            places = [index for index, _ in used]
            rows = [number for number, norm in enumerate(NORMS, start=1) if norm in norms]
            taken = norms_of([gradient for _, gradient in used], [NORMS[r - 1] for r in rows])
            table[0, places] = 1.0
            for row, values in zip(rows, taken.cpu().numpy(), strict=True):
                table[row, places] = values

    def _tell(self, norms: Collection[float]) -> NormTable:
        """A table of these norms, as gradients are now. Call it on all workers."""
        assert self._transport is not None
        if self._on_device is not None:
            used = torch.tensor(self._used_here())
            peers.all_reduce(used, group=self._transport.up)
            return self._on_device.tell((used > 0).tolist(), norms)
        table: Rows = np.zeros((NUM_ROWS, len(self._columns)))
        self._fill(table, norms)
        peers.all_reduce(torch.from_numpy(table), group=self._transport.up)
        return self._columns.table(table)

    def _told_losses(self) -> list[Loss]:
        """The losses that this worker sends, and their weights."""
        if not self._tells_loss:
            return []
        return [(loss, own) for loss, own, _ in self._losses if isinstance(loss, Tensor)]

    def _loss_sums(self) -> list[float]:
        """[4] losses * weights, weights, number of losses with a weight, and whether to stop."""
        sums = [0.0] * _NUM_SUMS
        sums[_STOP] = float(self.wants_stop)
        if not self._losses or not self._tells_loss:
            return sums
        for _, own, weighted in self._losses:
            sums[_WEIGHT] += own
            sums[_WEIGHTED] += weighted
        if self._on_device is None:
            losses = numbers_of(loss for loss, _, _ in self._losses)
            for value, (_, own, _) in zip(losses, self._losses, strict=True):
                sums[_LOSS] += value * own
        return sums

    def sum_round(self, stage: int, parameters: Any, sums: dict[str, Tensor]) -> None:
        """Sum one round's gradients over the replicas of a stage (schedules without flushes)."""
        group = self._groups[self._stage_ranks[stage]]
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                total = sums.get(name)
                # Zeros where this replica has no gradient: the others wait in the sum.
                total = torch.zeros_like(parameter) if total is None else total.contiguous()
                peers.all_reduce(total, group=group)
                sums[name] = total

    def share_loss_late(self) -> Tensor:
        """Share this batch's loss and return the previous one's, so no worker waits for it."""
        own = torch.tensor(self._loss_sums(), dtype=torch.float64)
        sums = own.to(self._place.device, non_blocking=True)
        losses = self._told_losses()
        if losses and self._on_device is not None:
            sums[_LOSS].copy_(weighted_sum(losses))
        work = peers.all_reduce(sums, async_op=True) if self._place.distributed else None
        # The first time there is none before, so this batch's own is waited for.
        before, self._late = self._late or (work, sums), (work, sums)
        if before[0] is not None:
            before[0].wait()
        if self._on_device is None:
            known = before[1].cpu()
            self.stops = float(known[_STOP])
        else:
            known = before[1]
            told = self._late_values.exchange(known)
            self.stops = 0.0 if told is None else told[_STOP]
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
        found: list[float] = sums.tolist()
        return found

    @late_loss.setter
    def late_loss(self, sums: list[float] | None) -> None:
        self._late_values.forget()
        known = None if sums is None else torch.tensor(sums, dtype=torch.float64)
        if known is not None:
            known[_STOP] = 0.0  # what was asked for before the checkpoint has been obeyed
            known = known.to(self._place.device) if self.stays_on_device else known
        self._late = None if known is None else (None, known)
