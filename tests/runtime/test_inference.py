"""Inference with virtual nodes: the same outputs in the same order on any mapping."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parent / "predicting.py"
spec = importlib.util.spec_from_file_location("predicting", SCRIPT)
predicting = importlib.util.module_from_spec(spec)
spec.loader.exec_module(predicting)

# The same virtual nodes, in order, of two samples each.
MAPPINGS = {"1": [8], "2": [5, 3], "3": [5, 2, 1], "4": [2, 1, 2, 3]}


def launched(devices: list[int], folder: Path, plan_of: Callable[..., Plan]) -> list[dict]:
    folder.mkdir()
    files.write(folder / "plan.json", plan_of([(nodes, 2) for nodes in devices]))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", "elastic"]
    command += ["-o", str(folder / "run"), str(folder / "plan.json"), str(SCRIPT), str(folder)]
    done = programs.run(command, timeout=240)
    assert done.returncode == 0, done.stderr
    paths = [folder / f"results{rank}.pt" for rank in range(len(devices))]
    return [torch.load(path, weights_only=True) for path in paths]


def check(results: list[dict], expected: dict) -> None:
    """Everything that ``expected``, one worker's results, says, also on these workers."""
    for rank, result in enumerate(results):
        wanted = [result["all"]] + ([result["main"]] if rank == 0 else [])
        assert (result["num_main"] > 0) == (rank == 0)
        for outputs in wanted:
            for name in ("index", "y", "drawn", "positive"):
                assert torch.equal(outputs[name], expected["all"][name]), name
            assert outputs["lengths"] == expected["all"]["lengths"]
        assert len(result["few"]) == (3 if rank == 0 else 0)
        assert result["largest"] <= 2
        assert torch.equal(result["whole"], expected["whole"])
        assert torch.equal(result["drawn_after"], results[0]["drawn_after"])
        assert result["training"]


@pytest.mark.slow
def test_unlike_mappings_give_the_same_outputs_in_order(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    one = launched(MAPPINGS["1"], tmp_path / "1", plan_of)
    outputs = one[0]["all"]
    assert outputs["index"].tolist() == list(range(predicting.NUM_SAMPLES))
    assert outputs["lengths"] == [2] * 16 + [1] * 5
    assert not outputs["grad"]
    assert torch.equal(outputs["positive"], outputs["y"] > 0)
    assert not torch.equal(outputs["drawn"], outputs["y"])
    check(one, one[0])
    check(launched(MAPPINGS["3"], tmp_path / "3", plan_of), one[0])


@pytest.mark.slow
def test_two_and_four_workers_give_them_too(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    one = launched(MAPPINGS["1"], tmp_path / "1", plan_of)
    for name in ("2", "4"):
        check(launched(MAPPINGS[name], tmp_path / name, plan_of), one[0])


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def data() -> TensorDataset:
    return TensorDataset(torch.arange(22.0)[:, None])


@pytest.mark.usefixtures("no_launch")
def test_plain_python_gives_the_models_own_outputs() -> None:
    model = nn.Linear(1, 2)
    job = hf.prepare(model)
    found = [*job.predict(DataLoader(data(), batch_size=8, drop_last=True), model)]
    assert [len(part) for part in found] == [8, 8, 6]
    with torch.no_grad():
        expected = [model(part) for part in data().tensors[0].split(8)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    found[0].zero_()
    job.finish()


@pytest.mark.usefixtures("no_launch")
def test_the_loop_leaves_gradients_and_the_mode_to_the_script() -> None:
    model = nn.Dropout(0.5)
    job = hf.prepare(model)
    for _ in job.predict(DataLoader(data(), batch_size=8), model):
        assert model.training
        assert torch.is_grad_enabled()
    job.finish()


@pytest.mark.usefixtures("no_launch")
def test_what_makes_no_sense_is_refused() -> None:
    model = nn.Linear(1, 2)
    job = hf.prepare(model)
    with pytest.raises(TargetError, match="outputs in order, and this loader shuffles"):
        job.predict(DataLoader(data(), batch_size=8, shuffle=True), model)
    with pytest.raises(TargetError, match=r"output\.f is a function, which is no plain data"):
        list(job.predict(DataLoader(data(), batch_size=8), lambda x: {"f": data}))
    with pytest.raises(TargetError, match="took a step inside a loop over job.predict"):  # noqa: PT012
        for _ in job.predict(DataLoader(data(), batch_size=8), model):
            batch = next(iter(job.batches(DataLoader(data(), batch_size=8))))
            job.backward(lambda x: model(x).mean(), batch)
    job.finish()
