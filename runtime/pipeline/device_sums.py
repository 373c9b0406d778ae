"""Sums over a pipeline's workers that stay on the devices: of losses, and of tables of norms.

One collective from device to device sums both, and no host waits for it. All numbers that hosts
decide by (weights, flags, which parameters have gradients) go from host to host; see
``synchronise.py``. Every number comes from one worker, and all others send zeros, so the result has
the same bits whatever the order in which the collective adds.
"""

import operator
from collections.abc import Collection, Sequence
from functools import reduce

import torch
from torch import Tensor, nn

from .. import peers
from ..group import Place
from ..tensor.gradients import plain
from .tables import NORMS, Columns, DeviceIndices, DeviceTable, norms_of

Loss = tuple[Tensor, float]
"""The loss [] of a microbatch, and its weight."""


class DeviceSums:
    """Sums what the workers' devices have to tell.

    Args:
        place: This worker among the others.
        tellers: The ranks that send losses.
        columns: The columns of a table of norms.
        told: The columns that this worker sends, with their parameters.
    """

    def __init__(
        self,
        place: Place,
        tellers: Sequence[int],
        columns: Columns,
        told: Sequence[tuple[int, nn.Parameter]],
    ) -> None:
        self._place, self._columns, self._told = place, columns, list(told)
        self._indices = DeviceIndices(place.device)
        self._num_losses = len(tellers)
        self._own_loss = list(tellers).index(place.rank) if place.rank in tellers else None

    def sum(
        self, losses: Sequence[Loss], used: Sequence[bool], norms: Collection[float] | None
    ) -> tuple[Tensor, DeviceTable | None]:
        """Sum the losses and a table of norms over all workers.

        Args:
            losses: Of this worker's microbatches.
            used: [parameters] whether there is a gradient, on any worker.
            norms: Which norms to send; None for no table.

        Returns:
            [] the sum of losses * weights, float64; and the table.
        """
        own = torch.zeros(self._num_losses, dtype=torch.float64, device=self._place.device)
        if losses and self._own_loss is not None:
            own[self._own_loss].copy_(weighted_sum(losses))
        table = None
        if norms is not None:
            table = self._own_norms(norms)
            own = torch.cat([own, table.view(-1)])
        if self._place.distributed:
            peers.all_reduce(own)
        loss = reduce(operator.add, own[: self._num_losses].unbind())
        return loss, None if table is None else self._table(used, own[self._num_losses :])

    def tell(self, used: Sequence[bool], norms: Collection[float]) -> DeviceTable:
        """A table of these norms, as gradients are now. Call it on all workers."""
        own = self._own_norms(norms).view(-1)
        peers.all_reduce(own)
        return self._table(used, own)

    def _table(self, used: Sequence[bool], sums: Tensor) -> DeviceTable:
        norms = self._columns.joined_on_device(sums.view(len(NORMS), -1), self._indices)
        return DeviceTable(used, norms, self._indices)

    def _own_norms(self, norms: Collection[float]) -> Tensor:
        """[norms, columns] the norms that this worker sends, and zeros; float64."""
        number, device = len(self._columns), self._place.device
        found = [(column, plain(p.grad)) for column, p in self._told if p.grad is not None]
        if not found:
            return torch.zeros((len(NORMS), number), dtype=torch.float64, device=device)
        rows = [row for row, norm in enumerate(NORMS) if norm in norms]
        taken = norms_of([gradient for _, gradient in found], [NORMS[row] for row in rows])
        # A row of zeros stands for the norms that were not asked for; a column of zeros stands for
        # what other workers send.
        padded = torch.nn.functional.pad(taken, (0, 1, 0, 1))
        row_of = {row: place for place, row in enumerate(rows)}
        column_of = {column: place for place, (column, _) in enumerate(found)}
        lines = self._indices.of([row_of.get(row, len(rows)) for row in range(len(NORMS))])
        places = self._indices.of([column_of.get(n, len(found)) for n in range(number)])
        return padded.index_select(0, lines).index_select(1, places)


def weighted_sum(losses: Sequence[Loss]) -> Tensor:
    """[] the sum of losses * weights in the order given, float64, on the losses' device."""
    values = torch.stack([loss.reshape(()) for loss, _ in losses]).double()
    weights = [weight for _, weight in losses]
    products: Sequence[Tensor]
    if len(set(weights)) == 1:
        products = (values * weights[0]).unbind()
    else:
        products = [v * weight for v, weight in zip(values.unbind(), weights, strict=True)]
    return reduce(operator.add, products)
