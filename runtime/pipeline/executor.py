"""Run a schedule's lists: nothing here decides what happens when (schedules/operations.py)."""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from ...schedules.operations import ACTIVATIONS, RECEIVES, Kind, Operation, Schedule
from ...schema.errors import ProblemError
from .channels import Inbox, Outbox

Received = tuple[tuple[Any, ...], tuple[bool, ...]]
NOTHING: Received = ((), ())


class Passes(Protocol):
    """What a job does around the operations."""

    def forward(self, operation: Operation, received: Received) -> tuple[Any, ...]:
        """Run the stage's forward pass; return what goes to the next stage."""

    def backward_pass(
        self, operation: Operation, gradients: tuple[Any, ...] | None
    ) -> tuple[Any, ...]:
        """Run a backward pass (or half of one); return the gradients for the stage before."""

    def reduce(self, operation: Operation) -> None:
        """Sum gradients over the replicas of a stage."""

    def update(self, operation: Operation) -> None:
        """Make the next weight version."""


class Executor:
    """One rank of a pipeline: its channels, and its place in the list."""

    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        self._rank, self._group = rank, group
        self._outbox = Outbox(group) if group is not None else None
        self._inboxes: dict[tuple[int, bool], Inbox] = {}
        self._operations: deque[Operation] = deque()
        self._schedule: Schedule | None = None
        self._activations: dict[tuple[int, int], Received] = {}
        self._gradients: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._made: dict[tuple[Kind, int, int], tuple[Any, ...]] = {}

    def begin(self, schedule: Schedule) -> tuple[Operation, ...]:
        """Start a schedule; receives are posted from here on, ahead of need.

        Returns:
            This rank's list.
        """
        mine = schedule.ranks[self._rank]
        self._begin(schedule, mine)
        return mine

    def _begin(self, schedule: Schedule, operations: Sequence[Operation]) -> None:
        self._schedule = schedule
        self._operations = deque(operations)
        expected = Counter(
            (op.peer, op.kind in ACTIVATIONS)
            for op in self._operations
            if op.kind in RECEIVES and op.peer is not None
        )
        for (peer, activation), number in sorted(expected.items()):
            if (peer, activation) not in self._inboxes:
                assert self._group is not None
                self._inboxes[peer, activation] = Inbox(self._group, peer, activation=activation)
            self._inboxes[peer, activation].expect(number)

    @property
    def is_drained(self) -> bool:
        """Whether the list is done: nothing is in flight."""
        return not self._operations

    def shorten(self, schedule: Schedule) -> tuple[Operation, ...]:
        """End earlier: go on with a schedule of fewer microbatches, which began the same way.

        Returns:
            What is left of this rank's list.
        """
        assert self._schedule is not None
        before, now = (whole.ranks[self._rank] for whole in (self._schedule, schedule))
        num_done = len(before) - len(self._operations)
        if before[:num_done] != now[:num_done]:
            raise ProblemError(f"{schedule.name} of fewer microbatches does not begin alike")
        for inbox in self._inboxes.values():
            inbox.expect_none()
        self._operations.clear()
        self._begin(schedule, now[num_done:])
        return now[num_done:]

    def run(self, passes: Passes, before: int | None = None) -> None:
        """Run the list, or up to where a microbatch from ``before`` on is asked for."""
        while self._operations:
            operation = self._operations[0]
            starts = operation.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION)
            if before is not None and starts and operation.microbatch >= before:
                break
            self._run_one(self._operations.popleft(), passes)
        if self._outbox is not None and not self._operations:
            self._outbox.flush()

    def _run_one(self, op: Operation, passes: Passes) -> None:
        place = (op.stage, op.microbatch)
        if op.kind is Kind.RECEIVE_ACTIVATION:
            self._activations[place] = self._inbox(op).take()
        elif op.kind is Kind.RECEIVE_GRADIENT:
            self._gradients[place] = self._inbox(op).take()[0]
        elif op.kind is Kind.FORWARD:
            self._forward(op, passes)
        elif op.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            self._backward(op, passes)
        elif op.kind is Kind.BACKWARD_WEIGHT:
            passes.backward_pass(op, None)
        elif op.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
            assert self._outbox is not None
            assert op.peer is not None
            values = self._made.pop((op.kind, *place))
            self._outbox.send(values, op.peer, activation=op.kind is Kind.SEND_ACTIVATION)
        elif op.kind is Kind.REDUCE:
            passes.reduce(op)
        else:
            passes.update(op)

    def _inbox(self, op: Operation) -> Inbox:
        assert op.peer is not None
        return self._inboxes[op.peer, op.kind in ACTIVATIONS]

    def _forward(self, op: Operation, passes: Passes) -> None:
        made = passes.forward(op, self._activations.pop((op.stage, op.microbatch), NOTHING))
        assert self._schedule is not None
        if op.stage + 1 == self._schedule.num_stages:
            return
        if self._sends(op, Kind.SEND_ACTIVATION):
            self._made[Kind.SEND_ACTIVATION, op.stage, op.microbatch] = made
            return
        wants = tuple(bool(getattr(value, "requires_grad", False)) for value in made)
        self._activations[op.stage + 1, op.microbatch] = (made, wants)

    def _backward(self, op: Operation, passes: Passes) -> None:
        made = passes.backward_pass(op, self._gradients.pop((op.stage, op.microbatch), None))
        if op.stage == 0:
            return
        if self._sends(op, Kind.SEND_GRADIENT):
            self._made[Kind.SEND_GRADIENT, op.stage, op.microbatch] = made
        else:
            self._gradients[op.stage - 1, op.microbatch] = made

    def _sends(self, op: Operation, kind: Kind) -> bool:
        """Whether what a pass made leaves this rank (its send follows in the list)."""
        for later in self._operations:
            if later.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                if (later.kind, later.stage, later.microbatch) == (kind, op.stage, op.microbatch):
                    return True
            else:
                return False
        return False


@contextmanager
def held(seconds: float | None) -> Iterator[None]:
    """Run a pass inside; on an emulated device leave no earlier than its stated time."""
    began = time.perf_counter()
    yield
    if seconds is not None:
        left = began + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
