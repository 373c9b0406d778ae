"""Tables of gradients' norms, on the hosts or on the devices.

A table says of each parameter whether it has a gradient, and the norms of that gradient. Hosts
exchange plain numbers. Between devices the norms stay on the devices, so no host waits for them.
Whether there is a gradient is known on the hosts in either case.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..tensor.lanes import Lanes

# Tables list the norms in this order.
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
