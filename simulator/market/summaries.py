"""What a rent policy's replays come to, beside the least possible cost."""

from collections.abc import Sequence
from math import ceil, floor
from typing import Protocol, TypeVar

from ...schema.market import PolicyReplay

_MOST_PAST = 100  # windows of a history to replay on
_Tick = TypeVar("_Tick")


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


def past_windows(
    traces: Sequence[Sequence[Sequence[_Tick | None]]], num_ticks: int
) -> list[list[tuple[_Tick, ...]]]:
    """Windows of a history that are known throughout, an eighth of a window apart.

    Where there are more than 100, as many of them, evenly spread.

    Args:
        traces: [traces][zones][ticks].
        num_ticks: Length of a window.

    Returns:
        [windows][zones][ticks].
    """
    found = []
    for zones in traces:
        length = min(map(len, zones))
        for first in range(0, length - num_ticks + 1, max(num_ticks // 8, 1)):
            cut = [
                tuple(tick for tick in zone[first : first + num_ticks] if tick is not None)
                for zone in zones
            ]
            if all(len(zone) == num_ticks for zone in cut):
                found.append(cut)
    return found[:: -(-len(found) // _MOST_PAST) or 1]


def interval_of(past: Sequence[float], *, least: float, most: float) -> tuple[float, float]:
    """Between which dollars nine in ten further jobs should cost, if the future is like the past.

    The order statistics at 5 and 95 % of the past and one more. Where the past has too few windows
    for one of them, it is what a job can cost at all.

    Args:
        past: What the policy would have paid in windows of the history.
        least: What no job can cost less than.
        most: Nor more than.
    """
    ranked = [least, *sorted(past), most]
    last = len(ranked) - 1
    return ranked[floor(0.05 * last)], ranked[ceil(0.95 * last)]
