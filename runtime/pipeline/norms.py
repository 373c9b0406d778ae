"""The norms of gradients that other workers hold.

In the first step workers exchange all norms; later only the 2-norm, and other norms that the script
has asked for on some worker. If a script asks for a further norm, all workers exchange all norms at
once.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta

from torch import Tensor

from ...schema.errors import PeerLostError, TargetError
from ..group import Place
from .tables import NORMS, Table

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
