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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ...schema.errors import TargetError
from .patching import around, check_version
from .scalars import with_scalars
from .training import Piece, Training, training

VERSIONS = ((4, 57), (5, 24))  # the oldest and the newest that were tested
_CLOSE = 1e-5  # of losses in 32 or 64 bits; parts of the latter may be computed in 32
_IGNORED = -100  # the label that counts nothing
_Kind = Literal["sum", "samples", "next labels", "labels"]
_KINDS: tuple[_Kind, ...] = ("sum", "samples", "next labels", "labels")
_FIRST: dict[str, int] = {"next labels": 1, "labels": 0}  # the first label of a sample that counts
_STATE, _STATE_ALONE = "rng_state_{}.pth", "rng_state.pth"  # Trainer's files in a checkpoint
# Where trl's trainers note results of each loss until they log them; trials are none.
_NOTES = ("_metrics", "_stored_metrics", "_total_train_tokens")
_ENDLESS = 1_000_000_000  # steps
_INTEGRATIONS = "transformers.integrations"  # loggers of other tools
_LOOSE = 3e-2  # of losses in 16 bits


def adapt(_: Any) -> None:
    """Change Trainer in this process."""
    from transformers import Trainer

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
    return original(*values, **options)


def _compute(
    original: Any, self: Any, model: Any, inputs: Any, *values: Any, **options: Any
) -> Any:
    """Compute a loss, and note by how many items it is divided, for trials."""
    self.items_asked = values[1] if len(values) > 1 else options.get("num_items_in_batch")
    return original(model, inputs, *values, **options)


def _predict(
    original: Any, self: Any, model: Any, inputs: Any, *values: Any, **options: Any
) -> Any:
    """Evaluate this worker's share; the loss is that of the whole batch."""
    current = training()
    piece = current.piece
    assert piece is not None
    with current.evaluating(piece):
        loss, logits, labels = original(model, inputs, *values, **options)
    if loss is not None:
        if self.evaluated_form is None:
            self.evaluated_form = _form_of(self, model, inputs, self.items_asked, current)
        shares = [(inputs, piece.own_samples)]
        (weight,) = self.evaluated_form.weights(shares, piece, current)
        own = loss * (weight / current.world_size) if weight else torch.zeros_like(loss)
        loss = current.sum_of(own).as_subclass(_BatchLoss)
    return loss, logits, labels


class _BatchLoss(Tensor):
    """The loss of a batch, which Trainer repeats for each sample before it gathers.

    It repeats it as often as the loader's batch size says; here each worker has its share.
    """

    def repeat(self, *sizes: Any) -> Tensor:
        """[own samples] the loss, once for each sample of this worker."""
        piece = training().piece
        plain = self.as_subclass(Tensor)
        return plain.repeat(*sizes) if piece is None else plain.repeat(piece.own_samples)


def _step(
    original: Any, self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Tensor:
    """Train on this worker's share, one virtual node after another."""
    from accelerate.utils import find_batch_size, slice_tensors

    current = training()
    piece = self.pieces_ahead.popleft()
    current.begin_batch(piece)
    parts = current.parts_of(piece)
    if len(parts) > 1 and find_batch_size(inputs) != piece.own_samples:
        raise TargetError(
            f"the batch has {find_batch_size(inputs)} rows for {piece.own_samples} samples, so it "
            "cannot be cut into virtual nodes",
            hint="solve for one virtual node a device, or use a collator that gives a row a sample",
        )
    if self.trained_form is None:
        self.trained_form = _form_of(self, model, inputs, num_items_in_batch, current)
    shares = [
        (slice_tensors(inputs, slice(*part)) if len(parts) > 1 else inputs, _size_in(piece, part))
        for part in parts
    ]
    weights = self.trained_form.weights(shares, piece, current)
    total = torch.zeros((), device=self.args.device)
    for number, ((share, num_samples), weight) in enumerate(zip(shares, weights, strict=True), 1):
        is_last = number == len(parts)
        waits = contextlib.nullcontext() if is_last else self.accelerator.no_sync(model=model)
        with current.part(num_samples, weight), waits:
            loss = original(model, share, num_items_in_batch)
        # What Trainer logs is the plain mean of the workers' losses.
        total = total + loss * weight if weight else total
    return total


def _size_in(piece: Piece, part: tuple[int, int]) -> int:
    return min(part[1] - part[0], piece.own_samples)


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


def _labels_of(inputs: Any, first: int) -> int:
    """The labels of some samples that count, from the position ``first`` of each sample on."""
    return int(inputs["labels"][..., first:].ne(_IGNORED).sum())


@dataclass(frozen=True, slots=True)
class _Form:
    """How the loss of a batch is made of the losses of its parts.

    Attributes:
        kind: The batch's loss is their sum, or a mean in which samples count, or labels, or labels
            without the first of each sample, which a causal language model predicts from nothing.
        scale: What Trainer multiplies the loss by, because others have the rest of the batch.
    """

    kind: _Kind
    scale: float

    def weights(
        self, shares: list[tuple[Any, int]], piece: Piece, current: Training
    ) -> list[float]:
        """[parts] what the loss of each part counts in the workers' plain mean; call it on all.

        Args:
            shares: [parts] (inputs, samples that count) of this worker.
            piece: This worker's part of the batch.
            current: This worker's training.
        """
        if self.kind == "sum":
            counts, total = [float(num_samples > 0) for _, num_samples in shares], 1.0
        elif self.kind == "samples":
            counts, total = [float(num_samples) for _, num_samples in shares], piece.num_samples
        else:
            counts = [
                float(_labels_of(inputs, _FIRST[self.kind])) if num_samples else 0.0
                for inputs, num_samples in shares
            ]
            own = torch.tensor(sum(counts), device=current.place.device)
            total = max(float(current.sum_of(own)), 1.0)
        return [count * current.world_size / (total * self.scale) for count in counts]


def _form_of(self: Any, model: Any, inputs: Any, num_items: Any, current: Training) -> _Form:
    """Find how the losses of parts make up the batch's, by asking the script's ``compute_loss``.

    It is asked for a few samples, and for them in two unequal parts, in evaluation mode. All
    workers must find the same; one with too few samples takes the others' answer. It asks as often
    as the others: a loss may gather results of all workers.

    Raises:
        TargetError: It is none of the known forms.
    """
    fits, scale = _tried(self, model, inputs, num_items, current)
    # [kinds + 2] workers that each kind fits, workers that could tell, sum of their scales
    own = [float(kind in fits) for kind in _KINDS] if fits is not None else [0.0] * len(_KINDS)
    own += [0.0, 0.0] if fits is None else [1.0, scale]
    found = torch.tensor(own, dtype=torch.float64, device=current.place.device)
    *counts, tellers, scales = current.sum_of(found).tolist()
    kinds = [kind for kind, count in zip(_KINDS, counts, strict=True) if count == tellers]
    if not tellers or not kinds:
        raise TargetError(
            "how the loss of a batch is made of the losses of its parts is not known: it is not "
            "their sum, nor their mean by samples or by labels"
            if tellers
            else "every device has less than two samples: how the loss of a batch is made of the "
            "losses of its parts cannot be tried",
            hint="compute a mean over samples, or divide by num_items_in_batch"
            if tellers
            else "use a larger batch, or a collator that gives each sample a row",
        )
    return _Form(kinds[0], round(scales / tellers))


def _with_unlike_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs whose first row has fewer labels: else means by samples and by labels look alike."""
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return inputs
    labels = labels.clone()
    row = labels[0].flatten()
    counted = (row != _IGNORED).nonzero().flatten()
    row[counted[len(counted) // 2 :]] = _IGNORED
    labels[0] = row.view_as(labels[0])
    return {**inputs, "labels": labels}


def _with_labels(inputs: dict[str, Any], keeps: Tensor) -> dict[str, Any]:
    return {**inputs, "labels": inputs["labels"].masked_fill(~keeps, _IGNORED)}


def _parts_to_try(inputs: dict[str, Any], num_samples: int) -> tuple[list[Any], set[_Kind]]:
    """([3] some inputs, and two parts of them; the kinds that their losses can tell).

    Where a collator joins samples in one row, the parts are the same row, with some labels each.
    """
    from accelerate.utils import find_batch_size, slice_tensors

    rows, labels = min(find_batch_size(inputs) or 1, 4), inputs.get("labels")
    if rows > 1:
        tried = _with_unlike_rows(inputs)
        kinds: set[_Kind] = {"sum", "samples"}
        if isinstance(labels, Tensor):
            kinds |= {"labels", "next labels"}
        parts = [slice_tensors(tried, slice(*cut)) for cut in ((0, rows), (0, 1), (1, rows))]
        return parts, kinds if num_samples > 1 else set()
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not num_samples:
        return [inputs] * 3, set()
    counts = labels != _IGNORED
    first = counts & (counts.flatten().cumsum(0).view_as(counts) <= counts.sum() // 3)
    parts = [inputs, _with_labels(inputs, first), _with_labels(inputs, counts & ~first)]
    # Of one sample, means by samples and by labels look alike.
    return parts, {"sum", "labels", "next labels"} if num_samples > 1 else {"sum"}


def _tried(
    self: Any, model: Any, inputs: Any, num_items: Any, current: Training
) -> tuple[set[_Kind] | None, float]:
    """(kinds that fit this worker's loss, scale); None where it has too few samples to tell."""
    assert current.piece is not None
    parts, kinds = _parts_to_try(dict(inputs), current.piece.own_samples)
    bare = self.accelerator.unwrap_model(model)
    was_training, held = bare.training, torch.random.get_rng_state()
    noted = {name: copy.deepcopy(getattr(self, name)) for name in _NOTES if hasattr(self, name)}

    def loss_of(part: Any) -> Tensor:
        with torch.no_grad(), self.compute_loss_context_manager():
            found: Tensor = self.compute_loss(
                bare, self._prepare_inputs(dict(part)), num_items_in_batch=num_items
            )
        return found.clone()

    bare.eval()
    try:
        losses = [loss_of(part) for part in parts]
        self.args.average_tokens_across_devices = False
        unscaled = float(loss_of(parts[0]))
    finally:
        self.args.average_tokens_across_devices = True
        bare.train(was_training)
        torch.random.set_rng_state(held)
        vars(self).update(noted)
    whole, first, second = (float(loss) for loss in losses)
    is_wide = losses[0].dtype in (torch.float32, torch.float64)
    close = (_CLOSE if is_wide else _LOOSE) * max(abs(whole), abs(first), abs(second))
    fits = set()
    for kind in kinds:
        _, a, b = (_weight_in(part, kind) for part in parts)
        found = first + second if kind == "sum" else (a * first + b * second) / max(a + b, 1)
        if abs(found - whole) <= close:
            fits.add(kind)
    # A worker of one sample in a row tells a sum only.
    is_silent = not kinds or (kinds == {"sum"} and not fits)
    return None if is_silent else fits, whole / unscaled if unscaled else 1.0


def _weight_in(part: Any, kind: _Kind) -> int:
    """What a part counts in a mean of some kind."""
    from accelerate.utils import find_batch_size

    if kind in _FIRST:
        return _labels_of(part, _FIRST[kind])
    return find_batch_size(part) or 1
