"""What ``hetflow solve`` is asked: profiles, pool and flags."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import Objective, PlannedSchedule, StageCost
from ..schema.profile import Profile
from .limits import Limits

CostModelName = Literal["profiled", "closed-form", "measured"]


@dataclass(frozen=True)
class SplitFlags:
    """The flags of a batch split, as ``hetflow solve`` names them."""

    objective: str = "step_seconds"
    method: str = "exact"
    virtual_nodes: int | None = None
    top: int = 1
    interpolate: bool = False


@dataclass(frozen=True)
class PipelineFlags:
    """The flags of a pipeline, as ``hetflow solve`` names them."""

    schedule: PlannedSchedule | Literal["auto"] = "1f1b"
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
class Question:
    """Everything a plan depends on."""

    profiles: tuple[Profile, ...]
    pool: Cluster
    pool_name: str
    batch_size: int
    split: SplitFlags
    pipeline: PipelineFlags
    optimizer: OptimizerState | None = None
    """The one that will train; None takes what the profiles say."""
    fastest: bool = False
    """Take the fastest plan on paper, also where measurements cannot tell a simpler one from it."""
    limits: Limits = field(default_factory=Limits)
