"""Layers that torch.fx did not find: exported ones are launched, hooked ones refused."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.layers import LayerTrace
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

pytestmark = pytest.mark.processes

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel
from hetflow import runtime as hf

def loss_of(model, batch):
    ids, mask = batch
    return model(input_ids=ids, attention_mask=mask, labels=ids).loss

def data(samples):
    ids = torch.randint(32, (samples, 8))
    mask = torch.ones_like(ids)
    mask[::2, 6:] = 0
    return ids, mask

def workload():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).double(), data, loss_of

if __name__ == "__main__":
    model = workload()[0]
    torch.manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    job = hf.prepare(model, optimizer)
    for batch in job.batches(DataLoader(TensorDataset(*data(44)), batch_size=16)):
        loss = job.backward(lambda ids, mask: loss_of(model, (ids, mask)), batch)
        optimizer.step()
        optimizer.zero_grad()
    job.print(f"loss {loss.item():.12f}")
    job.finish()
"""


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it where transformers is imported already."""
    preloaded = {programs.VARIABLE: programs.preloaded(*programs.TRANSFORMERS)}
    return programs.run(
        [sys.executable, *arguments], cwd=folder, timeout=240, env={**os.environ, **preloaded}
    )


def hetflow(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "hetflow.cli.main", *arguments)


@pytest.mark.slow
def test_gpt2_of_transformers_trains_as_on_one_device(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    measured = hetflow(
        tmp_path, "profile", "train.py:workload", "--quick", "--layers", "--microbatch-size", "4,2",
        "--batch-sizes", "4", "--sync-devices", "0", "--no-links", "--device", "cpu",
        "--name", "m", "--recompute",
    )  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    assert "layers found by torch.export: pipelines of them can be launched" in measured.stdout
    assert "23 layers at 2" in measured.stdout
    profile = files.read(tmp_path / "profiles" / "m.cpu.json", Profile)
    assert [point.batch_size for point in profile.recomputed_curve] == [4]
    solved = hetflow(
        tmp_path, "solve", "--profiles", "profiles", "--gpus", "2xcpu", "--batch-size", "16",
        "--strategy", "pipeline", "--num-stages", "2", "--microbatch-size", "4",
        "--link-bytes-per-second", "1e9", "--optimizer", "sgd", "-o", "plan.json",
    )  # fmt: skip
    assert solved.returncode == 0, solved.stderr
    done = hetflow(tmp_path, "launch", "-o", "run", "plan.json", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Adam keeps 2 bytes of state a byte of weights, the plan's") == 1
    alone = python(tmp_path, "train.py")
    assert alone.returncode == 0, alone.stderr
    record = files.read(tmp_path / "run" / "run.json", RunRecord)
    # The last batch is short: 12 samples, so the graph must not have fixed its batch size.
    assert record.final_loss == pytest.approx(float(alone.stdout.split()[-1]), rel=1e-10)


def test_layers_found_by_hooks_are_refused_before_anything_starts(
    tmp_path: Path, two_stages: Plan
) -> None:
    trace = LayerTrace(way="hooks", reason="torch.export: data-dependent")
    files.write(tmp_path / "plan.json", replace(two_stages, trace=trace))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = hetflow(tmp_path, "launch", "-o", "run", "plan.json", "train.py")
    assert done.returncode == 2
    assert "small cannot be cut into stages" in done.stderr
    assert "torch.export: data-dependent" in done.stderr
    assert "--strategy split" in done.stderr
    assert not (tmp_path / "run").exists()
