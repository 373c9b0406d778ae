"""Weights of a checkpoint in a plain model: as the job left them, and as other tools read them."""

from pathlib import Path

import pytest
import torch
from torch import nn

from hetflow import runtime as hf
from hetflow.runtime.checkpoints import checkpoint
from hetflow.schema.errors import FileError, TargetError

from .test_checkpoint import damaged, model_of, plain, train

__all__ = ["plain"]  # a fixture


def saved_by_nodes(folder: Path, sizes: tuple[int, ...]) -> nn.Module:
    """A checkpoint of unlike virtual nodes, each with statistics of its own; the model."""
    model = model_of()
    nodes = [
        {"1.running_mean": torch.full((6,), float(n), dtype=torch.float64)}
        for n, _ in enumerate(sizes)
    ]
    header = {
        "virtual_nodes": list(sizes),
        "seed": 0,
        "parameters": {
            name: f"float64 {list(value.shape)}" for name, value in model.named_parameters()
        },
        "step": 4,
        "position": {"call": 0, "step": 0, "length": 0},
    }
    state = {
        "parameters": dict(model.named_parameters()),
        "optimizer": None,
        "buffers": {"base": dict(model.named_buffers()), "nodes": nodes},
        "registered": [],
        "last_weight": None,
    }
    tensors: list[torch.Tensor] = []
    checkpoint.write(folder, header, checkpoint.encode(state, tensors), tensors)
    return model


def test_a_plain_model_gets_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    _, expected, job = train()
    expected.pop("lr")
    for folder in (tmp_path, max(tmp_path.glob("step-*"))):
        model = model_of()
        assert hf.load_weights(model, folder) == job.num_steps == 9
        found = model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_statistics_of_virtual_nodes_are_merged_by_their_samples(tmp_path: Path) -> None:
    expected = saved_by_nodes(tmp_path, (1, 3))
    model = model_of()
    with torch.no_grad():
        model[0].weight.zero_()
    assert hf.load_weights(model, str(tmp_path)) == 4
    assert torch.equal(model[0].weight, expected[0].weight)
    assert model[1].running_mean.tolist() == [0.75] * 6


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there is no checkpoint"):
        hf.load_weights(model_of(), tmp_path)
    saved_by_nodes(tmp_path, (1, 3))
    other = nn.Sequential(*model_of(), nn.Linear(1, 1))
    with pytest.raises(TargetError, match=r"another model: 4\.weight is absent there"):
        hf.load_weights(other, tmp_path)
    before = [parameter.clone() for parameter in other.parameters()]
    assert all(map(torch.equal, before, other.parameters()))
    (path,) = tmp_path.glob("step-*")
    damaged(path, "flipped")
    for folder in (tmp_path, path):
        with pytest.raises(FileError, match="does not match its checksum"):
            hf.load_weights(model_of(), folder)


@pytest.mark.slow
def test_a_published_model_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied weights and unsaved buffers are the model's: transformers and safetensors read it."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 8}
    config = transformers.GPT2Config(**sizes)
    ids = torch.arange(8)[None]

    def built(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
        return model

    trained = built(1)
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path / "saved"))
    job = hf.prepare(trained, torch.optim.SGD(trained.parameters(), lr=0.1))
    job.checkpoint()
    job.abandon()
    model = built(2)
    hf.load_weights(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "published")
    assert (tmp_path / "published" / "model.safetensors").exists()
    published = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "published").eval()
    assert torch.equal(published(ids).logits, trained(ids).logits)
    safetensors.save_model(model, str(tmp_path / "one.safetensors"))
    again = built(3)
    safetensors.load_model(again, str(tmp_path / "one.safetensors"))
    assert torch.equal(again(ids).logits, trained(ids).logits)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    again = built(4)
    again.load_state_dict(torch.load(tmp_path / "plain.pt"))
    assert torch.equal(again(ids).logits, trained(ids).logits)
