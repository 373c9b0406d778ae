"""transformers' Trainer under a plan: one training step runs the virtual nodes of this worker.

Trainer stands on accelerate, whose adapter cuts its batches and gathers its results. What is left:
Trainer takes several batches before it trains on the first, counts the items of a batch over all
workers, and logs the plain mean of the workers' losses.
"""

import contextlib
import copy
import functools
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ...schema.errors import TargetError
from ..determinism import streams_kept
from ..promise.promise import divisors_of, last_divisors_of
from ..promise.untouched import Untouched
from .losses import before, share_of
from .numbers import slope_of
from .patching import around, be_one_process, check_version
from .training import BatchPart, Training, training, with_scalars

VERSIONS = ((4, 57), (5, 24))  # the oldest and the newest that were tested
_CLOSE = 1e-5  # of losses in 32 or 64 bits; parts of the latter may be computed in 32
_CLOSE_OF_HALF = 2e-3  # of these, where the model computes in 16 bits
_IGNORED = -100  # the label that counts nothing
_Kind = Literal[
    "sum", "samples", "next labels", "labels", "divisor 0", "divisor 1", "divisor 2", "divisor 3"
]
_KINDS: tuple[_Kind, ...] = get_args(_Kind)  # in order of preference
_READ: tuple[_Kind, ...] = _KINDS[4:]  # by what divides the loss, the last division first
_FIRST: dict[str, int] = {"next labels": 1, "labels": 0}  # the first label of a sample that counts
_STATE, _STATE_ALONE = "rng_state_{}.pth", "rng_state.pth"  # Trainer's files in a checkpoint
_ENDLESS = 1_000_000_000  # steps
_INTEGRATIONS = "transformers.integrations"  # loggers of other tools
_LOOSE = 3e-2  # of losses in 16 bits
_DIVISORS = len(_READ)  # of a loss, that are followed
_ROWS, _WIDE = 4, 4  # rows that a trial may have on any device; bytes of 32-bit numbers


def adapt(_: Any) -> None:
    """Change Trainer in this process."""
    from transformers import Trainer, TrainingArguments

    be_one_process(TrainingArguments, "world_size")
    around(Trainer, "__init__", _make)


def _make(original: Any, self: Any, *values: Any, **options: Any) -> None:
    check_version("transformers", VERSIONS)
    original(self, *values, **options)
    settings, said = self.args, None
    if settings.n_gpu > 1:
        said = f"n_gpu is {settings.n_gpu}; a worker of a plan has one device"
    elif settings.torch_compile:
        said = "torch_compile was not tested with virtual nodes"
    elif settings.auto_find_batch_size:
        said = "auto_find_batch_size changes the batch that was planned"
    elif getattr(settings, "train_sampling_strategy", None) == "batch_rebalance":
        said = "train_sampling_strategy batch_rebalance gives each worker other batches"
    if said is not None:
        raise TargetError(f"Trainer under a plan: {said}", hint="leave this argument out")
    if training().watcher is not None:
        _leave_no_trace(self)
    # Else each worker counts by its own items, where one process counts by the batch's.
    settings.average_tokens_across_devices = True
    self.pieces_ahead, self.trained_form, self.evaluated_form = deque(), None, None
    self.form_now, self.weight_now, self.batches_trained, self.is_due = None, 0.0, 0, True
    # Of this object, because classes of other libraries replace the methods of Trainer's.
    for name, other in _METHODS.items():
        setattr(self, name, functools.partial(other, getattr(self, name), self))
    training().note_requests()
    for callback in self.callback_handler.callbacks:
        if type(callback).__module__.startswith(_INTEGRATIONS):
            callback.on_log = functools.partial(_log, callback.on_log)


def _log(original: Any, *values: Any, logs: dict[str, Any] | None = None, **options: Any) -> None:
    """Log to W&B, TensorBoard, MLflow and their like."""
    original(*values, logs=None if logs is None else with_scalars(logs, training()), **options)


def _leave_no_trace(trainer: Any) -> None:
    """Let a Trainer that is measured train on and on, and neither save nor log to other tools."""
    settings, callbacks = trainer.args, trainer.callback_handler.callbacks
    settings.max_steps, settings.save_strategy, settings.eval_strategy = _ENDLESS, "no", "no"
    settings.load_best_model_at_end = settings.eval_on_start = False
    callbacks[:] = [c for c in callbacks if not type(c).__module__.startswith(_INTEGRATIONS)]


def _take_batches(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    """Remember the part of each batch that Trainer takes before it trains on the first."""
    with training().taking() as self.pieces_ahead:
        return original(*values, **options)


def _count_items(original: Any, self: Any, batches: list[Any], *values: Any) -> Any:
    """Count no items of a sample that only keeps this worker in step with the others."""
    pieces = list(self.pieces_ahead) or [training().piece]  # more than batches at a stream's end
    counted = [
        batch
        if piece is None or piece.own_samples or "labels" not in batch
        else {**batch, "labels": torch.full_like(batch["labels"], _IGNORED)}
        for batch, piece in zip(batches, pieces[: len(batches)], strict=True)
    ]
    return original(counted, *values)


def _evaluate(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    """Evaluate on the first worker's buffers: Trainer does so without DistributedDataParallel."""
    training().equalise_buffers()
    training().gather_weights()
    return original(*values, **options)


def _compute(
    original: Any, self: Any, model: Any, inputs: Any, *values: Any, **options: Any
) -> Any:
    """Compute a loss, and note by how many items it is divided, for trials."""
    self.items_asked = values[1] if len(values) > 1 else options.get("num_items_in_batch")
    form: LossForm | None = self.form_now
    self.weight_now = self.weight_now or 0.0  # None where an evaluation asks no compute_loss
    given = copy.copy(inputs)  # Trainer takes the labels out for a compute_loss_func
    reads_graph = form is not None and form.kind in _READ
    with torch.set_grad_enabled(reads_graph or torch.is_grad_enabled()):
        made = original(model, inputs, *values, **options)
    if form is not None:
        loss = made[0] if isinstance(made, tuple) else made
        form.check(loss, given)
        known = training().known_losses
        if known is not None:
            known.add(loss.grad_fn)
        if reads_graph:
            self.weight_now = form.weight_of(loss, training())
            training().weigh_part(self.weight_now)
    return made


def _predict(
    original: Any, self: Any, model: Any, inputs: Any, *values: Any, **options: Any
) -> Any:
    """Evaluate this worker's share; the loss is that of the whole batch."""
    current = training()
    piece = current.piece
    assert piece is not None

    def evaluated() -> Any:
        self.weight_now = None
        with current.evaluating(piece), _weighed_by(self, self.evaluated_form):
            return original(model, inputs, *values, **options)

    loss, logits, labels = evaluated()
    if loss is not None and not current.runs_whole:
        if self.evaluated_form is None or not self.evaluated_form.is_told:
            current.losses.skip()
            self.evaluated_form = form_of(self, model, inputs, self.items_asked, current)
            if self.evaluated_form.kind in _READ:
                loss, logits, labels = evaluated()
        form, shares = self.evaluated_form, [(inputs, piece.own_samples)]
        if self.weight_now is None:
            form = form.of_model()  # as Seq2SeqTrainer asks the model, and not compute_loss
        (weight,) = form.weights(shares, piece, current)
        if form.kind in _READ:
            weight = self.weight_now
        own = loss * (weight / current.world_size) if weight else torch.zeros_like(loss)
        loss = current.sum_of(own).as_subclass(_BatchLoss)
    return loss, logits, labels


@contextlib.contextmanager
def _weighed_by(trainer: Any, form: "LossForm | None") -> Iterator[None]:
    """A context in which losses that the Trainer computes are of this form."""
    trainer.form_now = form
    try:
        yield
    finally:
        trainer.form_now = None


class _BatchLoss(Tensor):
    """The loss of a batch, which Trainer repeats for each sample before it gathers."""

    def repeat(self, *sizes: Any) -> Tensor:
        """[times] the loss on one worker, [0] on others: gathered it is as in one process."""
        # So a short batch counts as there: gather_for_metrics cuts it, Seq2SeqTrainer's gather not.
        current, plain = training(), self.as_subclass(Tensor)
        if current.piece is None:
            return plain.repeat(*sizes)
        has_samples = list(map(bool, current.shares(current.piece)))
        return plain.repeat(*sizes if current.place.rank == has_samples.index(True) else (0,))


def _step(
    original: Any, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Tensor:
    """Train on this worker's share, one virtual node after another."""
    from accelerate.utils import find_batch_size, slice_tensors

    current = training()
    piece = self.pieces_ahead.popleft()
    current.begin_batch(piece)
    if current.runs_whole:
        with current.part(piece.own_samples, 1.0):
            whole: Tensor = original(model, inputs, num_items_in_batch)
        return whole
    parts = current.parts_of(piece)
    if len(parts) > 1 and find_batch_size(inputs) != piece.own_samples:
        raise TargetError(
            f"the batch has {find_batch_size(inputs)} rows for {piece.own_samples} samples, so it "
            "cannot be cut into virtual nodes",
            hint="solve for one virtual node a device, or use a collator that gives a row a sample",
        )
    self.batches_trained += 1
    before: LossForm | None = self.trained_form
    is_told = before is not None and before.is_told
    self.is_due = self.is_due or not is_told or self.batches_trained.bit_count() == 1
    if self.is_due and current.is_between_steps:
        self.is_due = False
        current.losses.skip()  # a recording would see plain numbers in place of their tensors
        self.trained_form = form_of(self, model, inputs, num_items_in_batch, current, before)
    shares = [
        (
            slice_tensors(inputs, slice(start, end)) if len(parts) > 1 else inputs,
            min(end - start, piece.own_samples),
        )
        for start, end in parts
    ]
    weights = self.trained_form.weights(shares, piece, current)
    total, current.known_losses = torch.zeros((), device=self.args.device), set()
    for number, ((share, num_samples), weight) in enumerate(zip(shares, weights, strict=True), 1):
        is_last = number == len(parts)
        waits = contextlib.nullcontext() if is_last else self.accelerator.no_sync(model=model)
        with current.part(num_samples, weight), waits, _weighed_by(self, self.trained_form):
            loss = original(model, share, num_items_in_batch)
            weight = self.weight_now if self.trained_form.kind in _READ else weight
        # What Trainer logs is the plain mean of the workers' losses.
        total = total + loss * weight if weight else total
    if not self.trained_form.is_told and float(total.abs()) > _nothing_in(total.dtype):
        raise TargetError(
            "the loss is 0 for the samples that it was tried on, and not for all of the batch, so "
            "how it is made of the losses of its parts is not known",
            hint="compute a mean over samples, or divide by num_items_in_batch",
        )
    return total


def _save_random(original: Any, self: Any, folder: str) -> None:
    """Save the state of random streams under the name that one process looks for, too."""
    original(folder)
    own = Path(folder, _STATE.format(0))
    if self.args.process_index == 0 and own.is_file():
        shutil.copy(own, Path(folder, _STATE_ALONE))


def _load_random(original: Any, self: Any, folder: str | None) -> None:
    """Load the first worker's random state where this worker was not there when it was saved."""
    own = _STATE.format(self.args.process_index)
    for name in (own, _STATE.format(0), _STATE_ALONE):
        if folder is not None and Path(folder, name).is_file():
            with tempfile.TemporaryDirectory() as copied:
                shutil.copy(Path(folder, name), Path(copied, own))
                original(copied)
            return
    original(folder)


def _save_when_asked(original: Any, self: Any, *values: Any, **options: Any) -> None:
    """Save after a step, and leave, where this launch was asked to (--checkpoint, SIGTERM)."""
    is_asked = training().is_asked_to_stop()
    self.control.should_save = self.control.should_save or is_asked
    original(*values, **options)
    if is_asked:
        training().leave()


_METHODS: dict[str, Callable[..., Any]] = {
    "get_batch_samples": _take_batches,
    "_get_num_items_in_batch": _count_items,
    "training_step": _step,
    "compute_loss": _compute,
    "evaluation_loop": _evaluate,
    "prediction_step": _predict,
    "_maybe_log_save_evaluate": _save_when_asked,
    "_save_rng_state": _save_random,
    "_load_rng_state": _load_random,
}


def _nothing_in(dtype: torch.dtype) -> float:
    """What a loss that is 0 may be, by rounding."""
    return 1e3 * torch.finfo(dtype).eps


def _labels_of(inputs: Any, first: int) -> int:
    """The labels of some samples that count, from the position ``first`` of each sample on."""
    return int(inputs["labels"][..., first:].ne(_IGNORED).sum())


@dataclass(frozen=True, slots=True)
class LossForm:
    """How the loss of a batch is made of the losses of its parts.

    Attributes:
        kind: The batch's loss is their sum, or a mean. In a mean samples count, or labels, or
            "next labels": all but each sample's first, which a causal language model predicts from
            nothing. Or there counts what divides each loss in its graph: a mask, class weights.
        scale: What Trainer multiplies the loss by, because others have the rest of the batch.
        counts_all: Whether samples count, and labels would too: each of them counted in the trial.
        divisors: [n] by what a loss is divided for each sample or label that counts; 0 where that
            does not follow from their number.
        num_read: Divisors in the graph of a loss.
        fits: The kinds that it was in each trial.
        is_told: Whether a loss of a trial was not 0: all kinds fit one that is.
    """

    kind: _Kind
    scale: float
    counts_all: bool
    divisors: tuple[float, ...]
    num_read: int = 0
    fits: frozenset[_Kind] = frozenset(_KINDS)
    is_told: bool = True

    def check(self, loss: Tensor, inputs: Any) -> None:
        """Refuse a mean over a mask, or over targets, that was full in the trial and is not now.

        Raises:
            TargetError: What divides the loss no longer follows from the samples or labels.
        """
        if self.kind in ("sum", *_READ) or not any(self.divisors):
            return
        count = _weight_in(inputs, self.kind)
        for expected, divisor in zip(self.divisors, divisors_of(loss), strict=False):
            value = float(divisor)
            close = _LOOSE if divisor.dtype.itemsize < _WIDE else 10 * _CLOSE
            if expected and not abs(value - expected * count) <= close * abs(expected * count):
                raise TargetError(
                    f"the loss is divided by {value:.6g} where it was tried as a mean that divides "
                    f"by {expected * count:.6g}: it is a mean over a mask or over some targets",
                    hint="compute a mean over samples, or divide by num_items_in_batch",
                )

    def of_model(self) -> "LossForm":
        """The form of what the model returns itself, by what a batch shows.

        Raises:
            TargetError: The loss is divided by what only its graph shows.
        """
        kind = next((kind for kind in _KINDS if kind in self.fits and kind not in _READ), None)
        if kind is None:
            raise TargetError(
                "the loss of an evaluation is not computed by compute_loss, so what it is divided "
                "by is not known",
                hint="compute a mean over samples or labels",
            )
        return replace(self, kind=kind, scale=1)

    def weight_of(self, loss: Tensor, current: Training) -> float:
        """What a part's loss counts in the workers' plain mean, by its graph; call it on all.

        Raises:
            TargetError: It is no longer divided as in the trial.
        """
        found, at = last_divisors_of(loss), _READ.index(self.kind)
        if len(found) != self.num_read or found[at].numel() != 1:
            raise TargetError(
                "the loss is divided in another way than in the first batch",
                hint="compute it alike in every step, or divide by num_items_in_batch",
            )
        share = share_of(loss, found[at], counts=current.has_samples, sum_of=current.sum_of)
        return share * current.world_size / self.scale

    def weights(
        self, shares: list[tuple[Any, int]], piece: BatchPart, current: Training
    ) -> list[float]:
        """[parts] what the loss of each part counts in the workers' plain mean; call it on all.

        Args:
            shares: [parts] (inputs, samples that count) of this worker.
            piece: This worker's part of the batch.
            current: This worker's training.

        Raises:
            TargetError: Some labels begin to count nothing, which the trial has not seen.
        """
        if self.kind in _READ:
            return [float(num_samples > 0) for _, num_samples in shares]  # until the loss is there
        if self.kind == "sum":
            counts, total = [float(num_samples > 0) for _, num_samples in shares], 1.0
        elif self.kind == "samples":
            if self.counts_all and any(_ignores_labels(inputs) for inputs, _ in shares):
                raise TargetError(
                    f"some labels are {_IGNORED} now and none was in the first batch, so what the "
                    "loss divides by is not known",
                    hint="divide by num_items_in_batch, or give the first batch such a label too",
                )
            counts, total = [float(num_samples) for _, num_samples in shares], piece.num_samples
        else:
            counts = [
                float(_labels_of(inputs, _FIRST[self.kind])) if num_samples else 0.0
                for inputs, num_samples in shares
            ]
            own = torch.tensor(sum(counts), device=current.place.device)
            total = max(float(current.sum_of(own)), 1.0)
        return [count * current.world_size / (total * self.scale) for count in counts]


def _ignores_labels(inputs: Any) -> bool:
    labels = inputs.get("labels")
    is_known = isinstance(labels, Tensor) and not labels.is_floating_point()
    return is_known and bool((labels == _IGNORED).any())


def form_of(
    self: Any,
    model: Any,
    inputs: Any,
    num_items: Any,
    current: Training,
    before: LossForm | None = None,
) -> LossForm:
    """Find how the losses of parts make up the batch's, by asking the script's ``compute_loss``.

    It is asked for a virtual node's samples, and for them in two parts, in several ways and in
    evaluation mode. All workers must find the same; one with too few samples takes the others'
    answer. It asks as often as the others: a loss may gather results of all workers.
    ``before`` is what earlier batches have shown; a threshold, a mask or a term may come later.

    Raises:
        TargetError: It is none of the known forms, or another one than before.
    """
    own = _tried(self, model, inputs, num_items, current)
    told = [found for found in current.exchanged(own) if found.fits is not None]
    known = _KINDS if before is None else tuple(kind for kind in _KINDS if kind in before.fits)
    kinds = [kind for kind in known if all(kind in (found.fits or ()) for found in told)]
    if before is not None and before.is_told:
        if before.kind not in kinds:
            raise TargetError(
                "the loss of a batch is made of the losses of its parts in another way than in "
                "earlier batches" + (f": {own.said}" if own.said else ""),
                hint="compute a mean over samples, or divide by num_items_in_batch, in all batches",
            )
        return replace(before, fits=frozenset(kinds))
    if not told or not kinds:
        raise TargetError(
            "how the loss of a batch is made of the losses of its parts is not known: "
            + (
                own.said
                or "it is not their sum, nor their mean by samples or by labels"
                + ("" if current.some_run_parts else ", nor by what divides it in its graph")
            )
            if told
            else "every device has less than two samples: how the loss of a batch is made of the "
            "losses of its parts cannot be tried",
            hint="compute a mean over samples, or divide by num_items_in_batch"
            + ("; solve for one virtual node on each device" if current.some_run_parts else "")
            if told
            else "use a larger batch, or a collator that gives each sample a row",
        )
    kind = kinds[0]
    if kind == "samples":  # what divides the loss follows masks that come later, too
        kind = next((read for read in kinds if read in _READ), kind)
    is_open = kind == "samples" and "labels" in kinds
    of_all = [[*found.divisors.get(kind, ()), *[0.0] * _DIVISORS][:_DIVISORS] for found in told]
    return LossForm(
        kind,
        round(mean(found.scale for found in told)),
        is_open,
        tuple(mean(each) if all(each) else 0.0 for each in zip(*of_all, strict=True)),
        round(mean(found.num_read for found in told)),
        frozenset(kinds),
        any(found.is_telling for found in told),
    )


def _with_unlike_rows(inputs: dict[str, Any], hides: bool) -> dict[str, Any]:
    """Inputs whose first row has fewer labels: else means by samples and by labels look alike.

    With ``hides``, what may be a mask, and hides nothing, hides half of the row.
    """
    from accelerate.utils import find_batch_size

    rows, found = find_batch_size(inputs), {}
    for name, value in inputs.items():
        found[name] = value
        if not isinstance(value, Tensor) or not value.dim() or len(value) != rows:
            continue
        if name == "labels" and value.dim() > 1:
            if value.is_floating_point():
                continue
            nothing, row = _IGNORED, value[0].flatten().clone()
            counted = (row != _IGNORED).nonzero().flatten()
        elif hides and bool((value == 1).all()):
            nothing, row = 0, value[0].flatten().clone()
            counted = torch.arange(len(row), device=row.device)
        else:
            continue
        row[counted[len(counted) // 2 :]] = nothing
        found[name] = value.clone()
        found[name][0] = row.view_as(value[0])
    return found


def _with_labels(inputs: dict[str, Any], keeps: Tensor) -> dict[str, Any]:
    return {**inputs, "labels": inputs["labels"].masked_fill(~keeps, _IGNORED)}


def _cuts_of(rows: int) -> list[list[int]]:
    """[cuts] the rows of one of two parts; as many cuts for any number of rows from 2 on."""
    chosen = (range(1), range(rows - 1, rows), range(0, rows, 2), range(rows // 3 + 1))
    return [list(part) for part in (*chosen, range(1, rows, 3))]


def _parts_to_try(
    inputs: dict[str, Any], num_samples: int, most_rows: int, hides: bool
) -> tuple[list[Any], set[_Kind]]:
    """([1 + 2 * cuts] some inputs, and two parts of them for each cut; what losses can tell)."""
    # Where a collator joins samples in one row, the parts are the same row, with some labels each.
    from accelerate.utils import find_batch_size, slice_tensors

    all_rows, labels = find_batch_size(inputs) or 1, inputs.get("labels")
    rows = min(all_rows, max(most_rows, _ROWS))
    if rows > 1:
        kinds: set[_Kind] = {"sum", "samples"}
        if isinstance(labels, Tensor):
            kinds |= {"labels", "next labels"}
        kinds |= set(_READ)
        chosen = [all_rows * i // rows for i in range(rows)]
        tried = _with_unlike_rows(slice_tensors(inputs, chosen), hides)
        parts = [tried]
        for cut in _cuts_of(rows):
            rest = [row for row in range(rows) if row not in cut]
            parts += [slice_tensors(tried, cut), slice_tensors(tried, rest)]
        return parts, kinds if num_samples > 1 else set()
    number = len(_cuts_of(2))
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not num_samples:
        return [inputs] * (1 + 2 * number), set()
    counts = labels != _IGNORED
    place = counts.flatten().cumsum(0).view_as(counts)
    parts = [inputs]
    for step in range(1, number + 1):
        first = counts & ((place <= counts.sum() // 3) if step == 1 else (place % step == 0))
        parts += [_with_labels(inputs, first), _with_labels(inputs, counts & ~first)]
    # Of one sample, means by samples and by labels look alike.
    return parts, {"sum", "labels", "next labels"} if num_samples > 1 else {"sum"}


@dataclass(frozen=True, slots=True)
class _Found:
    """What a worker's trial found."""

    fits: set[_Kind] | None  # the kinds that fit; None where it has too few samples to tell
    scale: float = 1.0  # what Trainer multiplies the loss by
    # [n] what divides the loss for each that counts, by kind.
    divisors: dict[_Kind, list[float]] = field(default_factory=dict)
    num_read: int = 0  # divisors in the graph of a loss
    is_telling: bool = True  # whether any loss, or its gradients, are not 0
    said: str = ""


def _tried(self: Any, model: Any, inputs: Any, num_items: Any, current: Training) -> _Found:
    """What this worker finds."""
    piece = current.piece
    assert piece is not None
    most_rows = max(end - start for start, end in current.parts_of(piece))
    parts, kinds = _parts_to_try(dict(inputs), piece.own_samples, most_rows, hides=True)
    if current.some_run_parts:  # each goes back before the divisor of the next one is known
        kinds -= set(_READ)
    bare = self.accelerator.unwrap_model(model)
    untouched, dtypes = Untouched(self.compute_loss, bare), set()  # of what a trial changes

    def loss_of(part: Any) -> _Answer:
        with (
            torch.enable_grad(),
            self.compute_loss_context_manager(),
            untouched.calling(training=False),
        ):
            loss: Tensor = self.compute_loss(
                bare, self._prepare_inputs(dict(part)), num_items_in_batch=num_items
            )
            slope = slope_of("", loss, bare.parameters())  # may run parts of the model again
        dtypes.add(loss.dtype)
        value, size = (sum(found.values(), 0.0) for found in (slope.numbers, slope.scales))
        divisors = [float(divisor) for divisor in divisors_of(loss)]
        read = [
            (float(d), float(before(d))) if d.numel() == 1 else (0.0, 0.0)
            for d in last_divisors_of(loss)
        ]
        return _Answer(float(loss.detach()), value, size, divisors, read)

    try:
        with streams_kept():
            try:
                answers = [loss_of(part) for part in parts]
            except Exception:  # ones may be sizes, and no mask
                parts, _ = _parts_to_try(dict(inputs), piece.own_samples, most_rows, hides=False)
                answers = [loss_of(part) for part in parts]
            self.args.average_tokens_across_devices = False
            unscaled = loss_of(parts[0]).loss
    except TargetError:
        raise
    except Exception as error:  # as of a loss that needs some samples
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return _Found(fits=set(), said=f"of some samples it cannot be computed ({said})")
    finally:
        self.args.average_tokens_across_devices = True
        torch.clear_autocast_cache()  # else casts of weights would have no graph later
    is_narrow = (
        self.args.bf16 or self.args.fp16 or any(p.itemsize < _WIDE for p in bare.parameters())
    )
    close = _CLOSE_OF_HALF if is_narrow else _CLOSE
    if any(dtype.itemsize < _WIDE for dtype in dtypes):
        close = _LOOSE
    closes = (close, _LOOSE if is_narrow else 10 * close)
    fits = {kind for kind in kinds if _fits(kind, parts, answers, closes)}
    # A worker of one sample in a row tells a sum only.
    is_silent = not kinds or (kinds == {"sum"} and not fits)
    if is_silent:
        return _Found(fits=None)
    divisors: dict[_Kind, list[float]] = {
        kind: _divisors_of(kind, parts, answers) for kind in fits if kind not in ("sum", *_READ)
    }
    scale = answers[0].loss / unscaled if unscaled else 1.0
    nothing = max(map(_nothing_in, dtypes))
    is_telling = any(max(abs(a.loss), a.scale) > (nothing if not fits else 0) for a in answers)
    if not is_telling:  # as where a student is still its teacher
        fits = set(kinds)
    return _Found(fits, scale, divisors, len(answers[0].read), is_telling)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a trial found of some samples."""

    loss: float
    slope: float  # a number of its gradients
    scale: float  # what the rounding of that is relative to
    # [n] what the loss is divided by, and the targets that its cross entropies count.
    divisors: list[float]
    # [n] what it is divided by, and that before it was kept from being nothing.
    read: list[tuple[float, float]]


def _divisors_of(kind: _Kind, parts: list[Any], answers: list[_Answer]) -> list[float]:
    """[n] what the loss is divided by for each that counts, or 0 where that varies."""
    counts = [_weight_in(part, kind) for part in parts]
    found = []
    for at, first in enumerate(answers[0].divisors):
        each = first / max(counts[0], 1)
        follows = all(
            len(answer.divisors) > at
            and abs(answer.divisors[at] - each * count) <= _LOOSE * abs(each * count)
            for answer, count in zip(answers, counts, strict=True)
            if count
        )
        found.append(each if follows else 0.0)
    return found


def _fits(
    kind: _Kind, parts: list[Any], answers: list[_Answer], closes: tuple[float, float]
) -> bool:
    """Whether losses and their gradients, within rounding, are of a kind in each cut."""
    whole = answers[0]
    weights: list[float] = [_weight_in(part, kind) for part in parts]
    totals = [first + second for first, second in zip(weights[1::2], weights[2::2], strict=True)]
    if kind in _READ:
        position = _READ.index(kind)
        if any(len(answer.read) <= position for answer in answers):
            return False
        weights, given = map(list, zip(*(answer.read[position] for answer in answers), strict=True))
        # Of parts in which nothing counts more than nothing is kept.
        totals = [
            max(a + b, weights[0] * (a + b == 0))
            for a, b in zip(given[1::2], given[2::2], strict=True)
        ]
    for at in range(1, len(parts), 2):
        counted = [
            (1.0 if kind == "sum" else weight / totals[at // 2], answer)
            for weight, answer in zip(weights[at : at + 2], answers[at : at + 2], strict=True)
            if weight or kind == "sum"
        ]
        loss = sum(share * answer.loss for share, answer in counted)
        slope = sum(share * answer.slope for share, answer in counted)
        largest = max(abs(whole.loss), *(abs(answer.loss) for _, answer in counted), 0.0)
        scale = max(whole.scale, *(answer.scale for _, answer in counted), 0.0)
        if not abs(loss - whole.loss) <= closes[0] * largest:
            return False
        if not abs(slope - whole.slope) <= closes[1] * scale:
            return False
    return True


def _weight_in(part: Any, kind: _Kind) -> int:
    """What a part counts in a mean of some kind."""
    from accelerate.utils import find_batch_size

    if kind in _FIRST:
        return _labels_of(part, _FIRST[kind])
    return find_batch_size(part) or 1
