"""The norms of gradients that are on other workers.

Workers exchange all norms in the first step; later the 2-norm, and those other norms that the
script has asked for on some worker. When a script asks for a further norm, all workers exchange it
at once.
"""

import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...schema.errors import PeerLostError, TargetError
from ..group import Place
from ..tensor.lanes import Lanes

# In this order in all tables.
NORMS = (2.0, 1.0, math.inf)
NUM_ROWS = 1 + len(NORMS)
PATIENCE_SECONDS = 30.0
"""For workers that must ask as well: they are all behind the same step."""
Table = NDArray[np.float64]
"""[NUM_ROWS, parameters] whether a parameter has a gradient, and its norms."""


class ToldNorms:
    """What the workers have told each other in this step.

    Attributes:
        wanted: The norms that are told in each step.
        asked: Those that this worker's script has asked for, ever.
    """

    def __init__(self, tell: Callable[[], Table], place: Place) -> None:
        """``tell`` makes a table of all norms as they are now; all workers run it together."""
        self._tell, self._place = tell, place
        self._num_meetings = 0
        self.wanted = set(NORMS)
        self.asked: set[float] = set()
        self._known: set[float] = set()
        self._table: Table = np.zeros((NUM_ROWS, 0))
        self._ratios: dict[float, list[float]] = {}

    def take(self, table: Table, known: set[float]) -> None:
        """Take a step's table, with the norms that were told."""
        self._table, self._known, self._ratios = table, known, {}

    def ratio(self, index: int, norm: float) -> float:
        """A norm of a parameter's gradient over its 2-norm; 1 where that is zero or overflows."""
        if norm not in self._ratios:
            self.asked.add(norm)
            if norm not in self._known:
                self._meet(norm)
                # Gradients may have been scaled since (clipped, unscaled): ratios are the same.
                self.take(self._tell(), set(NORMS))
            two, row = self._table[1], self._table[1 + NORMS.index(norm)]
            usable = (two > 0) & (two < math.inf)
            found = np.divide(row, two, out=np.ones_like(two), where=usable)
            self._ratios[norm] = found.tolist()
        return self._ratios[norm][index]

    def told(self, index: int, norm: float) -> tuple[float, float]:
        """A parameter's 2-norm and another norm, as they were told; ask for the ratio before."""
        return float(self._table[1, index]), float(self._table[1 + NORMS.index(norm), index])

    def _meet(self, norm: float) -> None:
        """Wait until all workers ask, so that one which does not is named and not waited for.

        Raises:
            TargetError: Some do not.
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


class Columns:
    """The columns of a table: of each parameter one, or one for each of its parts.

    Args:
        parameters: By number: the name, and the first rank that holds it. That rank tells the norm,
            or every rank of its group that of its part.
        lanes: Which workers share layers.
    """

    def __init__(self, parameters: Sequence[tuple[str, int]], lanes: Lanes) -> None:
        self._columns = [
            (index, teller)
            for index, (name, first) in enumerate(parameters)
            for teller in (lanes.group(first) if lanes.is_cut(name, first) else (first,))
        ]
        self._num_parameters = len(parameters)

    def __len__(self) -> int:
        return len(self._columns)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The columns that a rank tells, and the parameters that they are of."""
        return [(n, index) for n, (index, teller) in enumerate(self._columns) if teller == rank]

    def joined(self, table: Table) -> Table:
        """[NUM_ROWS, parameters] the norms of whole gradients from those of parts."""
        if len(self._columns) == self._num_parameters:
            return table
        numbers = np.array([index for index, _ in self._columns])
        whole: Table = np.zeros((NUM_ROWS, self._num_parameters))
        np.maximum.at(whole[0], numbers, table[0])
        for row, norm in enumerate(NORMS, start=1):
            if norm == math.inf:
                np.maximum.at(whole[row], numbers, table[row])
            elif norm == 1.0:
                np.add.at(whole[row], numbers, table[row])
            else:
                np.add.at(whole[row], numbers, table[row] ** 2)
                whole[row] = np.sqrt(whole[row])
        return whole


def norms_of(gradients: Sequence[Tensor], norms: Sequence[float]) -> Tensor:
    """[norms, gradients] norms of each gradient, in float64 on the CPU."""
    return torch.stack([_each(gradients, norm).double() for norm in norms]).cpu()


def _each(gradients: Sequence[Tensor], norm: float) -> Tensor:
    if norm == math.inf and not any(g.is_complex() or not g.numel() for g in gradients):
        # vector_norm is ten times slower here: it does not use vector instructions.
        ends: list[Any] = [torch.aminmax(gradient) for gradient in gradients]
        least, most = (torch.stack(part) for part in zip(*ends, strict=True))
        return torch.maximum(-least, most)
    return torch.stack(torch._foreach_norm(list(gradients), norm))
