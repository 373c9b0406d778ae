"""Limits on the work of a search, which then ends with its best plan and a bound.

A solver reads no clock: its caller passes a function that says when to stop. Without one, a search
ends after a fixed amount of work, which is the same on every machine.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

_LONGER = 1000.0

# An error of a profile shifts the predictions of all its plans in the same direction. So two plans
# can be told apart even where neither step is known that well. The interval of a prediction is too
# wide as a limit on what a simpler plan may cost: a ResNet-18 pipeline 7 % slower on paper within
# an interval of 8 % was 21 % slower in truth (docs/decisions.md).
MOST_GIVEN_UP = 0.02
"""How much slower a simpler plan may be, of the fastest plan's predicted step."""


class OutOfTimeError(Exception):
    """The caller's limit came before a piece of a search was done."""


def never() -> bool:
    """Do not stop."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits of a pipeline search.

    Args:
        gap: Accept a plan whose step is proved within this fraction of the least.
        should_stop: Asked every few milliseconds of work; True ends the search.
        limits_work: Entries (moves x cuts) that the tables of one model may cost over all limits.
        relaxed_work: Entries of the one table that bounds what has no other.
        tree_work: Entries that a tree may look at.
        tree_passes: Passes of steps that a tree may replay.
        coarse_work: Entries of all tables over some cuts and runs of devices, for one model.
        anywhere_work: Entries of a search over placements in any order.
        most_limits: Tables of one model.
    """

    gap: float = 0.0
    should_stop: Callable[[], bool] = never
    limits_work: float = 5e7
    relaxed_work: float = 3e8
    tree_work: float = 1.5e7
    tree_passes: float = 3e5
    coarse_work: float = 2e7
    anywhere_work: float = 6e7
    most_limits: int = 24

    def until(self, should_stop: Callable[[], bool]) -> "Effort":
        """A search that the caller ends, instead of its work."""
        # What one table may cost stays as it is: it bounds the memory.
        return replace(
            self,
            should_stop=should_stop,
            tree_work=self.tree_work * _LONGER,
            tree_passes=self.tree_passes * _LONGER,
            limits_work=self.limits_work * 4,
            anywhere_work=self.anywhere_work * 4,
            most_limits=2 * self.most_limits,
        )

    def check(self) -> None:
        """End the piece of work that asks, if the caller says so.

        Loops that prepare a search ask it, so that no set-up outlasts a limit of time.

        Raises:
            OutOfTimeError: The limit came.
        """
        if self.should_stop():
            raise OutOfTimeError

    def accepts(self, seconds: float, bound: float) -> bool:
        """Whether a plan is near enough to a bound, one part in 10^9 at the least."""
        return bound >= seconds * (1 - max(self.gap, 1e-9))


DEFAULT = Effort()
