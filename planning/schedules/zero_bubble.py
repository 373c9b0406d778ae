"""ZB-H1 and ZB-H2: backward passes split so that weight gradients fill the bubble.

Qi et al., "Zero Bubble Pipeline Parallelism" (ICLR 2024). The backward pass is split into the
gradient of the input (B), which other ranks wait for, and that of the weights (W), which no rank
waits for. H1 holds no more activations than 1F1B does on its first rank. H2 holds twice as many,
where an activation counts half after its B. If F, B and W take equally long, H2 leaves no bubble in
a rank's own span.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from ...schema.errors import ProblemError
from ...schema.schedule import Kind, PipelineShape, Schedule
from .assemble import Pipeline, Slot, parallel_pipelines
from .registry import schedule


@schedule("zb-h1", splits_backward=True)
def h1(shape: PipelineShape) -> Schedule:
    """Generate ZB-H1: 1F1B with weight gradients delayed by the rank's position in the pipeline."""
    p = shape.pipeline_parallel_size
    return _build("zb-h1", shape, lambda m: _handcrafted(p, m), p)


@schedule("zb-h2", splits_backward=True)
def h2(shape: PipelineShape) -> Schedule:
    """Generate ZB-H2: more forward passes in the startup, 2p - 1 microbatches, no bubble."""
    # The order is found by the paper's heuristic, for F = B = W.
    p = shape.pipeline_parallel_size
    most = 2 * p - 1
    return _build("zb-h2", shape, lambda m: search(p, m, max_in_flight=most), most)


def _build(
    name: str, shape: PipelineShape, one_pipeline: Callable[[int], Pipeline], most_in_flight: int
) -> Schedule:
    shape.one_chunk(name)
    count, p = shape.parallel_pipelines(name), shape.pipeline_parallel_size
    if shape.num_microbatches < count * p:
        raise ProblemError(
            f"{name} needs at least {p} microbatches in each pipeline, got "
            f"{shape.num_microbatches // count}",
            hint="use 1f1b for few microbatches",
        )
    most = -(-shape.num_microbatches // count)
    return parallel_pipelines(
        name,
        shape,
        positions=range(p),
        one_pipeline=one_pipeline,
        max_in_flight=[min(most_in_flight, most)] * p,
    )


def _handcrafted(p: int, m: int) -> list[list[Slot]]:
    pipeline = []
    # As 1F1B, but each weight gradient comes ``position`` microbatches late: it fills the bubble
    # that later ranks have at the end, and holds no more than the first rank of 1F1B.
    for position in range(p):
        ahead = p - position
        slots: list[Slot] = [((Kind.FORWARD, position, k),) for k in range(ahead)]
        for k in range(m):
            slots.append(((Kind.BACKWARD_INPUT, position, k),))
            if k >= position:
                slots.append(((Kind.BACKWARD_WEIGHT, position, k - position),))
            if k + ahead < m:
                slots.append(((Kind.FORWARD, position, k + ahead),))
        slots += [((Kind.BACKWARD_WEIGHT, position, k),) for k in range(m - position, m)]
        pipeline.append(slots)
    return pipeline


def search(p: int, m: int, *, max_in_flight: int) -> list[list[Slot]]:
    """Order the passes of one pipeline; m >= p.

    Args:
        p: Ranks.
        m: Microbatches.
        max_in_flight: The memory limit: microbatches between their F and the end of their W.

    Returns:
        [ranks] slots of each rank, of the variant (of two) with the shorter span.
    """
    # Whether early backward passes help depends on p, m and the memory: both are tried.
    variants = [_Search(p, m, max_in_flight, early).run() for early in (True, False)]
    found = min(variants, key=lambda ranks: max(rank.span for rank in ranks))
    return [
        [((kind, position, microbatch),) for kind, microbatch in rank.order]
        for position, rank in enumerate(found)
    ]


@dataclass
class _RankState:
    """The state of one simulated rank: passes so far, when it is free, microbatches in flight."""

    order: list[tuple[Kind, int]] = field(default_factory=list)
    ends: dict[tuple[Kind, int], int] = field(default_factory=dict)
    free: int = 0
    in_flight: int = 0
    bubble: int = 0
    forwards: int = 0
    backwards: int = 0
    weights: int = 0

    @property
    def span(self) -> int:
        first = self.ends[Kind.FORWARD, 0]
        return self.free - first + 1


class _Search:
    def __init__(self, p: int, m: int, max_in_flight: int, early_backward: bool) -> None:
        self.m = m
        self.max_in_flight = max_in_flight
        self.early_backward = early_backward
        self.ranks = [_RankState() for _ in range(p)]

    def run(self) -> list[_RankState]:
        self._warm_up()
        for _ in range(self.m - 1):
            self._one_round()
        for position, rank in enumerate(self.ranks):
            while rank.weights < self.m:
                self._put_weight(position)
        return self.ranks

    def _warm_up(self) -> None:
        ranks = self.ranks
        for position in range(len(ranks)):
            self._put_forward(position)
        extra = self._extra_forwards()
        # Passes take one unit of time, so times are whole numbers.
        for position in range(len(ranks)):
            for _ in range(extra[position]):
                self._put_forward(position)
        for position in reversed(range(len(ranks))):
            self._put_backward(position)

    def _extra_forwards(self) -> list[int]:
        """Count the extra forward passes that fit on each rank before its first backward pass."""
        # Each later rank has at least one fewer, because the rank before it must send their
        # inputs.
        extra = [0] * len(self.ranks)
        # When the first gradient comes back, if every rank takes one unit.
        first_backward = self.ranks[-1].free + 1
        for position in reversed(range(len(self.ranks) - 1)):
            rank = self.ranks[position]
            room = self.max_in_flight - rank.in_flight
            idle = max(0, first_backward - rank.free)
            extra[position] = min(room, self.m - rank.forwards, idle)
            first_backward = max(rank.free + extra[position], first_backward) + 1
        # Each later rank has at least one fewer: the rank before it sends its inputs.
        for position in range(1, len(extra)):
            while (
                0 < extra[position] >= extra[position - 1]
                and self.ranks[position].forwards + extra[position] < self.m
            ):
                extra[position] -= 1
        return extra

    def _one_round(self) -> None:
        """Run one forward pass on every rank that has any left, then one backward pass on each."""
        wanted = [self._wants_forward(position) for position in range(len(self.ranks))]
        for position, rank in enumerate(self.ranks):
            # A forward pass that a later rank skips would only pile up in front of it.
            if all(wanted[position:]):
                # Memory is full: a weight gradient frees one microbatch.
                while rank.in_flight + 1 > self.max_in_flight:
                    self._put_weight(position)
                if position > 0:
                    self._fill(position, self._end(position - 1, Kind.FORWARD, rank.forwards))
                self._put_forward(position)
        for position in reversed(range(len(self.ranks))):
            rank = self.ranks[position]
            if position + 1 < len(self.ranks):
                end = self._end(position + 1, Kind.BACKWARD_INPUT, rank.backwards)
                self._fill(position, end)
            # Nothing is left to put in front of the first rank, so it holds no weight gradients
            # back.
            if position == 0 and rank.forwards == self.m:
                while rank.weights < rank.backwards:
                    self._put_weight(position)
            self._put_backward(position)

    def _wants_forward(self, position: int) -> bool:
        """Whether a rank should run a forward pass in this round."""
        rank = self.ranks[position]
        if rank.forwards >= self.m:
            return False
        # ``early_backward``: a forward pass that would delay the next backward pass may be skipped
        # ...
        if not self.early_backward or position + 1 == len(self.ranks):
            return True
        # ... only if the next rank has two inputs waiting ...
        behind = self.ranks[position + 1]
        if rank.forwards < behind.forwards + 2:
            return True
        arrives = behind.free + 2
        if rank.free >= arrives:
            return False
        overfull = rank.in_flight + 1 - self.max_in_flight
        weights = min(max(0, overfull), rank.backwards - rank.weights)
        if rank.free + 1 + weights <= arrives:
            return True
        # ... and this rank has been idle for less time than others.
        return arrives - rank.free > max(one.bubble for one in self.ranks) - rank.bubble

    def _fill(self, position: int, until: int) -> None:
        """Run weight gradients while the rank would otherwise wait."""
        rank = self.ranks[position]
        while rank.weights < rank.backwards and rank.free < until:
            self._put_weight(position)

    def _end(self, position: int, kind: Kind, microbatch: int) -> int:
        return self.ranks[position].ends[kind, microbatch]

    def _put_forward(self, position: int) -> None:
        rank = self.ranks[position]
        ready = self._end(position - 1, Kind.FORWARD, rank.forwards) if position else 0
        self._put(rank, Kind.FORWARD, rank.forwards, ready)
        rank.forwards += 1

    def _put_backward(self, position: int) -> None:
        rank, last = self.ranks[position], position + 1 == len(self.ranks)
        ready = 0 if last else self._end(position + 1, Kind.BACKWARD_INPUT, rank.backwards)
        self._put(rank, Kind.BACKWARD_INPUT, rank.backwards, ready)
        rank.backwards += 1

    def _put_weight(self, position: int) -> None:
        rank = self.ranks[position]
        self._put(rank, Kind.BACKWARD_WEIGHT, rank.weights, 0)
        rank.weights += 1

    def _put(self, rank: _RankState, kind: Kind, microbatch: int, ready: int) -> None:
        start = max(rank.free, ready)
        if rank.forwards:
            rank.bubble += start - rank.free
        rank.free = start + 1
        rank.in_flight += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD_WEIGHT)
        rank.ends[kind, microbatch] = rank.free
        rank.order.append((kind, microbatch))
