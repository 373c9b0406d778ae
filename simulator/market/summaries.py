"""What a rent policy's replays come to, beside the least possible cost."""

from collections.abc import Sequence
from typing import Protocol

from ...schema.market import PolicyReplay


class Outcome(Protocol):
    """What became of one job."""

    @property
    def dollars(self) -> float:
        """What it cost."""

    @property
    def is_late(self) -> bool:
        """Whether its deadline passed before it ended."""


def summary_of(
    policy: str,
    outcomes: Sequence[Outcome],
    num_launches: Sequence[int],
    least_dollars: Sequence[float],
) -> PolicyReplay:
    """Sum up one policy's replays.

    Args:
        policy: Its name.
        outcomes: [windows].
        num_launches: [windows] how often machines were launched.
        least_dollars: [windows] what no policy can be cheaper than.
    """
    dollars = tuple(outcome.dollars for outcome in outcomes)
    ratios = [
        paid / least if least > 0 else 1.0
        for paid, least in zip(dollars, least_dollars, strict=True)
    ]
    return PolicyReplay(
        policy=policy,
        mean_dollars=sum(dollars) / len(dollars),
        mean_over_bound=sum(ratios) / len(ratios),
        missed_deadlines=sum(outcome.is_late for outcome in outcomes),
        mean_launches=sum(num_launches) / len(num_launches),
        dollars=dollars,
    )


def in_time(replays: Sequence[PolicyReplay]) -> list[PolicyReplay]:
    """The policies that missed no deadline."""
    return [entry for entry in replays if not entry.missed_deadlines]


def choice_of(replays: Sequence[PolicyReplay]) -> str | None:
    """The cheapest policy that missed no deadline; None if all did."""
    left = in_time(replays)
    return min(left, key=lambda entry: entry.mean_dollars).policy if left else None
