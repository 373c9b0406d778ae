"""The mapping does not matter: real workers on gloo against plain PyTorch on one device."""

import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow.runtime.determinism import generator_of
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "scenarios.py"
spec = importlib.util.spec_from_file_location("scenarios", SCRIPT)
scenarios = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scenarios)

# (virtual nodes, samples of each) per device: the same four virtual nodes on 1 to 4 workers.
UNIFORM = {
    "1": [(4, 6)],
    "2": [(3, 6), (1, 6)],
    "3": [(2, 6), (1, 6), (1, 6)],
    "4": [(1, 6), (1, 6), (1, 6), (1, 6)],
}
UNEVEN = {"uneven": [(1, 14), (2, 3), (4, 1)]}

SCENARIOS = {
    # Batch-norm cannot train on virtual nodes of one sample.
    "uneven": ["plain", "drawn", "tokens"],
    "2": ["plain", "noisy", "noisy_workers", "drawn", "tokens", "mixed"],
}


@dataclass
class World:
    """What one launch left behind."""

    results: list[dict]
    seen: list[dict]
    record: RunRecord


@pytest.fixture(scope="module")
def worlds(
    tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]
) -> dict[str, World]:
    made = {}
    for name, devices in {**UNIFORM, **UNEVEN}.items():
        folder = tmp_path_factory.mktemp(f"world{name}")
        files.write(folder / "plan.json", plan_of(devices))
        done = programs.run(
            [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", str(folder / "run")]
            + [str(folder / "plan.json"), str(SCRIPT), str(folder)]
            + SCENARIOS.get(name, ["plain", "noisy", "drawn", "tokens", "mixed"]),
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        made[name] = World(
            results=[
                torch.load(folder / f"results{rank}.pt", weights_only=True)
                for rank in range(len(devices))
            ],
            seen=[
                json.loads((folder / f"seen{rank}.json").read_text())
                for rank in range(len(devices))
            ],
            record=files.read(folder / "run" / "run.json", RunRecord),
        )
    return made


def same(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(value.double().abs().max()), 1e-30) if value.numel() else 1.0
        error = float((found[name].double() - value.double()).abs().max()) / scale
        assert error <= tolerance, f"{name}: {error}"


def batches_of(epoch: int) -> list[torch.Tensor]:
    order = torch.randperm(scenarios.NUM_SAMPLES, generator=generator_of(0, "order", epoch))
    return list(order.split(scenarios.GLOBAL_BATCH_SIZE))


def one_device() -> dict:
    """The same training in plain PyTorch: whole batches, no hetflow."""
    model, data = scenarios.Net(), scenarios.Points()
    optimizer, scheduler = scenarios.tools(model)
    losses, norms = [], []
    for epoch in range(scenarios.EPOCHS):
        for index in batches_of(epoch):
            loss = nn.functional.cross_entropy(model(data.x[index]), data.y[index])
            loss.backward()
            losses.append(loss.item())
            scenarios.finish_step(model, optimizer, scheduler, norms)
    return {"state": model.state_dict(), "losses": losses, "norms": norms}


@pytest.mark.parametrize("name", [*UNIFORM, *UNEVEN])
def test_any_mapping_trains_as_one_device_does(worlds: dict[str, World], name: str) -> None:
    expected = one_device()
    for result in worlds[name].results:
        same(result["plain"]["state"], expected["state"], 1e-10)
        assert result["plain"]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert result["plain"]["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        assert result["plain"]["unused_is_none"]


@pytest.mark.parametrize("name", [*UNIFORM, *UNEVEN])
def test_every_sample_comes_exactly_once_an_epoch(worlds: dict[str, World], name: str) -> None:
    seen = Counter(i for one in worlds[name].seen for part in one["plain"] for i in part)
    assert seen == dict.fromkeys(range(scenarios.NUM_SAMPLES), scenarios.EPOCHS)


def test_a_sampler_is_drawn_once_for_all_workers(worlds: dict[str, World]) -> None:
    def drawn(name: str) -> Counter:
        return Counter(i for one in worlds[name].seen for part in one["drawn"] for i in part)

    assert drawn("1").total() == scenarios.GLOBAL_BATCH_SIZE
    for name in ("2", "3", "4", "uneven"):
        assert drawn(name) == drawn("1")
        same(
            worlds[name].results[0]["drawn"]["state"],
            worlds["1"].results[0]["drawn"]["state"],
            1e-10,
        )
        assert worlds[name].results[0]["drawn"]["steps"] == 1


@pytest.mark.parametrize("name", ["2", "3", "4"])
def test_dropout_and_batch_norm_follow_the_virtual_node(
    worlds: dict[str, World], name: str
) -> None:
    expected = worlds["1"].results[0]["noisy"]
    for result in worlds[name].results:
        same(result["noisy"]["state"], expected["state"], 1e-12)
        assert result["noisy"]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert result["noisy"]["score"] == pytest.approx(expected["score"], rel=1e-10)
    state = expected["state"]
    assert int(state["1.num_batches_tracked"]) == 2 * 3
    assert not torch.equal(state["1.running_mean"], torch.zeros(12, dtype=torch.float64))


@pytest.mark.parametrize("name", list(UNIFORM))
def test_augmentation_is_the_samples_own(worlds: dict[str, World], name: str) -> None:
    """The same bits, whichever device or data worker draws them."""

    def inputs(world: str, scenario: str) -> dict:
        return {k: v for one in worlds[world].seen for k, v in one[scenario][0].items()}

    assert len(inputs(name, "noisy")) == scenarios.NUM_SAMPLES * scenarios.EPOCHS
    assert inputs(name, "noisy") == inputs("1", "noisy")
    if name == "2":
        assert inputs(name, "noisy_workers") == inputs("1", "noisy")


@pytest.mark.parametrize("name", [*UNIFORM, *UNEVEN])
def test_a_mean_over_tokens_is_over_all_tokens(worlds: dict[str, World], name: str) -> None:
    model, data = scenarios.Net(), scenarios.Points()
    optimizer, _ = scenarios.tools(model)
    losses = []
    for index in batches_of(0):
        loss = scenarios.token_loss(model, data.x[index], data.y[index], index).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for result in worlds[name].results:
        same(result["tokens"]["state"], model.state_dict(), 1e-10)
        assert result["tokens"]["losses"] == pytest.approx(losses, rel=1e-12)


def test_mixed_precision_scales_alike_everywhere(worlds: dict[str, World]) -> None:
    expected = worlds["1"].results[0]["mixed"]
    assert expected["scales"] == [1024.0, 512.0, 512.0]
    for name in ("2", "3", "4"):
        for result in worlds[name].results:
            assert result["mixed"]["scales"] == expected["scales"]
            same(result["mixed"]["state"], expected["state"], 2e-2)
        states = [result["mixed"]["state"] for result in worlds[name].results]
        for state in states[1:]:
            same(state, states[0], 0.0)


@pytest.mark.parametrize("name", [*UNIFORM, *UNEVEN])
def test_the_record_tells_what_happened(worlds: dict[str, World], name: str) -> None:
    record, devices = worlds[name].record, {**UNIFORM, **UNEVEN}[name]
    assert (record.status, record.exit_code, record.world_size) == ("done", 0, len(devices))
    assert record.events == ()
    assert record.num_steps == 6
    assert record.final_loss == worlds[name].results[0]["plain"]["losses"][-1]
    assert len(record.parameters_digest or "") == 64
    assert sum(device.num_samples for device in record.devices) == 2 * scenarios.NUM_SAMPLES
    for device in record.devices:
        assert device.step_seconds is not None
        assert device.compute_seconds is not None
        assert device.compute_seconds <= device.step_seconds
        assert (device.peak_memory_bytes or 0) > 1 << 20
