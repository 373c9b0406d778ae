"""The definition of a schedule (ordered operations for each rank, as plain data), and its traits.

The timer, the reports and the runtime all use this definition. So the lists are complete: every
transfer names its peer, and every pass the weight version that it reads. A worker only has to
execute its list from top to bottom.

How a list is executed (the contract between the generators, `walk`, the timer and the runtime):

* passes, updates and reductions run one after another, in the order of the list;
* a send never blocks: it starts at its place in the list, and its buffer is kept until it is done;
* a receive waits until its message has arrived. A worker may post receives earlier;
* the messages of one channel (source, destination, activation or gradient) are sent and received
  in the same order, so a channel needs no tags;
* a reduction waits for every rank that holds the stage.

Two passes form an overlapped pair (DualPipe's F&B) if all their receives are before both and all
their sends after both: they start together and send their results together.

A schedule states its traits itself, in its registration. The planner, the launcher and the records
use these, never a schedule's name, so a new schedule needs one new file only: docs/schedules.md.
The checkers have traits and lists of their own for hetflow's schedules
(``checks.schedule_lists``); they judge a plug-in's by what it states.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple

from .errors import ProblemError
from .plugins import Registry

WeightSemantics = Literal["flush", "stashing", "vertical-sync", "double-buffered"]


class Kind(StrEnum):
    """The kind of an operation."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"
    REDUCE = "reduce"
    UPDATE = "update"


PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
ACTIVATIONS = frozenset({Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION})
# A pass that frees the activations of a microbatch, and one that needs the gradient of its output.
FREEING = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
DIFFERENTIATING = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})


class HeldMoment(NamedTuple):
    """What one replica of a stage holds at a moment of its schedule, in numbers of microbatches."""

    in_flight: int
    """Whose activations are kept."""
    halved: int = 0
    """Of these, whose weights' gradients alone are still to come."""
    received: int = 0
    """Inputs that came as messages and are kept."""
    sent: int = 0
    """Outputs on their way, and a gradient of one that has come."""
    returned: int = 0
    """Gradients of inputs on their way."""
    has_gradients: bool = True
    """False in the step's first backward pass."""


Message = tuple[bool, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of a rank's list.

    Attributes:
        kind: What the operation does.
        stage: The (virtual) stage, from 0 at the model's input; for a transfer, the stage of the
            rank whose list holds the operation.
        microbatch: The microbatch's number, from 0; for a reduction or update, the first one that
            it covers.
        num_microbatches: Number of consecutive microbatches that a reduction or update covers,
            over all replicas of the stage; 1 for everything else.
        weight_version: The version that a pass reads, or that an update writes. (An update applies
            the mean gradient of its microbatches to version - 1.) None for transfers and
            reductions.
        peer: The other rank of a transfer; None for everything else.
    """

    kind: Kind
    stage: int
    microbatch: int
    num_microbatches: int = 1
    weight_version: int | None = None
    peer: int | None = None

    @property
    def microbatches(self) -> range:
        """The microbatches that the operation covers."""
        return range(self.microbatch, self.microbatch + self.num_microbatches)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule.

    Attributes:
        name: Its name in the registry, or the user's own.
        placement: [stages] the ranks that hold each (virtual) stage. Several ranks are replicas,
            each of which runs a part of the microbatches.
        num_microbatches: Microbatches in the whole schedule, over all replicas.
        weight_semantics: Which weight version a pass reads, and when versions are made (see
            ``ScheduleTraits``).
        ranks: [ranks] the operations of each rank, in order.
        max_in_flight: [ranks] promised bound on the (stage, microbatch) pairs whose activations a
            rank holds; None for no promise.
        max_weight_versions: [ranks] promised bound on the versions of one stage's weights that a
            rank holds; None for no promise.
    """

    name: str
    placement: tuple[tuple[int, ...], ...]
    num_microbatches: int
    weight_semantics: WeightSemantics
    ranks: tuple[tuple[Operation, ...], ...]
    max_in_flight: tuple[int, ...] | None = None
    max_weight_versions: tuple[int, ...] | None = None

    @property
    def num_stages(self) -> int:
        """The number of (virtual) stages."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def num_operations(self) -> int:
        """Number of operations over all ranks."""
        return sum(map(len, self.ranks))

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """[ranks] stages that each rank holds (its model chunks), in the order of the model."""
        held: list[list[int]] = [[] for _ in self.ranks]
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def channels(self) -> tuple[tuple[int, int, bool], ...]:
        """List (source, destination, carries activations) of every channel in use, sorted."""
        return tuple(
            sorted(
                {
                    (rank, op.peer, op.kind in ACTIVATIONS)
                    for rank, operations in enumerate(self.ranks)
                    for op in operations
                    if op.kind in SENDS and op.peer is not None
                }
            )
        )


def message_of(operation: Operation, rank: int) -> Message:
    """Identify the message of a transfer; the send and its receive have the same identity.

    Returns:
        (carries an activation, the lower of the two stages, microbatch, source, destination).
    """
    activation = operation.kind in ACTIVATIONS
    peer = -1 if operation.peer is None else operation.peer
    upper = operation.kind in (Kind.RECEIVE_ACTIVATION, Kind.SEND_GRADIENT)
    ends = (rank, peer) if operation.kind in SENDS else (peer, rank)
    return (activation, operation.stage - upper, operation.microbatch, *ends)


def repeat(schedule: Schedule, num_batches: int) -> Schedule:
    """Run a flushing schedule several times, one batch after another.

    As in a training loop, a batch may start as soon as the schedule's dependencies allow it.

    Args:
        schedule: A schedule with flushes.
        num_batches: Number of batches; the numbers of microbatches and weight versions continue
            from one batch to the next.
    """

    def later(operation: Operation, batch: int) -> Operation:
        version = operation.weight_version
        return replace(
            operation,
            microbatch=operation.microbatch + batch * schedule.num_microbatches,
            weight_version=None if version is None else version + batch,
        )

    ranks = tuple(
        tuple(later(operation, batch) for batch in range(num_batches) for operation in operations)
        for operations in schedule.ranks
    )
    return replace(schedule, ranks=ranks, num_microbatches=schedule.num_microbatches * num_batches)


Placement = tuple[tuple[int, ...], ...]
"""Ranks of each stage or position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The degrees and counts for which a generator makes a schedule.

    Attributes:
        pipeline_parallel_size: p, the number of positions; each is one rank or several replicas.
        num_microbatches: Microbatches in the whole schedule over all replicas: m of one batch if
            the schedule flushes, else those of the whole run.
        num_model_chunks: v, stages per rank; 1 if the schedule does not interleave.
        replicas: [positions] number of ranks that share a position. Microbatch k goes to replica
            k mod replicas (1F1B-RR, thesis 2.4.2).
        microbatches_per_update: m of PipeDream-2BW; None for other schedules.

    Raises:
        ProblemError: A degree or a count is invalid.
    """

    pipeline_parallel_size: int
    num_microbatches: int
    num_model_chunks: int = 1
    replicas: tuple[int, ...] = ()
    microbatches_per_update: int | None = None

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "num_microbatches", "num_model_chunks"):
            _at_least_one(name, getattr(self, name))
        if self.microbatches_per_update is not None:
            _at_least_one("microbatches_per_update", self.microbatches_per_update)
        if not self.replicas:
            object.__setattr__(self, "replicas", (1,) * self.pipeline_parallel_size)
        for count in self.replicas:
            _at_least_one("replicas of a stage", count)
        if len(self.replicas) != self.pipeline_parallel_size:
            raise ProblemError(
                f"{len(self.replicas)} replica counts for {self.pipeline_parallel_size} stages; "
                f"give one for each stage"
            )

    @property
    def ranks_of_position(self) -> Placement:
        """[positions] ranks of each position, numbered along the pipeline."""
        ranks, first = [], 0
        for count in self.replicas:
            ranks.append(tuple(range(first, first + count)))
            first += count
        return tuple(ranks)

    def microbatches_of(self, position: int, replica: int) -> range:
        """Return the microbatches that one replica of a position runs."""
        return range(replica, self.num_microbatches, self.replicas[position])

    def parallel_pipelines(self, schedule: str) -> int:
        """Return the number of replicas, for a schedule that needs the same number everywhere.

        Raises:
            ProblemError: Positions have different numbers of replicas.
        """
        if len(set(self.replicas)) > 1:
            raise ProblemError(
                f"{schedule} needs as many replicas of every stage, got "
                f"{'-'.join(map(str, self.replicas))}",
                hint="use gpipe, 1f1b, pipedream or 2bw, or replicate every stage alike",
            )
        return self.replicas[0]

    def one_chunk(self, schedule: str) -> None:
        """Refuse model chunks for a schedule that does not support them.

        Raises:
            ProblemError: The shape has several model chunks.
        """
        if self.num_model_chunks != 1:
            raise ProblemError(
                f"{schedule} runs one chunk on a device, got num_model_chunks "
                f"{self.num_model_chunks}",
                hint="use interleaved for several chunks",
            )


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProblemError(f"{name} must be a whole number of at least 1, got {value!r}")


Generator = Callable[[PipelineShape], Schedule]
Replicas = Literal["any", "uniform", "one"]
PassOrder = Literal["forward-first", "alternating", "own"]

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
    placement: Literal["line", "round-robin", "v", "both-ways"] = "line"
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
        """Most channels between two workers: activations one way and gradients the other."""
        # Where a device holds several stages, two workers may be each other's next.
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
