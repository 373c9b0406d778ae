"""Complete an order of passes into a schedule, for one pipeline or several equal ones side by side.

A generator only states which passes each rank runs in which order. The rest is the same for all
schedules and is added here: transfers directly before the pass that needs them and directly after
the pass that makes them, weight versions, reductions and updates.

``parallel_pipelines`` replicates schedules that are defined for one pipeline only. Replica j of
every position belongs to pipeline j, which runs microbatches j, j + d, j + 2d, ... (the parallel
pipelines of thesis 3.2.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...schema.schedule import (
    DIFFERENTIATING,
    FREEING,
    Kind,
    Operation,
    PipelineShape,
    Placement,
    Schedule,
    WeightSemantics,
)

Pass = tuple[Kind, int, int]
"""(kind, stage, microbatch)."""
Slot = tuple[Pass, ...]
"""One pass, or two passes that overlap."""
Turn = tuple[bool, int]
"""(whether the pass is a backward pass, its microbatch)."""
Version = Callable[[int, int], int]
"""The weight version that (stage, microbatch) reads."""


def alternating(microbatches: Sequence[int], ahead: int) -> list[Turn]:
    """Order ``ahead`` forward passes, then one forward and one backward pass in turn.

    With as many ahead as keep the pipeline full this is 1F1B-RR (thesis 2.4.2), with all GPipe.
    """
    turns: list[Turn] = [(False, microbatch) for microbatch in microbatches[:ahead]]
    for number, microbatch in enumerate(microbatches):
        if number + ahead < len(microbatches):
            turns.append((False, microbatches[number + ahead]))
        turns.append((True, microbatch))
    return turns


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOrder:
    """The passes of each rank, and how weights are updated.

    Attributes:
        placement: [stages] the ranks that hold each stage.
        slots: [ranks] what each rank computes, in order.
        num_microbatches: In the whole schedule.
        microbatches_per_update: [stages] microbatches per weight version; None for a single update
            at the end.
        version: (stage, microbatch) -> the weight version that the passes read.
    """

    placement: Placement
    slots: Sequence[Sequence[Slot]]
    num_microbatches: int
    microbatches_per_update: Sequence[int] | None = None
    version: Version = lambda stage, microbatch: 0


def assemble(
    name: str,
    order: PassOrder,
    *,
    weight_semantics: WeightSemantics = "flush",
    max_in_flight: Sequence[int] | None = None,
    max_weight_versions: Sequence[int] | None = None,
) -> Schedule:
    """Complete an order of passes into a schedule.

    ``max_in_flight``, of (stage, microbatch) pairs, and ``max_weight_versions`` [ranks] are
    promised bounds on what is held; None promises nothing.
    """
    # (stage, microbatch) -> the rank that runs it, where messages go.
    holder = {
        (stage, microbatch): rank
        for rank, slots in enumerate(order.slots)
        for slot in slots
        for kind, stage, microbatch in slot
        if kind is Kind.FORWARD
    }
    return Schedule(
        name=name,
        placement=order.placement,
        num_microbatches=order.num_microbatches,
        weight_semantics=weight_semantics,
        ranks=tuple(
            _Rank(rank, order, holder).operations(slots) for rank, slots in enumerate(order.slots)
        ),
        max_in_flight=None if max_in_flight is None else tuple(max_in_flight),
        max_weight_versions=None if max_weight_versions is None else tuple(max_weight_versions),
    )


class _Rank:
    """Builds the list of operations of one rank."""

    def __init__(self, rank: int, order: PassOrder, holder: dict[tuple[int, int], int]) -> None:
        self.rank = rank
        self.order = order
        self.holder = holder
        self.stages = [s for s, ranks in enumerate(order.placement) if rank in ranks]
        self.left = {stage: self._passes_per_round(stage) for stage in self.stages}
        # A replica may have no microbatch of the last, short round.
        self.takes_part = {stage: [n > 0 for n in counts] for stage, counts in self.left.items()}
        self.next_round = dict.fromkeys(self.stages, 0)
        self.written: list[Operation] = []

    def operations(self, slots: Sequence[Slot]) -> tuple[Operation, ...]:
        # The parts of a slot overlap: all inputs before, all outputs after them.
        for slot in slots:
            for one in slot:
                self._receive(*one)
            for kind, stage, microbatch in slot:
                version = self.order.version(stage, microbatch)
                self._add(kind, stage, microbatch, weight_version=version)
            for one in slot:
                self._send(*one)
            for one in slot:
                self._count(*one)
        for stage in self.stages:
            self._close_rounds(stage, at_end=True)
        # All reductions come before the first update, so that workers can clip by the global norm.
        if self.order.microbatches_per_update is None:
            self.written.sort(key=lambda operation: operation.kind is Kind.UPDATE)
        return tuple(self.written)

    def _add(
        self,
        kind: Kind,
        stage: int,
        microbatch: int,
        *,
        weight_version: int | None = None,
        peer: int | None = None,
    ) -> None:
        self.written.append(
            Operation(
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                weight_version=weight_version,
                peer=peer,
            )
        )

    def _receive(self, kind: Kind, stage: int, microbatch: int) -> None:
        if kind is Kind.FORWARD:
            self._transfer(Kind.RECEIVE_ACTIVATION, stage, microbatch, stage - 1)
        elif kind in DIFFERENTIATING:
            self._transfer(Kind.RECEIVE_GRADIENT, stage, microbatch, stage + 1)

    def _send(self, kind: Kind, stage: int, microbatch: int) -> None:
        if kind is Kind.FORWARD:
            self._transfer(Kind.SEND_ACTIVATION, stage, microbatch, stage + 1)
        elif kind in DIFFERENTIATING:
            self._transfer(Kind.SEND_GRADIENT, stage, microbatch, stage - 1)

    def _transfer(self, kind: Kind, stage: int, microbatch: int, other_stage: int) -> None:
        peer = self.holder.get((other_stage, microbatch), self.rank)
        # Neighbouring stages on one rank (the turn of a V) send nothing.
        if peer != self.rank:
            self._add(kind, stage, microbatch, peer=peer)

    def _round_length(self, stage: int) -> int:
        per_update = self.order.microbatches_per_update
        return self.order.num_microbatches if per_update is None else per_update[stage]

    def _passes_per_round(self, stage: int) -> list[int]:
        length = self._round_length(stage)
        counts = [0] * -(-self.order.num_microbatches // length)
        for slot in self.order.slots[self.rank]:
            for kind, of_stage, microbatch in slot:
                if kind in FREEING and of_stage == stage:
                    counts[microbatch // length] += 1
        return counts

    def _count(self, kind: Kind, stage: int, microbatch: int) -> None:
        """Count a completed microbatch; update if it was the last one of its round."""
        if kind in FREEING:
            self.left[stage][microbatch // self._round_length(stage)] -= 1
            if self.order.microbatches_per_update is not None:
                self._close_rounds(stage)

    def _close_rounds(self, stage: int, *, at_end: bool = False) -> None:
        """Reduce and update for each complete round."""
        rounds, length = self.left[stage], self._round_length(stage)
        while self.next_round[stage] < len(rounds):
            number = self.next_round[stage]
            # A round is closed when all its passes are done. A replica without a microbatch in the
            # last one takes part at the end, as its peers wait for it.
            if rounds[number] or not (at_end or self.takes_part[stage][number]):
                return
            first = number * length
            covered = min(length, self.order.num_microbatches - first)
            for kind in (Kind.REDUCE, Kind.UPDATE):
                if kind is Kind.UPDATE or len(self.order.placement[stage]) > 1:
                    self.written.append(
                        Operation(
                            kind=kind,
                            stage=stage,
                            microbatch=first,
                            num_microbatches=covered,
                            weight_version=number + 1 if kind is Kind.UPDATE else None,
                        )
                    )
            self.next_round[stage] += 1


Pipeline = Sequence[Sequence[Slot]]


def parallel_pipelines(
    name: str,
    shape: PipelineShape,
    *,
    positions: Sequence[int],
    one_pipeline: Callable[[int], Pipeline],
    max_in_flight: Sequence[int],
) -> Schedule:
    """Build the flushing schedule of d copies of one pipeline.

    ``positions`` [stages] hold the stages. ``one_pipeline`` makes of a number of microbatches the
    slots [positions] of one pipeline, which numbers them from 0. ``max_in_flight`` [positions] is
    the promised bound on activations held.
    """
    count = shape.parallel_pipelines(name)
    shares = [len(shape.microbatches_of(0, replica)) for replica in range(count)]
    # Pipelines with equally many microbatches have the same order, so each is made once.
    pipelines = {share: one_pipeline(share) for share in set(shares)}
    slots = [
        [
            tuple((kind, stage, k * count + replica) for kind, stage, k in slot)
            for slot in pipelines[shares[replica]][position]
        ]
        for position in range(shape.pipeline_parallel_size)
        for replica in range(count)
    ]
    order = PassOrder(
        placement=tuple(shape.ranks_of_position[position] for position in positions),
        slots=slots,
        num_microbatches=shape.num_microbatches,
    )
    return assemble(
        name,
        order,
        max_in_flight=[bound for bound in max_in_flight for _ in range(count)],
        max_weight_versions=[1] * len(slots),
    )
