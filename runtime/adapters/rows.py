"""Batches as a script's loader made them: their samples, and which of their labels count."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...schema.errors import TargetError

_IGNORED = -100  # the label that counts nothing, in torch and transformers
_PLAIN = (str, bytes, bool, int, float, complex, type(None))


def rows_of(batch: Any, num_samples: int, start: int, end: int) -> Any:
    """Samples ``start`` to ``end`` of a batch, in its own structure.

    Args:
        batch: Tensors, arrays and lists with an entry for each sample; dicts, tuples and
            dataclasses of them. Single numbers and texts are for all samples.
        num_samples: Samples of the batch.
        start: The first sample.
        end: The end, excluded.

    Raises:
        TargetError: Something in it has no entry for each sample.
    """

    def part(value: Any) -> Any:
        return rows_of(value, num_samples, start, end)

    if isinstance(value := batch, Tensor | np.ndarray) and value.ndim:
        if len(value) == num_samples:
            return value[start:end]
    elif isinstance(batch, (*_PLAIN, Tensor, np.generic)):
        return batch
    elif isinstance(batch, Mapping):
        found = copy.copy(batch)
        for key, entry in batch.items():
            found[key] = part(entry)  # type: ignore[index]
        return found
    elif is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: part(getattr(batch, f.name)) for f in fields(batch)})
    elif isinstance(batch, list | tuple):
        return _of_list(batch, num_samples, start, end)
    raise TargetError(
        f"the batch has a {type(batch).__name__} without an entry for each of its {num_samples} "
        "samples, so it cannot be cut into parts",
        hint="let the loader's collate_fn give tensors with a row for each sample; or train with "
        "hf.prepare",
    )


def _of_list(batch: Sequence[Any], num_samples: int, start: int, end: int) -> Any:
    """A list of columns (inputs, targets), or else of samples."""
    is_of_samples = len(batch) == num_samples and all(isinstance(v, _PLAIN) for v in batch)
    if not is_of_samples:
        try:
            found = [rows_of(entry, num_samples, start, end) for entry in batch]
        except TargetError:
            if len(batch) != num_samples:
                raise
        else:
            is_named = hasattr(batch, "_fields")
            return type(batch)(*found) if is_named else type(batch)(found)  # type: ignore[call-arg]
    return batch[start:end]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for entry in batch.values():
            yield from _tensors(entry)
    elif isinstance(batch, list | tuple):
        for entry in batch:
            yield from _tensors(entry)


def _labels_in(batch: Any) -> Tensor | None:
    """The tensor of whole numbers named ``labels``, or else the last one."""
    named = batch.get("labels") if isinstance(batch, Mapping) else None
    found = [named] if isinstance(named, Tensor) else list(_tensors(batch))
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
    return int(counted.sum()), int(following.sum())


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
    return _exchanged(batch, labels, changed)


def _exchanged(batch: Any, old: Tensor, new: Tensor) -> Any:
    if batch is old:
        return new
    if isinstance(batch, Mapping):
        found = copy.copy(batch)
        for key, entry in batch.items():
            found[key] = _exchanged(entry, old, new)  # type: ignore[index]
        return found
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)([_exchanged(entry, old, new) for entry in batch])
    return batch


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
    elif isinstance(first, _PLAIN) and all(a == first for a in answers):
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
