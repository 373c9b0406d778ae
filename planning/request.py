"""The request for a plan: profiles, a pool, and options."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import StageCost
from ..schema.profile import Profile
from ..schema.schedule_traits import DEFAULT_SCHEDULE
from .limits import Limits
from .options import ALL, PIPELINES, SPLITS, Kind, Option, Planner, given, option

Strategy = Literal["auto", "split", "pipeline", "parallel"]
Method = Literal["exact", "cbc", "highs"]
AnyObjective = Literal["step_seconds", "waste", "bottleneck"]
CostModelName = Literal["profiled", "closed-form", "measured"]


@dataclass(frozen=True)
class SplitOptions:
    """Options of a batch split."""

    method: Method = option("exact", "milp", values={"exact": ("split",)})
    virtual_nodes: int | None = option(None, *SPLITS)
    interpolate: bool = option(False, *SPLITS)


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline; the fields are those of ``PipelineProblem``.

    The schedule ``auto`` takes the fastest of the schedules that flush. With ``repetitive``,
    PipeDream-2BW's planner chooses the plan (thesis 3.3), using ``cost_model``. The cost model
    ``measured`` takes its costs from the run records in the folder ``runs``.
    """

    schedule: str = option(
        DEFAULT_SCHEDULE,
        *PIPELINES,
        values={"auto": ("pipeline", "parallel")},
        open_values=["auto"],
    )
    """Name of a schedule that solvers plan, or ``auto``: the fastest of those that flush."""
    stage_cost: StageCost = option("ring", "pipeline")
    num_stages: int | None = option(None, "pipeline")
    replication: bool = option(True, "pipeline", open_values=[True])
    link_bytes_per_second: float | None = option(None, *PIPELINES, "parallel", narrows=False)
    microbatch_size: int | None = option(None, *PIPELINES, "parallel", narrows=False)
    num_model_chunks: int | None = option(
        None, "pipeline", "parallel", flag="--chunks-per-device", narrows=False,
        values={1: ("parallel",)},
    )  # fmt: skip
    repetitive: bool = option(False, "repetitive")
    cost_model: CostModelName = option("profiled", "repetitive")
    runs: Path | None = option(None, "repetitive")


@dataclass(frozen=True)
class ParallelOptions:
    """Options of a plan with pipeline, tensor and data parallelism.

    Links and microbatch size are in ``PipelineOptions``. ``recompute`` lets stages recompute
    activations, of attention cores or all. ``sequence_parallel`` spreads tokens between
    tensor-parallel layers; None does so if no plan fits otherwise. ``shard_optimizer`` lets the
    replicas of a stage share the optimizer's state.
    """

    recompute: bool = option(True, "parallel", narrows=False)
    sequence_parallel: bool | None = option(None, "parallel", narrows=False)
    shard_optimizer: bool = option(False, "parallel")


@dataclass(frozen=True)
class SolveRequest:
    """Everything that a plan depends on.

    ``top`` keeps so many configurations of least waste, or points of a parallel plan's Pareto
    table.
    ``pool_name`` is the text by which the user named the pool, for the plan's provenance.
    ``corrected_by`` names the runs by which the profiles were corrected. ``optimizer`` is the one
    that will train; None takes the profiles'. ``fastest`` takes the plan with the least predicted
    time, even if a simpler plan is as fast within the accuracy of the measurements.
    ``memory_reserve_bytes`` of each device are left free besides what is measured. ``stated`` names
    options that were given the value that they have anyway: who gives one expects it to be read.
    """

    profiles: tuple[Profile, ...]
    pool: Cluster
    pool_name: str
    batch_size: int
    strategy: Strategy = "auto"
    objective: AnyObjective = option(
        "step_seconds",
        values={"waste": ("waste",), "bottleneck": ("pipeline",), "step_seconds": ALL},
        open_values=["step_seconds"],
    )
    top: int = option(1, "waste", "parallel", open_values=[1])
    split: SplitOptions = field(default_factory=SplitOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    optimizer: OptimizerState | None = option(None, *ALL)
    memory_reserve_bytes: int = option(0, *ALL, flag="--memory-reserve")
    fastest: bool = option(False, "split", "pipeline", narrows=False)
    limits: Limits = field(default_factory=Limits)
    corrected_by: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()

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
    def planners(self) -> dict[Kind, Planner]:
        """The planner of each kind of plan that these options ask for."""
        by_method: Planner = "split" if self.split.method == "exact" else "milp"
        return {
            "split": "waste" if self.objective == "waste" else by_method,
            "pipeline": "repetitive" if self.pipeline.repetitive else "pipeline",
            "parallel": "parallel",
        }

    @property
    def options(self) -> list[Option]:
        """The options that were given.

        Virtual nodes and microbatches that are the same are read by plans of all kinds.
        """
        known = self
        if self.fixes_microbatches:
            known = replace(
                self,
                split=replace(self.split, virtual_nodes=None),
                pipeline=replace(self.pipeline, microbatch_size=None),
            )
        return list(given(known, self.stated))
