"""What a training script calls: ``job.batches``, ``job.backward`` and the rest.

A job does nothing by itself. It hands the script's calls on to its parts; docs/architecture.md
says which there are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..devices.backend import backend_of
from ..schema.errors import TargetError
from . import finish, peers
from .agreement.agreement import Agreement
from .data import Batch, check_in_order, check_loader
from .engine import LossFunction, Step, StepEngine
from .epoch import Epoch, Epochs
from .inference import PREDICTION_EPOCH, Prediction
from .progress import Progress
from .runner import Runner
from .saving import Checkpoints
from .session import Session
from .step_times import StepTimes
from .totals import check_same_length


class Job:
    """One worker of a training job. Made by ``prepare``.

    ``rank``, ``world_size``, ``is_main`` and ``device`` say which one; ``num_steps`` counts global
    steps.
    """

    def __init__(
        self,
        session: Session,
        engine: StepEngine,
        epochs: Epochs,
        progress: Progress,
        runner: Runner,
        agreement: Agreement,
        checkpoints: Checkpoints,
    ) -> None:
        self._session, self._engine, self._epochs = session, engine, epochs
        self._progress, self._runner = progress, runner
        self._agreement, self._checkpoints = agreement, checkpoints

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many workers there are."""
        return self._session.place.world_size

    @property
    def device(self) -> torch.device:
        """Where this worker runs its passes."""
        return self._session.device

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints, logs and saves."""
        return self._session.is_main

    @property
    def num_steps(self) -> int:
        """Global steps so far."""
        self._runner.join()
        return self._session.num_steps

    @property
    def step_times(self) -> tuple[StepTimes, ...]:
        """When the parts of each full step that has ended began and ended. Waits for the device."""
        return self._session.clock.steps

    def print(self, *values: object, **options: Any) -> None:
        """Print on the main worker only."""
        if self.is_main:
            print(*values, **options)  # noqa: T201

    def batches(self, loader: "DataLoader[Any]", *, epoch: int | None = None) -> Epoch:
        """One epoch over the script's DataLoader: exactly once over all workers.

        The loader's ``batch_size`` is the global batch. Each call is the next epoch.

        Args:
            loader: A map-style DataLoader; its dataset, collate function, workers, pinning, order
                and ``drop_last`` are kept.
            epoch: Number of the epoch (it keys the order and augmentations) where a script
                resumes in the middle; counted otherwise.

        Raises:
            TargetError: A loader that cannot be cut into virtual nodes exactly.
        """
        session, engine = self._session, self._engine
        config = session.place.start.config
        check_loader(loader, config.global_batch_size if config else None)
        self._runner.join()
        number = session.next_epoch if epoch is None else epoch
        sampler, _ = self._epochs.passes_of(loader)
        sampler.set_epoch(number, self._order(loader, number))
        call = session.num_calls
        session.next_epoch, session.num_calls = number + 1, call + 1
        made = Epoch(
            session,
            self._epochs,
            self._runner,
            self._progress,
            self._checkpoints,
            loader,
            call=call,
        )
        engine.drain()
        if not engine.flushes and session.num_steps:
            self.compare()
        if len(made):
            engine.begin_epoch(made.epoch, len(made), made.last_batch_samples)
        return made

    def _order(self, loader: "DataLoader[Any]", epoch: int) -> Sequence[int]:
        def draw() -> list[int]:
            return self._epochs.draw(loader, epoch)

        if self._runner.is_behind:
            return self._runner.order_of(self._session.num_calls, loader, draw)
        return self._runner.run(lambda: check_same_length(draw(), self._session.place))

    def backward(
        self,
        function: LossFunction,
        batch: Batch,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> Tensor:
        """Run this worker's virtual nodes; leave the global batch's gradient in ``param.grad``.

        Gradients are the mean over all samples of the global batch, on every worker. Under a
        pipeline a worker runs its stages, and has the gradients of their parameters; where the
        schedule does not flush, the updates have been made, and the loss returned is the batch's
        before (the first batch's for the first).

        Args:
            function: Called once a virtual node as ``function(*batch)`` (as ``function(batch)``
                where the collated batch is no tuple or list). Returns the mean loss over its
                samples, or (mean loss, weight) where the mean is over something else, such as
                tokens; use a Python number for the weight, a tensor costs a wait for the device.
            batch: A handle from ``batches``.
            scaler: The GradScaler of mixed precision, if the script has one.

        Returns:
            The mean loss over the global batch: detached, float64, equal on every worker.
        """
        session, agreement = self._session, self._agreement
        if backend_of(session.device).is_capturing():
            raise TargetError(
                "job.backward cannot be captured in a graph of kernels: a step reads the batch and "
                "the sums of the step before on the host",
                hint="call it outside of the capture",
            )
        self._runner.join()
        session.check_open()
        agreement.begin_step(session.num_steps, batch.epoch)
        step = Step(function, batch, scaler, agreement, agreement.settings_number)
        loss = session.close_step(self._runner.step(step))
        # Workers would make the update with unlike settings: end before it.
        if self._engine.flushes and agreement.is_broken_by(self._engine.settings_sums):
            self.compare()
        return loss

    def compare(self) -> None:
        """Check that all workers still train the same model. Call it on all workers.

        The job calls it by itself every so many steps, after changes of workers, before
        checkpoints and at the end. What a schedule without flushes has in flight is finished first.

        Raises:
            TargetError: They do not; it names the parameter, the workers, the steps and the cause.
        """
        self._engine.drain()
        self._runner.join()
        self._agreement.compare(self._session.num_steps)

    def register(self, *things: Any) -> None:
        """Save and restore these with every checkpoint: schedulers, a GradScaler, counters.

        Anything with ``state_dict`` and ``load_state_dict`` made of plain data and tensors.
        If the job goes on from a checkpoint, their state is loaded here. The optimizer of
        ``prepare`` is saved without being registered.

        Raises:
            TargetError: An object lacks these methods, or the checkpoint has other objects.
        """
        for thing in things:
            if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise TargetError(
                    f"cannot save a {type(thing).__name__}: it has no state_dict and "
                    f"load_state_dict"
                )
            self._agreement.registered(thing)
            self._progress.register(thing)

    def checkpoint(self) -> None:
        """Write a checkpoint now, and wait until it is on disk. Call it on all workers.

        Raises:
            TargetError: The launch gave no folder for checkpoints.
            FileError: It could not be written; earlier ones are untouched.
        """
        self._runner.join()
        if not self._checkpoints.is_asked_for:
            raise TargetError(
                "there is no folder for checkpoints",
                hint="hetflow launch --checkpoint DIR, or HETFLOW_CHECKPOINT=DIR under python",
            )
        self._checkpoints.save(wait=True)

    def sync_buffers(self) -> None:
        """Put the merged buffers (see runtime/buffers.py) into the model, on every worker.

        Under a pipeline also the parameters of all stages. Call it on all workers, before saving
        or evaluating the model between steps; ``evaluation`` and ``finish`` do so themselves.
        Virtual nodes keep their own.
        """
        if self._session.is_finished:
            self._engine.drain()
        self._runner.join()
        if self._runner.is_behind:
            return
        self._merge_buffers()
        self._engine.gather()

    def _merge_buffers(self) -> None:
        session, buffers = self._session, self._engine.buffers
        buffers.begin_step()
        merged = self._runner.meet(
            lambda: buffers.merged(peers.all_reduce if session.place.distributed else None)
        )
        buffers.install(merged)

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, with merged buffers and without gradients.

        Under a pipeline the whole model is on every worker inside: on its device, or on its host
        where the device is too small for it; send inputs to where the model's parameters are. Enter
        it on all workers; what is computed inside is each worker's own affair.
        """
        model = self._session.model
        training = model.training
        self.sync_buffers()
        model.eval()
        try:
            with torch.no_grad(), self._engine.whole_model():
                yield model
        finally:
            model.train(training)

    def predict(
        self,
        loader: "DataLoader[Any]",
        function: Callable[..., Any],
        *,
        on_all: bool = False,
    ) -> Prediction:
        """Evaluate a large batch on the virtual nodes; the outputs, in order of the samples.

        Call and iterate it on all workers, each global batch being shared out as in training, in
        evaluation mode, with merged buffers and without gradients. Each item is what ``function``
        returned for one virtual node's share, its tensors on the host.

        Args:
            loader: As for ``batches``, in a fixed order; under a plan its ``batch_size`` does not
                matter. Every sample gets its output, also with ``drop_last``.
            function: Called as in ``backward``; returns tensors and plain values, alone or in
                tuples, lists and dicts.
            on_all: Give the outputs on every worker; else the others have an empty loop.

        Raises:
            TargetError: A loader that shuffles, or that cannot be cut into virtual nodes; a
                pipeline, whose passes are spread over its stages.
        """
        self._engine.check_predicts()
        check_loader(loader, None)
        check_in_order(loader)
        self._runner.join()
        sampler, passes = self._epochs.passes_of(loader, predicts=True)
        if self._runner.is_behind:  # the others have done this before this worker came
            sampler.set_epoch(PREDICTION_EPOCH, [])
        else:
            sampler.set_epoch(PREDICTION_EPOCH, self._order(loader, PREDICTION_EPOCH))
            self.sync_buffers()
        return Prediction(
            self._session,
            self._runner,
            self._engine.buffers,
            sampler,
            passes,
            function,
            on_all=on_all,
        )

    def finish(self, *, whole: bool = True) -> None:
        """End the job: report measurements and the digest, and leave the process group.

        Called at the end of the script by itself; call it to leave earlier, or to use the model
        afterwards.

        Args:
            whole: Under a pipeline, bring the whole model to every worker, to its device or, where
                it does not fit, to its host. Else a worker keeps its own stages, and the model
                cannot be called any more; so it is where the script has ended.

        Raises:
            TargetError: Workers have diverged, or nobody can tell: the script destroyed the group.
            FileError: All this is done, and the last checkpoint could not be written.
        """
        session = self._session
        if session.is_finished:
            return
        self._runner.join()
        session.is_finished = True
        finish.meet_all(session, self._runner)
        self.compare()
        self._checkpoints.finish()
        self._engine.drain()
        if not self._runner.is_behind:
            self._merge_buffers()
        finish.report(session, self._engine.digest)
        if whole and not self._runner.is_behind:
            self._engine.gather()
        self._engine.close()
        self._agreement.close()
        finish.part(session)
        self._checkpoints.close()

    def abandon(self) -> None:
        """Leave the job where it stands: nothing is asked of other workers, saved or reported.

        A checkpoint that is being written is written. Nothing can be done with the job afterwards.
        """
        self._session.is_finished = True
        self._epochs.open = None
        self._engine.close()
        self._agreement.close()
        self._checkpoints.abandon()
