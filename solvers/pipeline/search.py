"""The protocol of a search for the least bottleneck: a method that places stages under limits."""

from typing import Protocol

from ...schema.pipeline import PipelineProblem
from ..effort import Effort, OutOfTimeError
from .placements import PlacedStage, PlacementSpace
from .stage_costs import StageCosts


class PlacementSearch(Protocol):
    """A method: the best placement under limits raised by some bytes, or None."""

    def __call__(
        self,
        problem: PipelineProblem,
        costs: StageCosts,
        space: PlacementSpace,
        extra_bytes: float = 0.0,
        *,
        below: float = ...,
        effort: Effort = ...,
    ) -> list[PlacedStage] | None:
        """Stages in the model's order."""


class StoppedError(OutOfTimeError):
    """The caller's limit ended a search; ``bound`` is the lower bound proved so far."""

    def __init__(self, bound: float, placed: list[PlacedStage] | None = None) -> None:
        super().__init__("stopped")
        self.bound, self.placed = bound, placed
