"""The request for a plan: profiles, a pool, and options."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
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
    """Options of a batch split; ``top`` is used with the objective ``waste`` only."""

    objective: AnyObjective = "step_seconds"
    method: Method = "exact"
    virtual_nodes: int | None = None
    top: int = 1
    interpolate: bool = False


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline; the fields are those of ``PipelineProblem``.

    The schedule ``auto`` takes the fastest of the schedules that flush. With ``repetitive``,
    PipeDream-2BW's planner chooses the plan (thesis 3.3), using ``cost_model``. The cost model
    ``measured`` takes its costs from the run records in the folder ``runs``.
    """

    schedule: str = DEFAULT_SCHEDULE
    """Name of a schedule that solvers plan, or ``auto``: the fastest of those that flush."""
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
    """Options of a plan with pipeline, tensor and data parallelism.

    Links and microbatch size are in ``PipelineOptions``. ``recompute`` lets stages recompute
    activations, of attention cores or all; ``top`` is the most points of the Pareto table.
    ``sequence_parallel`` spreads tokens between tensor-parallel layers; None does so if no plan
    fits otherwise. ``shard_optimizer`` lets the replicas of a stage share the optimizer's state.
    """

    recompute: bool = True
    top: int = 1
    sequence_parallel: bool | None = None
    shard_optimizer: bool = False


@dataclass(frozen=True)
class SolveRequest:
    """Everything that a plan depends on.

    ``pool_name`` is the text by which the user named the pool, for the plan's provenance.
    ``corrected_by`` names the runs by which the profiles were corrected. ``optimizer`` is the one
    that will train; None takes the profiles'. ``fastest`` takes the plan with the least predicted
    time, even if a simpler plan is as fast within the accuracy of the measurements.
    ``memory_reserve_bytes`` of each device are left free besides what is measured.
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
    memory_reserve_bytes: int = 0
    fastest: bool = False
    limits: Limits = field(default_factory=Limits)
    corrected_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.memory_reserve_bytes < 0:
            raise ProblemError(
                f"--memory-reserve {self.memory_reserve_bytes}: must not be negative",
                hint="leave it out to reserve only what was measured",
            )

    @property
    def fixes_microbatches(self) -> bool:
        """Whether both virtual nodes and microbatches were asked for, and are the same.

        Then plans of all kinds cut a batch alike, and each can go on from a checkpoint of another.
        """
        nodes, samples = self.split.virtual_nodes, self.pipeline.microbatch_size
        return nodes is not None and samples is not None and nodes * samples == self.batch_size

    @property
    def is_for_all_kinds(self) -> bool:
        """Whether no option was given that only splits have."""
        kept = self.split.virtual_nodes if self.fixes_microbatches else None
        return self.split == SplitOptions(virtual_nodes=kept)
