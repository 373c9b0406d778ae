"""The interface of a runner, which runs the operations of all workers; and one for fixed workers.

An operation is something that all workers do at the same time and in the same order: take a step,
draw an order, merge buffers. Where workers may join and leave, ``elastic/member.py`` runs them.
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
    """Runs operations of all workers, and does what is due between two steps."""

    @property
    def changes(self) -> bool:
        """Whether workers may join and leave."""

    @property
    def is_behind(self) -> bool:
        """Whether this worker's script lags: it has not reached the other workers' position."""

    def join(self) -> None:
        """Get the others' state, if this worker started later. Call it before state is needed."""

    def run(self, function: Callable[[], Answer]) -> Answer:
        """Run a function that needs all workers; if one is lost, the survivors run it again."""

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """Like ``run``, for a function that may contain no collective: a barrier is added."""

    def step(self, step: Step) -> Tensor:
        """Run a step and return its global batch's mean loss: [] float64."""

    def waiting(self) -> "AbstractContextManager[None]":
        """A context in which this worker waits for the others."""

    def runs_passes(self, *, resizes: bool) -> None:
        """Note that the script's own loop runs passes, so that a step cannot be repeated.

        Args:
            resizes: Whether workers may still join and leave between steps.
        """

    def boundary(self) -> None:
        """Do what is due between two steps, once the first one's checkpoint is taken."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """The order of an epoch's samples, also if the others began it before this worker joined.

        Args:
            call: The number of the call of ``job.batches``.
            loader: The script's loader.
            draw: Draws the order without a collective.
        """


class Alone:
    """The runner of workers that neither join nor leave: it calls the functions and adds nothing.

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
        """Do nothing: no other worker waits."""
        yield

    def runs_passes(self, *, resizes: bool) -> None:
        """Do nothing: no step is ever repeated."""

    def boundary(self) -> None:
        """Do nothing: no worker joins or leaves."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """See ``Runner``; no worker lags, so the order is drawn."""
        return draw()
