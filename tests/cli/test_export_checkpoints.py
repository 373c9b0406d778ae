"""Exported checkpoints, as torch's own reader and safetensors' take them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hetflow import runtime as hf
from hetflow.runtime.checkpoints import checkpoint
from hetflow.runtime.checkpoints.checkpoint import shapes_of
from hetflow.tests.runtime import continued
from hetflow.tests.runtime.gloo_workers import run_workers


def train(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Train a kind with hetflow; its checkpoints are after half of the steps, and at the end."""
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(folder))
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    torch.manual_seed(1)
    model = continued.Model()
    optimizer = continued.optimizer_of(kind, model)
    job = hf.prepare(model, optimizer)
    losses = []
    for number, batch in enumerate(job.batches(list(continued.BATCHES))):
        optimizer.zero_grad()
        losses.append(job.backward(lambda x: continued.loss_of(model, x), batch).item())
        optimizer.step()
        if number + 1 == continued.HALF:
            job.checkpoint()
    job.finish()
    return losses[continued.HALF :]


@pytest.mark.slow
@pytest.mark.processes
def test_torch_goes_on_from_exported_checkpoints(
    hetflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fully_shard on two workers, with shards of unlike lengths."""
    expected = {}
    for kind in continued.KINDS:
        expected[kind] = train(kind, tmp_path / kind, monkeypatch)
        saved = tmp_path / kind / f"step-{continued.HALF:09d}"
        done = hetflow("export", saved, "--to", "dcp", "-o", tmp_path / f"{kind}.dcp")
        assert done.code == 0, done.stderr
    run_workers(Path(continued.__file__), 2, tmp_path, *continued.KINDS, seconds=120)
    found = json.loads((tmp_path / "losses.json").read_text())
    for kind in continued.KINDS:
        assert found[kind] == pytest.approx(expected[kind], rel=1e-12), kind


def test_safetensors_have_each_tensor_once(
    hetflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    train("sgd", tmp_path / "kept", monkeypatch)
    file, asked = tmp_path / "model.safetensors", ("--to", "safetensors", "--json")
    done = hetflow("export", tmp_path / "kept", *asked, "-o", file)
    assert json.loads(done.stdout)["contents"] == "9 tensors"
    expected = continued.Model()
    hf.load_weights(expected, tmp_path / "kept")
    model = continued.Model()
    assert safetensors.load_model(model, file) == (set(), [])
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert not {"scratch", "head.weight"} & safetensors.load_file(file).keys()
    before = file.read_bytes()
    again = hetflow("export", tmp_path / "kept", *asked, "-o", file)
    assert (again.code, file.read_bytes()) == (2, before)
    assert "exists already" in again.stderr


def made(folder: Path, **header: Any) -> None:
    """Write a checkpoint of two weights and Adam's states, as hetflow 0.1.0 did but for names."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1)).backward()
    optimizer.step()
    state = {
        "parameters": {header.pop("first", "weight"): model.weight, "bias": model.bias},
        "optimizer": optimizer.state_dict(),
        "buffers": {"base": {}, "nodes": []},
        "registered": [],
        "last_weight": None,
    }
    header |= {"virtual_nodes": [], "seed": 0, "parameters": shapes_of(state["parameters"])}
    header |= {"step": 1, "position": {"call": 0, "step": 1, "length": 1}}
    tensors: list[torch.Tensor] = []
    checkpoint.write(folder, header, checkpoint.encode(state, tensors), tensors)


@pytest.mark.parametrize(
    ("header", "options", "said"),
    [
        ({}, ("-o", "out"), "does not say which parameters the states of its optimizer are of"),
        ({"optimizer_order": ["bias"]}, ("-o", "out"), "does not say which parameters"),
        ({"optimizer_order": ["weights", "bias"]}, ("-o", "out"), "must name parameters"),
        ({"optimizer_order": ["weight", "bias"], "tied": {"x": "y"}}, ("-o", "out"),
         "header.tied names y"),
        ({"tied": {"x": 1}}, ("-o", "out"), "header.tied and header.unsaved must be a str"),
        ({"unsaved": {}}, ("-o", "out"), "header.unsaved must be a list"),
        ({"first": "optimizer.param_groups[0][0]"}, ("-o", "out"), "that are not the model's"),
        ({}, (), "dcp is no text that can be printed"),
        ({}, ("--to", "slurm"), "folder\nhint: if it holds checkpoints, give --to dcp or"),
        ({}, ("-o", "out", "--", "a.py"), "dcp starts no script, got 'a.py'"),
        ({}, ("-o", "no/out"), "no: no such folder"),
        ({}, ("-o", "ckpt", "--force"), "ckpt: cannot be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_line(
    hetflow: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    header: dict[str, Any],
    options: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path / "ckpt", **header)
    answer = hetflow("export", "ckpt", "--to", "dcp", *options)
    assert (answer.code, answer.stdout) == (2, "")
    assert said in answer.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_full_disk_leaves_nothing(
    hetflow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch raises then is no Exception, and holds another's traceback."""
    made(tmp_path / "ckpt", optimizer_order=["weight", "bias"])

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    answer = hetflow("export", tmp_path / "ckpt", "--to", "dcp", "-o", tmp_path / "out")
    assert answer.code == 2
    assert answer.stderr.endswith("out: cannot be written: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
