"""Numbers that a step computes on a worker's part of a batch, and what they are on the whole.

A step of a script gives a loss and logs values, each of the samples that it sees. A trial finds how
the batch's number follows from those of its parts: the step is called on a few samples together and
in two unequal parts. What fits there is a mean over samples or labels, a sum, the largest or the
smallest. A number of no such kind must be equal on all workers, or it is refused.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...schema.errors import TargetError
from ...schema.options import option
from ..data import PLAIN, copied, rows_of
from ..determinism import streams_kept
from ..nested_tensors import mapped, plain, tensors_in
from ..promise.draws import Draws
from ..promise.trial import rounding_of
from ..promise.untouched import Untouched
from .training import BatchPart, Training

# Batches as a script's loader made them: their samples, and which of their labels count.

_IGNORED = -100  # the label that counts nothing, in torch and transformers


def _labels_in(batch: Any) -> Tensor | None:
    """The tensor of whole numbers named ``labels``, or else the last one."""
    named = batch.get("labels") if isinstance(batch, Mapping) else None
    found = [named] if isinstance(named, Tensor) else tensors_in(batch)
    whole = [t for t in found if t.dim() and not t.is_floating_point() and t.dtype != torch.bool]
    return whole[-1] if whole else None


def labels_counted(batch: Any) -> tuple[int, int]:
    """Labels of a batch that are not ignored: all, and those of each row's second position on.

    Causal language models have no label for the first token: they predict the next one.
    """
    labels = _labels_in(batch)
    if labels is None:
        return 0, 0
    counted = labels.ne(_IGNORED)
    following = counted[..., 1:] if counted.dim() > 1 else counted
    every, later = plain((counted.sum(), following.sum()))
    return int(every), int(later)


def with_unlike_rows(batch: Any) -> Any:
    """A batch whose first sample has two labels, if it may have ignored ones.

    Else a mean over labels and one over samples look alike.
    """
    labels = _labels_in(batch)
    if labels is None or labels.dim() < 2:
        return batch
    is_named = isinstance(batch, Mapping) and batch.get("labels") is labels
    if not is_named and not bool(labels.eq(_IGNORED).any()):
        return batch
    changed = labels.clone()
    counted = changed[0].flatten().ne(_IGNORED).nonzero().flatten()
    row = changed[0].flatten()
    row[counted[2:]] = _IGNORED
    changed[0] = row.view_as(changed[0])
    return mapped(lambda tensor: changed if tensor is labels else tensor, batch)


def joined(answers: Sequence[Any], counts: Sequence[int], where: str) -> Any:
    """What a function returned for parts of a batch, as it returns it for all of their samples.

    Args:
        answers: [parts] tensors and lists with an entry for each sample; dicts and tuples of them.
        counts: [parts] samples of each.
        where: Who returned them, for the error.

    Raises:
        TargetError: Something in them has no entry for each sample, and is not equal in all parts.
    """
    first = answers[0]
    if len(answers) == 1:
        return first
    if all(_is_rows(a, n) for a, n in zip(answers, counts, strict=True)):
        if isinstance(first, list):
            return [entry for answer in answers for entry in answer]
        if all(a.shape[1:] == first.shape[1:] for a in answers):
            return (
                torch.cat(list(answers)) if isinstance(first, Tensor) else np.concatenate(answers)
            )
    elif isinstance(first, dict) and all(a.keys() == first.keys() for a in answers):
        return {key: joined([a[key] for a in answers], counts, where) for key in first}
    elif isinstance(first, list | tuple) and all(len(a) == len(first) for a in answers):
        made = [joined(entries, counts, where) for entries in zip(*answers, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    elif isinstance(first, PLAIN) and all(a == first for a in answers):
        return first
    raise TargetError(
        f"{where} a {type(first).__name__} that has no entry for each sample, so those of the "
        "batch's parts cannot be put together",
        hint="return tensors with a row for each sample, of one shape",
    )


def _is_rows(answer: Any, count: int) -> bool:
    if isinstance(answer, Tensor | np.ndarray):
        return answer.ndim > 0 and len(answer) == count
    return isinstance(answer, list) and len(answer) == count


Numbers = dict[str, float]
"""The numbers of one call of a step, by name."""


@dataclass(frozen=True, slots=True)
class TriedStep:
    """What one call of a step in a trial gave.

    Attributes:
        numbers: By name.
        scales: Of some of them: what rounding is relative to, where not to the numbers themselves.
    """

    numbers: Numbers
    scales: Numbers


Call = Callable[[Any], TriedStep]
"""Calls a step on some samples, without effects."""

# In order of preference, for numbers that never tell them apart.
_MEANS = ("mean over samples", "mean over labels", "mean over following labels")
_KINDS = (*_MEANS, "sum", "largest", "smallest")
_OF_LOSSES = _KINDS[:4]
LOSS = "the loss"
_MOST_SAMPLES, _MOST_AGAIN = 8, 64  # of the first trial, and of later ones
_MOST_TRIES = 5
_SLOPE = "\nslope"
_MOST_SLOPES, _MOST_WEIGHTS = 8, 1 << 16  # parameters, and weights of each, in a slope


@dataclass(frozen=True, slots=True)
class CountedPart:
    """What counts in the means of some samples.

    Attributes:
        num_samples: Samples; 0 where one only keeps the worker in step with the others.
        num_labels: Labels that are not ignored.
        num_following: Those of each row's second position on.
    """

    num_samples: int
    num_labels: int
    num_following: int

    @classmethod
    def of(cls, batch: Any, num_samples: int) -> "CountedPart":
        """Count the samples and labels of a batch."""
        return cls(num_samples, *(labels_counted(batch) if num_samples else (0, 0)))

    def counted(self, kind: str) -> float:
        """What counts in numbers of a kind."""
        if kind in _MEANS[1:]:
            return self.num_labels if kind == _MEANS[1] else self.num_following
        return self.num_samples


def _put_together(kind: str, values: Sequence[float], parts: Sequence[CountedPart]) -> float:
    """The number of several parts together, if it is of this kind."""
    found = [
        (value, part.counted(kind))
        for value, part in zip(values, parts, strict=True)
        if part.counted(kind)
    ]
    if not found:
        return math.nan
    if kind in _MEANS:
        return sum(v * count for v, count in found) / sum(count for _, count in found)
    if kind == "sum":
        return sum(v for v, _ in found)
    return max(v for v, _ in found) if kind == "largest" else min(v for v, _ in found)


def _are_close(one: float, other: float, rounding: float, scale: float) -> bool:
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or abs(one - other) <= rounding * scale


class ScriptStep:
    """One of the script's functions that run on every batch, and what its numbers are.

    Args:
        name: The function's name.
        training: This worker's training.
        model: What the function may change: a trial puts it back.
    """

    def __init__(self, name: str, training: Training, model: nn.Module) -> None:
        self._name, self._training, self._model = name, training, model
        self._kinds: dict[str, tuple[str, ...]] = {}
        self._faults: dict[tuple[str, str], float] = {}
        self._num_tries, self._num_batches, self._is_due = 0, 0, False
        self._rounding = 0.0

    def try_if_due(self, call: Call, batch: Any) -> None:
        """Try the function on this worker's samples in batches 1, 2, 4, 8 and so on.

        A threshold, a mask or a term may come later. Call it on all workers.
        """
        self._num_batches += 1
        self._is_due = self._is_due or self._num_batches.bit_count() == 1
        if self._is_due and self._training.is_between_steps:
            self._is_due = False
            self._try(call, batch)

    def check_means(self, prefix: str) -> None:
        """Refuse the numbers of this name and those that follow it, unless they are means.

        Raises:
            TargetError: One is not the mean over samples.
        """
        for name, kinds in self._kinds.items():
            if name.startswith(prefix) and _MEANS[0] not in kinds:
                raise self._no_kind(name, "its mean over samples")

    def _try(self, call: Call, batch: Any) -> None:
        sharing = self._training.sharing
        if sharing is not None and sharing.runs:  # the trial would go through the same layers
            raise TargetError(
                f"{self._name} gives a number that its first batch did not, or did not show the "
                "kind of, and workers share states",
                hint="log it from the first batch on; or solve without " + option("shard"),
            )
        if sharing is not None:
            sharing.whole()  # the function may call a part of the model, which would not ask
        most = _MOST_AGAIN if self._num_tries else _MOST_SAMPLES
        self._num_tries += 1
        answers = self._training.exchanged(self._tried(call, batch, most))
        told = [answer for answer in answers if answer is not None]
        if failures := [answer for answer in answers if isinstance(answer, str)]:
            raise TargetError(
                f"{self._name} could not be tried on a few samples: {failures[0]}",
                hint="it must run on any number of samples; or train with hf.prepare",
            )
        if not told and self._num_tries > 1:
            return
        if not told:
            raise TargetError(
                f"{self._name} could not be tried, for no worker has two samples of the batch",
                hint="use larger batches, so that a device has two samples for a trial",
            )
        for name in {name: None for faults, _ in told for name in faults}:
            for faults, _ in told:
                for kind in _KINDS:
                    fault = faults.get(name, {}).get(kind, math.inf if name in faults else 0.0)
                    self._faults[name, kind] = self._faults.get((name, kind), 0.0) + fault
            fits = [kind for kind in _KINDS if math.isfinite(self._faults[name, kind])]
            self._kinds[name] = tuple(sorted(fits, key=lambda kind: self._faults[name, kind]))
        self._rounding = max(rounding for _, rounding in told)

    def _tried(
        self, call: Call, batch: Any, most: int
    ) -> tuple[dict[str, Numbers], float] | str | None:
        """(faults of kinds by name, rounding); a failure; None with too few samples to tell."""
        piece = self._training.piece
        rows = min(piece.own_samples if piece is not None else 0, most)
        if piece is None or rows < 2:
            return None
        tried = with_unlike_rows(rows_of(batch, piece.own_samples, 0, rows))
        ranges = ((0, rows), (0, 1), (1, rows))
        inputs = [rows_of(tried, rows, *ends) for ends in ranges]
        draws, untouched = Draws(rows), Untouched(call, self._model)
        failure = ""
        for trains in (False, True):  # in evaluation mode, if the function can run so
            try:
                with streams_kept(), draws.replaced():
                    answers = []
                    for number, (ends, given) in enumerate(zip(ranges, inputs, strict=True)):
                        with (
                            untouched.calling(training=trains),
                            draws.of(range(*ends), keeps=number == 0),
                        ):
                            answers.append(call(copied(given)))
            except TargetError:
                raise
            except Exception as error:
                failure = failure or f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            torch.clear_autocast_cache()  # else casts of weights would have no graph later
            parts = [
                CountedPart.of(given, b - a)
                for given, (a, b) in zip(inputs[1:], ranges[1:], strict=True)
            ]
            rounding = rounding_of(draws.coarsest, batch)
            return _faults_of_kinds(answers, parts, rounding), rounding
        return failure

    def weights(self, call: Call, batch: Any, parts: Sequence[CountedPart]) -> list[float]:
        """[parts] what the loss of each counts in the plain mean of workers; call it on all.

        Raises:
            TargetError: The batch's loss is not made of its parts' losses.
        """
        while True:
            kinds = [kind for kind in self._kinds.get(LOSS, ()) if kind in _OF_LOSSES]
            if not kinds:
                raise self._no_kind(LOSS, "their sum, nor their mean by samples or by labels")
            # Several kinds may fit all trials so far. That matters only where they weigh these
            # parts unlike; then this batch is tried too, and at last the likeliest kind counts.
            found = self._weights_by(kinds, parts)
            if self._num_tries >= _MOST_TRIES or len(kinds) == 1:
                return found[0]
            are_alike = all(
                math.isclose(a, b, rel_tol=1e-9)
                for other in found[1:]
                for a, b in zip(found[0], other, strict=True)
            )
            if all(row[0] for row in self._training.numbers_of_all([float(are_alike)])):
                return found[0]
            self._try(call, batch)

    def _weights_by(self, kinds: Sequence[str], parts: Sequence[CountedPart]) -> list[list[float]]:
        """[kinds][parts] the weight of each part's loss."""
        workers, training = self._training.world_size, self._training
        assert training.piece is not None
        totals: dict[str, float] = {_MEANS[0]: training.piece.num_samples}
        if unknown := [kind for kind in kinds if kind in _MEANS[1:]]:
            own = [sum(part.counted(kind) for part in parts) for kind in unknown]
            columns = zip(*training.numbers_of_all(own), strict=True)
            totals |= {
                kind: max(sum(column), 1.0) for kind, column in zip(unknown, columns, strict=True)
            }
        return [
            [float(workers) if part.num_samples else 0.0 for part in parts]
            if kind == "sum"
            else [part.counted(kind) * workers / totals[kind] for part in parts]
            for kind in kinds
        ]

    @property
    def loss_is_mean_over_samples(self) -> bool:
        """Whether the loss was found to count each sample alike."""
        return self._kinds.get(LOSS) == _MEANS[:1]

    def of_batch(
        self, numbers: Sequence[Numbers], parts: Sequence[CountedPart], call: Call, batch: Any
    ) -> Numbers:
        """The numbers of the global batch; call it on all workers.

        Raises:
            TargetError: Workers have other numbers or another order of samples; or the batch's
                number does not follow from those of its parts.
        """
        piece = self._training.piece
        assert piece is not None
        names = list(numbers[0])
        rows = self._training.numbers_of_all(_packed(names, numbers, parts, piece))
        if any(row[0] != rows[0][0] for row in rows):
            raise TargetError(
                "the workers have drawn different batches, so samples would be missed",
                hint="draw the order of samples with torch's default generator, or with one seed",
            )
        if any(row[1] != rows[0][1] or math.isnan(row[1]) for row in rows):
            raise TargetError(
                f"{self._name} does not log the same names on all parts of a batch",
                hint="log what does not depend on the samples, or with hf.prepare",
            )
        totals = [CountedPart(*map(int, row[2:5])) for row in rows]
        if any(name not in self._kinds for name in names):
            self._try(call, batch)
        found = {}
        for number, name in enumerate(names):
            first = 5 + number * len(_KINDS)
            columns = [[row[first + k] for row in rows] for k in range(len(_KINDS))]
            value = self._value(name, columns, totals)
            while value is None:
                self._try(call, batch)
                value = self._value(name, columns, totals)
            found[name] = value
        return found

    def _value(
        self, name: str, columns: list[list[float]], totals: Sequence[CountedPart]
    ) -> float | None:
        """A number of the whole batch; None where a trial must tell which it is."""
        kinds = self._kinds.setdefault(name, ())
        found = [_put_together(k, columns[_KINDS.index(k)], totals) for k in kinds]
        if not found:
            ends = [
                (high, low)
                for high, low, part in zip(*columns[-2:], totals, strict=True)
                if part.num_samples
            ]
            first = float(ends[0][0])
            if all(high == low == first for high, low in ends):
                return first  # as where the script sums it over workers by itself
            raise self._no_kind(name, "a mean, a sum, the largest or the smallest of them")
        scale = max(abs(value) for value in found)
        if self._num_tries >= _MOST_TRIES or all(
            _are_close(found[0], value, self._rounding, scale) for value in found[1:]
        ):
            return found[0]
        return None

    def _no_kind(self, name: str, kinds: str) -> TargetError:
        said = name if name.startswith("the ") else f"{name!r}"
        hint = "give the mean over samples"
        if name != LOSS:
            hint += "; or log a torchmetrics Metric, which sums its state over workers"
        return TargetError(
            f"in {self._name}, {said} of a batch does not follow from those of its parts: it is "
            f"not {kinds}",
            hint=f"{hint}; or train with hf.prepare",
        )


def _faults_of_kinds(
    answers: list[TriedStep], parts: list[CountedPart], rounding: float
) -> dict[str, Numbers]:
    """By name and kind: by how much of its scale a number fails to be of it, where it may be."""
    # What is within the rounding may be; the less, the likelier.
    whole, *of_parts = answers
    found: dict[str, Numbers] = {}
    for name, value in whole.numbers.items():
        values = [answer.numbers.get(name, math.nan) for answer in of_parts]
        scales = [answer.scales.get(name, answer.numbers.get(name, 0.0)) for answer in answers]
        scale = max((abs(v) for v in scales if not math.isnan(v)), default=0.0)
        base = name.removesuffix(_SLOPE)
        before = found.get(base, dict.fromkeys(_KINDS, 0.0))
        found[base] = {}
        for kind in before:
            together = _put_together(kind, values, parts)
            if _are_close(together, value, rounding, scale):
                fault = abs(together - value) / scale if together != value and scale else 0.0
                found[base][kind] = before[kind] + (0.0 if math.isnan(fault) else fault)
    return found


def slope_of(name: str, loss: torch.Tensor, parameters: Iterable[nn.Parameter]) -> TriedStep:
    """A number of a loss's gradients, which must follow from its parts' as the loss does.

    Before training, losses of all samples may be equal, and tell nothing. Gradients differ.
    """
    some = [p for p in parameters if p.requires_grad and p.numel() <= _MOST_WEIGHTS][-_MOST_SLOPES:]
    if not some or not loss.requires_grad:
        return TriedStep({}, {})
    found = torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
    products = [
        gradient.detach().double().flatten()
        * torch.cos(torch.arange(gradient.numel(), device=gradient.device, dtype=torch.float64))
        for gradient in found
        if gradient is not None
    ]
    value = float(sum(product.sum() for product in products))
    scale = float(sum(product.abs().sum() for product in products))
    return TriedStep({name + _SLOPE: value}, {name + _SLOPE: scale})


def _packed(
    names: list[str], numbers: Sequence[Numbers], parts: Sequence[CountedPart], piece: BatchPart
) -> list[float]:
    """What this worker tells the others: the order, the names, its counts, its numbers."""
    are_alike = all(list(answer) == names for answer in numbers)
    own = [
        float(piece.digest),
        float(zlib.crc32("\n".join(names).encode())) if are_alike else math.nan,
        float(sum(part.num_samples for part in parts)),
        float(sum(part.num_labels for part in parts)),
        float(sum(part.num_following for part in parts)),
    ]
    for name in names if are_alike else ():
        values = [answer[name] for answer in numbers]
        own += [_put_together(kind, values, parts) for kind in _KINDS]
    # Workers that log different names must meet in this exchange too, to be told.
    return own + [0.0] * ((1 << max(len(own) - 1, 63).bit_length()) - len(own))
