"""A training job under a pipeline plan: the same script, the model run stage by stage.

``job.backward`` calls the script's function once a microbatch on every worker. Where the function
calls the model, this worker's stage runs instead: in the middle of the pipeline the function is
left there, on the last stage it goes on to the loss. So whatever the function does around the
model (autocast, preparation of inputs) holds on every stage.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...schedules.operations import PASSES, Kind, Operation, Schedule
from ...schema.errors import TargetError
from ...schema.launch import PipelineWork
from ..data import Batch, Pass
from ..group import Place
from ..job import Epoch, Job, LossFunction
from ..lower_pipeline import schedule_of
from ..streams import seed_streams
from .cut import cut
from .executor import Executor, Received, held
from .ownership import Ownership, StageBuffers
from .stage import Stage, parameters_of
from .synchronise import Synchroniser
from .trace import layers_of
from .versions import WeightVersions


class _Left(BaseException):
    """The stage is done; the rest of the script's function belongs to the last stage."""


class PipelineJob(Job):
    """One worker of a pipeline. Made by ``prepare``."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        place: Place,
        work: PipelineWork,
        *,
        seed: int,
    ) -> None:
        super().__init__(model, optimizer, place, seed=seed, overlap=False)
        parts = cut(layers_of(model), [stage.layers for stage in work.stages])
        held_here = work.stages_of_rank[place.rank]
        self._work, self._optimizer = work, optimizer
        self._last_stage = len(parts) - 1
        self._stages = {
            number: Stage(parts[number], recompute=work.recompute, device=place.device)
            for number in held_here
        }
        self._buffers = StageBuffers(
            model, self._local, self._batch_sizes, [parts[number].module for number in held_here]
        )
        self._ownership = Ownership(
            dict(model.named_parameters()),
            parameters_of(parts),
            [stage.ranks for stage in work.stages],
            place.rank,
        )
        self._schedule = schedule_of(work, work.num_microbatches)
        self._flushes = self._schedule.weight_semantics == "flush"
        self._check_semantics()
        self._ownership.take_from(optimizer)
        self._synchroniser = Synchroniser(self._ownership, place, work)
        transport = dist.new_group(backend="gloo") if place.distributed else None
        self._executor = Executor(place.rank, transport)
        self._versions = {
            number: WeightVersions(stage.parameters) for number, stage in self._stages.items()
        }
        self._gradients: dict[int, dict[str, Tensor]] = {number: {} for number in self._stages}
        self._signature = inspect.signature(model.forward)
        self._forward = model.forward
        model.forward = self._refuse_outside
        self._run_stage: Callable[..., Any] | None = None
        self._ownership.strip()
        if not self._flushes and optimizer is not None:
            self._take_over_steps(optimizer)

    def _check_semantics(self) -> None:
        if self._flushes:
            return
        if self._ownership.tied:
            raise TargetError(
                f"{self._ownership.tied[0]} is shared by several stages, which "
                f"{self._work.schedule} would update apart",
                hint="use a schedule that flushes, such as 1f1b",
            )
        if self._optimizer is None:
            raise TargetError(
                f"{self._work.schedule} updates by itself: give prepare the optimizer"
            )

    def _take_over_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """The schedule says when to update; the script's own calls do nothing."""
        self._step = optimizer.step

        def step(closure: object = None) -> None:
            optimizer._opt_called = True  # type: ignore[attr-defined]

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step  # type: ignore[method-assign, assignment]

    @property
    def weight_versions(self) -> int:
        """The most versions of a stage's weights that this worker has held at once."""
        return max(versions.most_held for versions in self._versions.values())

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
        bound = self._signature.bind(*arguments, **named)
        bound.apply_defaults()
        return run(_by_placeholder(bound))

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
        if scaler is not None:
            raise TargetError("GradScaler is not supported under a pipeline", hint="use bfloat16")
        self._open_step(batch)
        self._function, self._batch = function, batch
        self._inputs: dict[int, tuple[Pass, Any]] = {}
        self._feeding = batch.inputs()
        return self._close_step(self._run_flush(batch) if self._flushes else self._run_on(batch))

    def _run_flush(self, batch: Batch) -> Tensor:
        number = min(self._work.num_microbatches, batch.num_samples)
        schedule = self._schedule
        if number != schedule.num_microbatches:
            schedule = schedule_of(self._work, number)
        self._offset = 0
        self._synchroniser.begin(batch.num_samples)
        self._executor.begin(schedule)
        self._executor.run(self)
        self._clock.computed()
        return self._synchroniser.finish()

    # Without flushes

    def _run_on(self, batch: Batch) -> Tensor:
        if batch.step == 0 or not self._executor._operations:
            self._begin_run(batch)
        self._synchroniser.begin(batch.num_samples)
        self._offset = batch.step * self._work.num_microbatches
        is_last = batch.step + 1 == self._num_batches
        before = None if is_last else self._offset + self._work.num_microbatches
        self._executor.run(self, before)
        self._clock.computed()
        return self._synchroniser.share_loss_late()

    def _begin_run(self, batch: Batch) -> None:
        if batch.step != 0:
            raise TargetError("the epoch was left in the middle; begin the next with job.batches")
        rest = min(self._work.num_microbatches, self._last_batch_samples)
        total = (self._num_batches - 1) * self._work.num_microbatches + rest
        schedule: Schedule = schedule_of(self._work, total)
        mine = schedule.ranks[self._place.rank]
        for number, versions in self._versions.items():
            versions.begin(op for op in mine if op.stage == number and op.kind in PASSES)
            self._gradients[number] = {}
        self._executor.begin(schedule)

    def batches(self, loader: Any, *, epoch: int | None = None) -> Epoch:
        """One epoch; without flushes it is one run of the schedule, drained at its end."""
        made = super().batches(loader, epoch=epoch)
        self._num_batches = len(made)
        if self._num_batches:
            self._last_batch_samples = made._sampler.passes(self._num_batches - 1)[0]
        return made

    # What the executor asks for

    def forward(self, operation: Operation, received: Received) -> tuple[Any, ...]:
        """Run this worker's stage inside the script's function."""
        number, microbatch = operation.stage, operation.microbatch
        item, inputs = self._input_of(microbatch - self._offset)
        stage, is_last = self._stages[number], operation.stage == self._last_stage
        weights = None if self._flushes else self._weights(operation)
        made: list[Any] = []

        def run(arguments: dict[str, Any]) -> Any:
            answer = stage.forward(microbatch, arguments, received, weights)
            if is_last:
                return answer
            made.append(answer)
            raise _Left

        began = self._clock.begin_pass()
        with held(self._work.stages[number].forward_seconds):
            self._buffers.load(item.virtual_node)
            seed_streams(self._seed, "pass", self.num_steps, item.virtual_node, "stage", number)
            results = self._call(run, inputs, made)
            if is_last:
                scaled = self._synchroniser.add(results, item.num_samples, scales=self._flushes)
                results = () if scaled is None else (scaled,)
            stage.keep(microbatch, results)
            self._buffers.save(item.virtual_node)
        self._passed(operation)
        self._clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)
        return tuple(results)

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
        stage, number = self._stages[operation.stage], operation.stage
        seconds = self._work.stages[number].backward_seconds
        halves = operation.kind is not Kind.BACKWARD
        with held(seconds if seconds is None or not halves else seconds / 2):
            if operation.kind is Kind.BACKWARD_WEIGHT:
                stage.backward_weight(operation.microbatch)
                return ()
            if operation.kind is Kind.BACKWARD_INPUT:
                return stage.backward_input(operation.microbatch, gradients)
            made = stage.backward(operation.microbatch, gradients)
            if not self._flushes:
                self._collect(operation)
        self._passed(operation)
        return made

    def _weights(self, operation: Operation) -> dict[str, Tensor]:
        assert operation.weight_version is not None
        return self._versions[operation.stage].read(operation.weight_version)

    def _passed(self, operation: Operation) -> None:
        if not self._flushes:
            assert operation.weight_version is not None
            self._versions[operation.stage].passed(operation.weight_version)

    def _collect(self, operation: Operation) -> None:
        """Add a microbatch's gradients into those of its round, as a share of the mean."""
        leaves, sums = self._weights(operation), self._gradients[operation.stage]
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                sums[name] = sums[name] + leaf.grad if name in sums else leaf.grad
                leaf.grad = None

    def reduce(self, operation: Operation) -> None:
        """Sum a round's gradients over the replicas; flushes do all of it at their end."""
        if not self._flushes:
            stage = self._stages[operation.stage]
            sums = self._gradients[operation.stage]
            self._synchroniser.sum_round(operation.stage, stage.parameters, sums)

    def update(self, operation: Operation) -> None:
        """Make the next weight version; after a flush the script itself does."""
        if self._flushes:
            return
        versions, sums = self._versions[operation.stage], self._gradients[operation.stage]
        versions.before_update()
        parameters = self._stages[operation.stage].parameters
        for name, total in sums.items():
            parameters[name].grad = total / operation.num_microbatches
        self._step()
        for parameter in parameters.values():
            parameter.grad = None
        sums.clear()
        versions.after_update()

    # The whole model

    def sync_buffers(self) -> None:
        """Merged buffers and the parameters of all stages into the model, on every worker."""
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


def _by_placeholder(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments under the names that torch.fx gives them."""
    named: dict[str, Any] = {}
    prefix: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        named[prefix.get(kind, "") + name] = value
    return named
