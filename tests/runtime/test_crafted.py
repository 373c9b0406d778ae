"""Checkpoints with a valid checksum and wrong content: one clear line, and never a traceback."""

import contextlib
import copy
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime.checkpoints import checkpoint, parts, saving
from hetflow.runtime.checkpoints.checkpoint import BrokenCheckpoint
from hetflow.runtime.checkpoints.restoring import load_registered
from hetflow.schema.errors import HetflowError
from hetflow.tests.profiles import examples

from . import crafted

SLOWLY = settings(
    max_examples=examples(150),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "factors": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "two": lambda p: [torch.optim.Adam([next(p)], lr=0.1), torch.optim.Adam(p, lr=0.1)],
}


def train(kind: str = "adam", *, steps: int | None = None) -> Any:
    """Two steps an epoch and two epochs of a job with batch-norm, and things registered."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    given = OPTIMIZERS[kind](model.parameters())
    optimizers = given if isinstance(given, list) else [given]
    optimizer = optimizers[0]
    saving.OpenedFolders.jobs = 0
    job = hf.prepare(model, given)
    try:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=9, cycle_momentum=False
        )
        job.register(scheduler, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]))
        loader = DataLoader(TensorDataset(torch.randn(8, 3)), batch_size=4)
        for _ in range(2):
            for batch in job.batches(loader):
                job.backward(lambda x: model(x).pow(2).mean(), batch)
                for each in optimizers:
                    each.step()
                scheduler.step()
                model.zero_grad()
                if job.num_steps == steps:
                    job.checkpoint()
                    break
        job._checkpoints.finish = lambda: None
        job.finish()
    finally:
        job.abandon()
    return job


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A checkpoint after step 3 for each optimizer."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind in OPTIMIZERS:
            folder = tmp_path_factory.mktemp(kind)
            patch.setenv("HETFLOW_CHECKPOINT", str(folder))
            train(kind, steps=3)
            (found[kind],) = folder.iterdir()
        yield found


def refusal(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> HetflowError | None:
    """What a job that goes on from a folder says; anything but our errors is a failure."""
    monkeypatch.setenv("HETFLOW_CHECKPOINT", str(folder))
    found: list[HetflowError] = []
    try:
        train(kind)
    except HetflowError as error:
        found.append(error)
    assert not any("\n" in error.message for error in found)
    return found[0] if found else None


def test_a_checkpoint_that_is_only_checksummed_anew_is_gone_on_from(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, path in saved.items():
        own = tmp_path / kind / path.name
        shutil.copytree(path, own)
        crafted.put(own, crafted.content_of(own))
        assert refusal(own.parent, kind, monkeypatch) is None


@SLOWLY
@given(data=st.data(), kind=st.sampled_from(list(OPTIMIZERS)))
def test_whatever_a_checkpoint_holds_nothing_but_our_errors_comes_out(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, kind: str
) -> None:
    own = tmp_path / kind / saved[kind].name
    shutil.rmtree(own, ignore_errors=True)
    shutil.copytree(saved[kind], own)
    manifest = crafted.content_of(own)
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.sampled_from(list(crafted.places(manifest))))
        how = data.draw(
            st.sampled_from(
                [crafted.removed, crafted.doubled, *map(crafted.replaced, crafted.VALUES)]
            )
        )
        manifest = crafted.changed(manifest, at, how)
    crafted.put(own, manifest)
    refusal(own.parent, kind, monkeypatch)


def state_of(manifest: dict[str, Any], name: str) -> Any:
    """The encoded value under a key of the state."""
    return next(value for key, value in manifest["state"]["dict"] if key == name)


def entry(encoded: dict[str, Any], key: Any) -> list[Any]:
    """A pair of an encoded dict."""
    return next(pair for pair in encoded["dict"] if pair[0] == key)


def of_optimizer(manifest: dict[str, Any]) -> dict[str, Any]:
    """The encoded state of the optimizer's first parameter."""
    return entry(entry(state_of(manifest, "optimizer"), "state")[1], 0)[1]


def group(manifest: dict[str, Any]) -> dict[str, Any]:
    return entry(state_of(manifest, "optimizer"), "param_groups")[1]["list"][0]


def shrink_moment(manifest: dict[str, Any]) -> None:
    number = entry(of_optimizer(manifest), "exp_avg")[1]["tensor"]
    manifest["tensors"][number]["shape"] = [3, 2]  # as many bytes, another shape


def one_cycle(manifest: dict[str, Any]) -> dict[str, Any]:
    """The encoded state of the first scheduler that is registered."""
    found: dict[str, Any] = state_of(manifest, "registered")["list"][0]
    return found


def second_phase(manifest: dict[str, Any]) -> list[Any]:
    """Which entry of the optimizer's groups the schedule's second part begins with."""
    phases = entry(one_cycle(manifest), "_schedule_phases")[1]["list"]
    return entry(phases[1], "start_lr")


CRAFTED = {
    "header.position.step must be a whole number from 0": lambda m: m["header"]["position"].update(
        step=-1
    ),
    "header.step is not what the folder's name says": lambda m: m["header"].update(step=1 << 40),
    "header.position.length is absent": lambda m: m["header"]["position"].pop("length"),
    "header holds 'more', which no checkpoint does": lambda m: m["header"].update(more=1),
    "tensors[1].offset must be a whole number from 0": lambda m: m["tensors"][1].update(offset=-64),
    "tensors[1].offset must be 64": lambda m: m["tensors"][1].update(offset=0),
    "tensors[0].bytes must be a whole number from 0": lambda m: m["tensors"][0].update(
        bytes=10**30
    ),
    "manifest.json holds a whole number of 401 digits": lambda m: entry(group(m), "lr").__setitem__(
        1, 10**400
    ),
    "weight_decay": lambda m: entry(group(m), "weight_decay").__setitem__(1, -(10**30)),
    "tensors[0].bytes must be 24": lambda m: m["tensors"][0].update(bytes=25),
    "tensors[0].shape is larger than any tensor": lambda m: m["tensors"][0].update(
        shape=[0, 1 << 62, 1 << 62], bytes=0
    ),
    "tensors[0].dtype is no type of tensors": lambda m: m["tensors"][0].update(dtype="object"),
    "its state does not name its tensors in order": lambda m: entry(
        state_of(m, "parameters"), "0.weight"
    ).__setitem__(1, {"tensor": 1}),
    "state.registered must be a list, got dict": lambda m: entry(
        m["state"], "registered"
    ).__setitem__(1, {"dict": []}),
    "state.optimizer.param_groups must number the parameters in order": lambda m: entry(
        group(m), "params"
    ).__setitem__(1, {"list": [0, 1, 2, 4, 3, 5]}),
    "the optimizer's group 0 cannot take its state: lr is absent": lambda m: group(m)[
        "dict"
    ].remove(entry(group(m), "lr")),
    "state.lr is a str there and a float here": lambda m: entry(group(m), "lr").__setitem__(
        1, "fast"
    ),
    "state.lr is a bool there and a float here": lambda m: entry(group(m), "lr").__setitem__(
        1, True
    ),
    "state.betas has 1 entries there and 2 here": lambda m: entry(group(m), "betas").__setitem__(
        1, {"tuple": [0.9]}
    ),
    "exp_avg is of another shape, for a parameter of shape [2, 3]": shrink_moment,
    "state._step_count is a str there": lambda m: entry(
        state_of(m, "registered")["list"][0], "_step_count"
    ).__setitem__(1, "x"),
    "state.cycle_momentum is True there and False here": lambda m: entry(
        state_of(m, "registered")["list"][0], "cycle_momentum"
    ).__setitem__(1, True),
    "capturable is for parameters on an accelerator": lambda m: entry(
        group(m), "capturable"
    ).__setitem__(1, True),
    "(OneCycleLR) cannot take its state: KeyError: None": lambda m: second_phase(m).__setitem__(
        1, None
    ),
    "(OneCycleLR) cannot take its state: KeyError: 'x'": lambda m: second_phase(m).__setitem__(
        1, "x"
    ),
    "(OneCycleLR) cannot take its state: UnboundLocalError": lambda m: entry(
        one_cycle(m), "_schedule_phases"
    ).__setitem__(1, {"tuple": []}),
    "(OneCycleLR) cannot take its state: ValueError: Unknown _anneal_func_type": lambda m: entry(
        one_cycle(m), "_anneal_func_type"
    ).__setitem__(1, None),
    "(OneCycleLR) cannot take its state: ValueError: Tried to step": lambda m: entry(
        one_cycle(m), "total_steps"
    ).__setitem__(1, 0),
}


def flatten_factor(manifest: dict[str, Any]) -> None:
    number = entry(of_optimizer(manifest), "col_var")[1]["tensor"]
    assert manifest["tensors"][number]["shape"] == [1, 3]
    manifest["tensors"][number]["shape"] = [3]


OF_FACTORS = {"col_var is of another shape, for a parameter of shape [2, 3]": flatten_factor}
OF_SEVERAL = {
    "state.optimizer must be a list of several optimizers only": lambda m: state_of(
        m, "optimizer"
    ).update(list=[{"list": state_of(m, "optimizer")["list"]}]),
    "state.optimizer[1].param_groups is absent": lambda m: state_of(m, "optimizer")["list"][1][
        "dict"
    ].pop(),
    "optimizer 2's group 0 cannot take its state: state.lr is a str there": lambda m: entry(
        entry(state_of(m, "optimizer")["list"][1], "param_groups")[1]["list"][0], "lr"
    ).__setitem__(1, "fast"),
}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        *(("adam", said) for said in CRAFTED),
        *(("factors", said) for said in OF_FACTORS),
        *(("two", said) for said in OF_SEVERAL),
    ],
)
def test_what_is_wrong_with_a_crafted_checkpoint_is_said(
    saved: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, said: str
) -> None:
    own = tmp_path / saved[kind].name
    shutil.copytree(saved[kind], own)
    manifest = crafted.content_of(own)
    {**CRAFTED, **OF_FACTORS, **OF_SEVERAL}[said](manifest)
    crafted.put(own, manifest)
    error = refusal(tmp_path, kind, monkeypatch)
    assert error is not None
    assert said in error.message


def test_a_manifest_that_nests_without_end_and_a_pipe_are_broken(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    own = tmp_path / saved["adam"].name
    shutil.copytree(saved["adam"], own)
    manifest = crafted.content_of(own)
    nest: Any = 1
    for _ in range(201):
        nest = {"list": [nest]}
    entry(manifest["state"], "registered")[1] = nest
    crafted.put(own, manifest)
    with pytest.raises(BrokenCheckpoint, match="nested too deeply"):
        parts.reader()(own)
    (own / "manifest.json").write_text('{"manifest": ' + "[" * 100_000)
    with pytest.raises(BrokenCheckpoint, match="not complete"):
        parts.reader()(own)
    (own / "manifest.json").unlink()
    os.mkfifo(own / "manifest.json")
    with pytest.raises(BrokenCheckpoint, match=r"manifest\.json is no file"):
        checkpoint.read(own)


def part(folder: Path, number: int, run: str = "r", total: int = 2) -> Path:
    """One part of a pipeline's checkpoint after step 4; from the third on, parts hold nothing."""
    header = {
        "virtual_nodes": [2, 2], "seed": total,
        "parameters": {"a": "float32 [2]", "b": "float32 [3]"}, "step": 4,
        "position": {"call": 1, "step": 0, "length": 8}, "part": number, "num_parts": total,
        "run": run, "stages": [[["0"], [0]], [["1"], [1]]],
        "optimizer_order": ["a", "b"], "registered_sha256": "x",
    }  # fmt: skip
    held = {0: {"a": torch.ones(2)}, 1: {"b": torch.ones(3)}}.get(number, {})
    params = [{"lr": 0.1, "params": [0, 1]}]
    state = {
        "parameters": held,
        "optimizer": {"state": {number: {"step": 1}} if held else {}, "param_groups": params},
        "buffers": {"base": {}, "nodes": [{}, {}]},
        "registered": [{"values": [1.0]}], "last_weight": None, "late_loss": None,
    }  # fmt: skip
    tensors: list[torch.Tensor] = []
    encoded = checkpoint.encode(state, tensors)
    parts.write(folder, header, encoded, tensors)
    return folder / "step-000000004" / f"part-{number}-of-{total}"


@SLOWLY
@given(data=st.data())
def test_whatever_a_part_holds_it_is_read_or_broken(tmp_path: Path, data: Any) -> None:
    shutil.rmtree(tmp_path / "saved", ignore_errors=True)
    own = [part(tmp_path / "saved", number) for number in range(2)]
    whole = own[0].parent
    assert parts.reader()(whole).state["parameters"].keys() == {"a", "b"}
    harmed = own[data.draw(st.integers(0, 1))]
    manifest = crafted.content_of(harmed)
    at = data.draw(st.sampled_from(list(crafted.places(manifest))))
    values = map(crafted.replaced, crafted.VALUES)
    how = data.draw(st.sampled_from([crafted.removed, crafted.doubled, *values]))
    crafted.put(harmed, crafted.changed(manifest, at, how))
    wanted = parts.Wanted({"b"}, set(), [[["0"], [0]], [["1"], [1]]], 1)
    for read in (parts.reader(), parts.reader(wanted)):
        with contextlib.suppress(BrokenCheckpoint, HetflowError):
            read(whole)
    parts.is_complete(whole)


def test_a_part_that_died_on_the_way_is_told_from_one_that_was_lost(tmp_path: Path) -> None:
    whole = part(tmp_path, 0).parent
    with pytest.raises(BrokenCheckpoint, match="part-1-of-2 is missing") as never:
        parts.reader()(whole)
    part(tmp_path, 1)
    shutil.rmtree(whole / "part-0-of-2")
    with pytest.raises(BrokenCheckpoint, match="part-0-of-2 is missing") as lost:
        parts.reader()(whole)
    kinds = [type(caught.value).__name__ for caught in (never, lost)]
    assert kinds == ["IncompleteCheckpoint", "BrokenCheckpoint"]


def test_a_step_written_again_by_another_plan_is_read_from_the_newest_parts(tmp_path: Path) -> None:
    """The set was taken that the file system listed first."""
    made = {n: [part(tmp_path / str(n), i, total=n) for i in range(n)] for n in (2, 3)}
    whole = made[2][0].parent
    for path in made[3]:
        path.rename(whole / path.name)

    def age(total: int, seconds: int) -> None:
        for path in whole.glob(f"part-*-of-{total}"):
            os.utime(path / "manifest.json", (seconds, seconds))

    for newest in (2, 3):
        age(5 - newest, 1000)
        age(newest, 2000)
        assert parts.reader()(whole).header["seed"] == newest
        assert parts.is_complete(whole)
    age(2, 2000)
    with pytest.raises(BrokenCheckpoint, match="parts of 2 and of 3 are equally old"):
        parts.reader()(whole)
    part(whole.parent, 0, total=3)
    assert {path.name for path in whole.iterdir()} == {
        "complete", *(f"part-{number}-of-3" for number in range(3))
    }  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lrs.OneCycleLR(o, 0.1, total_steps=4),
        lambda o: lrs.MultiStepLR(o, [1, 2]),
        lambda o: lrs.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: lrs.CyclicLR(o, 0.01, 0.1),
        lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lrs.ReduceLROnPlateau(o),
        lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)]),
        lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], [2]),
    ],
)
@pytest.mark.parametrize("steps", [0, 3])
def test_a_scheduler_takes_its_own_state_also_at_its_end(
    make: Callable[[torch.optim.Optimizer], Any], steps: int, tmp_path: Path
) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return optimizer, make(optimizer)

    optimizer, trained = made()
    for _ in range(steps):
        optimizer.step()
        trained.step(*([1.0] if isinstance(trained, lrs.ReduceLROnPlateau) else []))
    again, resumed = made()
    again.load_state_dict(optimizer.state_dict())
    before = copy.deepcopy(again.param_groups)
    load_registered(tmp_path, 1, resumed, copy.deepcopy(trained.state_dict()))
    assert resumed.state_dict() == trained.state_dict()
    assert again.param_groups == before
