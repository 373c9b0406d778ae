"""Run a schedule's operation lists; the schedule alone decides the order (schedules/)."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...planning.schedules.counting import most_under_way
from ...schema.errors import ProblemError
from ...schema.launch import PipelineWork
from ...schema.schedule import ACTIVATIONS, PASSES, RECEIVES, SENDS, Kind, Operation, Schedule
from ..data import Batch
from ..protocol.lower import schedule_of
from ..tensor.operators import TensorGroup
from .channels import Holdings, Message, Outbox, ReceiveQueue, Receiver, Sender
from .optimizer import ScheduledSteps
from .stage import StageRunner
from .synchronise import Synchroniser
from .transport import Channel, ChannelLines, Routes, Transport

NOTHING: Message = ((), ())


class StagePasses(Protocol):
    """The work of the operations, which an engine does for an executor."""

    def forward(self, operation: Operation, received: Message) -> tuple[Any, ...]:
        """Run the stage's forward pass; return the values for the next stage."""

    def backward_pass(
        self, operation: Operation, gradients: tuple[Any, ...] | None
    ) -> tuple[Any, ...]:
        """Run a backward pass (or half of one); return the gradients for the stage before."""

    def reduce(self, operation: Operation) -> None:
        """Sum gradients over the replicas of a stage."""

    def update(self, operation: Operation) -> None:
        """Make the next weight version."""


class _Step(NamedTuple):
    """An operation, and facts that follow from its position in the list."""

    operation: Operation
    place: tuple[int, int]
    channel: tuple[int, bool]
    """Of a transfer: the other rank, and whether it carries activations."""
    leaves: bool
    """Whether the pass's result goes to another rank (its send follows in the list)."""
    starts: bool
    """Whether it asks for a microbatch for the first time."""


class _Program:
    """One rank's list, analysed once: a training loop runs it many times."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        operations = schedule.ranks[rank]
        sends = {(op.kind, op.stage, op.microbatch) for op in operations if op.kind in SENDS}
        self.schedule = schedule
        self.last_stage = schedule.num_stages - 1
        self.under_way = most_under_way(schedule, rank)
        self.steps = [
            _Step(
                op,
                (op.stage, op.microbatch),
                (-1 if op.peer is None else op.peer, op.kind in ACTIVATIONS),
                op.kind in _SENT_BY and (_SENT_BY[op.kind], op.stage, op.microbatch) in sends,
                op.kind in (Kind.FORWARD, Kind.RECEIVE_ACTIVATION),
            )
            for op in operations
        ]
        self.channels = {step.channel for step in self.steps if step.operation.kind in RECEIVES}


_SENT_BY = {
    Kind.FORWARD: Kind.SEND_ACTIVATION,
    Kind.BACKWARD: Kind.SEND_GRADIENT,
    Kind.BACKWARD_INPUT: Kind.SEND_GRADIENT,
}


class Executor:
    """One rank of a pipeline: its channels, and its position in the list.

    A rank of a schedule is a tensor-parallel group; this worker is one of the group.

    Args:
        rank: The group's number.
        device: Where messages are joined.
        holdings: [stages] what each worker of a group holds of a stage's results.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport | None,
        routes: Routes,
        group: TensorGroup,
        device: torch.device,
        holdings: Sequence[Holdings],
    ) -> None:
        self._rank, self._transport, self._routes = rank, transport, routes
        self._group, self._device, self._holdings = group, device, holdings
        self._receivers: dict[tuple[int, bool], Receiver] = {}
        self._senders: dict[tuple[int, bool], Sender] = {}
        self._under_way: dict[bool, deque[Sender]] = {False: deque(), True: deque()}
        self._gradient_holdings: dict[tuple[int, int], Holdings] = {}
        self._program: _Program | None = None
        self._next = 0
        self._activations: dict[tuple[int, int], Message] = {}
        self._gradients: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._made_activations: dict[tuple[int, int], tuple[Any, ...]] = {}
        self._made_gradients: dict[tuple[int, int], tuple[Any, ...]] = {}

    @property
    def is_drained(self) -> bool:
        """Whether the list is done, so nothing is in flight."""
        return self._program is None or self._next == len(self._program.steps)

    def begin(self, schedule: Schedule) -> tuple[Operation, ...]:
        """Start a schedule: this rank's list. Receives are posted ahead from the first one on."""
        if self._program is None or self._program.schedule is not schedule:
            self._program = _Program(schedule, self._rank)
            # In any order, and on each worker another: to post a receive is no collective.
            for channel in self._program.channels - self._receivers.keys():
                peer, activation = channel
                ways = self._routes.incoming(peer, activation)
                inboxes = [(lane, ReceiveQueue(self._lines(way))) for lane, way in ways]
                degree = len(self._routes.groups[peer])
                self._receivers[channel] = Receiver(inboxes, self._group, degree, self._device)
        self._next = 0
        return schedule.ranks[self._rank]

    def shorten(self, schedule: Schedule) -> tuple[Operation, ...]:
        """End earlier: continue with a schedule of fewer microbatches and the same beginning.

        Returns:
            The rest of this rank's list.

        Raises:
            ProblemError: The shorter schedule does not begin with the operations already run.
        """
        assert self._program is not None
        before, now = (whole.ranks[self._rank] for whole in (self._program.schedule, schedule))
        if before[: self._next] != now[: self._next]:
            raise ProblemError(f"{schedule.name} of fewer microbatches does not begin alike")
        self._program = _Program(schedule, self._rank)
        return now[self._next :]

    def run(self, passes: StagePasses, before: int | None = None) -> None:
        """Run the list, to its end or until it asks for microbatch ``before`` or a later one."""
        assert self._program is not None
        steps = self._program.steps
        while self._next < len(steps):
            step = steps[self._next]
            if before is not None and step.starts and step.operation.microbatch >= before:
                return
            self._next += 1
            self._do(step, passes)
        # Only at the list's end: buffers of messages under way are kept across ``before``.
        for way in self._under_way.values():
            while way:
                way.popleft().release()

    def _do(self, step: _Step, passes: StagePasses) -> None:
        op, place = step.operation, step.place
        match op.kind:
            case Kind.FORWARD:
                self._forward(step, passes)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(step, passes)
            case Kind.BACKWARD_WEIGHT:
                passes.backward_pass(op, None)
            case Kind.SEND_ACTIVATION:
                self._send(step, self._made_activations.pop(place), self._holdings[op.stage])
            case Kind.RECEIVE_ACTIVATION:
                received = self._receivers[step.channel].take()
                self._activations[place] = received.message
                if received.holdings:
                    self._gradient_holdings[place] = received.of_gradients()
            case Kind.SEND_GRADIENT:
                holdings = self._gradient_holdings.pop(place, ())
                self._send(step, self._made_gradients.pop(place), holdings)
            case Kind.RECEIVE_GRADIENT:
                self._gradients[place] = self._receivers[step.channel].take().message[0]
            case Kind.REDUCE:
                passes.reduce(op)
            case Kind.UPDATE:
                passes.update(op)

    def _send(self, step: _Step, values: tuple[Any, ...], holdings: Holdings) -> None:
        assert self._program is not None
        if step.channel not in self._senders:
            peer, activation = step.channel
            ways = self._routes.outgoing(peer, activation)
            outboxes = [(lane, Outbox(self._lines(way))) for lane, way in ways]
            degree = len(self._routes.groups[peer])
            self._senders[step.channel] = Sender(outboxes, self._group, degree)
        sender, way = self._senders[step.channel], self._under_way[step.channel[1]]
        sender.send(values, holdings)
        # Over all receivers of a kind of message together, in the order sent.
        way.append(sender)
        while len(way) > self._program.under_way[not step.channel[1]]:
            way.popleft().release()

    def _lines(self, channel: Channel) -> ChannelLines:
        assert self._transport is not None
        return self._transport.lines(channel)

    def _forward(self, step: _Step, passes: StagePasses) -> None:
        op = step.operation
        made = passes.forward(op, self._activations.pop(step.place, NOTHING))
        assert self._program is not None
        if op.stage == self._program.last_stage:
            return
        if step.leaves:
            self._made_activations[step.place] = made
            return
        # The next stage is on this rank too: handed over as a message would be, without a copy.
        wants = tuple(bool(getattr(value, "requires_grad", False)) for value in made)
        self._activations[op.stage + 1, op.microbatch] = (made, wants)

    def _backward(self, step: _Step, passes: StagePasses) -> None:
        op = step.operation
        made = passes.backward_pass(op, self._gradients.pop(step.place, None))
        if op.stage == 0:
            return
        if step.leaves:
            self._made_gradients[step.place] = made
        else:
            self._gradients[op.stage - 1, op.microbatch] = made


@contextmanager
def held(seconds: float | None) -> Iterator[None]:
    """Run a pass inside; on an emulated device, leave no earlier than its stated seconds."""
    began = time.perf_counter()
    yield
    left = began + (seconds or 0.0) - time.perf_counter()
    if left > 0:
        time.sleep(left)


# Run schedules without flushes: over many batches, with stale weights and their own updates.
#
# A run lasts from a batch to the end of its epoch (thesis 2.4.3). ``drain`` can end it earlier:
# no further microbatches start, and those in flight are finished, as at the end of an epoch.
#
# Weight versions of a stage are immutable while a pass may still read them (thesis 2.4.3).
#
# The newest version shares its memory with the parameters. If a later pass still reads that
# version, an update first moves the parameters to new memory and then changes them in place. So
# there are as many copies as versions in use.


class WeightVersions:
    """The newest version of one stage's parameters, and the older ones that passes still need."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._parameters = parameters
        self._reads: Counter[int] = Counter()
        self._leaves: dict[int, dict[str, Tensor]] = {}
        self._newest = 0
        self.most_held = 0

    def begin(self, operations: Iterable[Operation]) -> None:
        """Start a schedule at version 0, with the operations of this stage."""
        self._reads = _reads_of(operations)
        self._newest = 0
        self._leaves = {0: self._fresh()}
        self.most_held = max(self.most_held, 1)

    def shorten(self, operations: Iterable[Operation]) -> None:
        """Release versions early: only these operations are still to come."""
        self._reads = _reads_of(operations)
        for version in [v for v in self._leaves if not self._reads[v] and v != self._newest]:
            del self._leaves[version]

    def _fresh(self) -> dict[str, Tensor]:
        # `.data` has its own version counter, so later updates do not count as writes to this leaf.
        return {
            name: parameter.data.requires_grad_(parameter.requires_grad)
            for name, parameter in self._parameters.items()
        }

    def read(self, version: int) -> dict[str, Tensor]:
        """The leaf tensors of a version, by name; gradients add up in them."""
        return self._leaves[version]

    def passed(self, version: int) -> None:
        """Note that a pass that read a version is done."""
        self._reads[version] -= 1
        if not self._reads[version] and version != self._newest:
            del self._leaves[version]

    def before_update(self) -> None:
        """Make the parameters safe to change in place, before an update."""
        if self._reads[self._newest]:
            for parameter in self._parameters.values():
                # The parameters move, and the leaves of the old version keep the old memory: passes
                # in flight hold references to those. Copying the version for the passes would break
                # what autograd saved.
                parameter.data = parameter.data.clone()
        else:
            del self._leaves[self._newest]

    def after_update(self) -> None:
        """Note that the parameters now hold the next version."""
        self._newest += 1
        self._leaves[self._newest] = self._fresh()
        self.most_held = max(self.most_held, len(self._leaves))


def _reads_of(operations: Iterable[Operation]) -> Counter[int]:
    return Counter(
        op.weight_version
        for op in operations
        if op.kind in PASSES and op.weight_version is not None
    )


class Unflushed:
    """The runs of one worker, one after another.

    Attributes:
        offset: Number, within the run, of the first microbatch of the present batch.
    """

    def __init__(
        self,
        work: PipelineWork,
        stages: Mapping[int, StageRunner],
        executor: Executor,
        synchroniser: Synchroniser,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._work, self._stages = work, stages
        self._executor, self._synchroniser = executor, synchroniser
        self._steps = ScheduledSteps(
            optimizer, most_behind=sum(len(stage.ranks) for stage in work.stages)
        )
        self._versions = {n: WeightVersions(stage.parameters) for n, stage in stages.items()}
        self._gradients: dict[int, dict[str, Tensor]] = {number: {} for number in stages}
        self._epochs: dict[int, tuple[int, int]] = {}
        self._first_step, self._next_batch = 0, (0, 0)
        self.offset = 0

    @property
    def most_versions(self) -> int:
        """The largest number of versions of a stage's weights held at once."""
        return max(versions.most_held for versions in self._versions.values())

    def epoch_of(self, epoch: int, num_batches: int, last_batch_samples: int) -> None:
        """Set the length of an epoch, before its first batch."""
        self._epochs[epoch] = (num_batches, last_batch_samples)

    def run(self, batch: Batch, passes: StagePasses) -> None:
        """Feed a batch into the run; begin a run if there is none."""
        # A batch out of turn (a new epoch, a resumed one) cannot follow in the schedule that is
        # running.
        if (batch.epoch, batch.step) != self._next_batch:
            self.drain(passes)
        if self.is_drained:
            self._begin(batch)
        self._next_batch = (batch.epoch, batch.step + 1)
        number = batch.step - self._first_step
        self.offset = number * self._work.num_microbatches
        self._synchroniser.begin(batch.num_samples)
        self._steps.feed(number)
        is_last = batch.step + 1 == self._epochs[batch.epoch][0]
        self._executor.run(passes, None if is_last else self.offset + self._work.num_microbatches)

    def _begin(self, batch: Batch) -> None:
        num_batches, last_batch_samples = self._epochs[batch.epoch]
        self._first_step = batch.step
        rest = min(self._work.num_microbatches, last_batch_samples)
        # The whole epoch is one schedule, as its length decides where the pipeline drains. The last
        # batch may be short, with fewer microbatches.
        total = (num_batches - 1 - batch.step) * self._work.num_microbatches + rest
        schedule = schedule_of(self._work, total)
        mine = self._executor.begin(schedule)
        for number, versions in self._versions.items():
            versions.begin(op for op in mine if op.stage == number and op.kind in PASSES)
            self._gradients[number] = {}

    @property
    def is_drained(self) -> bool:
        """Whether nothing is in flight, so each parameter has only its newest value."""
        return self._executor.is_drained

    def drain(self, passes: StagePasses) -> None:
        """Finish the microbatches in flight. Call it on all workers."""
        if self.is_drained:
            return
        schedule = schedule_of(self._work, self.offset + self._work.num_microbatches)
        # The shorter schedule is that of a run that ends here, so all workers agree without a word
        # which operations are still to come. Versions that only cancelled passes would have read
        # are released.
        left = self._executor.shorten(schedule)
        for number, versions in self._versions.items():
            versions.shorten(op for op in left if op.stage == number)
        self._executor.run(passes)

    # Called for single operations

    def weights(self, operation: Operation) -> dict[str, Tensor]:
        """The leaf tensors that a pass reads, by name."""
        assert operation.weight_version is not None
        return self._versions[operation.stage].read(operation.weight_version)

    def passed(self, operation: Operation) -> None:
        """Note that a pass is done."""
        assert operation.weight_version is not None
        self._versions[operation.stage].passed(operation.weight_version)

    def lend(self, operation: Operation) -> None:
        """Let a backward pass add to its round's gradients in place, so one copy is enough."""
        sums = self._gradients[operation.stage]
        for name, leaf in self.weights(operation).items():
            leaf.grad = sums.pop(name, None)

    def collect(self, operation: Operation) -> None:
        """Take the round's gradients back from the weight version that the pass read."""
        leaves, sums = self.weights(operation), self._gradients[operation.stage]
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                sums[name] = leaf.grad
                leaf.grad = None

    def reduce(self, operation: Operation) -> None:
        """Sum a round's gradients over the replicas."""
        stage = self._stages[operation.stage]
        sums = self._gradients[operation.stage]
        self._synchroniser.sum_round(operation.stage, stage.parameters, sums)

    def update(self, operation: Operation) -> None:
        """Make the next weight version with the mean of a round's gradients."""
        versions, sums = self._versions[operation.stage], self._gradients[operation.stage]
        versions.before_update()
        parameters = self._stages[operation.stage].parameters
        for name, total in sums.items():
            parameters[name].grad = total.div_(operation.num_microbatches)
        self._steps.make(operation.microbatch // self._work.num_microbatches)
        for parameter in parameters.values():
            parameter.grad = None
        sums.clear()
        versions.after_update()
