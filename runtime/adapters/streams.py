"""Data without an index: each worker reads all samples, and keeps its share of each batch."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .patching import around
from .training import Share, note_split

# (samples of the global batch, checksum of some of them, this worker's part)
Read = tuple[int, int, Any]


def adapt(module: Any) -> None:
    """Change ``datasets.distributed`` in this process."""
    around(module, "split_dataset_by_node", _note_split)


def _note_split(original: Any, dataset: Any, rank: int, world_size: int, **options: Any) -> Any:
    if world_size > 1:
        note_split()
    return original(dataset, rank, world_size, **options)


@dataclass(frozen=True, slots=True)
class Shared:
    """A collator that is given a global batch's samples and collates this worker's.

    Attributes:
        collate: The script's collator.
        batch_size: The loader's; None where the dataset gives whole batches.
        share: This worker's share.
    """

    collate: Callable[[Any], Any]
    batch_size: int | None
    share: Share

    def __call__(self, samples: Any) -> Read:
        """Collate this worker's samples of a global batch."""
        if self.batch_size is None:
            batch = self.collate(samples)
            num_samples = rows_of(batch)
            piece = self.share.of(num_samples, None)
            return num_samples, _checksum(samples), _rows(batch, piece.start, piece.own_samples)
        piece = self.share.of(len(samples), self.batch_size)
        ends = (samples[0], samples[-1])
        return len(samples), _checksum(ends), self.collate(piece.of(samples))


def _checksum(value: Any, before: int = 0) -> int:
    """A checksum of what samples hold, equal in all processes that read the same.

    Pickles of tensors are not. Objects of other types only count by their type.
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(value, Mapping):
        value = list(value.items())
    if isinstance(value, tuple | list):
        for entry in value:
            before = _checksum(entry, before)
        return before
    if hasattr(value, "tobytes"):  # arrays, images
        content = value.tobytes()
    else:
        is_plain = isinstance(value, str | bytes | int | float | None)
        content = repr(value if is_plain else type(value)).encode()
    return zlib.crc32(content, before)


def rows_of(batch: Any) -> int:
    """The samples of a batch that is made already: the rows of its first tensor; 0 without one."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, tuple | list):
        return next((rows for rows in map(rows_of, batch) if rows), 0)
    return 0


def _rows(batch: Any, start: int, own: int) -> Any:
    """Some rows of a batch; the first where there are none."""
    if isinstance(batch, Tensor):
        return batch[start : start + own] if own else batch[:1]
    if isinstance(batch, Mapping):
        return {key: _rows(value, start, own) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_rows(value, start, own) for value in batch)
    return batch
