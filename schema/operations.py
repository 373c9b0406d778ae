"""The definition of a schedule: an ordered list of operations for each rank, as plain data.

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
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal

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
