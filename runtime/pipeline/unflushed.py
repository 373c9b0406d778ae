"""Run schedules without flushes: over many batches, with stale weights and their own updates.

A run lasts from a batch to the end of its epoch (thesis 2.4.3). ``drain`` can end it earlier:
no further microbatches start, and those in flight are finished, as at the end of an epoch.

Weight versions of a stage are immutable while a pass may still read them (thesis 2.4.3).

The newest version shares its memory with the parameters. If a later pass still reads that version,
an update first moves the parameters to new memory and then changes them in place. So there are as
many copies as versions in use.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...protocol.lower import schedule_of
from ...schema.launch import PipelineWork
from ...schema.operations import PASSES, Operation
from ..data import Batch
from .executor import Executor, Passes
from .optimizer import ScheduledSteps
from .stage import Stage
from .synchronise import Synchroniser


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
        stages: Mapping[int, Stage],
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

    def run(self, batch: Batch, passes: Passes) -> None:
        """Feed a batch into the run; begin a run if there is none."""
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

    def drain(self, passes: Passes) -> None:
        """Finish the microbatches in flight. Call it on all workers."""
        if self.is_drained:
            return
        schedule = schedule_of(self._work, self.offset + self._work.num_microbatches)
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
