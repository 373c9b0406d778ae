"""A predicted step as the terms that it is put together from, for people and as data.

One type for every kind of plan: whoever knows a plan's terms makes an ``Explanation`` of it
(explain_split.py), and it is shown here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schema.errors import ProblemError
from .grid import grid, milliseconds

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a step.

    Args:
        name: What takes the time.
        seconds: Of all its times together, within one step.
        count: How often it happens in a step.
        note: What the name leaves open: the size, the devices; may be empty.
    """

    name: str
    seconds: float
    count: int = 1
    note: str = ""

    @property
    def each_seconds(self) -> float:
        """Of one time."""
        return self.seconds / self.count


@dataclass(frozen=True, slots=True)
class Explanation:
    """A predicted step and its terms, which add up to it.

    Args:
        title: Of what plan.
        step_seconds: What was predicted.
        terms: One after another in the step, or in the reader's order.
        remarks: What the numbers do not hold, was assumed, or was not measured: a sentence each.
        low_seconds: Least step that the measurements allow; None where that is unknown.
        high_seconds: Most, likewise.
        is_estimated: Whether a device type in use was estimated, not measured.

    Raises:
        ProblemError: The terms do not add up to the step.
    """

    title: str
    step_seconds: float
    terms: tuple[Term, ...]
    remarks: tuple[str, ...] = ()
    low_seconds: float | None = None
    high_seconds: float | None = None
    is_estimated: bool = False

    def __post_init__(self) -> None:
        total = sum(term.seconds for term in self.terms)
        if abs(total - self.step_seconds) > ROUNDING * max(total, self.step_seconds):
            raise ProblemError(
                f"{self.title}: the terms add up to {total} s, predicted is a step of "
                f"{self.step_seconds} s",
                hint="`hetflow check` says what is wrong with the plan; solve it again",
            )


def explanation_table(explanation: Explanation) -> str:
    """The terms, their sum, and what they leave open."""
    step = explanation.step_seconds
    rows: list[Sequence[object]] = [
        (
            f"{term.name} ({term.note})" if term.note else term.name,
            term.count,
            milliseconds(term.each_seconds),
            milliseconds(term.seconds),
            _share(term.seconds, step),
        )
        for term in explanation.terms
    ]
    rows.append(("step", "", "", milliseconds(step), _share(step, step)))
    lines = [explanation.title, grid(("term", "times", "each", "together", "share"), rows)]
    return "\n".join([*lines, _interval(explanation), *explanation.remarks])


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    """The same as data: seconds, not rounded."""
    return {
        "title": explanation.title,
        "step_seconds": explanation.step_seconds,
        "step_seconds_low": explanation.low_seconds,
        "step_seconds_high": explanation.high_seconds,
        "estimated": explanation.is_estimated,
        "terms": [
            {
                "name": term.name,
                "note": term.note,
                "count": term.count,
                "each_seconds": term.each_seconds,
                "seconds": term.seconds,
                "share": term.seconds / explanation.step_seconds,
            }
            for term in explanation.terms
        ],
        "remarks": list(explanation.remarks),
    }


def _share(seconds: float, step: float) -> str:
    return f"{100 * seconds / step:.1f} %"


def _interval(explanation: Explanation) -> str:
    low, high = explanation.low_seconds, explanation.high_seconds
    if low is None or high is None:
        return "how far off this may be is unknown: the profile does not tell its spread"
    known = "estimates" if explanation.is_estimated else "measurements"
    return f"the {known} allow {milliseconds(low)} to {milliseconds(high)}"
