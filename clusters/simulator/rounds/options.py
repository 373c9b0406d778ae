"""Options of rounds in virtual time."""

import math
from dataclasses import dataclass

from ....schema.errors import ProblemError
from ...mechanisms.cluster.seats import DeviceLayout
from ...mechanisms.rounds.rules import LONGEST_ROUND, SHORTEST_ROUND, RoundRules
from ..cluster.failures import FailureOptions

STEPS_LEFT = 1e-9  # of a step: rounding of its own additions, not work


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOptions(RoundRules):
    """How rounds run.

    ``restart_seconds`` is lost by a job that starts or changes its device type (a lease that is
    renewed loses nothing), ``resize_seconds`` (None: as much) by one that goes over to other
    devices of its server, which a live cluster does without a stop. ``ends_early`` ends a round by
    the text as soon as nobody holds a device and a job waits or comes, as a live cluster does.
    ``records_spans`` keeps who held what, on the servers of ``layout``
    (None: ``servers``, else a flat pool). ``failures`` (None: never) cost the job on the device
    the round: it goes back to the checkpoint at the round's start, and restarts. ``servers``
    holds the devices of each type on each server [types][servers]: jobs are then placed on
    servers, run at their unconsolidated rate where they are spread, and restart when they move;
    None ignores placement. Policies share what is up; a job that does not fit that waits.
    """

    restart_seconds: float = 0.0
    resize_seconds: float | None = None
    ends_early: bool = False
    records_spans: bool = False
    layout: DeviceLayout | None = None
    failures: FailureOptions | None = None
    seed: int = 0
    servers: tuple[tuple[int, ...], ...] | None = None
    max_rounds: int = 10_000_000

    def __post_init__(self) -> None:
        at_least_0 = (self.reset_seconds, self.restart_seconds, self.moving_seconds)
        if not SHORTEST_ROUND <= self.round_seconds <= LONGEST_ROUND or not all(
            0 <= t < math.inf for t in at_least_0
        ):
            raise ProblemError(
                f"rounds must last {SHORTEST_ROUND:g} to {LONGEST_ROUND:g} s, resets, restarts and "
                "resizes >= 0 s, all finite; got "
                f"{self.round_seconds}, {', '.join(map(str, at_least_0))}"
            )
        for what, seconds in (("restart", self.restart_seconds), ("resize", self.moving_seconds)):
            if seconds >= self.round_seconds:
                raise ProblemError(
                    f"a {what} of {seconds} s leaves nothing of a round of "
                    f"{self.round_seconds} s; make rounds longer"
                )

    @property
    def moving_seconds(self) -> float:
        """What a resize costs."""
        return self.restart_seconds if self.resize_seconds is None else self.resize_seconds

    @property
    def is_plain(self) -> bool:
        """Whether no servers, failures or spans have to be watched round by round."""
        return (
            self.selection == "by_type"
            and self.servers is None
            and self.failures is None
            and not self.records_spans
        )
