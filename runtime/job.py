"""What a training script calls: ``job.batches``, ``job.backward`` and the rest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..schema.errors import TargetError
from . import peers
from .agreement.agreement import Agreement, SharedTensors, Subject
from .agreement.known import KnownParameters
from .agreement.strangers import OtherOptimizers
from .buffers import VirtualNodeBuffers
from .data import (
    Batch,
    Pass,
    PassSampler,
    check_in_order,
    check_loader,
    epoch_order,
    is_drawn,
    pass_loader,
)
from .determinism import refusal_of
from .elastic.member import Member
from .epoch import Epoch
from .gradients import GradientReducer
from .group import Place
from .inference import PREDICTION_EPOCH, Prediction
from .measurements import StepClock
from .places import batch_sizes_of, holders_of, invariant_of, pass_holder_of
from .saving import Checkpoints
from .setup import broadcast_state, named_parameters
from .step_times import StepTimes
from .streams import seed_streams
from .totals import StepTotals

LossFunction = Callable[..., Any]
Answer = TypeVar("Answer")


class Job:
    """One worker of a training job. Made by ``prepare``.

    ``rank``, ``world_size``, ``is_main`` and ``device`` say which one; ``num_steps`` counts global
    steps.
    """

    _checkpoints: Checkpoints | None = None
    _member: Member | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        place: Place,
        *,
        seed: int,
        overlap: bool,
    ) -> None:
        self._model, self._seed, self._overlap = model, seed, overlap
        self._optimizers = optimizers
        self.device = place.device
        self._num_steps = 0
        self._epoch, self._calls = 0, 0
        self._last_loss: Tensor | None = None
        self._parameters = named_parameters(model, optimizers)
        broadcast_state(model, optimizers, self._parameters, place)
        self._clock = StepClock(place.device)
        self._holder = pass_holder_of(place)
        config = place.start.config
        self._batch_sizes = batch_sizes_of(place)
        self.take(place)
        self._totals = StepTotals(self._reducer, place, len(self._batch_sizes) or 1)
        self._global_batch_size = config.global_batch_size if config else None
        self._buffers = VirtualNodeBuffers(model, self._local, self._batch_sizes or (1,))
        self._loaders: dict[
            tuple[int, bool], tuple[DataLoader[Any], PassSampler, DataLoader[Any]]
        ] = {}
        self._open_epoch: Epoch | None = None
        self._finished = False

    def _go_on(self) -> None:
        """From the newest checkpoint, where there is one; and finish when the script ends."""
        from .finish import at_exit

        start, self._member = self._place.start, Member.of(self)
        has_folder = start.checkpoint_folder is not None or start.handover_folder is not None
        if has_folder or self._member is not None:
            self._checkpoints = self._open(start.checkpoint_folder, start.checkpoint_every)
        self._agree(every=start.compare_every)
        at_exit(self)

    def _agree(self, *, every: int, watches_first: bool = True) -> None:
        """Begin to compare with the other workers; see ``Agreement``."""
        self._agreement = Agreement(
            self._subject(), every=every, step=self._num_steps, watches_first=watches_first
        )

    def _subject(self, *, is_pipeline: bool = False, flushes: bool = True) -> Subject:
        """What this worker and the others must agree on.

        Args:
            is_pipeline: Whether parameters are shared out over stages.
            flushes: Whether all workers have made the same updates between two steps.
        """
        known = KnownParameters(
            self._model, self._optimizers, self._parameters, keeps_groups=is_pipeline
        )

        def is_saved() -> bool:
            return self._checkpoints is not None

        is_launched = self._place.start.config is not None
        return Subject(
            known=known,
            optimizers=self._optimizers,
            others=OtherOptimizers(
                self._optimizers, known.names, lambda: is_launched or is_saved()
            ),
            shared=self._shared,
            place=lambda: self._place,
            together=self._waiting_together,
            is_launched=is_launched,
            weighs_samples=len(self._batch_sizes) > 1,
            is_saved=is_saved,
            compares_between_steps=flushes,
        )

    def _shared(self) -> list[SharedTensors]:
        """What all workers hold alike: parameters, and buffers as the script last wrote them."""
        held: dict[str, Tensor] = dict(self._parameters)
        # Buffers that are not persistent are caches, and may follow each worker's own inputs.
        held |= {slot.name: slot.base for slot in self._buffers.slots if slot.is_persistent}
        return [SharedTensors(None, held)]

    def _waiting_together(self, function: Callable[[], Answer]) -> Answer:
        def wait() -> Answer:
            with self._member.waiting() if self._member is not None else nullcontext():
                return function()

        return self._together(wait)

    def compare(self) -> None:
        """Check that all workers still train the same model. Call it on all workers.

        The job calls it by itself every so many steps, after changes of workers, before
        checkpoints and at the end.

        Raises:
            TargetError: They do not; it names the parameter, the workers, the steps and the cause.
        """
        self._join()
        self._agreement.compare(self._num_steps)

    def _open(self, folder: Path | None, every: int) -> Checkpoints:
        return Checkpoints(self, folder, every)

    def take(self, place: Place) -> None:
        """Take a worker's rank, its virtual nodes and its part of the sums."""
        self._place, slot = place, place.slot
        self.rank, self.world_size = place.rank, place.world_size
        self._place_of_nodes = holders_of(place)
        self._local = [node.index for node in slot.virtual_nodes] if slot else [0]
        self._reducer = GradientReducer(
            self._parameters,
            distributed=place.distributed,
            invariant=invariant_of(place),
            is_first=place.rank == 0,
            keeps_carried=place.control is not None and place.control.changes,
        )

    @property
    def num_steps(self) -> int:
        """Global steps so far."""
        self._join()
        return self._num_steps

    @num_steps.setter
    def num_steps(self, number: int) -> None:
        self._num_steps = number

    @property
    def step_times(self) -> tuple[StepTimes, ...]:
        """When the parts of each full step that has ended began and ended. Waits for the device."""
        return self._clock.steps

    def _join(self) -> None:
        """A worker that was started later gets the others' state where it is first needed."""
        if self._member is not None and self._member.is_outside:
            self._member.join()

    def _together(self, function: Callable[[], Answer]) -> Answer:
        """Run what needs all workers; if one is lost, run it again among the survivors."""
        return function() if self._member is None else self._member.run(function)

    def _meeting(self, function: Callable[[], Answer]) -> Answer:
        """Like ``_together``, with a barrier: the function may contain no collective."""

        def meet() -> Answer:
            answer = function()
            if self._member is not None:
                self._totals.meet()
            return answer

        return self._together(meet)

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints, logs and saves."""
        return self.rank == 0

    def print(self, *values: object, **options: Any) -> None:
        """Print on the main worker only."""
        if self.is_main:
            print(*values, **options)  # noqa: T201

    def batches(self, loader: "DataLoader[Any]", *, epoch: int | None = None) -> "Epoch":
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
        check_loader(loader, self._global_batch_size)
        self._join()
        self._epoch = self._epoch if epoch is None else epoch
        sampler, passes = self._pass_loader(loader)
        sampler.set_epoch(self._epoch, self._order(loader))
        self._epoch, self._calls = self._epoch + 1, self._calls + 1
        return Epoch(self, sampler, passes, call=self._calls - 1, is_drawn=is_drawn(loader))

    def _order(self, loader: "DataLoader[Any]") -> Sequence[int]:
        def draw() -> list[int]:
            return epoch_order(loader, self._seed, self._epoch, self._broadcast)

        if self._member is not None and self._member.is_behind:
            return self._member.order_of(self._calls, loader, draw)
        return self._together(lambda: self._checked(draw()))

    def _checked(self, order: list[int]) -> list[int]:
        self._totals.check_same_length(len(order))
        return order

    def _pass_loader(
        self, loader: "DataLoader[Any]", *, predicts: bool = False
    ) -> tuple[PassSampler, "DataLoader[Any]"]:
        known = self._loaders.get((id(loader), predicts))
        if known is None or known[0] is not loader:
            assert loader.batch_size is not None
            sizes = self._batch_sizes or (loader.batch_size,)
            sampler = PassSampler(sizes, self._local, loader.drop_last and not predicts)
            known = (loader, sampler, pass_loader(loader, sampler, self._seed, self.device))
            self._loaders[id(loader), predicts] = known
        return known[1], known[2]

    def _broadcast(self, order: list[int]) -> list[int]:
        """The first worker's order, as plain numbers: nothing is unpickled."""
        if not self._place.distributed:
            return order
        length = torch.tensor(len(order), device=self.device)
        peers.broadcast(length, src=0)
        drawn = torch.zeros(int(length), dtype=torch.int64, device=self.device)
        if self.is_main:
            drawn.copy_(torch.tensor(order))
        peers.broadcast(drawn, src=0)
        found: list[int] = drawn.tolist()
        return found

    def backward(
        self,
        function: LossFunction,
        batch: Batch,
        *,
        scaler: "torch.amp.GradScaler | None" = None,
    ) -> Tensor:
        """Run this worker's virtual nodes; leave the global batch's gradient in ``param.grad``.

        Gradients are the mean over all samples of the global batch, on every worker.

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
        self._join()
        self._begin_step(batch)
        if self._member is None:
            self._run_passes(function, batch, scaler)
            loss = self._close_step(self._totals.finish())
            self._check_settings(self._totals.settings_sums)
            return loss

        def step() -> Tensor:
            self._run_passes(function, batch, scaler)
            return member.exchange()

        member = self._member
        sums = member.run(step, batch)
        loss = self._close_step(self._totals.close(sums))
        member.stepped()
        self._check_settings(self._totals.settings_sums)
        return loss

    def _begin_step(self, batch: Batch) -> None:
        """What may need an exchange of its own before a step."""
        if not self._finished:
            self._agreement.begin_step(self._num_steps, batch.epoch)
            self._totals.settings_number = self._agreement.settings_number

    def _check_settings(self, sums: Any) -> None:
        """End before the update where workers would make it with unlike settings."""
        if self._agreement.is_broken_by(sums):
            self.compare()

    def _run_passes(
        self, function: LossFunction, batch: Batch, scaler: "torch.amp.GradScaler | None"
    ) -> None:
        self._begin(batch)
        try:
            for number, (item, inputs) in enumerate(batch.inputs(), start=1):
                self._run_pass(function, item, inputs, scaler, last=number == len(batch.passes))
        except RuntimeError as error:
            refusal = refusal_of(error, self._place.start.determinism)
            if refusal is None:
                raise
            raise refusal from error
        self._reducer.launch_rest()
        self._clock.computed()

    def _begin(self, batch: Batch) -> None:
        self._open_step(batch)
        if self._holder:
            self._holder.begin_step()
        self._reducer.begin()
        self._agreement.begin_passes()
        self._totals.begin(batch.num_samples)

    def _open_step(self, batch: Batch) -> None:
        """What every step begins with, also a pipeline's."""
        if self._finished:
            raise TargetError("the job is finished", hint="call job.finish after the last step")
        self._clock.begin_step(is_full=batch.is_full)
        self._notice_written()

    def _notice_written(self) -> None:
        """Buffers that the script wrote between steps hold for every virtual node."""
        written = self._buffers.begin_step()
        if written and self._member is not None:
            self._member.mirror.rewrite(written)

    def _close_step(self, loss: Tensor) -> Tensor:
        """What every step ends with: the streams between steps are the same on every worker."""
        self._clock.synchronised()
        seed_streams(self._seed, "between", self._num_steps)
        self._num_steps += 1
        self._last_loss = loss
        return loss

    def _run_pass(
        self,
        function: LossFunction,
        item: Pass,
        inputs: Any,
        scaler: "torch.amp.GradScaler | None",
        *,
        last: bool,
    ) -> None:
        began = self._clock.begin_pass()
        with self._holder.hold(item.num_samples) if self._holder else nullcontext():
            self._buffers.load(item.virtual_node)
            self._reducer.enter(item.virtual_node)
            seed_streams(self._seed, "pass", self._num_steps, item.virtual_node)
            answer = function(*inputs) if isinstance(inputs, tuple | list) else function(inputs)
            self._agreement.look_at(answer, item.num_samples)
            share = self._totals.add(answer, item.num_samples, item.virtual_node)
            if last and self._overlap:
                self._reducer.arm(defer_last=self._holder is not None)
            if share is not None:
                self._go_back(*share, scaler)
            self._buffers.save(item.virtual_node)
            self._reducer.leave()
        self._clock.end_pass(began, num_samples=item.num_samples, is_full=item.is_full)

    def _go_back(self, loss: Tensor, share: float, scaler: "torch.amp.GradScaler | None") -> None:
        gradient = self._totals.gradient(loss, share) if scaler is None else None
        if gradient is not None:
            loss.backward(gradient)  # type: ignore[no-untyped-call]
            return
        scaled = loss if share == 1 else loss * share
        (scaler.scale(scaled) if scaler is not None else scaled).backward()  # type: ignore[no-untyped-call]

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
            if self._checkpoints is not None:
                self._checkpoints.register(thing)

    def checkpoint(self) -> None:
        """Write a checkpoint now, and wait until it is on disk. Call it on all workers.

        Raises:
            TargetError: The launch gave no folder for checkpoints.
            FileError: It could not be written; earlier ones are untouched.
        """
        self._join()
        if self._checkpoints is None or not self._checkpoints.is_asked_for:
            raise TargetError(
                "there is no folder for checkpoints",
                hint="hetflow launch --checkpoint DIR, or HETFLOW_CHECKPOINT=DIR under python",
            )
        self._checkpoints.save(wait=True)

    def sync_buffers(self) -> None:
        """Put the merged buffers (see runtime/buffers.py) into the model, on every worker.

        Call it on all workers, before saving or evaluating the model between steps;
        ``evaluation`` and ``finish`` do so themselves. Virtual nodes keep their own.
        """
        self._join()
        if self._member is not None and self._member.is_behind:
            return
        self._notice_written()
        merged = self._meeting(
            lambda: self._buffers.merged(
                self._totals.all_reduce if self._place.distributed else None
            )
        )
        self._buffers.install(merged)

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, with merged buffers and without gradients.

        Enter it on all workers; what is computed inside is each worker's own affair.
        """
        training = self._model.training
        self.sync_buffers()
        self._model.eval()
        try:
            with torch.no_grad():
                yield self._model
        finally:
            self._model.train(training)

    def predict(
        self,
        loader: "DataLoader[Any]",
        function: Callable[..., Any],
        *,
        on_all: bool = False,
    ) -> "Prediction":
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
            TargetError: A loader that shuffles, or that cannot be cut into virtual nodes.
        """
        check_loader(loader, None)
        check_in_order(loader)
        self._join()
        sampler, passes = self._pass_loader(loader, predicts=True)
        if self._member is not None and self._member.is_behind:
            # The others have done this before this worker came.
            sampler.set_epoch(PREDICTION_EPOCH, [])
            return Prediction(self, sampler, passes, function, on_all=on_all)
        order = self._together(
            lambda: self._checked(
                epoch_order(loader, self._seed, PREDICTION_EPOCH, self._broadcast)
            )
        )
        sampler.set_epoch(PREDICTION_EPOCH, order)
        self.sync_buffers()
        return Prediction(self, sampler, passes, function, on_all=on_all)

    def finish(self) -> None:
        """End the job: report measurements and the digest, and leave the process group.

        Called at the end of the script by itself; call it to leave earlier.
        """
        from .finish import finish

        if not self._finished:
            self._join()
            self._finished = True
            finish(self)
