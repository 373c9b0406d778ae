"""The norms of gradients that other workers hold, as tables on the hosts or on the devices.

A table says of each parameter whether it has a gradient, and the norms of that gradient. Hosts
exchange plain numbers. Between devices the norms stay on the devices, so no host waits for them.
Whether there is a gradient is known on the hosts in either case.

In the first step workers exchange all norms; later only the 2-norm, and other norms that the script
has asked for on some worker. If a script asks for a further norm, all workers exchange all norms at
once.

One collective from device to device sums losses and tables, and no host waits for it. All numbers
that hosts decide by (weights, flags, which parameters have gradients) go from host to host
(``synchronise.py``). Every number comes from one worker, and all others send zeros, so the result
has the same bits whatever the order in which the collective adds.
"""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import reduce
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...schema.errors import PeerLostError, TargetError
from .. import peers
from ..group import Place
from ..tensor.gradients import plain
from ..tensor.groups import Lanes

NORMS = (2.0, 1.0, math.inf)
NUM_ROWS = 1 + len(NORMS)
Rows = NDArray[np.float64]
"""[NUM_ROWS, parameters] whether a parameter has a gradient, then its norms; float64."""
_MOST_INDICES = 64


class Table(Protocol):
    """The norms of all parameters' gradients, some of which may not be known."""

    @property
    def used(self) -> Sequence[bool]:
        """[parameters] whether there is a gradient."""

    @property
    def is_finite(self) -> "bool | Tensor":
        """Whether no gradient has an infinite or NaN entry; needs the infinity norms."""

    def multiply(self, factor: float) -> None:
        """Scale all norms."""

    def divide(self, divisor: "float | Tensor") -> None:
        """Scale all norms."""

    def two_norms(self, indices: Sequence[int]) -> Tensor:
        """[indices] the 2-norms of these parameters' gradients, float64."""

    def norm(self, index: int, norm: float) -> "float | Tensor":
        """A norm of one gradient."""

    def ratios(self, norm: float) -> "Sequence[float] | Tensor":
        """[parameters] the norm over the 2-norm; 1 where that is zero or overflows."""


class HostTable:
    """A table of plain numbers; see ``Table``.

    Args:
        rows: The table; changed in place.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.used: list[bool] = (rows[0] > 0).tolist()

    @property
    def is_finite(self) -> bool:
        """See ``Table``."""
        return bool(np.isfinite(self._rows[1 + NORMS.index(math.inf)]).all())

    def multiply(self, factor: float) -> None:
        """See ``Table``."""
        self._rows[1:] *= factor

    def divide(self, divisor: "float | Tensor") -> None:
        """See ``Table``."""
        self._rows[1:] /= float(divisor)

    def two_norms(self, indices: Sequence[int]) -> Tensor:
        """See ``Table``; on the host."""
        return torch.from_numpy(self._rows[1, list(indices)])

    def norm(self, index: int, norm: float) -> float:
        """See ``Table``."""
        return float(self._rows[1 + NORMS.index(norm), index])

    def ratios(self, norm: float) -> list[float]:
        """See ``Table``."""
        two, row = self._rows[1], self._rows[1 + NORMS.index(norm)]
        usable = (two > 0) & (two < math.inf)
        found = np.divide(row, two, out=np.ones_like(two), where=usable)
        ratios: list[float] = found.tolist()
        return ratios


class DeviceIndices:
    """Lists of indices as tensors on a device; each list is sent there once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sent: dict[tuple[int, ...], Tensor] = {}

    def of(self, indices: Sequence[int]) -> Tensor:
        """[indices] int64, on the device."""
        key = tuple(indices)
        if key not in self._sent:
            if len(self._sent) >= _MOST_INDICES:
                self._sent.clear()
            host = torch.tensor(key, dtype=torch.int64)
            self._sent[key] = host.to(self.device, non_blocking=True)
        return self._sent[key]


class DeviceTable:
    """A table whose norms are on a device; see ``Table``. Nothing here waits for the device.

    Args:
        used: [parameters] whether there is a gradient.
        norms: [norms, parameters] float64; changed in place.
        indices: Makes indices on the same device.
    """

    def __init__(self, used: Sequence[bool], norms: Tensor, indices: DeviceIndices) -> None:
        self.used = used
        self._norms, self._indices = norms, indices

    @property
    def is_finite(self) -> Tensor:
        """See ``Table``; [] on the device."""
        return torch.isfinite(self._norms[NORMS.index(math.inf)]).all()

    def multiply(self, factor: float) -> None:
        """See ``Table``."""
        if factor != 1:
            self._norms *= factor

    def divide(self, divisor: "float | Tensor") -> None:
        """See ``Table``."""
        if isinstance(divisor, Tensor) or divisor != 1:
            self._norms /= divisor

    def two_norms(self, indices: Sequence[int]) -> Tensor:
        """See ``Table``; on the device."""
        return self._norms[0].index_select(0, self._indices.of(indices))

    def norm(self, index: int, norm: float) -> Tensor:
        """See ``Table``; [] on the device."""
        return self._norms[NORMS.index(norm), index]

    def ratios(self, norm: float) -> Tensor:
        """See ``Table``; on the device."""
        two, row = self._norms[0], self._norms[NORMS.index(norm)]
        usable = (two > 0) & (two < math.inf)
        return torch.where(usable, row / two, torch.ones_like(two))


class Columns:
    """The columns of a table: one for each whole parameter, and one for each part of a cut one.

    Args:
        parameters: [parameters] the name, and the first rank that holds it. That rank sends the
            norm; of a cut parameter, every rank of its group sends its part's norm.
        lanes: Which workers share layers.
    """

    def __init__(self, parameters: Sequence[tuple[str, int]], lanes: Lanes) -> None:
        self._columns = [
            (index, teller)
            for index, (name, first) in enumerate(parameters)
            for teller in (lanes.group(first) if lanes.is_cut(name, first) else (first,))
        ]
        self._num_parameters = len(parameters)
        self._are_whole = len(self._columns) == len(parameters)

    def __len__(self) -> int:
        return len(self._columns)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The columns that a rank sends, and the indices of their parameters."""
        return [(n, index) for n, (index, teller) in enumerate(self._columns) if teller == rank]

    def joined(self, table: Rows) -> Rows:
        """[NUM_ROWS, parameters] the norms of whole gradients, from those of parts."""
        if self._are_whole:
            return table
        numbers = np.array([index for index, _ in self._columns])
        whole: Rows = np.zeros((NUM_ROWS, self._num_parameters))
        np.maximum.at(whole[0], numbers, table[0])
        with np.errstate(invalid="ignore"):  # the norm of a gradient with a NaN is one
            for row, norm in enumerate(NORMS, start=1):
                if norm == math.inf:
                    np.maximum.at(whole[row], numbers, table[row])
                elif norm == 1.0:
                    np.add.at(whole[row], numbers, table[row])
                else:
                    np.add.at(whole[row], numbers, table[row] ** 2)
                    whole[row] = np.sqrt(whole[row])
        return whole

    def joined_on_device(self, norms: Tensor, indices: DeviceIndices) -> Tensor:
        """[norms, parameters] from [norms, columns] on a device, with the bits of ``joined``."""
        if self._are_whole:
            return norms
        padded = torch.cat([norms, norms.new_zeros(len(NORMS), 1)], 1)
        parts = [padded.index_select(1, indices.of(places)) for places in self._places()]
        found = []
        for row, norm in enumerate(NORMS):
            whole = parts[0][row].square() if norm == 2.0 else parts[0][row]
            for part in parts[1:]:
                if norm == math.inf:
                    whole = torch.maximum(whole, part[row])
                else:
                    whole = whole + (part[row].square() if norm == 2.0 else part[row])
            found.append(whole.sqrt() if norm == 2.0 else whole)
        return torch.stack(found)

    def _places(self) -> list[list[int]]:
        """[parts, parameters] the column of each parameter's part; a zero one where it has fewer.

        The zero column follows all others.
        """
        of_parameter: list[list[int]] = [[] for _ in range(self._num_parameters)]
        for column, (index, _) in enumerate(self._columns):
            of_parameter[index].append(column)
        most = max(map(len, of_parameter))
        padded = [places + [len(self)] * (most - len(places)) for places in of_parameter]
        return [list(places) for places in zip(*padded, strict=True)]


def norms_of(gradients: Sequence[Tensor], norms: Sequence[float]) -> Tensor:
    """[norms, gradients] the norms of each gradient, float64, on the gradients' device."""
    return torch.stack([_each(gradients, norm).double() for norm in norms])


def _each(gradients: Sequence[Tensor], norm: float) -> Tensor:
    if norm == math.inf and not any(g.is_complex() or not g.numel() for g in gradients):
        # vector_norm is ten times slower for this norm: it does not use vector instructions.
        ends: list[Any] = [torch.aminmax(gradient) for gradient in gradients]
        least, most = (torch.stack(part) for part in zip(*ends, strict=True))
        return torch.maximum(-least, most)
    return torch.stack(torch._foreach_norm(list(gradients), norm))


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


PATIENCE_SECONDS = 30.0
"""How long to wait for workers that must ask too; all are between the same two steps."""


class ToldNorms:
    """The norms that workers have sent each other in this step.

    Attributes:
        wanted: The norms that are sent in each step.
        asked: The norms that this worker's script has ever asked for.
    """

    def __init__(self, tell: Callable[[], Table], place: Place) -> None:
        """``tell`` makes a table of all norms as they are now; all workers call it together."""
        self._tell, self._place = tell, place
        self._num_meetings = 0
        self.wanted = set(NORMS)
        self.asked: set[float] = set()
        self._known: set[float] = set()
        self._table: Table | None = None
        self._ratios: dict[float, Sequence[float] | Tensor] = {}

    def take(self, table: Table, known: set[float]) -> None:
        """Take a step's table, and which norms it contains."""
        self._table, self._known, self._ratios = table, known, {}

    def ratio(self, index: int, norm: float) -> float | Tensor:
        """A parameter's norm of some order over its 2-norm; 1 if that is zero or overflows."""
        if norm not in self._ratios:
            self.asked.add(norm)
            if norm not in self._known:
                self._meet(norm)
                # Gradients may have been scaled since (clipped, unscaled); ratios stay the same.
                self.take(self._tell(), set(NORMS))
            assert self._table is not None
            self._ratios[norm] = self._table.ratios(norm)
        return self._ratios[norm][index]

    def told(self, index: int, norm: float) -> tuple[float | Tensor, float | Tensor]:
        """The 2-norm and another norm, as received; call ``ratio`` before, which asks for it."""
        assert self._table is not None
        return self._table.norm(index, 2.0), self._table.norm(index, norm)

    def _meet(self, norm: float) -> None:
        """Wait until all workers ask; a worker that does not is named instead of waited for.

        Raises:
            TargetError: Some workers do not ask.
        """
        store, rank = self._place.store, self._place.rank
        assert store is not None
        signs = [f"norms/{self._num_meetings}/{r}" for r in range(self._place.world_size)]
        self._num_meetings += 1
        store.set(signs[rank], "")
        try:
            store.wait(signs, timedelta(seconds=PATIENCE_SECONDS))
        except PeerLostError as error:
            if not error.timed_out:
                raise
            absent = [str(r) for r, sign in enumerate(signs) if not store.has(sign)]
            raise TargetError(
                f"worker {rank} asks for the {norm:g}-norm of all gradients for the first time, "
                f"and {PATIENCE_SECONDS:g} s later worker {', '.join(absent)} does not",
                hint="ask on every worker, or for the 2-norm, which all are told in each step",
            ) from None


# Tables list the norms in this order.
