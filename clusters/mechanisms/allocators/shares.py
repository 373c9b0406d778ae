"""An allocator's answer to the mechanism: each job's part of the time on each column."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ....schema.plugins import Registry
from ....solvers.allocation.space_sharing.column_generation import PairTimes
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


@dataclass(frozen=True, slots=True)
class Baseline:
    """A scheduler that policies are compared with: an allocator that solves no program.

    ``make`` gets the seed of its random draws. ``most_devices`` is how many it gives one job at
    most; None: what the job asks for.
    """

    make: Callable[[int], Allocator]
    shares_space: bool = False
    most_devices: int | None = None


BASELINES: Registry[Baseline] = Registry(
    "policy", group="hetflow.baselines", own=("hetflow.papers.gavel.baselines",)
)
OPTIMA: Registry[Callable[[bool], Allocator]] = Registry(
    "optimum", group="hetflow.optima", own=("hetflow.papers.gavel.centre_las",)
)
"""Of LAS's optima, those that take longer than a vertex; called with whether weights count."""
