"""Scripts that were never written for hetflow are profiled in their own loops, and refused well."""

import json
import os
import sys
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.runtime.adapters.training import Sized
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

TRAINER = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=128, n_embd=64, n_layer=1, n_head=2))
drawn = torch.Generator().manual_seed(0)
ids = torch.randint(0, 64, (128, 128), generator=drawn)
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=int(sys.argv[2]), max_steps=6, logging_steps=1,
    save_steps=2, eval_strategy="epoch", report_to=[], disable_tqdm=True,
)
trainer = Trainer(
    model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    eval_dataset=[{"input_ids": row, "labels": row} for row in ids[:8]],
)
trainer.train()
trainer.save_model(sys.argv[1] + "/saved")

# Versions are read once, not in every step: that took 5 % of the CPU's time.
from accelerate import PartialState
from hetflow.runtime.adapters import patching
patching.version = None
PartialState()

# Freed memory stays in the process.
import resource
torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    torch.ones(10_000_000)
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 50_000  # of 195,000
"""

LIGHTNING = """
import sys
import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

data = torch.utils.data.TensorDataset(torch.randn(64, 8))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
trainer = L.Trainer(
    max_steps=6, logger=CSVLogger(sys.argv[1]), log_every_n_steps=1, limit_train_batches=2,
    accumulate_grad_batches=2, default_root_dir=sys.argv[1], enable_progress_bar=False,
    callbacks=[
        EarlyStopping("val_loss"), LearningRateMonitor("step"),
        ModelCheckpoint(sys.argv[1], every_n_train_steps=1),
    ],
)
trainer.fit(Net(), loader, loader)
trainer.save_checkpoint(sys.argv[1] + "/saved.ckpt")
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from torch import nn

fabric = Fabric(devices=1)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=16))
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
model[0].requires_grad_(False)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.01))
for (x,) in loader:
    fabric.backward(model(x).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
"""

LOOP = """
import sys
import torch
from accelerate import Accelerator
from torch import nn

accelerator = None if "--alone" in sys.argv else Accelerator()
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = nn.Linear(4, 1)
if "--prepare" in sys.argv:
    from hetflow import runtime as hf
    job = hf.prepare(model)
    job.batches(loader)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if accelerator:
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (x,) in enumerate(loader):
    if "--short" in sys.argv and step == 4:
        break
    if "--fixed" in sys.argv:
        x = x.view(16, 4)
    loss = model(x).pow(2).mean()
    accelerator.backward(loss) if accelerator else loss.backward()
    optimizer.step()
    optimizer.zero_grad()
open("trained", "w").close()
"""


def batches(sized: Sized, number: int) -> list[list[int]]:
    iterator = iter(sized)
    return [next(iterator) for _ in range(number)]


def test_a_loader_that_is_not_trained_on_gives_a_few_samples_of_each_batch_and_ends() -> None:
    sized = Sized([[0, 1, 2], [3, 4, 5], [6]], 2)
    assert list(sized) == [[0, 1], [3, 4], [6]]
    assert list(sized) == [[0, 1], [3, 4], [6]]


def test_a_loader_that_is_trained_on_gives_all_samples_in_any_sizes_over_and_over() -> None:
    sized = Sized([[0, 1, 2], [3, 4, 5], [6]], 2)
    iterator = iter(sized)
    assert next(iterator) == [0, 1]
    sized.is_trained_on, sized.num_samples = True, 4
    assert [next(iterator), next(iterator)] == [[3, 4, 5, 6], [0, 1, 2, 3]]
    sized.num_samples = 1
    assert [next(iterator), next(iterator)] == [[4], [5]]
    sized.num_samples = 9
    assert next(iterator) == [6, 0, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.slow
@pytest.mark.measures
def test_three_commands_train_a_trainer_script_on_unlike_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINER, encoding="utf-8")
    # So slow, with samples so long, that noise is small beside what the second device spares.
    devices = ["--device", "cpu:fast=0.06", "--device", "cpu:slow=0.03"]
    sizes = ["--batch-sizes", "2,8,16,24", "--quick"]
    gpus = ["--gpus", "1xcpu:fast,1xcpu:slow", "--batch-size", "32"]
    solved = ["solve", "--profiles", "profiles", *gpus, "-o", "plan.json", "--fastest"]
    for _ in range(3):
        profiled = ["profile", "train.py", *devices, *sizes, "--force", "--", "out", "32"]
        assert run(profiled) == 0
        # Of the script nothing came after its loop, and nothing was saved in it.
        assert [path.name for path in (tmp_path / "out").iterdir()] == []
        assert run(solved) in (0, 4)
        plan = files.read(tmp_path / "plan.json", Plan)
        shares = {group.device_type: group.device_batch_size for group in plan.groups}
        if len(shares) == 2:  # else noise: by what was measured, one device alone is best
            break
    assert shares["cpu:fast"] > shares["cpu:slow"] > 0
    fast, slow = (
        files.read(tmp_path / "profiles" / f"train.cpu-{name}.json", Profile)
        for name in ("fast", "slow")
    )
    for one, other in zip(fast.batch_curve, slow.batch_curve, strict=True):
        assert other.step_seconds == pytest.approx(2 * one.step_seconds)
    assert fast.weight_bytes == 4 * (64 * 64 + 128 * 64 + 12 * 64 * 64 + 13 * 64 + 2 * 64)
    assert fast.optimizer is not None
    assert (fast.optimizer.name, fast.optimizer.is_default) == ("AdamW", False)
    assert fast.optimizer.state_bytes_per_weight_byte == pytest.approx(2, rel=0.01)
    assert fast.sync is not None
    assert fast.provenance is not None
    assert fast.provenance["script_batch_size"] == 32
    assert "in the loop" in fast.provenance["sync"]["method"]

    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", "run", "plan.json"]
    done = programs.run([*command, "train.py", "trained", "32"], timeout=180, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = files.read(tmp_path / "run" / "run.json", RunRecord)
    assert record.status == "done"
    assert record.measured_step_seconds is not None
    for device in record.devices:
        assert device.num_samples == 6 * shares[device.device_type]
        # No step ends before its emulated device's time is over.
        table = next(e for e in plan.emulated if e.device_type == device.device_type)
        group = next(g for g in plan.groups if g.device_type == device.device_type)
        held = {entry.batch_size: entry.step_seconds for entry in table.passes}
        least = group.virtual_nodes * held[group.virtual_node_batch_size]
        assert device.compute_seconds is not None
        assert device.compute_seconds >= least
    assert (tmp_path / "trained" / "saved" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.measures
@pytest.mark.parametrize(
    ("sizes", "arguments", "said"),
    [
        ("2,4", ["--short"], "loop.py: its loop ended after 5 batches, and measuring takes more"),
        ("2,4", ["--alone"], "loop.py trains by itself"),
        (
            "2,4",
            ["--alone", "--prepare"],
            "loop.py calls hf.prepare, and such a script is measured",
        ),
        ("2,64", [], "batch size 64: the script's dataset has 40 samples"),
        ("8,16", ["--fixed", "--size", "16"], "its own is 16 (--size 16)"),
    ],
)
def test_a_script_that_cannot_be_measured_is_refused(
    sizes: str,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    asked = ["--device", "cpu", "--quick", "--batch-sizes", sizes, "--sync-devices", "0"]
    assert run(["profile", "loop.py", *asked, "--", *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 2
    assert sorted(os.listdir(tmp_path)) == ["loop.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loop.py", "--layers"], "a script's loop trains the whole model"),
        (["loop.py", "--optimizer", "sgd"], "a script has its own"),
        (["loop.py", "--recompute"], "decides itself what it recomputes"),
        (["loop.py", "--device", "spec:H100"], "a script is measured where it runs"),
        (["zoo:mlp", "--", "--epochs", "3"], "zoo:mlp takes no arguments, got --epochs 3"),
        (["none.py"], "none.py: no such file"),
    ],
)
def test_what_a_script_cannot_have_is_refused_before_it_runs(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    assert run(["profile", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["loop.py"]


@pytest.mark.slow
@pytest.mark.measures
def test_a_script_that_trains_at_one_size_only_is_profiled_at_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    asked = ["--device", "cpu", "--quick", "--batch-sizes", "16", "--sync-devices", "0"]
    assert run(["profile", "loop.py", *asked, "--", "--fixed"]) == 0
    found = files.read(tmp_path / "profiles" / "loop.cpu.json", Profile)
    assert [point.batch_size for point in found.batch_curve] == [16]


@pytest.mark.slow
@pytest.mark.measures
def test_a_script_with_an_accelerator_is_profiled_alone_and_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    assert run(["profile", "loop.py", "--device", "cpu", "--quick", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    # Sizes grow as far as the dataset goes.
    assert [point["batch_size"] for point in told["batch_curve"]] == [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32,
    ]  # fmt: skip
    assert told["weight_bytes"] == 5 * 4
    assert told["sync"]["num_devices"] == 2
    if len(os.sched_getaffinity(0)) > 1:
        assert told["busy"]["num_devices"] == 2
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
@pytest.mark.measures
def test_scripts_of_lightning_are_profiled_in_their_loops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lit.py").write_text(LIGHTNING, encoding="utf-8")
    (tmp_path / "fabric.py").write_text(FABRIC, encoding="utf-8")
    asked = ["--device", "cpu", "--quick", "--json", "--batch-sizes", "2,8"]
    assert run(["profile", "lit.py", *asked, "--", "out"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert [point["batch_size"] for point in told["batch_curve"]] == [2, 8]
    assert told["weight_bytes"] == 4 * (8 * 64 + 64 + 64 + 1)
    assert told["optimizer"]["name"] == "AdamW"
    assert told["provenance"]["script_batch_size"] == 16
    assert told["sync"]["num_devices"] == 2
    # Of the script nothing came after its loop, and nothing was saved or logged in it.
    assert not (tmp_path / "out").exists()
    assert run(["profile", "fabric.py", *asked, "--sync-devices", "0"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["weight_bytes"], told["frozen_weight_bytes"]) == (4 * 9, 4 * 72)
    assert told["optimizer"]["name"] == "SGD"
