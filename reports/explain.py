"""A predicted step as the sum of its terms, as a table and as data.

All kinds of plan use one type. A module that knows the terms of one kind makes an ``Explanation``
(such as explain_split.py), and this module shows it.
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
        seconds: Total time within one step, in seconds.
        count: How many times it happens in a step.
        note: Details that the name does not give: the size, the devices; may be empty.
    """

    name: str
    seconds: float
    count: int = 1
    note: str = ""

    @property
    def each_seconds(self) -> float:
        """Seconds for one of the ``count`` times."""
        return self.seconds / self.count


@dataclass(frozen=True, slots=True)
class Explanation:
    """A predicted step and its terms, which add up to it.

    Args:
        title: The plan that is explained.
        step_seconds: The predicted step, in seconds.
        terms: In the order of the step, or in an order that helps the reader.
        remarks: What the numbers leave out, assume, or did not measure: one sentence each.
        low_seconds: Shortest step that the measurements allow; None where that is unknown.
        high_seconds: Longest step that they allow; None where that is unknown.
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
    """The terms in milliseconds, their sum, and the remarks, as a table."""
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
    """The explanation as plain data: seconds, not rounded."""
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
