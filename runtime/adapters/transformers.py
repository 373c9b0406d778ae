"""transformers' Trainer under a plan: one training step runs the virtual nodes of this worker.

Trainer stands on accelerate, whose adapter cuts its batches and gathers its results. What is left:
Trainer takes several batches before it trains on the first, counts the items of a batch over all
workers, and logs the plain mean of the workers' losses.
"""

import contextlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...schema.errors import TargetError
from .patching import around, check_version
from .training import Piece, Training, training

VERSIONS = ((5, 23), (5, 23))  # the oldest and the newest that were tested
_CLOSE = 1e-5  # of losses in 32 or 64 bits; parts of the latter may be computed in 32
_IGNORED = -100  # the label that counts nothing
_KINDS: tuple[Literal["sum", "samples", "items"], ...] = ("sum", "samples", "items")
_LOOSE = 3e-2  # of losses in 16 bits


def adapt() -> None:
    """Change Trainer in this process."""
    from transformers import Trainer

    around(Trainer, "__init__", _make)
    around(Trainer, "get_batch_samples", _take_batches)
    around(Trainer, "_get_num_items_in_batch", _count_items)
    around(Trainer, "training_step", _step)
    around(Trainer, "evaluation_loop", _evaluate)
    around(Trainer, "prediction_step", _predict)


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
    if said is not None:
        raise TargetError(f"Trainer under a plan: {said}", hint="leave this argument out")
    # Else each worker counts by its own items, where one process counts by the batch's.
    settings.average_tokens_across_devices = True
    self.pieces_ahead, self.trained_form, self.evaluated_form = deque(), None, None


def _take_batches(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    """Remember the part of each batch that Trainer takes before it trains on the first."""
    with training().taking() as self.pieces_ahead:
        return original(self, *values, **options)


def _count_items(original: Any, self: Any, batches: list[Any], *values: Any) -> Any:
    """Count no items of a sample that only keeps this worker in step with the others."""
    counted = [
        batch
        if piece is None or piece.own_samples or "labels" not in batch
        else {**batch, "labels": torch.full_like(batch["labels"], _IGNORED)}
        for batch, piece in zip(batches, self.pieces_ahead or [training().piece], strict=True)
    ]
    return original(self, counted, *values)


def _evaluate(original: Any, self: Any, *values: Any, **options: Any) -> Any:
    """Evaluate on the first worker's buffers: Trainer does so without DistributedDataParallel."""
    training().equalise_buffers()
    return original(self, *values, **options)


def _predict(
    original: Any, self: Any, model: Any, inputs: Any, *values: Any, **options: Any
) -> Any:
    """Evaluate this worker's share; the loss is that of the whole batch."""
    current = training()
    loss, logits, labels = original(self, model, inputs, *values, **options)
    if loss is not None:
        piece = current.piece
        assert piece is not None
        if self.evaluated_form is None:
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            self.evaluated_form = _form_of(self, model, inputs, num_items, current)
        shares = [(inputs, piece.own_samples)]
        (weight,) = self.evaluated_form.weights(self, shares, piece, current)
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
    weights = self.trained_form.weights(self, shares, piece, current)
    total = torch.zeros((), device=self.args.device)
    for number, ((share, num_samples), weight) in enumerate(zip(shares, weights, strict=True), 1):
        is_last = number == len(parts)
        waits = contextlib.nullcontext() if is_last else self.accelerator.no_sync(model=model)
        with current.part(num_samples, weight), waits:
            loss = original(self, model, share, num_items_in_batch)
        # What Trainer logs is the plain mean of the workers' losses.
        total = total + loss * weight if weight else total
    return total


def _size_in(piece: Piece, part: tuple[int, int]) -> int:
    return min(part[1] - part[0], piece.own_samples)


def _items_of(trainer: Any, inputs: Any) -> int:
    """The labels of some samples that count."""
    labels = inputs["labels"]
    if getattr(trainer, "_loss_shifts_labels", False):
        labels = labels[..., 1:]
    return int(labels.ne(_IGNORED).sum())


@dataclass(frozen=True, slots=True)
class _Form:
    """How the loss of a batch is made of the losses of its parts.

    Attributes:
        kind: The batch's loss is their sum, or a mean in which samples or items (labels) count.
        scale: What Trainer multiplies the loss by, because others have the rest of the batch.
    """

    kind: Literal["sum", "samples", "items"]
    scale: float

    def weights(
        self, trainer: Any, shares: list[tuple[Any, int]], piece: Piece, current: Training
    ) -> list[float]:
        """[parts] what the loss of each part counts in the workers' plain mean; call it on all.

        Args:
            trainer: The script's Trainer.
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
                float(_items_of(trainer, inputs)) if num_samples else 0.0
                for inputs, num_samples in shares
            ]
            own = torch.tensor(sum(counts), device=current.place.device)
            total = max(float(current.sum_of(own)), 1.0)
        return [count * current.world_size / (total * self.scale) for count in counts]


def _form_of(self: Any, model: Any, inputs: Any, num_items: Any, current: Training) -> _Form:
    """Find how the losses of parts make up the batch's, by asking the script's ``compute_loss``.

    It is asked for a few samples, and for them in two unequal parts, in evaluation mode. All
    workers must find the same; one with too few samples takes the others' answer.

    Raises:
        TargetError: It is none of the known forms.
    """
    found = _tried(self, model, inputs, num_items, current)
    seen = torch.zeros(len(_KINDS) + 1, dtype=torch.float64, device=current.place.device)
    if found is not None:
        seen[_KINDS.index(found[0]) if found[0] in _KINDS else -1] = 1
    seen = current.sum_of(seen)
    scales = current.sum_of(seen.new_tensor([0.0, 0.0] if found is None else [found[1], 1.0]))
    kinds = [kind for kind, count in zip(_KINDS, seen.tolist(), strict=False) if count]
    if len(kinds) != 1 or seen[-1]:
        raise TargetError(
            "how the loss of a batch is made of the losses of its parts is not known: it is not "
            "their sum, nor their mean by samples or by labels",
            hint="compute a mean over samples, or divide by num_items_in_batch; a device needs two "
            "samples, for a trial",
        )
    return _Form(kinds[0], round(float(scales[0] / scales[1])))


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


def _tried(
    self: Any, model: Any, inputs: Any, num_items: Any, current: Training
) -> tuple[str, float] | None:
    """(kind, scale) of this worker's loss; None where it has too few samples to tell."""
    from accelerate.utils import find_batch_size, slice_tensors

    rows = min(find_batch_size(inputs) or 0, 4)
    if rows < 2 or current.piece is None or current.piece.own_samples < 2:
        return None
    bare = self.accelerator.unwrap_model(model)
    was_training, held = bare.training, torch.random.get_rng_state()
    tried = _with_unlike_rows(dict(inputs))
    parts = [slice_tensors(tried, slice(*cut)) for cut in ((0, rows), (0, 1), (1, rows))]

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
    whole, first, second = (float(loss) for loss in losses)
    scale = whole / unscaled if unscaled else 1.0
    is_wide = losses[0].dtype in (torch.float32, torch.float64)
    close = (_CLOSE if is_wide else _LOOSE) * max(abs(whole), abs(first), abs(second))
    if abs(first + second - whole) <= close:
        return "sum", scale
    if abs((first + (rows - 1) * second) / rows - whole) <= close:
        return "samples", scale
    if "labels" in inputs:
        items = [_items_of(self, part) for part in parts]
        if abs((items[1] * first + items[2] * second) / max(items[0], 1) - whole) <= close:
            return "items", scale
    return "unknown", scale
