"""Judges of what papers' methods state, by the methods' names; the papers' room registers them.

No judge imports that room, and what it registers here imports records and this room alone.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, Stage
from ...schema.plugins import Registry


@dataclass(frozen=True, kw_only=True)
class StagePrices:
    """How a method prices the stages of a pipeline, where it is not as in flat plans.

    Attributes:
        objective: (plan, problem) -> seconds per input of the slowest stage or boundary.
        of_stage: (plan, problem, stage) -> seconds per input.
        link: (problem, stage, next stage) -> bytes per second between them.
        crossing_bytes: (problem, ids of the layers before a cut) -> bytes that cross the cut; None
            if they are counted from the graph's edges.
    """

    objective: Callable[[Plan, PipelineProblem], float]
    of_stage: Callable[[Plan, PipelineProblem, int], float]
    link: Callable[[PipelineProblem, Stage, Stage], float]
    crossing_bytes: Callable[[PipelineProblem, set[str]], float | None]


@dataclass(frozen=True, kw_only=True)
class MethodJudge:
    """The judge of one method's plans.

    Attributes:
        faults: (plan, problem or None) -> what of the method's own facts is wrong, as sentences.
        prices: Of its stages; None if they are priced as all others.
    """

    faults: Callable[[Plan, Any], Iterable[str]]
    prices: StagePrices | None = None


METHOD_JUDGES: Registry[MethodJudge] = Registry(
    "judge of a method",
    group="hetflow.methods",
    own=("hetflow.papers.pipedream.judge", "hetflow.papers.easyscale.judge"),
    is_optional=True,
)


def prices_of(problem: PipelineProblem) -> StagePrices | None:
    """Return the prices of the method that solves a problem; None of flat plans."""
    return METHOD_JUDGES.get("pipedream-nested").prices if problem.solved == "nested" else None
