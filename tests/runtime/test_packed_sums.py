"""Sums that travel with gradients: exact, whatever is summed with them."""

import math

import pytest
import torch

from hetflow.runtime.packed_sums import PackedSums

LOSSES = [0.1, 1 / 3, 2.5e9 + 0.3, -7e-12, 0.0, math.inf]
WEIGHTS = [32.0, 1 / 7, 3.0 * (1 << 40) + 1, 1e-3, 2.0**24 + 1, 1.0]


def summed(packed: PackedSums, losses: list[float], dtype: torch.dtype) -> torch.Tensor:
    """Of two workers, each with every second virtual node."""
    found = torch.zeros(packed.length)
    for worker in range(2):
        own = range(worker, packed.num_nodes, 2)
        part = torch.full((packed.length,), math.nan)
        given = {node: torch.tensor(losses[node], dtype=dtype) for node in own}
        weights = {node: WEIGHTS[node] for node in own}
        packed.pack([1.0, float(worker)], given, weights, [1] if worker else [0, 1], part)
        found += part
    return packed.unpack(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_losses_and_weights_come_back_to_the_bit(dtype: torch.dtype) -> None:
    packed = PackedSums(2, len(LOSSES), 3)
    found = summed(packed, LOSSES, dtype).tolist()
    losses = torch.tensor(LOSSES, dtype=dtype).double().tolist()
    products = [loss * weight for loss, weight in zip(losses, WEIGHTS, strict=True)]
    assert found == [2.0, 1.0, *products, *WEIGHTS, 1.0, 0.0, 2.0]


def test_a_loss_that_is_no_number_stays_one() -> None:
    found = summed(PackedSums(2, 2, 3), [math.nan, 1.0], torch.float64)
    assert math.isnan(found[2])
    assert found[3] == WEIGHTS[1]
