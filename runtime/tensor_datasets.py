"""Gather the samples of a pass at once, where the dataset consists of tensors.

A DataLoader indexes each tensor of a TensorDataset once a sample and stacks the results: for 32
samples of two tensors, 64 calls into torch and two copies. One index for each tensor copies the
same rows once. Where no process loads and nothing is pinned, the loader itself would only pass the
rows on, and is left out.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map


class Rows(Dataset[Any]):
    """Passes of a dataset that consists of tensors, collated.

    Args:
        dataset: The dataset.
        subsets: The subsets through which the script sees it, from the script's side.
    """

    def __init__(self, dataset: TensorDataset, subsets: "Sequence[Subset[Any]]") -> None:
        self._dataset, self._subsets = dataset, tuple(subsets)

    @classmethod
    def of(cls, loader: "DataLoader[Any]") -> "Rows | None":
        """The rows of a loader's dataset; None where they are not what the loader would give.

        Processes that load data put it into shared memory sample by sample, so they keep to the
        loader's way.
        """
        dataset: Any = loader.dataset
        subsets: list[Subset[Any]] = []
        while type(dataset) is Subset:
            subsets.append(dataset)
            dataset = dataset.dataset
        is_plain = (
            type(dataset) is TensorDataset
            and loader.num_workers == 0
            and loader.collate_fn is default_collate
            and default_collate_fn_map.get(Tensor) is collate_tensor_fn
            and all(_is_plain(tensor) for tensor in dataset.tensors)
        )
        return cls(dataset, subsets) if is_plain else None

    def __getitems__(self, keys: Sequence[tuple[int, int, int]]) -> list[Tensor]:
        """The samples of a pass; a key is (epoch, sample, how often it was drawn before)."""
        samples = [sample for _, sample, _ in keys]
        for subset in self._subsets:
            samples = [subset.indices[sample] for sample in samples]
        # Between two passes ``torch.tensor`` of a list takes several times as long.
        index = torch.frombuffer(array("q", samples), dtype=torch.int64)
        return [tensor[index] for tensor in self._dataset.tensors]


class Passes:
    """Passes over rows, one epoch for each iteration, as a DataLoader without processes gives them.

    Args:
        rows: The dataset.
        sampler: The keys of each pass.
    """

    def __init__(self, rows: Rows, sampler: "Iterable[Sequence[tuple[int, int, int]]]") -> None:
        self._rows, self._sampler = rows, sampler

    def __iter__(self) -> Iterator[list[Tensor]]:
        return map(self._rows.__getitems__, self._sampler)


def as_they_are(rows: list[Tensor]) -> list[Tensor]:
    """The collate function of ``Rows``, whose passes are collated already."""
    return rows


def _is_plain(tensor: Tensor) -> bool:
    """Whether rows by an index have the values and strides of single rows, stacked."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
    )
