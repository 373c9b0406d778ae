"""Checkpoints: whole or not there, and a run that goes on ends as if it had never stopped."""

import errno
import json
import os
import re
import shutil
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset

from hetflow import runtime as hf
from hetflow.runtime import worker
from hetflow.runtime.checkpoints import checkpoint, saving
from hetflow.runtime.job import Job
from hetflow.runtime.protocol.environment import FAILURE
from hetflow.schema import files
from hetflow.schema.errors import FileError, TargetError
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

from . import digests

NUM_SAMPLES, BATCH = 22, 8
WRITE_FOLDER = checkpoint.write_folder


def write(folder: Path, step: int, state: object = None) -> Path:
    tensors: list[torch.Tensor] = []
    encoded = checkpoint.encode({"step": step, "state": state}, tensors)
    return checkpoint.write(folder, {"step": step}, encoded, tensors)


def test_plain_data_and_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    state = {
        "numbers": [1, 2.5, float("inf"), True, None, "text"],
        3: ("a", torch.tensor([1.5, -2.0], dtype=torch.bfloat16)),
        "milestones": Counter({4: 1}),
        "ordered": OrderedDict(x=torch.zeros(0, 3), y=torch.tensor(7)),
        "wave": torch.tensor([1 + 2j]),
        "turned": torch.arange(6).reshape(2, 3).t(),
    }
    found = checkpoint.read(write(tmp_path, 1, state)).state["state"]
    assert found.keys() == state.keys()
    assert found["numbers"] == state["numbers"]
    assert isinstance(found[3], tuple)
    assert torch.equal(found[3][1], state[3][1])
    assert isinstance(found["milestones"], Counter)
    assert found["ordered"]["x"].shape == (0, 3)
    for name in ("wave", "turned"):
        assert torch.equal(found[name], state[name])


def test_what_is_not_plain_data_is_refused_with_its_place() -> None:
    with pytest.raises(TargetError, match=r"state\.a\[1\] is a function"):
        checkpoint.encode({"a": [1, write]}, [])


def damaged(path: Path, how: str) -> None:
    data = path / "tensors.bin"
    content = bytearray(data.read_bytes())
    if how == "flipped":
        content[5] ^= 1
        data.write_bytes(content)
    elif how == "torn":
        data.write_bytes(content[:-3])
    elif how == "manifest":
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text().replace("float32", "float16"))
    elif how == "half":
        manifest = path / "manifest.json"
        manifest.write_text(manifest.read_text()[:40])
    else:
        data.unlink()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("flipped", "does not match its checksum"),
        ("torn", "bytes"),
        ("manifest", "manifest.json does not match"),
        ("half", "manifest.json is not complete"),
        ("absent", "tensors.bin: No such file"),
    ],
)
def test_a_broken_one_is_found_and_the_one_before_is_used(
    tmp_path: Path, how: str, said: str
) -> None:
    write(tmp_path, 1, torch.ones(9))
    damaged(write(tmp_path, 2, torch.ones(9)), how)
    found, broken = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.state["step"] == 1
    ((path, error),) = broken.items()
    assert path.name == "step-000000002"
    assert said in str(error)


def test_old_ones_go_and_a_crash_in_mid_write_leaves_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / ".making-step-000000004").mkdir()
    assert checkpoint.newest(tmp_path)[0].state["step"] == 3
    write(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


def test_what_killed_writers_left_half_done_goes(tmp_path: Path) -> None:
    whole = write(tmp_path, 4)
    for left in (tmp_path / ".making-step-000000009", whole / ".making-part-0-of-2"):
        left.mkdir()
        (left / "tensors.bin").touch()
    checkpoint.tidy(tmp_path)
    checkpoint.tidy(tmp_path / "absent")
    assert [path.name for path in tmp_path.rglob(".making*")] == []
    assert checkpoint.read(whole).state["step"] == 4


def test_planted_links_block_nothing_and_are_not_followed(tmp_path: Path) -> None:
    """In a folder that others can write to, whoever it is they point at stays as it was."""
    folder, elsewhere = tmp_path / "saved", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (folder / ".making-step-000000001").symlink_to(elsewhere)
    (folder / ".making-step-000000002").symlink_to(tmp_path / "nowhere")
    (folder / "step-000000003").symlink_to(elsewhere)
    (folder / "step-000000004").symlink_to(tmp_path / "nowhere")
    for step in (1, 2, 3, 4):
        write(folder, step, torch.ones(3))
        assert checkpoint.newest(folder)[0].state["step"] == step
    (folder / ".making-step-000000009").symlink_to(elsewhere)
    checkpoint.tidy(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000000003", "step-000000004"]
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="the checkpoint was not written") as caught:
        write(tmp_path / "file", 1)
    assert "earlier checkpoints are untouched" in caught.value.hint


class Points(Dataset):
    """Points that say which they are."""

    def __init__(self, length: int = NUM_SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.rand(5, dtype=torch.float64), index


def model_of(width: int = 6) -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(5, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 1)
    return nn.Sequential(*layers).double()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import signal

    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    for name, empty in (("_open", []), ("_before", {}), ("_received", [])):
        monkeypatch.setattr(f"hetflow.runtime.finish.StopRequests.{name}", empty)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


class Stop(Exception):
    """The script fails here."""


def train(
    stop_at: int | None = None, length: int = NUM_SAMPLES, save: bool = False, epochs: int = 3
) -> tuple[list[list[int]], dict, Job]:
    """A script with a schedule per epoch: steps end at 3, 6 and 9."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    job = hf.prepare(model, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.5)
    job.register(scheduler)
    seen: list[list[int]] = []
    loader = DataLoader(Points(length), batch_size=BATCH, shuffle=True)
    try:
        for _ in range(epochs):
            for batch in job.batches(loader):

                def loss_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
                    seen.append(index.tolist())
                    return (model(x) - index[:, None] / 10).pow(2).mean()

                job.backward(loss_of, batch)
                optimizer.step()
                optimizer.zero_grad()
                if job.num_steps == stop_at:
                    if save:
                        job.checkpoint()
                    raise Stop
            scheduler.step()
        job.finish()
    except Stop:
        job.abandon()
    state = {**model.state_dict(), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}
    return seen, state, job


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4, 7, 8])
def test_a_run_goes_on_inside_an_epoch_with_every_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    whole, expected, _ = train()
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    before, _, _ = train(stop_at=stop_at, save=True)
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    after, found, job = train()
    assert before + after == whole
    assert job.num_steps == 9
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_a_name_that_only_a_skipped_loop_sets_draws_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hint() -> object:
        worker.fail(UnboundLocalError("cannot access local variable 'loss'"))
        return json.loads((tmp_path / "note").read_text())["hint"]

    for name, value in (("skipped_epochs", False), ("told", False), ("code", [0])):
        monkeypatch.setattr(worker.ScriptRun, name, value)
    monkeypatch.setattr("hetflow.runtime.finish.ScriptEnd.failed", False)
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path / "kept"))
    train(stop_at=4, save=True)
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    monkeypatch.setenv(FAILURE, str(tmp_path / "note"))
    assert hint() is None
    train()
    assert "loss = None" in str(hint())


def test_periodic_ones_lose_only_the_steps_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, expected, _ = train()
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("HETFLOW_CHECKPOINT_EVERY", "3")
    train(stop_at=5)
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    after, found, _ = train()
    assert after == whole[3:]
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    again, kept, _ = train()
    assert again == []
    assert torch.equal(kept["0.weight"], expected["0.weight"])


def test_other_models_seeds_and_data_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    train(stop_at=2, save=True)
    hooks = dict(_global_optimizer_pre_hooks)

    def refused(said: str, **options: object) -> None:
        monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
        with pytest.raises(TargetError, match=said) as caught:
            train(**options) if options else hf.prepare(model_of(7))
        assert "\n" not in caught.value.message
        assert dict(_global_optimizer_pre_hooks) == hooks or options  # nothing watches on

    refused(r"0\.weight is float64 \[6, 5\] there and float64 \[7, 5\] here")
    refused("the dataset has 30 samples, and had 22", length=30)
    monkeypatch.setenv("HETFLOW_SEED", "4")
    refused("was made with seed 0, this run has 4", epochs=1)


def train_apart(num_optimizers: int, stop_at: int | None = None) -> tuple[dict, list[dict]]:
    """Three steps of a body and a head, each with its own kind of optimizer, or one for both."""
    saving.OpenedFolders.jobs = 0  # as in a process of its own
    model = model_of()
    head = list(model[-1].parameters())
    body = list(model[:-1].parameters())
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam([*body, *head], lr=0.1)]
    if num_optimizers > 1:
        optimizers = [
            torch.optim.SGD(body, lr=0.1, momentum=0.9),
            torch.optim.Adam(head[:1] if num_optimizers > 2 else head, lr=0.1),
            *([torch.optim.Adam(head[1:], lr=0.1)] if num_optimizers > 2 else []),
        ]
    job = hf.prepare(model, optimizers)
    for batch in job.batches(DataLoader(Points(NUM_SAMPLES), batch_size=BATCH, shuffle=True)):

        def loss_of(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            return (model(x) - index[:, None] / 10).pow(2).mean()

        job.backward(loss_of, batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if job.num_steps == stop_at:
            job.checkpoint()
            job.abandon()
            break
    job.finish()
    return model.state_dict(), [optimizer.state_dict() for optimizer in optimizers]


@pytest.mark.parametrize(("saved", "other"), [(2, 1), (2, 3), (1, 2)])
def test_two_optimizers_come_back_and_another_number_of_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, other: int
) -> None:
    expected, expected_states = train_apart(saved)
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    train_apart(saved, stop_at=2)
    with pytest.raises(TargetError) as caught:
        train_apart(other)
    assert caught.value.message == (
        f"{tmp_path / 'step-000000002'} holds the state of {saved} optimizer(s), the script has "
        f"{other}"
    )
    found, states = train_apart(saved)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    for own, whole in zip(states, expected_states, strict=True):
        assert own["param_groups"] == whole["param_groups"]
        for number, values in whole["state"].items():
            for name, value in values.items():
                assert torch.equal(own["state"][number][name], value), name


def again(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], dict, Job]:
    """Start the same script again."""
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    return train()


def test_a_folder_of_broken_ones_is_refused_until_asked_to_start_from_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, expected, _ = train()
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("HETFLOW_CHECKPOINT_EVERY", "2")
    train(stop_at=5)
    for path, how in zip(sorted(tmp_path.iterdir()), ("torn", "flipped"), strict=True):
        damaged(path, how)
    there = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    with pytest.raises(FileError) as caught:
        again(monkeypatch)
    assert re.fullmatch(
        f"{tmp_path}: none of the checkpoints there can be used "
        r"\(step-000000004: tensors\.bin does not match its checksum; "
        r"step-000000002: tensors\.bin has \d+ of \d+ bytes\)",
        caught.value.message,
    )
    assert "from_scratch=True (HETFLOW_RESTART_FROM_SCRATCH=1)" in caught.value.hint
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == there
    monkeypatch.setenv("HETFLOW_RESTART_FROM_SCRATCH", "1")
    seen, found, _ = again(monkeypatch)
    assert seen == whole
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert f"earlier checkpoints are kept in {tmp_path / 'before-1'}" in capsys.readouterr().err
    kept = sorted(
        str(p.relative_to(tmp_path / "before-1")) for p in tmp_path.rglob("before-1/**/*")
    )
    assert kept == there
    # What torchrun starts again goes on from the run's own.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert again(monkeypatch)[0] == []


def test_what_was_never_complete_does_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "step-000000004").mkdir()
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    assert train()[2].num_steps == 9
    said = "step-000000004 was never complete (it has no part yet); starting at step 0"
    assert said in capsys.readouterr().err
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000004", "step-000000009"]


def test_a_broken_one_does_not_count_as_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("HETFLOW_CHECKPOINT_EVERY", "3")
    train(stop_at=4)
    shutil.copytree(tmp_path / "step-000000003", tmp_path / "step-000000005")
    monkeypatch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
    train(stop_at=7)
    said = "step-000000005 is broken (header.step is not what the folder's name says); going on"
    assert said in capsys.readouterr().err
    there = {path.name for path in tmp_path.iterdir()}
    assert there == {"step-000000003", "step-000000005", "step-000000006"}


def full_disk(monkeypatch: pytest.MonkeyPatch, *calls: int) -> None:
    """From now on the disk is full at these attempts to write a checkpoint, counted from 1."""
    number = [0]

    def write(*arguments: object) -> None:
        number[0] += 1
        is_full = number[0] in calls

        def no_space(handle: int) -> None:
            if is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            WRITE_FOLDER(*arguments)

    monkeypatch.setattr(checkpoint, "write_folder", write)


def test_the_last_one_that_cannot_be_written_is_an_error_and_earlier_ones_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    monkeypatch.setenv("HETFLOW_CHECKPOINT_EVERY", "4")
    full_disk(monkeypatch, 1, 3)  # after steps 4 and 9 of 9
    with pytest.raises(FileError, match="the checkpoint was not written: No space left") as caught:
        train()
    assert "step-000000009" in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000008"]
    said = capsys.readouterr().err
    assert said.count("warning") == 2
    shutil.rmtree(tmp_path / "step-000000008")
    full_disk(monkeypatch, 1, 2)
    seen, _, job = again(monkeypatch)
    assert job.num_steps == 9
    warning = "warning: checkpoints could not be written after step 4, 8; the last one is on disk"
    assert warning in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FileError, match="cannot be read: Permission denied"):
        checkpoint.newest(tmp_path)


def test_a_run_that_was_over_ends_as_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(tmp_path))
    _, expected, first = train()
    steps = first._progress.registered[0].last_epoch
    _, found, job = again(monkeypatch)
    assert job._progress.registered[0].last_epoch == steps
    assert torch.equal(found["lr"], expected["lr"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hetflow.runtime.checkpoints.saving.OpenedFolders.jobs", 0)
        _, found, _ = train(epochs=1)
    assert torch.equal(found["lr"], expected["lr"])


AT_EXIT = """
import errno, os
import torch
from hetflow import runtime as hf
from torch.utils.data import DataLoader, TensorDataset

def full(handle):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

os.fsync = full
model = torch.nn.Linear(2, 1)
job = hf.prepare(model)
for batch in job.batches(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)):
    job.backward(lambda x: model(x).mean(), batch)
print("trained", flush=True)
HOW
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("", 2, "hetflow: {}/step-000000002: the checkpoint was not written: "),
        ("raise ValueError('own')", 1, "ValueError: own"),
    ],
)
def test_a_script_that_ends_without_its_last_checkpoint_has_an_exit_code(
    tmp_path: Path, how: str, code: int, said: str
) -> None:
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(AT_EXIT.replace("HOW", how))
    environment = {**os.environ, "HETFLOW_CHECKPOINT": str(saved)}
    done = programs.run([sys.executable, script], env=environment, timeout=150)
    assert (done.returncode, done.stdout) == (code, "trained\n"), done.stderr
    assert said.format(saved) in done.stderr
    assert ("Traceback" in done.stderr) == (code == 1)


def test_checkpoints_need_a_folder_and_things_with_state() -> None:
    job = hf.prepare(model_of())
    with pytest.raises(TargetError, match="no folder for checkpoints"):
        job.checkpoint()
    with pytest.raises(TargetError, match="cannot save a int"):
        job.register(3)
    job.finish()


@pytest.mark.processes
@pytest.mark.slow
def test_sigterm_saves_and_another_mapping_ends_with_the_same_digest(tmp_path: Path) -> None:
    saving = ["--checkpoint", str(tmp_path / "saved")]
    stopped = digests.stopped("2 workers", "elastic", tmp_path / "a", 4, *saving)
    assert stopped.returncode == 143, stopped.stderr
    [saved_step] = re.findall(r"asked to stop; saved .*, step (\d+)\n", stopped.stderr)
    record = files.read(tmp_path / "a" / "run" / "run.json", RunRecord)
    assert (record.status, record.parameters_digest) == ("interrupted", None)
    assert [device.num_steps for device in record.devices] == [int(saved_step)] * 2
    assert record.measured_step_seconds is not None
    assert not list((tmp_path / "saved").glob(".making*"))
    resumed = digests.run("2 types", "elastic", tmp_path / "b", *saving)
    assert resumed.returncode == 0, resumed.stderr
    assert "going on from" in resumed.stderr
    assert digests.written(tmp_path / "b") == digests.undisturbed("1 worker", "elastic")
