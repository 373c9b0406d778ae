"""Traits of a pipeline schedule that other packages need, stated once by the schedule itself.

The planner, the launcher and the records use these traits, never a schedule's name. So a new
schedule needs one new file only: see docs/schedules.md. The checkers have traits and lists of their
own for hetflow's schedules (``checks.schedule_lists``); they judge a plug-in's by what it states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .errors import ProblemError
from .operations import Schedule
from .operations import WeightSemantics as WeightSemantics
from .pipeline_shape import PipelineShape
from .plugins import Registry

Generator = Callable[[PipelineShape], Schedule]
Replicas = Literal["any", "uniform", "one"]
PassOrder = Literal["forward-first", "alternating", "own"]
Placement = Literal["line", "round-robin", "v", "both-ways"]

DEFAULT_SCHEDULE = "1f1b"
"""What is planned unless another schedule is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTraits:
    """A schedule's traits.

    Attributes:
        name: What plans and commands call it.
        weight_semantics: Which weight version a pass reads, and when versions are made: ``flush``
            one update at the end of each batch; ``stashing`` and ``vertical-sync`` PipeDream
            (thesis 2.4.3); ``double-buffered`` PipeDream-2BW (3.2.1).
        replicas: How often stages may be replicated: ``any`` number each, ``uniform`` equally
            many of every stage (pipelines side by side), or ``one``.
        order: How a replica orders its passes, where solvers may rely on it: ``forward-first``
            all forward passes of a batch before the first backward pass (GPipe); ``alternating``
            just as many inputs as keep the pipeline full, then one of each in turn (1F1B-RR,
            thesis 2.4.2); ``own`` whatever the generated list says, which solvers then count from.
        placement: Which position of the pipeline holds stage s: ``line`` position s;
            ``round-robin`` s mod p, so the last position sends to the first; ``v`` down the
            positions and up again; ``both-ways`` one stage of each direction.
        num_model_chunks: Numbers of stages per device that a planner tries.
        chunked_as: The schedule with this one's order where devices hold several stages, if any.
        splits_backward: Whether every backward pass is in two halves (gradient of the input,
            gradient of the weights), which cannot recompute activations.
        plannable: Whether ``hetflow solve`` plans it.
        generate: Shape -> the lists of operations; raises ProblemError for unsupported shapes. None
            where only the traits are known.
    """

    name: str
    weight_semantics: WeightSemantics = "flush"
    replicas: Replicas = "uniform"
    order: PassOrder = "own"
    placement: Placement = "line"
    num_model_chunks: tuple[int, ...] = (1,)
    chunked_as: str | None = None
    splits_backward: bool = False
    plannable: bool = True
    generate: Generator | None = None

    def __post_init__(self) -> None:
        if not self.num_model_chunks or min(self.num_model_chunks) < 1:
            raise ProblemError(f"schedule {self.name}: give numbers of model chunks, at least 1")
        if self.is_chunked != (self.placement in ("round-robin", "v")):
            raise ProblemError(
                f"schedule {self.name}: stages placed {self.placement} do not go with "
                f"{self.num_model_chunks} chunks on a device"
            )
        if self.plannable and self.replicas == "any" and self.order == "own":
            raise ProblemError(
                f"schedule {self.name}: replicas of unlike number are planned for an order of "
                "passes that the solver knows",
                hint='state the order, or replicas="uniform"',
            )
        if self.plannable and self.replicas == "one":
            raise ProblemError(f"schedule {self.name}: plans have replicas; say plannable=False")

    @property
    def flushes(self) -> bool:
        """Whether each batch ends with one update; otherwise the schedule is endless."""
        return self.weight_semantics == "flush"

    @property
    def updates_each_round(self) -> bool:
        """Whether a stage updates after one input on each replica, instead of once per batch."""
        return self.weight_semantics in ("stashing", "vertical-sync")

    @property
    def is_double_buffered(self) -> bool:
        """Whether it keeps two weight versions and updates once per batch (PipeDream-2BW)."""
        return self.weight_semantics == "double-buffered"

    @property
    def is_uniform(self) -> bool:
        """Whether all stages have equally many replicas."""
        return self.replicas != "any"

    @property
    def is_chunked(self) -> bool:
        """Whether a device holds several stages."""
        return self.num_model_chunks != (1,)

    @property
    def channels_between(self) -> int:
        """Most channels between two workers: activations one way and gradients the other.

        Where a device holds several stages, two workers may be each other's next.
        """
        return 2 if self.placement == "line" else 4

    @property
    def takes_chunks(self) -> bool:
        """Whether the user can choose the number of stages per device."""
        return len(self.num_model_chunks) > 1


SCHEDULES: Registry[ScheduleTraits] = Registry(
    "schedule",
    group="hetflow.schedules",
    own=(
        "hetflow.planning.schedules.one_f_one_b",
        "hetflow.planning.schedules.interleaved",
        "hetflow.planning.schedules.zero_bubble",
        "hetflow.planning.schedules.zero_bubble_v",
        "hetflow.planning.schedules.pipedream",
        "hetflow.papers.dualpipe",
    ),
)


def traits(schedule: str) -> ScheduleTraits:
    """Return the traits of a schedule by its name.

    Raises:
        ProblemError: No installed schedule has that name.
    """
    return SCHEDULES.get(schedule)


def generator_of(name: str) -> Generator:
    """Return the function that makes a schedule's lists.

    Raises:
        ProblemError: The name is unknown, or the registered schedule has no generator.
    """
    found = traits(name).generate
    if found is None:
        raise ProblemError(
            f"schedule {name!r} is registered without a generator",
            hint="register it with @hetflow.planning.schedules.registry.schedule",
        )
    return found


def schedule_in_order(order: PassOrder) -> str:
    """The first schedule whose passes run in an order, with one update at the end of each batch."""
    loaded = (SCHEDULES.loaded(name) for name in SCHEDULES.names())
    return next(known.name for known in loaded if known and known.flushes and known.order == order)


def is_planned(schedule: str) -> bool:
    """Whether ``hetflow solve`` plans the schedule with this name."""
    known = SCHEDULES.find(schedule)
    return known is not None and known.plannable


def planned_schedules() -> tuple[str, ...]:
    """Names of the schedules that ``hetflow solve`` plans, and of all plug-ins not loaded yet."""
    names = SCHEDULES.names()
    known = {name: SCHEDULES.loaded(name) for name in names}
    return tuple(name for name, entry in known.items() if entry is None or entry.plannable)
