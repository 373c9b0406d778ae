"""A target's batches as a dataset, so that the loop that trains can load them.

A target that gives its own dataset is loaded from that. Else a batch is taken apart along its
first dimension, and torch's collate function puts samples together again. Where that cannot be
done, each virtual node gets a ready batch, and loading is not measured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..schema.errors import TargetError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import DataLoader

_SEED = 0
_MANY = 1 << 20
_OF_LOADERS = (
    "num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Where a rehearsal's samples come from.

    Attributes:
        dataset: Map-style.
        options: For the DataLoader over it.
        batch_of: Makes what the target's loss takes of what the script's function gets.
        obstacle: Why loading is not measured; None where it is.
    """

    dataset: Any
    options: Mapping[str, Any]
    batch_of: Callable[[tuple[Any, ...]], Any]
    obstacle: str | None = None

    def loader(self, global_batch_size: int, num_steps: int) -> "DataLoader[Any]":
        """A loader of so many global batches, drawn at random as a shuffling loader does."""
        import torch
        from torch.utils.data import DataLoader

        drawn = torch.Generator().manual_seed(_SEED)
        shape = (global_batch_size * num_steps,)
        order: list[int] = torch.randint(len(self.dataset), shape, generator=drawn).tolist()
        return DataLoader(self.dataset, batch_size=global_batch_size, sampler=order, **self.options)


class Samples:
    """The samples of one workload, on the host; made anew only where a size needs more.

    Args:
        host_batch: Makes a batch of a size, on the host.
        dataset: The target's own dataset or DataLoader, if it gives one.
    """

    def __init__(self, host_batch: Callable[[int], Any], dataset: Any) -> None:
        self._host_batch, self._dataset = host_batch, dataset
        self._size, self._source = 0, SampleSource(None, {}, tuple)

    def source(self, batch_size: int) -> SampleSource:
        """Where virtual nodes of this size get their samples."""
        suits = self._size == batch_size or (
            self._size > batch_size and self._source.obstacle is None
        )
        if not suits:
            self._size, self._source = batch_size, self._make(batch_size)
        return self._source

    def _make(self, batch_size: int) -> SampleSource:
        from torch.utils.data import TensorDataset

        batch = self._host_batch(batch_size)
        if self._dataset is not None:
            return _of_target(self._dataset, batch)
        obstacle = _obstacle(batch, batch_size) or self._obstacle_of_one(batch_size)
        if obstacle is None:
            # As a script with plain tensors has it; the runtime draws no numbers for its samples.
            dataset = TensorDataset(*_tensors(batch))
            return SampleSource(dataset, {}, lambda parts: _like(batch, iter(parts)))
        return _ready(self._host_batch, obstacle)

    def _obstacle_of_one(self, batch_size: int) -> str | None:
        """Of another size: the first dimension may be as long as the batch by chance."""
        if batch_size == 1:
            return None
        try:
            return _obstacle(self._host_batch(1), 1)
        except TargetError:
            return None  # not every target can make a batch of one sample


def _obstacle(batch: Any, batch_size: int) -> str | None:
    lengths = {len(tensor) if tensor.dim() else None for tensor in _tensors(batch)}
    if lengths == {batch_size}:
        return None
    return (
        "a batch cannot be taken apart into samples: the first dimension of its tensors is not "
        "the number of samples; the target can give a dataset (its fifth value)"
    )


def _of_target(own: Any, batch: Any) -> SampleSource:
    """The target's dataset or DataLoader, whose batches must have the form of ``make_batch``'s."""
    from torch.utils.data import DataLoader

    dataset, options = own, {}
    if isinstance(own, DataLoader):
        dataset, options = own.dataset, {name: getattr(own, name) for name in _OF_LOADERS}
    number = len(_tensors(batch))

    def batch_of(parts: tuple[Any, ...]) -> Any:
        found = _tensors(parts)
        if len(found) != number:
            raise TargetError(
                f"the target's dataset gives {len(found)} tensors a batch, and make_batch {number}",
                hint="let both give the same, in the same order",
            )
        return _like(batch, iter(found))

    return SampleSource(dataset, options, batch_of)


class _Numbers(Sequence[int]):
    """A dataset of numbers, which costs next to nothing to load."""

    def __len__(self) -> int:
        return _MANY

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def _ready(make: Callable[[int], Any], obstacle: str) -> SampleSource:
    """Give one batch to every virtual node of a size."""
    known: dict[int, Any] = {}

    def collate(numbers: list[int]) -> dict[str, Any]:
        size = len(numbers)
        if size not in known:
            known[size] = make(size)
        return {"batch": known[size]}

    return SampleSource(
        _Numbers(), {"collate_fn": collate}, lambda parts: parts[0]["batch"], obstacle=obstacle
    )


def _tensors(value: Any) -> list["Tensor"]:
    """The tensors in nested tuples, lists and dicts (in order of their keys)."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [found for key in sorted(value) for found in _tensors(value[key])]
    if isinstance(value, tuple | list):
        return [found for entry in value for found in _tensors(entry)]
    return []


def _like(form: Any, tensors: Iterator["Tensor"]) -> Any:
    """Tensors in the form of a batch; what is no tensor there stays as it is there."""
    import torch

    if isinstance(form, torch.Tensor):
        return next(tensors)
    if isinstance(form, Mapping):
        made = {key: _like(form[key], tensors) for key in sorted(form)}
        return type(form)({key: made[key] for key in form})  # type: ignore[call-arg]
    if isinstance(form, tuple) and hasattr(form, "_fields"):
        return type(form)(*(_like(entry, tensors) for entry in form))
    if isinstance(form, tuple | list):
        return type(form)(_like(entry, tensors) for entry in form)
    return form
