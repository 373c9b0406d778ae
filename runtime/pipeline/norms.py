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
