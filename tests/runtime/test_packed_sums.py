"""Sums that travel with gradients: exact, whatever is summed with them."""

import math
from types import SimpleNamespace

import pytest
import torch

from hetflow.runtime import split_engine
from hetflow.runtime.gradients import GradientReducer
from hetflow.runtime.group import Place
from hetflow.runtime.protocol.environment import Start
from hetflow.runtime.totals import PackedSums, StepTotals, is_one_number, packed_sums
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

LOSSES = [0.1, 1 / 3, 2.5e9 + 0.3, -7e-12, 0.0, math.inf]
WEIGHTS = [32.0, 1 / 7, 3.0 * (1 << 40) + 1, 1e-3, 2.0**24 + 1, 1.0]


def summed(packed: PackedSums, losses: list[float], dtype: torch.dtype | None) -> torch.Tensor:
    """Of two workers, each with every second virtual node."""
    found = torch.zeros(packed.length)
    for worker in range(2):
        own = range(worker, packed.num_nodes, 2)
        part = torch.full((packed.length,), math.nan)
        given = {
            node: losses[node] if dtype is None else torch.tensor(losses[node], dtype=dtype)
            for node in own
        }
        weights = {
            node: torch.tensor(WEIGHTS[node], dtype=torch.float64) if node % 3 else WEIGHTS[node]
            for node in own
        }
        packed.pack([1.0, float(worker)], given, weights, [1] if worker else [0, 1], part)
        found += part
    return packed.unpack(found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, None])
def test_losses_and_weights_come_back_to_the_bit(dtype: torch.dtype | None) -> None:
    packed = PackedSums(2, len(LOSSES), 3)
    found = summed(packed, LOSSES, dtype).tolist()
    losses = torch.tensor(LOSSES, dtype=dtype or torch.float64).double().tolist()
    products = [loss * weight for loss, weight in zip(losses, WEIGHTS, strict=True)]
    assert found == [2.0, 1.0, *products, *WEIGHTS, 1.0, 0.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, None])
def test_a_loss_that_is_no_number_stays_one(dtype: torch.dtype | None) -> None:
    found = summed(PackedSums(2, 2, 3), [math.nan, 1.0], dtype)
    assert math.isnan(found[2])
    assert found[3] == WEIGHTS[1]


def test_unlike_settings_show_in_what_travels_with_gradients() -> None:
    """The settings' number has 22 bits, and its square 44: more than float32 adds exactly."""
    groups = [[(1 << 22) - 1] * 40, [(1 << 22) - 1] * 39 + [(1 << 22) - 2], [3, 4, 5]]
    for numbers in groups:
        layout = packed_sums(1, 1, on_host=True)
        total, places = torch.zeros(layout.length), [totals_of(number) for number in numbers]
        for totals in places:
            part = torch.full((layout.length,), math.nan)
            totals.write(part)
            total += part
        found = list(places[0]._unpacked(total)[3:6])
        assert found == [len(numbers), sum(numbers), sum(n**2 for n in numbers)]
        assert is_one_number(*found) == (len(set(numbers)) == 1)


def totals_of(settings_number: int) -> StepTotals:
    place = Place(Start(), None, torch.device("cpu"))
    totals = StepTotals(GradientReducer([torch.nn.Parameter(torch.ones(1))]), place)
    totals.begin(4, settings_number)
    return totals


@pytest.mark.parametrize(("types", "travel"), [(("cpu", "cpu"), True), (("cpu", "V100"), False)])
def test_sums_travel_with_gradients_on_all_workers_or_on_none(
    types: tuple[str, ...], travel: bool
) -> None:
    """A host cannot know whether a device of another type is a part of its host."""
    slots = tuple(
        WorkerSlot(
            rank=rank, device_type=name, virtual_nodes=(VirtualNode(index=rank, batch_size=2),)
        )
        for rank, name in enumerate(types)
    )
    config = LaunchConfig(model="any", global_batch_size=4, workers=slots)
    found = []
    for slot, device in zip(slots, ("cpu", "cuda" if "V100" in types else "cpu"), strict=True):
        place = Place(
            Start(config=config), slot, torch.device(device), rank=slot.rank, world_size=2
        )
        session = SimpleNamespace(place=place, batch_sizes=(2, 2), parameters={"weight": None})
        found.append(split_engine._num_sums(session, has_buffers=False) > 0)  # type: ignore[arg-type]
    assert found == [travel, travel]
