"""The zero-bubble paper's heuristic: place F, B and W by simulated time under a memory limit.

Qi et al., "Zero Bubble Pipeline Parallelism", section 3.1. A rank starts with as many forward
passes as fit before the first backward pass arrives. Then it runs one B and one F in turn, and a W
whenever it would be idle or has no memory left. Every pass takes one unit of time, transfers take
none. A microbatch counts whole from its F to the end of its W, so the limit is one of microbatches.
"""

from dataclasses import dataclass, field

from ..schema.operations import Kind
from .assemble import Slot


def search(p: int, m: int, *, max_in_flight: int) -> list[list[Slot]]:
    """Order the passes of one pipeline; m >= p.

    Args:
        p: Ranks.
        m: Microbatches.
        max_in_flight: The memory limit: microbatches between their F and the end of their W.

    Returns:
        [ranks] slots of each rank, of the variant (of two) with the shorter span.
    """
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
        for position in range(len(ranks)):
            for _ in range(extra[position]):
                self._put_forward(position)
        for position in reversed(range(len(ranks))):
            self._put_backward(position)

    def _extra_forwards(self) -> list[int]:
        """Count the extra forward passes that fit on each rank before its first backward pass.

        Each later rank has at least one fewer, because the rank before it must send their inputs.
        """
        extra = [0] * len(self.ranks)
        first_backward = self.ranks[-1].free + 1
        for position in reversed(range(len(self.ranks) - 1)):
            rank = self.ranks[position]
            room = self.max_in_flight - rank.in_flight
            idle = max(0, first_backward - rank.free)
            extra[position] = min(room, self.m - rank.forwards, idle)
            first_backward = max(rank.free + extra[position], first_backward) + 1
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
            if all(wanted[position:]):
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
            if position == 0 and rank.forwards == self.m:
                while rank.weights < rank.backwards:
                    self._put_weight(position)
            self._put_backward(position)

    def _wants_forward(self, position: int) -> bool:
        """Whether a rank should run a forward pass in this round.

        With ``early_backward``, a rank skips a forward pass that would delay its next backward
        pass. It does so only if the next rank has two inputs waiting and the rank itself has been
        idle for less time than the others.
        """
        rank = self.ranks[position]
        if rank.forwards >= self.m:
            return False
        if not self.early_backward or position + 1 == len(self.ranks):
            return True
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
