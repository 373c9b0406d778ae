"""An allocator's answer to the mechanism: each job's part of the time on each column."""

from dataclasses import dataclass
from typing import Protocol

from ...solvers.allocation.space_sharing.column_generation import PairTimes
from ..arrays import Floats
from ..cluster.active import Active


@dataclass(frozen=True, slots=True)
class Shares:
    """Time fractions ``x`` [columns, jobs] of jobs alone, and those of pairs where they share."""

    x: Floats
    pairs: PairTimes | None = None


class Allocator(Protocol):
    """What shares the pool among the jobs present."""

    name: str
    agnostic: bool
    shares_space: bool

    @property
    def leaves_idle(self) -> bool:
        """Whether devices that no job has a share of stay idle on purpose."""

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Share the pool."""
