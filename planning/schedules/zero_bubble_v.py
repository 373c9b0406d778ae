"""ZB-V: zero bubble with the memory of 1F1B; each rank has two stages, placed in a V shape.

Qi et al., "Zero Bubble Pipeline Parallelism", section 6, and "Pipeline Parallelism with
Controllable Memory". Rank r holds stages r and 2p - 1 - r, so the first backward pass starts
where the first forward pass started. The order is found by the authors' heuristic: simulate
with every pass taking one unit of time and transfers none, alternate backward and forward
passes, fill waits and free memory with weight gradients.

A microbatch travels four legs: forward down the ranks and up again, backward down and up again.
"""

from collections import deque

from ...schema.errors import ProblemError
from ...schema.schedule import Kind, PipelineShape, Schedule
from .assemble import Pass, Slot, parallel_pipelines
from .registry import schedule

_DOWN, _UP, _BACK_DOWN, _BACK_UP = range(4)


@schedule("zb-v", placement="v", num_model_chunks=(2,), splits_backward=True)
def generate(shape: PipelineShape) -> Schedule:
    """Order the passes of one batch.

    Raises:
        ProblemError: A pipeline has fewer than p microbatches, or ranks have more than two stages.
    """
    p, count = shape.pipeline_parallel_size, shape.parallel_pipelines("zb-v")
    if shape.num_model_chunks not in (1, 2):
        raise ProblemError(
            f"zb-v puts two stages on a rank, got num_model_chunks {shape.num_model_chunks}"
        )
    if shape.num_microbatches < count * p:
        raise ProblemError(
            f"zb-v needs at least {p} microbatches in each pipeline, got "
            f"{shape.num_microbatches // count}",
            hint="use 1f1b for few microbatches",
        )
    return parallel_pipelines(
        "zb-v",
        shape,
        positions=[min(stage, 2 * p - 1 - stage) for stage in range(2 * p)],
        one_pipeline=lambda m: _Search(p, m).run(),
        max_in_flight=[2 * p] * p,
    )


class _Search:
    """Simulated ranks: an F stores two units of memory, of which B and W free one each."""

    def __init__(self, p: int, m: int) -> None:
        self.p, self.m = p, m
        self.slots: list[list[Slot]] = [[] for _ in range(p)]
        self.done = [[0, 0, 0, 0] for _ in range(p)]
        self.ends: dict[tuple[int, int, int], int] = {}
        self.free = [0] * p
        self.memory = [0] * p
        # As much as 1F1B's first rank holds: p microbatches on two stages, two units each.
        self.max_memory = 4 * p
        self.pending: list[deque[Pass]] = [deque() for _ in range(p)]

    def run(self) -> list[list[Slot]]:
        self._warm_up()
        self._level()
        # A backward and a forward pass each, 2 m times: each rank has 2 m of both.
        for _ in range(2 * self.m):
            self._one_backward_each()
            self._one_forward_each()
        for rank in range(self.p):
            while self.pending[rank]:
                self._put_weight(rank)
        return self.slots

    def _warm_up(self) -> None:
        """Run the first microbatch down and up the ranks; start more while ranks would wait."""
        for rank in range(self.p):
            self._put(_DOWN, rank)
        for rank in reversed(range(self.p)):
            if rank < self.p - 1:
                # The way up and back has arrived; while a rank waits for it, more microbatches
                # start, as far as memory allows for those that come down again.
                arrives = self.ends[_UP, rank + 1, 0]
                while (
                    self.memory[rank] + 2 * (2 + 2 * rank) <= self.max_memory
                    and self.free[rank] < arrives
                    and self.done[rank][_DOWN] < self.m
                ):
                    for upper in range(rank + 1):
                        self._put(_DOWN, upper)
            self._put(_UP, rank)

    def _level(self) -> None:
        """Run forward passes on later ranks until they have as many as earlier ranks."""
        leg = _DOWN
        for rank in range(1, self.p):
            mine, above = self.done[rank], self.done[rank - 1]
            while (
                mine[_DOWN] + mine[_UP] < above[_DOWN] + above[_UP]
                or mine[_UP] <= above[_UP] < self.m
            ):
                for lower in reversed(range(rank, self.p)):
                    if self.done[lower][leg] < self.m:
                        self._put(leg, lower)
                leg = _UP if leg == _DOWN else _DOWN

    def _one_backward_each(self) -> None:
        legs = [self._next_backward(rank) for rank in range(self.p)]
        # Ups from the last rank, downs from the first: each pass finds its input ready.
        ups = [rank for rank in reversed(range(self.p)) if legs[rank] == _BACK_UP]
        downs = [rank for rank in range(self.p) if legs[rank] == _BACK_DOWN]
        for rank in ups + downs:
            self._fill(rank, legs[rank])
            self._put(legs[rank], rank)

    def _next_backward(self, rank: int) -> int:
        # The way down again must not fall behind the way up, which other ranks wait for.
        done = self.done[rank]
        if done[_BACK_UP] >= done[_BACK_DOWN]:
            return _BACK_DOWN
        arrived = rank == self.p - 1 or self._arrived(_BACK_UP, rank)
        return _BACK_UP if arrived or done[_BACK_DOWN] >= self.m else _BACK_DOWN

    def _one_forward_each(self) -> None:
        for rank in range(self.p):
            leg = self._next_forward(rank)
            if leg is None:
                continue
            # An F takes two units; a W gives one back.
            while self.memory[rank] + 2 > self.max_memory:
                self._put_weight(rank)
            self._fill(rank, leg)
            self._put(leg, rank)

    def _next_forward(self, rank: int) -> int | None:
        done = self.done[rank]
        if done[_UP] >= self.m:
            return None
        if done[_UP] >= done[_DOWN]:
            return _DOWN
        if rank == self.p - 1 or self._arrived(_UP, rank):
            return _UP
        can_start = done[_DOWN] < self.m and (rank == 0 or self._arrived(_DOWN, rank))
        return _DOWN if can_start else None

    def _source(self, leg: int, rank: int) -> int | None:
        """Return the rank that sends the microbatch on this leg; None at a turning point."""
        source = rank - 1 if leg in (_DOWN, _BACK_DOWN) else rank + 1
        return source if 0 <= source < self.p else None

    def _arrived(self, leg: int, rank: int) -> bool:
        return (leg, self._source(leg, rank), self.done[rank][leg]) in self.ends

    def _fill(self, rank: int, leg: int) -> None:
        """Run weight gradients while the rank would otherwise wait."""
        source = self._source(leg, rank)
        if source is not None:
            arrives = self.ends[leg, source, self.done[rank][leg]]
            while self.pending[rank] and self.free[rank] < arrives:
                self._put_weight(rank)

    def _put(self, leg: int, rank: int) -> None:
        microbatch, source = self.done[rank][leg], self._source(leg, rank)
        ready = 0 if source is None else self.ends[leg, source, microbatch]
        stage = rank if leg in (_DOWN, _BACK_UP) else 2 * self.p - 1 - rank
        kind = Kind.FORWARD if leg in (_DOWN, _UP) else Kind.BACKWARD_INPUT
        if kind is Kind.BACKWARD_INPUT:
            self.pending[rank].append((Kind.BACKWARD_WEIGHT, stage, microbatch))
        self.free[rank] = max(self.free[rank], ready) + 1
        self.ends[leg, rank, microbatch] = self.free[rank]
        self.done[rank][leg] += 1
        self.memory[rank] += 2 if kind is Kind.FORWARD else -1
        self.slots[rank].append(((kind, stage, microbatch),))

    def _put_weight(self, rank: int) -> None:
        self.slots[rank].append((self.pending[rank].popleft(),))
        self.free[rank] += 1
        self.memory[rank] -= 1
