"""The object that a training script calls: ``job.batches``, ``job.backward`` and the rest.

A job passes the script's calls on to its parts; docs/architecture.md lists them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..devices.backend import DeviceBackend, backend_of
from ..schema.errors import TargetError
from ..schema.options import command
from . import finish, peers
from .agreement.agreement import Agreement
from .checkpoints.restoring import Progress
from .checkpoints.saving import Checkpoints
from .data import Batch, check_in_order, check_loader, has_index
from .determinism import seed_streams_in_step
from .engine import Answer, LossFunction, Runner, Step, StepEngine
from .epoch import Epoch, Epochs, IndexReader, StreamReader, check_stream
from .measurements import StepTimes
from .outputs import PREDICTION_EPOCH, PredictedOutputs, evaluating
from .promise.promise import Promise
from .promise.trial import ReturnForm
from .protocol.environment import tell_first_step
from .rounds import JobRounds
from .session import Session
from .split_engine import SplitEngine
from .totals import Weighted, check_same_length, weighted_by
from .unplanned import HINT, has_gone_back


class Job:
    """One worker of a training job, made by ``prepare``.

    Example:
        >>> import hetflow, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> job = hetflow.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> job.rank, job.world_size, job.is_main, job.num_steps
        (0, 1, True, 0)
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
        promise: Promise | None,
    ) -> None:
        self._promise = promise
        self._session, self._engine, self._epochs = session, engine, epochs
        # No method of the job's own: what refers to itself keeps its memory until it is looked for.
        self._begin_step = partial(_begin_step, backend_of(session.device), runner, session)
        self._progress, self._runner = progress, runner
        self._agreement, self._checkpoints = agreement, checkpoints
        split = engine if isinstance(engine, SplitEngine) else None
        self._rounds = JobRounds(
            session, split, runner, agreement, self._begin_step, tests=promise is not None
        )

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

    def __iter__(self) -> NoReturn:
        """Refuse ``model, optimizer, loader = hf.prepare(...)``, as other libraries have it.

        Raises:
            TargetError: Always; it says what to write.
        """
        raise TargetError(
            "hf.prepare returns one job; the model and the optimizers stay the script's own",
            hint="job = hf.prepare(model, optimizer); then for batch in job.batches(loader)",
        )

    def print(self, *values: object, **options: Any) -> None:
        """Print on the main worker only."""
        if self.is_main:
            print(*values, **options)  # noqa: T201

    def scalars(self) -> dict[str, float]:
        """What a logger shows of the job, as plain numbers by name; log them on the main worker.

        Returns:
            ``loss`` of the last global batch; ``step_seconds/measured``, the median of this
            worker's full steps, and ``step_seconds/predicted``, the plan's; under a split plan
            ``samples/RANK TYPE``, each worker's samples of a full batch. What is not known is left
            out. Waits for the loss, if it is on a device.

        Example:
            >>> import hetflow, torch
            >>> hetflow.prepare(torch.nn.Linear(2, 1)).scalars()
            {}
        """
        session, config = self._session, self._session.place.start.config
        predicted = None if config is None else config.predicted_step_seconds
        known = {
            "loss": None if session.last_loss is None else float(session.last_loss),
            "step_seconds/measured": session.clock.timings(wait=False).step_seconds,
            "step_seconds/predicted": predicted,
        }
        if config is not None and config.pipeline is None:
            for slot in config.workers:
                number = sum(node.batch_size for node in slot.virtual_nodes)
                known[f"samples/{slot.rank} {slot.device_type}"] = float(number)
        return {name: value for name, value in known.items() if value is not None}

    def batches(self, loader: Any, *, epoch: int | None = None, steps: int | None = None) -> Epoch:
        """Iterate one epoch over the script's data: each sample once over all workers.

        A batch of the loader is a global batch. Each call is the next epoch.

        Args:
            loader: A DataLoader over a dataset with an index; its dataset, collate function,
                workers, pinning, order and ``drop_last`` are kept, also batches that a batch
                sampler cuts. Or whole batches that every worker draws alike and keeps its rows of:
                a DataLoader over an IterableDataset, another iterable, a function such as
                ``get_batch``.
            epoch: Number of the epoch, which keys the order and augmentations. Set it where a
                script resumes in the middle; by default epochs are counted from 0.
            steps: The most steps of the epoch, for data without an index; a function needs it.

        Raises:
            TargetError: The loader cannot be cut into virtual nodes exactly.

        Example:
            >>> import hetflow, torch
            >>> job = hetflow.prepare(torch.nn.Linear(2, 1))
            >>> def get_batch():
            ...     return torch.rand(4, 2), torch.rand(4, 1)
            >>> [batch.num_samples for batch in job.batches(get_batch, steps=3)]
            [4, 4, 4]
        """
        session, engine = self._session, self._engine
        config = session.place.start.config
        size = config.global_batch_size if config else None
        is_indexed = has_index(loader)
        if not is_indexed:
            check_stream(loader, steps, size)
        else:
            check_loader(loader, size)
            if steps is not None:
                raise TargetError(
                    "job.batches: steps is for data without an index",
                    hint="leave the loop after so many batches; or give a sampler of so many",
                )
        self._runner.join()
        number = session.next_epoch if epoch is None else epoch
        reader: IndexReader | StreamReader
        if is_indexed:
            sampler, _ = self._epochs.passes_of(loader)
            sampler.set_epoch(number, self._order(loader, number))
            reader = IndexReader(session, self._epochs, self._rounds, loader)
        else:
            reader = self._stream(loader, number, steps)
        call = session.num_calls
        session.next_epoch, session.num_calls = number + 1, call + 1
        made = Epoch(
            session,
            self._epochs,
            self._runner,
            self._checkpoints,
            reader,
            call=call,
        )
        engine.drain()
        if not engine.flushes and session.num_steps:
            self.compare()
        if isinstance(reader, IndexReader) and len(reader):
            engine.begin_epoch(number, len(reader), reader.last_batch_samples)
        return made

    def _stream(self, source: Any, epoch: int, steps: int | None) -> StreamReader:
        if not self._engine.flushes:
            raise TargetError(
                "a schedule without flushes runs over a whole epoch, and data without an index "
                "does not say how many batches it has",
                hint="use a schedule that flushes, such as 1f1b; or a dataset with an index",
            )
        registered, dataset = self._progress.registered, getattr(source, "dataset", None)
        is_registered = any(thing is dataset for thing in registered if dataset is not None)
        if is_registered and getattr(source, "num_workers", None):
            raise TargetError(
                "the dataset is registered, and its data workers have copies of it that go on",
                hint="use num_workers=0, or register a loader with a state (StatefulDataLoader)",
            )
        return StreamReader(
            self._session,
            source,
            self._rounds,
            epoch=epoch,
            steps=steps,
            has_state=is_registered or any(thing is source for thing in registered),
            saw=self._agreement.saw,
        )

    def _order(self, loader: "DataLoader[Any]", epoch: int) -> Sequence[int]:
        def draw() -> list[int]:
            return self._epochs.draw(loader, epoch)

        if self._runner.is_behind:
            return self._runner.order_of(self._session.num_calls, loader, draw)

        def agreed() -> list[int]:
            with self._runner.waiting():
                return check_same_length(draw(), self._session.place)

        return self._runner.run(agreed)

    @overload
    def backward(
        self,
        function: Tensor | Weighted,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
        weight: float | Tensor | None = None,
        per_virtual_node: bool = False,
    ) -> Tensor: ...

    @overload
    def backward(
        self,
        function: LossFunction,
        batch: Batch,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
        weight: Callable[..., float] | None = None,
        has_aux: Literal[False] = False,
        over_batch: LossFunction | None = None,
        per_virtual_node: bool = False,
    ) -> Tensor: ...

    @overload
    def backward(
        self,
        function: LossFunction,
        batch: Batch,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
        weight: Callable[..., float] | None = None,
        has_aux: Literal[True],
        over_batch: None = None,
        per_virtual_node: bool = False,
    ) -> tuple[Tensor, list[Any]]: ...

    def backward(
        self,
        function: LossFunction | Tensor | Weighted,
        batch: Batch | None = None,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
        weight: Callable[..., float] | float | Tensor | None = None,
        has_aux: bool = False,
        over_batch: LossFunction | None = None,
        per_virtual_node: bool = False,
    ) -> Tensor | tuple[Tensor, list[Any]]:
        """Run this worker's virtual nodes; put the global batch's gradient into ``param.grad``.

        Gradients are the mean over all samples of the global batch, on every worker. Under a
        pipeline, a worker runs its stages and has the gradients of their parameters. If the
        schedule does not flush, the updates have already been made, and the loss returned is the
        previous batch's (the first batch's in the first step).

        When a function is first used, it is called on a few samples together and in parts
        (runtime/promise/): if its loss is no mean over samples, the script ends before an update.

        In a loop that computes its losses by itself, give the loss of the part that the loop is at,
        and no batch: ``job.backward(loss)``. What its graph shows is checked in place of a call.

        Args:
            function: The loss of a part of the batch (see ``parts``): [] or ``hf.Weighted``. Or a
                function. It is called once for each virtual node as ``function(*batch)``, or as
                ``function(batch)`` where the collated batch is no tuple or list. Returns the mean
                loss over its samples; or ``hf.Weighted(mean loss, weight)`` where the mean is over
                something else, such as tokens.
            batch: A handle from ``batches``; None with a loss.
            scaler: The GradScaler of mixed precision, if the script has one.
            weight: Called as the function is; returns the weight of its loss, in place of
                ``hf.Weighted``. With a loss, its weight.
            has_aux: The function returns ``(loss, other values)``. The other values, tensors and
                plain data alone or in tuples, lists and dicts, come back on every worker.
            over_batch: For a loss that compares samples: ``function`` then returns outputs with one
                row for each sample (a tensor, or several in a tuple or dict). ``over_batch`` is
                called with those of the whole global batch, as ``function`` is with a batch. It
                returns the loss. Every virtual node runs twice.
            per_virtual_node: The loss is meant to be each virtual node's own, as batch-norm's
                statistics are: do not test it. Every mapping of the same virtual nodes then gives
                the same result, which is not that of one device.

        Returns:
            [] float64, detached: the mean loss over the global batch, equal on every worker; for a
            part that is not this worker's last one, the mean over its parts so far. With
            ``has_aux``, also a list of what each virtual node gave beside its loss, in order of the
            samples, with tensors on the host.

        Raises:
            TargetError: The loss is no mean over samples; the job is finished; the workers'
                optimizer settings differ; or the model cannot hold the plan's determinism level.
        """
        if isinstance(function, Tensor | Weighted):
            self._check_of_loss(batch, weight, has_aux=has_aux, over_batch=over_batch)
            mean, step = self._rounds.backward(
                function, scaler=scaler, weight=weight, per_virtual_node=per_virtual_node
            )
            if step is None:
                return mean
            loss = self._close_step(step)
            self._rounds.close(step)
            self._check_settings()
            return loss
        if not callable(function) or not isinstance(batch, Batch):
            got = "no batch" if batch is None else f"a {type(batch).__name__} as batch"
            raise TargetError(
                f"job.backward takes a function and a batch of job.batches, or the loss of a part "
                f"of a batch; it got {type(function).__name__} and {got}",
                hint="for batch in job.batches(loader): job.backward(lambda x, y: "
                "criterion(model(x), y), batch); a function that draws batches: "
                "job.batches(draw, steps=1000)",
            )
        session, agreement = self._session, self._agreement
        self._begin_step()
        form = ReturnForm(has_aux=has_aux, gives_outputs=over_batch is not None)
        self._check_form(form, weight)
        if callable(weight):
            function = weighted_by(function, weight, has_aux=has_aux)
        promise = None if per_virtual_node else self._promise
        # A pipeline's engine tests a loss by itself, on what its last stage gives.
        whole = promise if self._engine.runs_whole else None
        failure = None if whole is None else whole.test(function, batch, form)
        agreement.begin_step(session.num_steps, batch.epoch)
        step = Step(
            function,
            batch,
            scaler,
            agreement,
            has_aux=has_aux,
            over_batch=over_batch,
            waiting=self._runner.waiting,
            promise=promise,
        )
        loss = self._close_step(step)
        if failure is not None:  # it ran on the virtual nodes' samples, so this is not its fault
            raise failure
        if whole is not None:
            whole.check()
        self._check_settings()
        return (loss, step.rest) if has_aux else loss

    def _close_step(self, step: Step) -> Tensor:
        """Sum a step over the workers and count it; return its mean loss []."""
        session = self._session
        loss = self._runner.step(step)
        session.clock.synchronised()
        # What the script draws until its next batch, an optimizer's noise say, is equal everywhere.
        again = ("round", step.round) if step.round else ()
        seed_streams_in_step(session.seed, "between", session.num_steps, *again)
        session.num_steps += int(not step.round)  # further rounds over a batch do not count
        if session.last_loss is None:
            tell_first_step()
        session.last_loss = loss
        return loss

    def _check_settings(self) -> None:
        """End before an update where the workers' optimizers have unlike settings: they diverge."""
        if self._engine.settings_differ and self._session.watch.settings_are_exact:
            self.compare()

    def _check_of_loss(
        self, batch: Batch | None, weight: object, *, has_aux: bool, over_batch: object
    ) -> None:
        """Refuse what goes with a function only."""
        given = {
            "a batch": batch is not None,
            "has_aux": has_aux,
            "over_batch": over_batch is not None,
            "a function as weight": callable(weight),
        }
        for name, is_given in given.items():
            if is_given:
                raise TargetError(
                    f"job.backward: {name} goes with a function, not with a loss",
                    hint="job.backward(loss) inside: for x, y in job.parts(batch)",
                )

    def parts(self, batch: Batch) -> Iterator[Any]:
        """Iterate this worker's parts of a batch, one for each of its virtual nodes.

        The loop's body computes the loss of each part and gives it to ``job.backward(loss)``. With
        the last one, ``param.grad`` is the gradient of the mean loss over the global batch, on
        every worker, as after ``job.backward(function, batch)``. A batch may be gone over several
        times, each with its own update: a GAN's models, SAM's two passes, the closure of LBFGS. Its
        samples stay on the device meanwhile.

        A worker without samples in a short batch gets one part of up to two samples that count
        nothing: so the loop's body runs as often on all workers.

        Args:
            batch: A handle from ``batches``.

        Yields:
            What the loader's collate function gave for the part's samples, on ``job.device``.

        Raises:
            TargetError: The plan is a pipeline, or the model has SyncBatchNorm.

        Example:
            >>> import hetflow, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> job = hetflow.prepare(model, optimizer)
            >>> data = torch.utils.data.TensorDataset(torch.ones(4, 2))
            >>> for batch in job.batches(torch.utils.data.DataLoader(data, batch_size=2)):
            ...     for (x,) in job.parts(batch):
            ...         loss = job.backward(model(x).mean())
            ...     optimizer.step()
            ...     optimizer.zero_grad()
        """
        return self._rounds.parts(batch)

    def _check_form(self, form: ReturnForm, weight: object) -> None:
        if weight is not None and not callable(weight):
            raise TargetError(
                f"job.backward: weight must be a function of the batch, got {weight!r}",
                hint="weight=lambda x, y: int((y != -100).sum()), or return hf.Weighted",
            )
        if form.gives_outputs and (form.has_aux or weight is not None):
            raise TargetError(
                "job.backward: over_batch goes with neither has_aux nor weight",
                hint="the function gives outputs of each sample, and over_batch the loss alone",
            )
        if (form.gives_outputs or form.has_aux) and not self._engine.runs_whole:
            raise TargetError(
                f"job.backward: {'over_batch' if form.gives_outputs else 'has_aux'} is for split "
                f"plans; under a pipeline no worker has the outputs of whole passes",
                hint="solve for a split plan; or compute other values in job.evaluation()",
            )

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
                hint=f"{command('launch', checkpoint='DIR')}, or HETFLOW_CHECKPOINT=DIR under "
                "python",
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

        def merge() -> dict[str, Tensor]:
            with self._runner.waiting():
                return buffers.merged(peers.all_reduce if session.place.distributed else None)

        buffers.install(self._runner.meet(merge))

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
        engine, self._session.has_evaluated = self._engine, True
        if self._join_for_model():
            self._merge_buffers()
            if whole:
                engine.gather()
        calls = engine.whole_model() if whole else engine.evaluating()
        with evaluating(self._session.model, calls) as model:
            yield model

    def predict(
        self,
        loader: "DataLoader[Any]",
        function: Callable[..., Any],
        *,
        on_all: bool = False,
    ) -> PredictedOutputs:
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
        calls_together = self._engine.check_predicts()
        self._session.has_evaluated = True
        check_loader(loader, None, predicts=True)
        check_in_order(loader)
        self._runner.join()
        sampler, passes = self._epochs.passes_of(loader, predicts=True)
        if self._runner.is_behind:  # the others did this before this worker joined
            sampler.set_epoch(PREDICTION_EPOCH, [])
        else:
            sampler.set_epoch(PREDICTION_EPOCH, self._order(loader, PREDICTION_EPOCH))
            self._merge_buffers()
            if not calls_together:
                self._engine.gather()

        def first_sample(step: int) -> Any:
            return self._epochs.read(loader, sampler.cut(step).keys_of([(0, 1)]))[0]

        return PredictedOutputs(
            self._session,
            self._runner,
            self._engine.buffers,
            sampler,
            passes,
            function,
            on_all=on_all,
            together=(self._engine.evaluating, first_sample) if calls_together else None,
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
        if self._promise is not None:
            self._promise.finish()
        if session.num_steps == 0 and not session.has_evaluated and has_gone_back():
            raise TargetError(
                "the script has called hf.prepare and trained by backward passes of its own: each "
                "worker on whole batches, not under the plan",
                hint=HINT,
            )
        # By the store: a worker that left its loop early would not come to a collective.
        finish.meet_all(session, self._runner.run)
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
        self._checkpoints.close()  # last: it may raise, and now no other worker waits for this one

    def abandon(self) -> None:
        """Leave the job at once: other workers are not asked, nothing is saved or reported.

        A checkpoint that is being written is completed. The job cannot be used afterwards.
        """
        self._session.is_finished = True
        self._epochs.open = None
        self._engine.close()
        self._agreement.close()
        self._checkpoints.abandon()


class Alone:
    """The runner of workers that neither join nor leave: it only calls the functions."""

    changes, is_behind = False, False

    def __init__(self, engine: StepEngine) -> None:
        self._engine = engine

    def join(self) -> None:
        """No worker joins later."""

    def run(self, function: Callable[[], Answer]) -> Answer:
        """See ``Runner``."""
        return function()

    def meet(self, function: Callable[[], Answer]) -> Answer:
        """See ``Runner``."""
        return function()

    def step(self, step: Step) -> Tensor:
        """See ``Runner``."""
        return self._engine.run(step)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Do nothing: no other worker waits."""
        yield

    def runs_passes(self, *, resizes: bool) -> None:
        """Do nothing: no step is ever repeated."""

    def boundary(self) -> None:
        """Do nothing: no worker joins or leaves."""

    def order_of(
        self, call: int, loader: "DataLoader[Any]", draw: Callable[[], list[int]]
    ) -> Sequence[int]:
        """See ``Runner``; no worker lags, so the order is drawn."""
        return draw()


def _begin_step(backend: DeviceBackend, runner: Runner, session: Session) -> None:
    """Join the others for a step, and refuse one that cannot be."""
    if not backend.is_host and backend.is_capturing():
        raise TargetError(
            "job.backward cannot be captured in a graph of kernels: a step reads the batch and "
            "the sums of the step before on the host",
            hint="take batches and call it outside of the capture",
        )
    runner.join()
    if session.is_finished:
        raise TargetError("the job is finished", hint="call job.finish after the last step")
