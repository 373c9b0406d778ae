"""The object that a training script calls: ``job.batches``, ``job.backward`` and the rest.

A job passes the script's calls on to its parts; docs/architecture.md lists them.
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
    """One worker of a training job, made by ``prepare``.

    Attributes:
        rank: Rank of this worker, 0 to ``world_size`` - 1.
        world_size: Number of workers.
        is_main: Whether this worker prints, logs and saves.
        device: Where this worker runs its passes.
        num_steps: Global steps so far.
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
        self._backend = backend_of(session.device)
        self._progress, self._runner = progress, runner
        self._agreement, self._checkpoints = agreement, checkpoints

    @property
    def rank(self) -> int:
        """Rank of this worker, 0 to ``world_size`` - 1."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of workers."""
        return self._session.place.world_size

    @property
    def device(self) -> torch.device:
        """The device on which this worker runs its passes."""
        return self._session.device

    @property
    def is_main(self) -> bool:
        """Whether this worker prints, logs and saves."""
        return self._session.is_main

    @property
    def num_steps(self) -> int:
        """The number of global steps so far."""
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
        """Iterate one epoch over the script's DataLoader: each sample once over all workers.

        The loader's ``batch_size`` is the global batch size. Each call is the next epoch.

        Args:
            loader: A map-style DataLoader; its dataset, collate function, workers, pinning, order
                and ``drop_last`` are kept.
            epoch: Number of the epoch, which keys the order and augmentations. Set it where a
                script resumes in the middle; by default epochs are counted from 0.

        Raises:
            TargetError: The loader cannot be cut into virtual nodes exactly.
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
        """Run this worker's virtual nodes; put the global batch's gradient into ``param.grad``.

        Gradients are the mean over all samples of the global batch, on every worker. Under a
        pipeline, a worker runs its stages and has the gradients of their parameters. If the
        schedule does not flush, the updates have already been made, and the loss returned is the
        previous batch's (the first batch's in the first step).

        Args:
            function: Called once for each virtual node as ``function(*batch)``, or as
                ``function(batch)`` where the collated batch is no tuple or list. Returns the mean
                loss over its samples; or (mean loss, weight) where the mean is over something else,
                such as tokens. Give the weight as a Python number: a tensor makes the host wait.
            batch: A handle from ``batches``.
            scaler: The GradScaler of mixed precision, if the script has one.

        Returns:
            [] float64, detached: the mean loss over the global batch, equal on every worker.

        Raises:
            TargetError: The job is finished, the workers' optimizer settings differ, or the model
                cannot hold the plan's determinism level.
        """
        session, agreement = self._session, self._agreement
        if self._backend.is_capturing():
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
        # The workers' optimizers have different settings and would diverge: end before the update.
        if self._engine.flushes and agreement.is_broken_by(self._engine.settings_sums):
            self.compare()
        return loss

    def compare(self) -> None:
        """Check that all workers still train the same model. Call it on all workers.

        The job does so by itself every so many steps, when workers change, before checkpoints and
        at the end. If the schedule does not flush, microbatches in flight are finished first.

        Raises:
            TargetError: They do not; names the parameter, the workers, the steps and the cause.
        """
        self._engine.drain()
        self._runner.join()
        self._agreement.compare(self._session.num_steps)

    def register(self, *things: Any) -> None:
        """Save and restore these with every checkpoint: schedulers, a GradScaler, counters.

        If the job resumes from a checkpoint, their state is loaded here. The optimizers given to
        ``prepare`` are saved without being registered.

        Args:
            things: Objects with ``state_dict`` and ``load_state_dict``; their state consists of
                plain data and tensors.

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
            TargetError: The launch was given no folder for checkpoints.
            FileError: It could not be written; earlier checkpoints are unchanged.
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

        Under a pipeline, also the parameters of all stages. Call it on all workers before saving
        the model between steps; ``finish`` does it itself. Virtual nodes keep their own buffers.
        """
        if self._join_for_model():
            self._merge_buffers()
            self._engine.gather()

    def _join_for_model(self) -> bool:
        """Join the others to use the model between steps; False if this worker lags behind."""
        if self._session.is_finished:
            self._engine.drain()
        self._runner.join()
        return not self._runner.is_behind

    def _merge_buffers(self) -> None:
        session, buffers = self._session, self._engine.buffers
        buffers.begin_step()
        merged = self._runner.meet(
            lambda: buffers.merged(peers.all_reduce if session.place.distributed else None)
        )
        buffers.install(merged)

    @contextmanager
    def evaluation(self, *, whole: bool = False) -> Iterator[nn.Module]:
        """Enter the model in evaluation mode, with merged buffers and without gradients.

        Enter it on all workers. Under a split plan every worker has the whole model, and what it
        computes inside concerns that worker only. Under a pipeline a call of the model runs on all
        stages where they are, and its answer comes to ``job.device`` of the workers that made the
        call: all of them with the same inputs (it then runs once), each with its own, or only
        some. A worker that leaves the context runs its stages until all have left. Parameters of
        other stages have no values inside.

        Args:
            whole: Under a pipeline, bring the whole model to every worker: to its device or, if it
                does not fit, to its host. Move inputs to the device of the model's parameters.
                Then parts of the model can be called too, and parameters can be read.
        """
        model, engine = self._session.model, self._engine
        training = model.training
        if self._join_for_model():
            self._merge_buffers()
            if whole:
                engine.gather()
        model.eval()
        try:
            with torch.no_grad(), engine.whole_model() if whole else engine.evaluating():
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
        """Evaluate a large batch on the virtual nodes (VirtualFlow 1.3).

        Call and iterate it on all workers. Each global batch is shared out as in training; passes
        run in evaluation mode, with merged buffers and without gradients. Outputs come in order of
        the samples: each item is what ``function`` returned for one virtual node's share, with its
        tensors on the host.

        Args:
            loader: As for ``batches``, in a fixed order; under a plan its ``batch_size`` does not
                matter. Every sample gets its output, also with ``drop_last``.
            function: Called as in ``backward``; returns tensors and plain values, alone or in
                tuples, lists and dicts.
            on_all: Give the outputs on every worker; else only the main worker's loop has items.

        Raises:
            TargetError: The loader shuffles or cannot be cut into virtual nodes; or the plan is a
                pipeline, where no worker runs a whole pass.
        """
        self._engine.check_predicts()
        check_loader(loader, None)
        check_in_order(loader)
        self._runner.join()
        sampler, passes = self._epochs.passes_of(loader, predicts=True)
        if self._runner.is_behind:  # the others did this before this worker joined
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

        It is called by itself when the script ends. Call it to leave earlier, or to use the model
        afterwards.

        Args:
            whole: Under a pipeline, bring the whole model to every worker: to its device or, if it
                does not fit, to its host. Else a worker keeps its own stages only and the model can
                no longer be called; this is what the end of the script does.

        Raises:
            TargetError: Workers have diverged; or that is unknown, because the script destroyed the
                process group.
            FileError: The job has ended, but the last checkpoint could not be written.
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
        """Leave the job at once: other workers are not asked, nothing is saved or reported.

        A checkpoint that is being written is completed. The job cannot be used afterwards.
        """
        self._session.is_finished = True
        self._epochs.open = None
        self._engine.close()
        self._agreement.close()
        self._checkpoints.abandon()
