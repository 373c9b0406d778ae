"""How the operations of all workers are run: a protocol, and the runner whose workers stay.

An operation is what all workers do at once, in the same order: take a step, draw an order, merge
buffers. Where workers may come and go, ``elastic/member.py`` runs it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor

from .engine import Step, StepEngine

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.utils.data import DataLoader

Answer = TypeVar("Answer")


class Runner(Protocol):
    """Runs operations, and sees to what happens between two steps."""

    @property
    def changes(self) -> bool:
        """Whether workers may come and go."""

    @property
    def is_behind(self) -> bool:
        """Whether this worker's script has not come to where the other workers are."""

    def join(self) -> None:
        """Get the others' state, if this worker was started later; call it before it is needed."""

    def run(self, function: Callable[[], Answer]) -> Answer:
        """Run what needs all workers; if one is lost, run it again among the survivors."""

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """Like ``run``, with a barrier: the function may contain no collective."""

    def step(self, step: Step) -> Tensor:
        """Run a step; the mean loss of its global batch."""

    def waiting(self) -> "AbstractContextManager[None]":
        """Inside, this worker waits for the others."""

    def boundary(self) -> None:
        """Between two steps, when what the first left behind is saved."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """The order of an epoch that the others began before this worker came.

        Args:
            call: The number of the call of ``job.batches``.
            loader: The script's.
            draw: Draws the order, without an exchange.
        """


class Alone:
    """The runner of workers that stay as they are: it adds nothing.

    Args:
        engine: Runs the steps.
    """

    changes, is_behind = False, False

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    def join(self) -> None:
        """No worker joins later."""

    def run(self, function: Callable[[], Answer]) -> Answer:
        """See ``Runner``."""
        return function()

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """See ``Runner``."""
        return function()

    def step(self, step: Step) -> Tensor:
        """See ``Runner``."""
        return self._engine.run(step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Nothing: no other worker waits."""
        yield

    def boundary(self) -> None:
        """No worker joins or leaves."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """See ``Runner``; no worker lags, so it is as drawn."""
        return draw()
