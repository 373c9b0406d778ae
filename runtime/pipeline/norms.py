"""The norms of gradients that are on other workers, as far as somebody wants to know them.

All norms are told in the first step; later the 2-norm, and of the others those that a script has
asked for on some worker. One that is asked for anew is told then and there, by all workers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# In this order in all tables.
NORMS = (2.0, 1.0, math.inf)
NUM_ROWS = 1 + len(NORMS)
Table = NDArray[np.float64]
"""[NUM_ROWS, parameters] whether a parameter has a gradient, and its norms."""


class ToldNorms:
    """What the workers have told each other in this step.

    Attributes:
        wanted: The norms that are told in each step.
        asked: Those that this worker's script has asked for, ever.
    """

    def __init__(self, tell: Callable[[], Table]) -> None:
        """``tell`` makes a table of all norms as they are now; all workers run it together."""
        self._tell = tell
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
                # Gradients may have been scaled since (clipped, unscaled): ratios are the same.
                self.take(self._tell(), set(NORMS))
            two, row = self._table[1], self._table[1 + NORMS.index(norm)]
            usable = (two > 0) & (two < math.inf)
            found = np.divide(row, two, out=np.ones_like(two), where=usable)
            self._ratios[norm] = found.tolist()
        return self._ratios[norm][index]


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
