"""How rounds decide, and the limits that all kinds of rounds keep to."""

import math
from dataclasses import dataclass
from typing import Literal

from ....schema.errors import ProblemError

ANY_SHARE = 1e-300
"""Less than any share that a policy gives."""
SHORTEST_ROUND = 1.0  # seconds: shorter than any restart, and a simulated day takes hours
LONGEST_ROUND = 1e7  # seconds, four months: events within a round are drawn one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """How rounds decide.

    ``reset_seconds`` is the least time between allocations. ``fills_idle`` gives devices away
    that no job has a share of. For ``convention`` and ``selection`` see ``decide``.
    """

    round_seconds: float = 360.0
    reset_seconds: float = 1920.0
    convention: Literal["text", "published"] = "text"
    selection: Literal["by_type", "joint"] = "by_type"
    fills_idle: bool = True

    def __post_init__(self) -> None:
        if (
            not SHORTEST_ROUND <= self.round_seconds <= LONGEST_ROUND
            or not 0 <= self.reset_seconds < math.inf
        ):
            raise ProblemError(
                f"rounds must last {SHORTEST_ROUND:g} to {LONGEST_ROUND:g} s, and resets >= 0 s "
                f"and end; got {self.round_seconds} and {self.reset_seconds}"
            )

    @property
    def head_start_seconds(self) -> float:
        """What every job counts as having received at an allocation: half a round.

        Else f = 0, and a job with next to no share goes before one with a large share that has
        had its first round.
        """
        return self.round_seconds / 2.0
