"""Tables of norms: those of whole gradients follow from those of parts, to the last bit."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from hetflow.runtime.group import Place
from hetflow.runtime.pipeline.norms import (
    NORMS,
    NUM_ROWS,
    Columns,
    DeviceSums,
    norms_of,
    weighted_sum,
)
from hetflow.runtime.protocol.environment import Start

HOST = torch.device("cpu")
# Groups of three workers, of two and of one: their parameters have as many columns, or one.
TELLERS = [(0, 1, 2), (3, 4), (5,), (3,)]


def columns_of_parts() -> Columns:
    return Columns(TELLERS, HOST)


def whole_norm(norm: float, parts: Sequence[float]) -> float:
    """The norm of a gradient from the norms of its parts, added in their order."""
    if norm == math.inf:
        return max(parts)
    total = 0.0
    for part in parts:
        total += part**2 if norm == 2.0 else part
    return math.sqrt(total) if norm == 2.0 else total


@pytest.mark.parametrize("zeros", [[], [3, 4]])
def test_a_table_holds_the_norms_of_whole_gradients(zeros: list[int]) -> None:
    parts_of = {"a": [0, 1, 2], "b": [3, 4], "c": [5], "whole": [6]}
    for seed in range(5):
        columns = columns_of_parts()
        rows = np.random.default_rng(seed).exponential(size=(NUM_ROWS, len(columns)))
        rows[0], rows[1:, zeros] = 1.0, 0.0
        rows[0, [3, 4, 6]] = 0.0, 1.0, 0.0  # one part of b's gradient is enough
        table = columns.table(rows.copy())
        assert list(table.used) == [True, True, True, False]
        table.multiply(0.3)
        table.divide(1024.0)
        expected = {
            norm: [
                whole_norm(norm, rows[row, p].tolist()) * 0.3 / 1024.0 for p in parts_of.values()
            ]
            for row, norm in enumerate(NORMS, start=1)
        }
        for norm in NORMS:
            assert [table.norm(index, norm) for index in range(len(TELLERS))] == expected[norm]
            ratios = [
                o / t if t else 1.0 for o, t in zip(expected[norm], expected[2.0], strict=True)
            ]
            assert table.ratios(norm) == ratios
        assert table.two_norms([3, 0, 2]).tolist() == [expected[2.0][n] for n in (3, 0, 2)]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_entry_of_one_part_shows(bad: float) -> None:
    columns = columns_of_parts()
    for entry in (1.0, bad):
        rows = np.ones((NUM_ROWS, len(columns)))
        rows[1 + NORMS.index(math.inf), 4] = entry
        assert columns.table(rows).is_finite == math.isfinite(entry)


def test_a_worker_tells_its_own_norms_and_zeros_for_all_others() -> None:
    columns = Columns([(0,)] * 4, HOST)
    parameters = [nn.Parameter(torch.zeros(3)) for _ in "abcd"]
    for number, parameter in enumerate(parameters[:3]):
        parameter.grad = torch.full((3,), float(number + 1)) if number != 1 else None
    sums = DeviceSums(Place(Start(), None, HOST), [0], columns, list(enumerate(parameters[:3])))
    losses = [(torch.tensor(0.1), 3.0), (torch.tensor(0.7), 2.0)]
    for asked in (set(NORMS), {2.0}, {math.inf, 2.0}):
        loss, table = sums.sum(losses, [True, False, True, False], asked)
        assert table is not None
        assert loss == weighted_sum(losses)
        for norm in NORMS:
            found = [float(table.norm(index, norm)) for index in range(4)]
            used = [parameters[0].grad, parameters[2].grad]
            own = norms_of([g for g in used if g is not None], [norm])[0].tolist()
            assert found == ([own[0], 0.0, own[1], 0.0] if norm in asked else [0.0] * 4)
    assert sums.sum([], [False] * 4, None)[1] is None


def test_losses_are_added_in_order_as_on_the_host() -> None:
    values = torch.rand(7, generator=torch.Generator().manual_seed(1))
    for weights in ([3.0] * 7, [3.0, 2.0, 0.0, 5.0, 7.0, 1.0, 9.0]):
        expected = 0.0
        for value, weight in zip(values.tolist(), weights, strict=True):
            expected += value * weight
        assert float(weighted_sum(list(zip(values, weights, strict=True)))) == expected
