"""What a schedule is: for each rank an ordered list of operations, as plain data.

One definition serves everyone: the timer predicts from it, the report draws it, the runtime
executes it. So the lists are complete: every transfer names its peer, every pass the weight
version it reads, and following the list from top to bottom is all that a worker has to do.

How a list is executed (the contract between the generators, `walk`, the timer and the runtime):

* passes, updates and reductions run one after another, in the order of the list;
* a send never blocks: it starts where it stands and its buffer is kept until it is done;
* a receive waits until its message is there. A worker may post receives ahead of need;
* the messages of one channel (source, destination, activation or gradient) are sent and received
  in the same order, so a channel needs no tags;
* a reduction waits for every rank that holds the stage.

Two passes whose receives all stand before them and whose sends all stand behind them form an
overlapped pair (DualPipe's F&B): they start together and hand on their results together.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

from ..schema.schedule_traits import WeightSemantics as WeightSemantics


class Kind(StrEnum):
    """What an operation does."""

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

Message = tuple[bool, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of a rank's list.

    Attributes:
        kind: What is done.
        stage: The (virtual) stage it belongs to, from 0 at the input of the model; for a transfer
            the stage of the rank whose list holds it.
        microbatch: Its number, from 0; of a reduction or update the first it covers.
        num_microbatches: How many consecutive microbatches a reduction or update covers, over all
            replicas of the stage; 1 for everything else.
        weight_version: The version that a pass reads, or that an update writes (an update takes
            version - 1 and applies the mean gradient of its microbatches). None for transfers
            and reductions.
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
        placement: [stages] the ranks that hold each (virtual) stage. More than one: replicas,
            each of which runs a share of the microbatches.
        num_microbatches: Microbatches in the whole schedule, over all replicas.
        weight_semantics: Which weight version a pass reads, and when versions are made (see
            ``ScheduleTraits``).
        ranks: [ranks] the operations of each rank, in order.
        max_in_flight: [ranks] the most (stage, microbatch) pairs whose activations a rank may
            hold, as the schedule promises; None where it promises nothing.
        max_weight_versions: [ranks] the most versions of one stage's weights that a rank may
            hold, as the schedule promises; None where it promises nothing.
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
        """Operations over all ranks."""
        return sum(map(len, self.ranks))

    @cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """[ranks] the stages each rank holds, in the order of the model: its model chunks."""
        held: list[list[int]] = [[] for _ in self.ranks]
        for stage, ranks in enumerate(self.placement):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def channels(self) -> tuple[tuple[int, int, bool], ...]:
        """(source, destination, carries activations) of every channel in use, sorted."""
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
    """The identity of what a transfer carries: equal for the send and its receive.

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

    Nothing but the schedule's own dependencies separates the batches, as in a training loop.

    Args:
        schedule: A schedule with flushes.
        num_batches: How often; microbatches and weight versions are numbered on.
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
