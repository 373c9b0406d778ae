"""The norms of gradients that other workers hold.

In the first step workers exchange all norms; later only the 2-norm, and other norms that the script
has asked for on some worker. If a script asks for a further norm, all workers exchange all norms at
once.
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

# Tables list the norms in this order.
NORMS = (2.0, 1.0, math.inf)
NUM_ROWS = 1 + len(NORMS)
PATIENCE_SECONDS = 30.0
"""How long to wait for workers that must ask too; all are between the same two steps."""
Table = NDArray[np.float64]
"""[NUM_ROWS, parameters] whether a parameter has a gradient, then its norms; float64."""


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
        self._table: Table = np.zeros((NUM_ROWS, 0))
        self._ratios: dict[float, list[float]] = {}

    def take(self, table: Table, known: set[float]) -> None:
        """Take a step's table, and which norms it contains."""
        self._table, self._known, self._ratios = table, known, {}

    def ratio(self, index: int, norm: float) -> float:
        """A parameter's norm of some order over its 2-norm; 1 if that is zero or overflows."""
        if norm not in self._ratios:
            self.asked.add(norm)
            if norm not in self._known:
                self._meet(norm)
                # Gradients may have been scaled since (clipped, unscaled); ratios stay the same.
                self.take(self._tell(), set(NORMS))
            two, row = self._table[1], self._table[1 + NORMS.index(norm)]
            usable = (two > 0) & (two < math.inf)
            found = np.divide(row, two, out=np.ones_like(two), where=usable)
            self._ratios[norm] = found.tolist()
        return self._ratios[norm][index]

    def told(self, index: int, norm: float) -> tuple[float, float]:
        """The 2-norm and another norm, as received; call ``ratio`` before, which asks for it."""
        return float(self._table[1, index]), float(self._table[1 + NORMS.index(norm), index])

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

    def __len__(self) -> int:
        return len(self._columns)

    def of_rank(self, rank: int) -> list[tuple[int, int]]:
        """The columns that a rank sends, and the indices of their parameters."""
        return [(n, index) for n, (index, teller) in enumerate(self._columns) if teller == rank]

    def joined(self, table: Table) -> Table:
        """[NUM_ROWS, parameters] the norms of whole gradients, from those of parts."""
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
    """[norms, gradients] the norms of each gradient, float64 on the CPU."""
    return torch.stack([_each(gradients, norm).double() for norm in norms]).cpu()


def _each(gradients: Sequence[Tensor], norm: float) -> Tensor:
    if norm == math.inf and not any(g.is_complex() or not g.numel() for g in gradients):
        # vector_norm is ten times slower for this norm: it does not use vector instructions.
        ends: list[Any] = [torch.aminmax(gradient) for gradient in gradients]
        least, most = (torch.stack(part) for part in zip(*ends, strict=True))
        return torch.maximum(-least, most)
    return torch.stack(torch._foreach_norm(list(gradients), norm))
