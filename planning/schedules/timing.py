"""Time a schedule: start and end of every operation, and metrics that follow from them."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...schema.errors import ProblemError
from ...schema.schedule import (
    PASSES,
    RECEIVES,
    SENDS,
    Kind,
    Message,
    Operation,
    Schedule,
    message_of,
)
from .counting import peak_in_flight

Span = tuple[float, float]
"""(start, end) in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The times of one microbatch on each stage.

    Attributes:
        forward_seconds: [stages] one forward pass of one replica.
        backward_seconds: [stages] one whole backward pass, recomputation included.
        backward_weight_seconds: [stages] the part of it for the gradient of the weights, for
            schedules that split the pass; None takes half.
        activation_seconds: [stages - 1] the transfer of an activation to the next stage.
        gradient_seconds: [stages - 1] the transfer of a gradient back from it.
        update_seconds: [stages] one optimizer step.
        reduce_seconds: [stages] one gradient reduction among replicas. With None, replicas do not
            wait for each other (the reduction hides behind other work).
    """

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    backward_weight_seconds: tuple[float, ...] | None = None
    activation_seconds: tuple[float, ...] | None = None
    gradient_seconds: tuple[float, ...] | None = None
    update_seconds: tuple[float, ...] | None = None
    reduce_seconds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        stages = len(self.forward_seconds)
        for name in self.__slots__:
            values = getattr(self, name)
            if values is None:
                continue
            links = name in ("activation_seconds", "gradient_seconds")
            if len(values) != stages - links:
                raise ProblemError(
                    f"{name} has {len(values)} entries for {stages} stages; give {stages - links}"
                )
            for value in values:
                if not (math.isfinite(value) and value >= 0):
                    raise ProblemError(f"{name} must be finite and >= 0, got {value}")
        for whole, part in zip(
            self.backward_seconds, self.backward_weight_seconds or (), strict=False
        ):
            if part > whole:
                raise ProblemError(
                    f"backward_weight_seconds {part} is a part of backward_seconds, "
                    f"so at most {whole}"
                )

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_seconds: float,
        backward_seconds: float,
        *,
        backward_weight_seconds: float | None = None,
        transfer_seconds: float = 0.0,
    ) -> "StageTimes":
        """Make equal times for all stages, with updates of 0 seconds and without reductions."""
        weight = backward_weight_seconds
        return cls(
            forward_seconds=(forward_seconds,) * num_stages,
            backward_seconds=(backward_seconds,) * num_stages,
            backward_weight_seconds=None if weight is None else (weight,) * num_stages,
            activation_seconds=(transfer_seconds,) * (num_stages - 1),
            gradient_seconds=(transfer_seconds,) * (num_stages - 1),
        )

    def pass_seconds(self, kind: Kind, stage: int) -> float:
        """Seconds of a pass or an update of a stage."""
        if kind is Kind.FORWARD:
            return self.forward_seconds[stage]
        if kind is Kind.UPDATE:
            return self.update_seconds[stage] if self.update_seconds else 0
        whole = self.backward_seconds[stage]
        if kind is Kind.BACKWARD:
            return whole
        parts = self.backward_weight_seconds
        weight = whole / 2 if parts is None else parts[stage]
        return weight if kind is Kind.BACKWARD_WEIGHT else whole - weight

    def transfer_seconds(self, activation: bool, boundary: int) -> float:
        """Seconds of one message over the boundary between two stages."""
        seconds = self.activation_seconds if activation else self.gradient_seconds
        return seconds[boundary] if seconds else 0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of all operations, and the metrics that papers report.

    Attributes:
        schedule: The schedule that was timed.
        spans: [ranks][operations] start and end, in seconds. The span of a send is its transfer;
            that of a receive is the time for which its rank waits.
        makespan_seconds: Time from 0 to the end of the last operation.
        busy_seconds: [ranks] time in passes and updates.
        span_seconds: [ranks] time from the start of a rank's first pass to the end of its last.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    span_seconds: tuple[float, ...]

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """[ranks] time of the makespan not spent in passes and updates."""
        return tuple(self.makespan_seconds - busy for busy in self.busy_seconds)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """[ranks] busy time / makespan."""
        return tuple(_over(busy, self.makespan_seconds) for busy in self.busy_seconds)

    @property
    def span_bubble_fractions(self) -> tuple[float, ...]:
        """[ranks] time without a pass in the rank's own span / that span (zero-bubble papers)."""
        ranks = zip(self.schedule.ranks, self.spans, strict=True)
        passes = (sum(end - start for start, end in _passes(*rank)) for rank in ranks)
        pairs = zip(self.span_seconds, passes, strict=True)
        return tuple(_over(max(0.0, span - busy), span) for span, busy in pairs)

    @property
    def bubble_fraction(self) -> float:
        """Idle time / busy time of all ranks together (thesis 4.2.2)."""
        return _over(sum(self.idle_seconds), sum(self.busy_seconds))

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """[ranks] the most (stage, microbatch) pairs whose activations are held at once."""
        return peak_in_flight(self.schedule)

    @cached_property
    def steady_seconds_per_microbatch(self) -> float:
        """Seconds per input on the last stage, in the second half of the schedule."""
        # For schedules without flushes, which have one startup only. Measured over an integer
        # number of rounds of all replicas.
        last = self.schedule.num_stages - 1
        ends = sorted(
            span[1]
            for operations, spans in zip(self.schedule.ranks, self.spans, strict=True)
            for operation, span in zip(operations, spans, strict=True)
            if operation.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and operation.stage == last
        )
        # Whole rounds of all replicas: a part of one would count some stages' replicas more often.
        rounds = math.lcm(*(len(ranks) for ranks in self.schedule.placement))
        window = len(ends) // 2 // rounds * rounds
        if window == 0:
            return _over(self.makespan_seconds, self.schedule.num_microbatches)
        return (ends[-1] - ends[-1 - window]) / window


def walk(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Yield (rank, index of the operation) so that causes come before effects."""
    position = [0] * schedule.num_ranks
    sent: set[Message] = set()
    waiting: dict[Message, int] = {}
    arrived: dict[tuple[int, int], list[int]] = {}
    ready = deque(range(schedule.num_ranks))
    # Who received something, or never ran, may go on.
    while ready:
        rank = ready.popleft()
        operations = schedule.ranks[rank]
        # A rank runs until it waits for something.
        while position[rank] < len(operations):
            operation = operations[position[rank]]
            if operation.kind in RECEIVES:
                message = message_of(operation, rank)
                if message not in sent:
                    # Woken by the send, so nobody asks again and again: O(operations).
                    waiting[message] = rank
                    break
                sent.remove(message)
            elif operation.kind is Kind.REDUCE:
                # The last rank of the stage to arrive lets all go on, one directly after another.
                group = arrived.setdefault((operation.stage, operation.microbatch), [])
                group.append(rank)
                if len(group) < len(schedule.placement[operation.stage]):
                    break
                for peer in group:
                    yield peer, position[peer]
                    position[peer] += 1
                ready.extend(peer for peer in group if peer != rank)
                continue
            elif operation.kind in SENDS:
                message = message_of(operation, rank)
                sent.add(message)
                if message in waiting:
                    ready.append(waiting.pop(message))
            yield rank, position[rank]
            position[rank] += 1


def time_schedule(schedule: Schedule, times: StageTimes) -> Timing:
    """Time a schedule, event by event; O(operations).

    Passes run in list order; transfers overlap with them, one at a time on each directed link.

    Raises:
        ProblemError: The times are for another number of stages, or the schedule deadlocks.
    """
    if len(times.forward_seconds) != schedule.num_stages:
        raise ProblemError(
            f"times for {len(times.forward_seconds)} stages do not fit a schedule of "
            f"{schedule.num_stages}; give one entry for each virtual stage"
        )
    clock = _Clock(schedule, times)
    for rank, index in walk(schedule):
        clock.run(rank, schedule.ranks[rank][index])
    stuck = [r for r, ops in enumerate(schedule.ranks) if len(clock.spans[r]) < len(ops)]
    if stuck:
        rank = stuck[0]
        waits = schedule.ranks[rank][len(clock.spans[rank])]
        raise ProblemError(
            f"schedule {schedule.name} deadlocks: rank {rank} waits for ever in {waits.kind} of "
            f"stage {waits.stage}, microbatch {waits.microbatch}",
            hint="validate the schedule",
        )
    return Timing(
        schedule=schedule,
        spans=tuple(map(tuple, clock.spans)),
        makespan_seconds=max((span[1] for spans in clock.spans for span in spans), default=0),
        busy_seconds=tuple(clock.busy),
        span_seconds=tuple(
            _own_span(*pair) for pair in zip(schedule.ranks, clock.spans, strict=True)
        ),
    )


class _Clock:
    """The current times of all ranks and links."""

    def __init__(self, schedule: Schedule, times: StageTimes) -> None:
        self.schedule = schedule
        self.times = times
        self.now: list[float] = [0] * schedule.num_ranks
        self.busy: list[float] = [0] * schedule.num_ranks
        self.spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
        self.arrival: dict[Message, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        # [directed link] when it is free: one transfer at a time.
        self.reduction: dict[tuple[int, int], float] = {}

    def run(self, rank: int, operation: Operation) -> None:
        start = self.now[rank]
        if operation.kind in SENDS:
            self.spans[rank].append(self._send(rank, operation, start))
            return
        if operation.kind in RECEIVES:
            end = max(start, self.arrival.pop(message_of(operation, rank)))
        elif operation.kind is Kind.REDUCE:
            start, end = self._reduce(rank, operation)
        else:
            seconds = self.times.pass_seconds(operation.kind, operation.stage)
            self.busy[rank] += seconds
            end = start + seconds
        self.spans[rank].append((start, end))
        self.now[rank] = end

    def _send(self, rank: int, operation: Operation, start: float) -> Span:
        message = message_of(operation, rank)
        activation, boundary, _, source, destination = message
        begin = max(start, self.link_free.get((source, destination), 0))
        arrival = begin + self.times.transfer_seconds(activation, boundary)
        self.link_free[source, destination] = self.arrival[message] = arrival
        return begin, arrival

    def _reduce(self, rank: int, operation: Operation) -> Span:
        """Start a reduction on all ranks of its stage, which `walk` yields one after another."""
        if self.times.reduce_seconds is None:
            return self.now[rank], self.now[rank]
        key = (operation.stage, operation.microbatch)
        if key not in self.reduction:
            peers = self.schedule.placement[operation.stage]
            self.reduction[key] = max(self.now[peer] for peer in peers)
        start = self.reduction[key]
        return start, start + self.times.reduce_seconds[operation.stage]


def _passes(operations: Sequence[Operation], spans: Sequence[Span]) -> list[Span]:
    return [span for op, span in zip(operations, spans, strict=True) if op.kind in PASSES]


def _own_span(operations: Sequence[Operation], spans: Sequence[Span]) -> float:
    passes = _passes(operations, spans)
    return passes[-1][1] - passes[0][0] if passes else 0


def _over(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
