"""Everything a plan depends on: profiles, a pool, and what is asked of the plan."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import Objective, StageCost
from ..schema.profile import Profile
from ..schema.schedule_traits import DEFAULT_SCHEDULE
from .limits import Limits

Strategy = Literal["auto", "split", "pipeline", "parallel"]
Method = Literal["exact", "cbc", "highs"]
AnyObjective = Literal["step_seconds", "waste", "bottleneck"]
CostModelName = Literal["profiled", "closed-form", "measured"]


@dataclass(frozen=True)
class SplitOptions:
    """What is asked of a batch split; ``top`` counts for the objective ``waste``."""

    objective: AnyObjective = "step_seconds"
    method: Method = "exact"
    virtual_nodes: int | None = None
    top: int = 1
    interpolate: bool = False


@dataclass(frozen=True)
class PipelineOptions:
    """What is asked of a pipeline; the fields are those of ``PipelineProblem``.

    ``schedule`` auto takes the fastest of those that flush. With ``repetitive`` PipeDream-2BW's
    planner chooses, by ``cost_model``; its ``measured`` costs come from the run records in
    ``runs``.
    """

    schedule: str = DEFAULT_SCHEDULE
    """A planned schedule's name, or ``auto``: the fastest of those that flush."""
    stage_cost: StageCost = "ring"
    num_stages: int | None = None
    replication: bool = True
    link_bytes_per_second: float | None = None
    objective: Objective | None = None
    microbatch_size: int | None = None
    num_model_chunks: int | None = None
    repetitive: bool = False
    cost_model: CostModelName = "profiled"
    runs: Path | None = None


@dataclass(frozen=True)
class ParallelOptions:
    """What is asked of a plan of three dimensions, beside a pipeline's links and microbatch.

    ``recompute`` lets stages recompute; ``top`` counts the points of its Pareto table.
    """

    recompute: bool = True
    top: int = 1


@dataclass(frozen=True)
class SolveRequest:
    """Everything a plan depends on.

    ``pool_name`` is how the user named the pool, for the plan's provenance; ``corrected_by`` are
    the runs that the profiles were corrected by. ``optimizer`` is the one that will train; None
    takes what the profiles say. With ``fastest`` the fastest plan on paper is taken, also where
    the measurements cannot tell a simpler one from it.
    """

    profiles: tuple[Profile, ...]
    pool: Cluster
    pool_name: str
    batch_size: int
    strategy: Strategy = "auto"
    split: SplitOptions = field(default_factory=SplitOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    optimizer: OptimizerState | None = None
    fastest: bool = False
    limits: Limits = field(default_factory=Limits)
    corrected_by: tuple[str, ...] = ()
