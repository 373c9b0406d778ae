"""Run a schedule's lists: nothing here decides what happens when (schedules/operations.py)."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from ...schedules.counting import peak_in_flight
from ...schedules.operations import ACTIVATIONS, RECEIVES, SENDS, Kind, Operation, Schedule
from ...schema.errors import ProblemError
from .channels import Inbox, Outbox
from .messages import Message
from .transport import Channel, Line, Transport

NOTHING: Message = ((), ())


class Passes(Protocol):
    """What a job does around the operations."""

    def forward(self, operation: Operation, received: Message) -> tuple[Any, ...]:
        """Run the stage's forward pass; return what goes to the next stage."""

    def backward_pass(
        self, operation: Operation, gradients: tuple[Any, ...] | None
    ) -> tuple[Any, ...]:
        """Run a backward pass (or half of one); return the gradients for the stage before."""

    def reduce(self, operation: Operation) -> None:
        """Sum gradients over the replicas of a stage."""

    def update(self, operation: Operation) -> None:
        """Make the next weight version."""


class _Step(NamedTuple):
    """An operation, and what follows from its place in the list."""

    operation: Operation
    place: tuple[int, int]
    leaves: bool
    """Whether what the pass makes goes to another rank (its send follows in the list)."""


class _Program:
    """One rank's list, looked through once: a training loop runs it again and again."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        operations = schedule.ranks[rank]
        sends = {(op.kind, op.stage, op.microbatch) for op in operations if op.kind in SENDS}
        self.schedule = schedule
        self.last_stage = schedule.num_stages - 1
        # No rank holds more microbatches, so of more messages the first has been answered.
        self.most_under_way = max(peak_in_flight(schedule))
        self.steps = [
            _Step(
                op,
                (op.stage, op.microbatch),
                op.kind in _SENT_BY and (_SENT_BY[op.kind], op.stage, op.microbatch) in sends,
            )
            for op in operations
        ]
        self._expected: dict[int, dict[tuple[int, bool], int]] = {}

    def expected_from(self, place: int) -> dict[tuple[int, bool], int]:
        """Messages by (peer, whether activations) that are due from a place in the list on."""
        if place not in self._expected:
            receives = [s.operation for s in self.steps[place:] if s.operation.kind in RECEIVES]
            counts = Counter((op.peer, op.kind in ACTIVATIONS) for op in receives)
            self._expected[place] = {
                (peer, activation): number
                for (peer, activation), number in counts.items()
                if peer is not None
            }
        return self._expected[place]


_SENT_BY = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}
_STARTS = (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)


class Executor:
    """One rank of a pipeline: its channels, and its place in the list."""

    def __init__(self, rank: int, transport: Transport | None) -> None:
        self._rank, self._transport = rank, transport
        self._inboxes: dict[tuple[int, bool], Inbox] = {}
        self._outboxes: dict[tuple[int, bool], Outbox] = {}
        self._program: _Program | None = None
        self._next = 0
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._made: dict[tuple[Kind, int, int], tuple[Any, ...]] = {}

    @property
    def is_drained(self) -> bool:
        """Whether the list is done: nothing is in flight."""
        return self._program is None or self._next == len(self._program.steps)

    def begin(self, schedule: Schedule) -> tuple[Operation, ...]:
        """Start a schedule; receives are posted from here on, ahead of need.

        Returns:
            This rank's list.
        """
        if self._program is None or self._program.schedule is not schedule:
            self._program = _Program(schedule, self._rank)
        self._go_on(0)
        return schedule.ranks[self._rank]

    def shorten(self, schedule: Schedule) -> tuple[Operation, ...]:
        """End earlier: go on with a schedule of fewer microbatches, which began the same way.

        Returns:
            What is left of this rank's list.
        """
        assert self._program is not None
        before, now = (whole.ranks[self._rank] for whole in (self._program.schedule, schedule))
        if before[: self._next] != now[: self._next]:
            raise ProblemError(f"{schedule.name} of fewer microbatches does not begin alike")
        for inbox in self._inboxes.values():
            inbox.expect_none()
        self._program = _Program(schedule, self._rank)
        self._go_on(self._next)
        return now[self._next :]

    def _go_on(self, place: int) -> None:
        """Run the program from this place in the list on."""
        assert self._program is not None
        self._next = place
        for (peer, activation), number in self._program.expected_from(place).items():
            if (peer, activation) not in self._inboxes:
                lines = self._lines((peer, self._rank, activation))
                self._inboxes[peer, activation] = Inbox(*lines)
            self._inboxes[peer, activation].expect(number)

    def run(self, passes: Passes, before: int | None = None) -> None:
        """Run the list, or up to where a microbatch from ``before`` on is asked for."""
        assert self._program is not None
        steps = self._program.steps
        while self._next < len(steps):
            step = steps[self._next]
            operation = step.operation
            if before is not None and operation.kind in _STARTS and operation.microbatch >= before:
                return
            self._next += 1
            self._run_one(step, passes)
        for outbox in self._outboxes.values():
            outbox.flush()

    def _run_one(self, step: _Step, passes: Passes) -> None:
        op = step.operation
        if op.kind is Kind.RECEIVE_ACTIVATION:
            self._activations[step.place] = self._inbox(op).take()
        elif op.kind is Kind.RECEIVE_GRADIENT:
            self._gradients[step.place] = self._inbox(op).take()[0]
        elif op.kind is Kind.FORWARD:
            self._forward(step, passes)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._backward(step, passes)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            passes.backward_pass(op, None)
        elif op.kind in SENDS:
            assert self._program is not None
            values = self._made.pop((op.kind, *step.place))
            self._outbox(op).send(values, limit=self._program.most_under_way)
        elif op.kind is Kind.REDUCE:
            passes.reduce(op)
        else:
            passes.update(op)

    def _inbox(self, op: Operation) -> Inbox:
        assert op.peer is not None
        return self._inboxes[op.peer, op.kind in ACTIVATIONS]

    def _outbox(self, op: Operation) -> Outbox:
        assert op.peer is not None
        place = (op.peer, op.kind in ACTIVATIONS)
        if place not in self._outboxes:
            self._outboxes[place] = Outbox(*self._lines((self._rank, *place)))
        return self._outboxes[place]

    def _lines(self, channel: Channel) -> tuple[Line, Line | None, torch.device]:
        assert self._transport is not None
        return (*self._transport.lines(channel), self._transport.device)

    def _forward(self, step: _Step, passes: Passes) -> None:
        op = step.operation
        made = passes.forward(op, self._activations.pop(step.place, NOTHING))
        assert self._program is not None
        if op.stage == self._program.last_stage:
            return
        if step.leaves:
            self._made[Kind.SEND_ACTIVATION, op.stage, op.microbatch] = made
            return
        wants = tuple(bool(getattr(value, "requires_grad", False)) for value in made)
        self._activations[op.stage + 1, op.microbatch] = (made, wants)

    def _backward(self, step: _Step, passes: Passes) -> None:
        op = step.operation
        made = passes.backward_pass(op, self._gradients.pop(step.place, None))
        if op.stage == 0:
            return
        if step.leaves:
            self._made[Kind.SEND_GRADIENT, op.stage, op.microbatch] = made
        else:
            self._gradients[op.stage - 1, op.microbatch] = made


@contextmanager
def held(seconds: float | None) -> Iterator[None]:
    """Run a pass inside; on an emulated device leave no earlier than its stated time."""
    began = time.perf_counter()
    yield
    if seconds is not None:
        left = began + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
