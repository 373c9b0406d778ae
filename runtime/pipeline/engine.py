"""A training job under a pipeline plan: the same script, the model run stage by stage.

``job.backward`` calls the script's function once a microbatch on every worker. Where the function
calls the model, this worker's stage runs instead: in the middle of the pipeline the function is
left there, on the last stage it goes on to the loss. So whatever the function does around the
model (autocast, preparation of inputs) holds on every stage.
"""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...protocol.lower_pipeline import microbatches_of, schedule_of
from ...schedules.operations import Kind, Operation
from ...schema.errors import ProblemError, TargetError
from ...schema.launch import PipelineWork
from ..agreement.agreement import SharedTensors, Subject
from ..data import Batch, Pass
from ..epoch import Epoch
from ..group import Place
from ..job import Job, LossFunction
from ..saving import Checkpoints, shapes_of
from ..streams import seed_streams
from .arguments import by_placeholder
from .cut import check_crossing, cut
from .executor import Executor, held
from .losses import check_reads_none_of, nodes_of
from .messages import Message
from .optimizer import OwnShare
from .ownership import Ownership, StageBuffers
from .saving import StageCheckpoints
from .scaling import LossScaling
from .stage import Stage, parameters_of
from .synchronise import Synchroniser
from .trace import layers_of
from .transport import transport_of
from .unflushed import Unflushed


class _Left(BaseException):
    """The stage is done; the rest of the script's function belongs to the last stage."""


class PipelineJob(Job):
    """One worker of a pipeline. Made by ``prepare``."""

    _buffers: StageBuffers

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        place: Place,
        work: PipelineWork,
        *,
        seed: int,
    ) -> None:
        if len(optimizers) > 1:
            raise TargetError(
                f"a pipeline takes one optimizer, not {len(optimizers)}",
                hint="make one with a group of parameters for each of them",
            )
        super().__init__(model, optimizers, place, seed=seed, overlap=False)
        optimizer = next(iter(optimizers), None)
        layered = layers_of(model, work.trace)
        parts = cut(layered, [stage.layers for stage in work.stages])
        self._check_call = layered.check_call
        held_here = work.stages_of_rank[place.rank]
        self._work = work
        self._last_stage = len(parts) - 1
        self._stages = {
            number: Stage(parts[number], recompute=work.recompute, device=place.device)
            for number in held_here
        }
        self._schedule = schedule_of(work, work.num_microbatches)
        self._buffers = StageBuffers(
            model,
            self._local,
            self._batch_sizes,
            [
                (parts[number], microbatches_of(self._schedule, place.rank, number))
                for number in held_here
            ],
        )
        self._ownership = Ownership(
            dict(model.named_parameters()),
            parameters_of(parts),
            [stage.ranks for stage in work.stages],
            place.rank,
        )
        self._flushes = self._schedule.weight_semantics == "flush"
        self._check_semantics()
        own = self._ownership.own
        self.share = OwnShare(optimizer, self._ownership.parameters, own) if optimizer else None
        transport = transport_of(place, [stage.ranks for stage in work.stages])
        self._synchroniser = Synchroniser(self._ownership, place, work, transport)
        self._executor = Executor(place.rank, transport)
        self._signature = inspect.signature(model.forward)
        self._forward = model.forward
        model.forward = self._refuse_outside
        self._run_stage: Callable[..., Any] | None = None
        # Without flushes the stages read versions, and never the parameters themselves.
        self._strangers = {
            id(parameter): name
            for name, parameter in self._ownership.parameters.items()
            if name not in own or not self._flushes
        }
        self._answered: set[Any] = set()
        self.shapes = shapes_of(self._parameters)
        self._ownership.strip()
        self._unflushed: Unflushed | None = None
        if not self._flushes and optimizer is not None:
            self._unflushed = Unflushed(
                work, self._stages, self._executor, self._synchroniser, optimizer
            )

    def _check_semantics(self) -> None:
        if self._flushes:
            return
        if self._ownership.tied:
            raise TargetError(
                f"{self._ownership.tied[0]} is shared by several stages, which "
                f"{self._work.schedule} would update apart",
                hint="use a schedule that flushes, such as 1f1b",
            )
        if not self._optimizers:
            raise TargetError(
                f"{self._work.schedule} updates by itself: give prepare the optimizer"
            )

    def _open(self, folder: Path | None, every: int) -> Checkpoints:
        return StageCheckpoints(self, folder, every)

    def _subject(self, **_: Any) -> Subject:
        return super()._subject(is_pipeline=True, flushes=self._flushes)

    def _shared(self) -> list[SharedTensors]:
        """What several workers hold alike: a stage's replicas, and stages with a tied weight."""
        ownership = self._ownership
        found = []
        for holders in sorted({h for h in ownership.holders.values() if len(h) > 1}):
            names = [n for n in ownership.parameters if ownership.holders[n] == holders]
            own: dict[str, Tensor] = {
                n: ownership.parameters[n] for n in names if n in ownership.own
            }
            found.append(SharedTensors(holders, own))
        return found

    def compare(self) -> None:
        """See ``Job.compare``; without flushes what is in flight is finished first."""
        self.drain()
        super().compare()

    @property
    def layers_and_ranks(self) -> list[list[list[Any]]]:
        """[stages] the names of its layers, and its ranks."""
        return [[list(stage.layers), list(stage.ranks)] for stage in self._work.stages]

    @property
    def weight_versions(self) -> int:
        """The most versions of a stage's weights that this worker has held at once."""
        return self._unflushed.most_versions if self._unflushed is not None else 0

    @property
    def activations_held(self) -> int:
        """The most microbatches whose activations this worker has held at once, of one stage."""
        return max(stage.most_in_flight for stage in self._stages.values())

    # The script's function meets the model

    def _refuse_outside(self, *arguments: Any, **named: Any) -> Any:
        if self._run_stage is None:
            raise TargetError(
                "the model is spread over several workers",
                hint="call it inside job.backward's function, or inside job.evaluation()",
            )
        run, self._run_stage = self._run_stage, self._refuse_second
        given = by_placeholder(self._signature, arguments, named)
        self._check_call(given)
        return run(given)

    def _refuse_second(self, arguments: object) -> Any:
        raise TargetError(
            "the function calls the model twice; a pipeline runs it once a microbatch",
            hint="join the inputs into one call",
        )

    def backward(
        self,
        function: LossFunction,
        batch: Batch,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> Tensor:
        """Run the schedule over one global batch; see ``Job.backward``.

        Where the schedule flushes, ``param.grad`` of this worker's parameters is the gradient of
        the mean loss over the global batch. Where it does not, the updates have been made, and
        the loss returned is the batch's before (the first batch's for the first).
        """
        self._begin_step(batch)
        self._scaling = LossScaling(scaler, self._ownership, self._synchroniser)
        self._open_step(batch)
        self._synchroniser.wants_stop = self._totals.wants_stop
        self._function, self._loss_is_checked = function, False
        self._inputs: dict[int, tuple[Pass, Any]] = {}
        self._feeding = batch.inputs()
        if self._unflushed is None:
            loss = self._run_flush(batch)
        else:
            self._scaling.refuse()
            self._unflushed.run(batch, self)
            self._clock.computed()
            loss = self._synchroniser.share_loss_late()
        self._totals.stops = self._synchroniser.stops
        loss = self._close_step(loss)
        if self._unflushed is None:
            self._check_settings(self._synchroniser.settings_sums)
        return loss

    def _run_flush(self, batch: Batch) -> Tensor:
        number = min(self._work.num_microbatches, batch.num_samples)
        schedule = self._schedule
        if number != schedule.num_microbatches:
            schedule = schedule_of(self._work, number)
        self._synchroniser.begin(batch.num_samples)
        self._synchroniser.settings_number = self._agreement.settings_number
        self._agreement.begin_passes()
        self._synchroniser.expect()
        self._executor.begin(schedule)
        self._executor.run(self)
        self._clock.computed()
        loss = self._synchroniser.finish()
        self._scaling.share_overflow()
        return loss

    # Without flushes

    @property
    def is_drained(self) -> bool:
        """Whether no microbatch is in flight: each parameter has its newest value only."""
        return self._unflushed is None or self._unflushed.is_drained

    def drain(self) -> None:
        """Finish what is in flight, where the schedule has no flushes. Call it on all workers."""
        if self._unflushed is not None:
            self._unflushed.drain(self)

    def batches(self, loader: Any, *, epoch: int | None = None) -> Epoch:
        """One epoch; without flushes it is one run of the schedule, drained at its end."""
        made = super().batches(loader, epoch=epoch)
        self.drain()
        if self._unflushed is not None and self._num_steps:
            self.compare()
        if len(made):
            samples = made._sampler.passes(len(made) - 1)[0]
            if self._unflushed is not None:
                self._unflushed.epoch_of(made.epoch, len(made), samples)
            elif samples < self._work.num_microbatches:
                self._check_short_batch(samples)
        return made

    def _check_short_batch(self, samples: int) -> None:
        """Now, and not at the end of the epoch."""
        try:
            schedule_of(self._work, samples)
        except ProblemError as error:
            raise TargetError(
                f"the last batch of an epoch has {samples} samples for "
                f"{self._work.num_microbatches} microbatches, and {error.message}",
                hint="give the DataLoader drop_last=True",
            ) from None

    # What the executor asks for

    def forward(self, operation: Operation, received: Message) -> tuple[Any, ...]:
        """Run this worker's stage inside the script's function."""
        number, microbatch = operation.stage, operation.microbatch
        late = self._unflushed
        stage, is_last = self._stages[number], operation.stage == self._last_stage
        weights = None if late is None else late.weights(operation)
        made: list[Any] = []

        def run(arguments: dict[str, Any]) -> Any:
            answer = stage.forward(microbatch, arguments, received, weights)
            if is_last:
                self._answered = set(nodes_of(answer))
                return answer
            check_crossing(stage.part, answer, number)
            made.append(answer)
            raise _Left

        entered = self._clock.begin_pass()
        with held(self._work.stages[number].forward_seconds):
            # An emulated device's samples are there in time, as a real one's prefetched ones.
            item, inputs = self._input_of(microbatch - (late.offset if late else 0))
            began = self._clock.begin_pass()
            self._buffers.load(item.virtual_node)
            seed_streams(self._seed, "pass", self.num_steps, item.virtual_node, "stage", number)
            results = self._call(run, inputs, made)
            if is_last:
                self._check_loss(results)
                self._agreement.look_at(results, item.num_samples, self._answered)
                scaled = self._synchroniser.add(results, item.num_samples, scales=self._flushes)
                results = () if scaled is None else (self._scaling.scale(scaled),)
            stage.keep(microbatch, results)
            self._buffers.save(item.virtual_node)
        if late is not None:
            late.passed(operation)
        self._clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)
        self._clock.end_stage_pass(number, entered, is_backward=False)
        return tuple(results)

    def _check_loss(self, loss: Any) -> None:
        """In the first microbatch of a step: later ones go the same way."""
        if not self._loss_is_checked:
            check_reads_none_of(loss, self._strangers, self._answered)
        self._loss_is_checked = True

    def _call(self, run: Callable[..., Any], inputs: Any, made: list[Any]) -> Any:
        self._run_stage = run
        try:
            whole = isinstance(inputs, tuple | list)
            answer = self._function(*inputs) if whole else self._function(inputs)
        except _Left:
            return made[0]
        finally:
            unused, self._run_stage = self._run_stage is run, None
        if unused:
            raise TargetError("the function did not call the model")
        return answer

    def _input_of(self, microbatch: int) -> tuple[Pass, Any]:
        while microbatch not in self._inputs:
            item, inputs = next(self._feeding)
            self._inputs[item.virtual_node] = (item, inputs)
        return self._inputs[microbatch]

    def backward_pass(self, operation: Operation, gradients: Any) -> tuple[Any, ...]:
        """Run a backward pass, or half of one."""
        began = self._clock.begin_pass()
        made = self._backward_pass(operation, gradients)
        self._clock.end_stage_pass(operation.stage, began, is_backward=True)
        return made

    def _backward_pass(self, operation: Operation, gradients: Any) -> tuple[Any, ...]:
        stage, number = self._stages[operation.stage], operation.stage
        seconds = self._work.stages[number].backward_seconds
        halves = operation.kind is not Kind.BACKWARD
        with held(seconds if seconds is None or not halves else seconds / 2):
            if operation.kind is Kind.BACKWARD_WEIGHT:
                stage.backward_weight(operation.microbatch)
                return ()
            if operation.kind is Kind.BACKWARD_INPUT:
                return stage.backward_input(operation.microbatch, gradients)
            if self._unflushed is not None:
                self._unflushed.lend(operation)
            made = stage.backward(operation.microbatch, gradients)
        if self._unflushed is not None:
            self._unflushed.collect(operation)
            self._unflushed.passed(operation)
        return made

    def reduce(self, operation: Operation) -> None:
        """Sum a round's gradients over the replicas; flushes do all of it at their end."""
        if self._unflushed is not None:
            self._unflushed.reduce(operation)

    def update(self, operation: Operation) -> None:
        """Make the next weight version; after a flush the script itself does."""
        if self._unflushed is not None:
            self._unflushed.update(operation)

    # The whole model

    def sync_buffers(self) -> None:
        """Merged buffers and the parameters of all stages into the model, on every worker."""
        if self._finished:
            self.drain()
        super().sync_buffers()
        self._ownership.gather()

    def predict(self, *_: Any, **__: Any) -> Any:
        """Refused: virtual nodes of a pipeline are spread over its stages."""
        raise TargetError(
            "job.predict is for split plans",
            hint="use job.evaluation(): the whole model is on every worker inside it",
        )

    def evaluation(self) -> Any:
        """The whole model on every worker, in evaluation mode; stages again afterwards."""
        return _Whole(self, super().evaluation())

    def finish(self) -> None:
        """End the job; every worker's model is whole afterwards."""
        if not self._finished:
            self._model.forward = self._forward
        super().finish()


class _Whole:
    """Evaluation with the whole model."""

    def __init__(self, job: PipelineJob, evaluation: Any) -> None:
        self._job, self._evaluation = job, evaluation

    def __enter__(self) -> nn.Module:
        model: nn.Module = self._evaluation.__enter__()
        model.forward = self._job._forward
        return model

    def __exit__(self, *failure: Any) -> None:
        self._job._model.forward = self._job._refuse_outside
        self._job._ownership.strip()
        self._evaluation.__exit__(*failure)
