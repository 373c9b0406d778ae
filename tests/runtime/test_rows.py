"""Passes that are gathered at once are those that the loader would collate sample by sample."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from hetflow.runtime.data import PassSampler, RowLoader, pass_loader

NUM_SAMPLES = 12
ORDER = [3, 0, 7, 7, 11, -2, 4, 1]  # a script's own sampler may repeat samples and count backwards


def whole() -> TensorDataset:
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 3, 4, 4),
        torch.randint(10, (NUM_SAMPLES,)),
        torch.rand(NUM_SAMPLES, 5, dtype=torch.float64) > 0.5,
    )


class OfTheScript(TensorDataset):
    """A dataset of the script's own, which may do anything to a sample."""


def passes_of(dataset: Dataset[Any], order: Sequence[int], **options: Any) -> list[Any]:
    loader = DataLoader(dataset, batch_size=4, **options)
    sampler = PassSampler([3, 1], [0, 1], drop_last=False)
    sampler.set_epoch(0, order)
    return list(pass_loader(loader, sampler, 0, torch.device("cpu")))


@pytest.mark.parametrize(
    "cut",
    [
        lambda dataset: dataset,
        lambda dataset: Subset(Subset(dataset, torch.arange(NUM_SAMPLES)[3:]), [8, 0, 5]),
    ],
)
def test_rows_are_the_samples_stacked(cut: Any) -> None:
    dataset = cut(whole())
    order = [index for index in ORDER if index < len(dataset)]
    assert RowLoader.of(DataLoader(dataset)) is not None
    found = passes_of(dataset, order)
    # A collate function of the script's own is called with single samples.
    expected = passes_of(dataset, order, collate_fn=lambda samples: default_collate(samples))
    assert len(found) == len(expected) > 1
    for mine, theirs in zip(found, expected, strict=True):
        assert type(mine) is type(theirs) is list
        for rows, stacked in zip(mine, theirs, strict=True):
            assert torch.equal(rows, stacked)
            assert (rows.dtype, rows.stride()) == (stacked.dtype, stacked.stride())


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (whole(), {"collate_fn": lambda samples: samples}),
        (whole(), {"num_workers": 1}),
        (OfTheScript(torch.ones(NUM_SAMPLES)), {}),
        (TensorDataset(torch.ones(NUM_SAMPLES, 2, requires_grad=True)), {}),
        (TensorDataset(torch.ones(2, NUM_SAMPLES).T), {}),
        (TensorDataset(torch.ones(NUM_SAMPLES, 2, dtype=torch.complex64).conj()), {}),
        (TensorDataset(torch.eye(NUM_SAMPLES).to_sparse()), {}),
    ],
)
def test_other_datasets_and_loaders_keep_their_way(
    dataset: Dataset[Any], options: dict[str, Any]
) -> None:
    assert RowLoader.of(DataLoader(dataset, **options)) is None


def test_a_sample_that_is_not_there_is_an_error() -> None:
    with pytest.raises(IndexError, match=f"index {NUM_SAMPLES} is out of bounds"):
        passes_of(whole(), [0, NUM_SAMPLES])


def test_a_pass_is_a_copy() -> None:
    """As a script may change its batch in place."""
    values = torch.zeros(NUM_SAMPLES)
    for (rows,) in passes_of(TensorDataset(values), range(NUM_SAMPLES)):
        rows.add_(1)
    assert not values.any()
