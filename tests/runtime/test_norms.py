"""Tables of norms: those on a device say what those on the host say, to the last bit."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

from hetflow.protocol.environment import Start
from hetflow.runtime.group import Place
from hetflow.runtime.pipeline.norms import (
    NORMS,
    NUM_ROWS,
    Columns,
    DeviceIndices,
    DeviceSums,
    DeviceTable,
    HostTable,
    norms_of,
    weighted_sum,
)
from hetflow.runtime.tensor.groups import Cut, Lanes

HOST = torch.device("cpu")
# Groups of three workers, of two and of one: their parameters have as many columns, or one.
GROUPS, FIRST = [(0, 1, 2), (3, 4), (5,)], {"a": 0, "b": 3, "c": 5, "whole": 3}


def both_tables(seed: int, zeros: Sequence[int] = ()) -> tuple[HostTable, DeviceTable]:
    """The same random table on the host and as on a device, joined from the norms of parts."""
    columns = Columns(list(FIRST.items()), Lanes(GROUPS, dict.fromkeys("abc", Cut(0))))
    rows = np.random.default_rng(seed).exponential(size=(NUM_ROWS, len(columns)))
    rows[0], rows[1:, list(zeros)] = 1.0, 0.0
    indices = DeviceIndices(HOST)
    norms = columns.joined_on_device(torch.from_numpy(rows[1:].copy()), indices)
    host = HostTable(columns.joined(rows))
    return host, DeviceTable(host.used, norms, indices)


def test_a_table_on_a_device_has_the_bits_of_one_on_the_host() -> None:
    for seed in range(5):
        host, device = both_tables(seed, zeros=[3, 4])
        for table in (host, device):
            table.multiply(0.3)
            table.divide(1024.0)
        assert torch.equal(host.two_norms([3, 0, 2]), device.two_norms([3, 0, 2]))
        for norm in NORMS:
            assert device.ratios(norm).tolist() == host.ratios(norm)
            found = [float(device.norm(index, norm)) for index in range(len(FIRST))]
            assert found == [host.norm(index, norm) for index in range(len(FIRST))]
        assert host.ratios(1.0)[1] == 1.0  # its 2-norm is 0


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_entry_of_one_part_shows_on_host_and_device(bad: float) -> None:
    columns = Columns(list(FIRST.items()), Lanes(GROUPS, dict.fromkeys("abc", Cut(0))))
    for entry in (1.0, bad):
        rows = np.ones((NUM_ROWS, len(columns)))
        rows[1 + NORMS.index(math.inf), 4] = entry
        norms = columns.joined_on_device(torch.from_numpy(rows[1:]), DeviceIndices(HOST))
        device = DeviceTable([True] * len(FIRST), norms, DeviceIndices(HOST))
        assert HostTable(columns.joined(rows)).is_finite == math.isfinite(entry)
        assert bool(device.is_finite) == math.isfinite(entry)


def test_a_worker_tells_its_own_norms_and_zeros_for_all_others() -> None:
    columns = Columns([(name, 0) for name in "abcd"], Lanes([(0,)], {}))
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
