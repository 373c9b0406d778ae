"""``import hetflow``: few names, typed, documented, lazy; plans are the command line's."""

import doctest
import gc
import importlib
import inspect
import json
import logging
import subprocess
import sys
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import hetflow
from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.profile import LayerGraph, LayerNode, Profile
from hetflow.tests import handmade, programs
from hetflow.tests.plan_parts import kind_of

MODULES = ("cluster", "plugins", "rent")
VERBS = [name for name in hetflow.__all__ if name[0].islower() and name not in MODULES]
VERBS += [f"cluster.{name}" for name in hetflow.cluster.__all__]
VERBS += [f"rent.{name}" for name in hetflow.rent.__all__]
POOL = "2xV100,2xP100"
KINDS = [name for name in hetflow.__all__ if name[0].isupper()] + ["runtime.Job"]
LAUNCHES = ("launch", "profile", "rent.run", "RunRecord")  # processes of seconds
SCRIPT = """
import torch, hetflow

model = torch.nn.Linear(2, 1)
job = hetflow.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(32, 2))
for batch in job.batches(torch.utils.data.DataLoader(data, batch_size=16)):
    job.backward(lambda x: model(x).mean(), batch)
"""
SPLIT = {"strategy": "split"}
PIPELINE = {"strategy": "pipeline", "link_bytes_per_second": 1e9, "schedule": "gpipe"}


def profile(device_type: str, slowness: float) -> Profile:
    """One with layers."""
    nodes = tuple(
        LayerNode(
            id=f"l{i}",
            op="Linear",
            forward_seconds=slowness * 0.001 * (1 + i % 3),
            backward_seconds=slowness * 0.002,
            activation_bytes=1 << 16,
            weight_bytes=1 << 20,
        )
        for i in range(6)
    )
    edges = tuple((f"l{i}", f"l{i + 1}") for i in range(5))
    return replace(
        handmade.profile(device_type, slowness, model="m"),
        weight_bytes=6 << 20,
        optimizer=named_optimizer("adam"),
        layers=LayerGraph(microbatch_size=8, nodes=nodes, edges=edges),
    )


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    files.write(folder / "v100.json", profile("V100", 1.0))
    files.write(folder / "p100.json", profile("P100", 4.0))
    return folder


def test_there_are_few_names_and_each_is_there() -> None:
    assert len(hetflow.__all__) <= 40
    assert sorted(hetflow.__all__) == sorted(" ".join(hetflow._NAMES.values()).split())
    for name in hetflow.__all__:
        found = getattr(hetflow, name)
        assert name in MODULES or found.__name__ == name
        assert inspect.getdoc(found), f"{name} has no words"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hetflow.nothing  # noqa: B018


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that examples name; these fork workers as other tests do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    plan = hetflow.solve([replace(profile("cpu", 1.0), layers=None)], "cpu", batch_size=16)
    hetflow.write("plan.json", plan)
    Path("train.py").write_text(SCRIPT)


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "name", [pytest.param(v, marks=[pytest.mark.slow] if v in LAUNCHES else []) for v in VERBS]
)
def test_every_verb_is_typed_and_has_an_example_that_runs(name: str) -> None:
    verb = attrgetter(name)(hetflow)
    signature = inspect.signature(verb)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    run_example(verb)


def run_example(thing: Any) -> None:
    examples = doctest.DocTestFinder(recurse=False).find(
        thing, thing.__name__, importlib.import_module(thing.__module__)
    )
    assert sum(len(test.examples) for test in examples) > 0, f"{thing} has no example"
    runner = doctest.DocTestRunner()
    assert [runner.run(test).failed for test in examples] == [0]
    gc.collect()  # what was left open warns now, and warnings fail tests


@pytest.mark.usefixtures("workplace")
@pytest.mark.parametrize(
    "name", [pytest.param(v, marks=[pytest.mark.slow] if v in LAUNCHES else []) for v in KINDS]
)
def test_every_class_has_an_example_that_runs(name: str) -> None:
    run_example(attrgetter(name)(hetflow))


def test_it_starts_without_torch_and_plans_without_it() -> None:
    code = (
        "import sys, hetflow\n"
        "light = [m for m in ('torch', 'scipy', 'numpy', 'pydantic') if m in sys.modules]\n"
        "hetflow.solve, hetflow.check, hetflow.allocate, hetflow.launch, hetflow.resize\n"
        "hetflow.simulate, hetflow.profile, hetflow.read, hetflow.Cluster.parse('V100')\n"
        "print(light, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] False"


@pytest.mark.parametrize("options", [{}, SPLIT, {"virtual_nodes": 16}, PIPELINE])
def test_a_plan_solved_from_python_is_the_command_lines_to_the_byte(
    profiles: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    said, called = tmp_path / "cli.json", tmp_path / "api.json"
    flags = [x for k, v in options.items() for x in (f"--{k.replace('_', '-')}", str(v))]
    asked = ["--profiles", str(profiles), "--gpus", POOL, "--batch-size", "256"]
    assert run(["solve", *asked, *flags, "-o", str(said)]) == 0
    plan = hetflow.solve(profiles, POOL, batch_size=256, **options)
    hetflow.write(called, plan)
    assert called.read_bytes() == said.read_bytes()
    assert hetflow.read(said) == plan
    assert hetflow.check(plan, profiles, POOL) == []


def test_an_allocation_from_python_is_the_command_lines(tmp_path: Path) -> None:
    jobs, rates = Path("sample:jobs.csv"), Path("sample:throughputs.csv")
    said, called = tmp_path / "cli.json", tmp_path / "api.json"
    pool = "4xV100,4xP100"
    flags = ["--throughputs", str(rates), "--gpus", pool, "-o", str(said)]
    assert run(["allocate", str(jobs), *flags]) == 0
    allocation = hetflow.allocate(jobs, rates, pool)
    hetflow.write(called, allocation)
    assert called.read_bytes() == said.read_bytes()
    assert hetflow.check(allocation, pool=pool, jobs=jobs, throughputs=rates) == []


def test_the_library_speaks_through_logging(
    profiles: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger = logging.getLogger("hetflow")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, logger="hetflow"):
        hetflow.solve(profiles, POOL, batch_size=256, optimizer="sgd", strategy="split")
    assert [record.name for record in caplog.records][:1] == ["hetflow"]
    assert caplog.records[0].levelno == logging.WARNING
    assert capsys.readouterr() == ("", "")
    sentence = caplog.records[0].getMessage()
    asked = ["--profiles", str(profiles), "--gpus", POOL, "--batch-size", "256"]
    assert run(["solve", *asked, "--optimizer", "sgd", "--strategy", "split"]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"hetflow: warning: {sentence}\n"
    assert kind_of(json.loads(captured.out)) == "split"
    assert logger.handlers == []


def test_runs_also_correct_profiles_for_pipelines(profiles: Path, tmp_path: Path) -> None:
    """The help says so; it was refused as an option of repetitive models."""
    empty = tmp_path / "runs"
    empty.mkdir()
    with pytest.raises(hetflow.FileError, match="holds no run.json"):
        hetflow.solve(profiles, POOL, batch_size=256, runs=empty, **PIPELINE)


def test_a_dry_run_shows_any_plan_also_where_its_devices_are_not(
    profiles: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, script = tmp_path / "plan.json", tmp_path / "train.py"
    script.touch()
    hetflow.write(plan, hetflow.solve(profiles, POOL, batch_size=256, strategy="split"))
    shown = hetflow.dry_run(plan, str(script), ["--epochs", "3"])
    devices = [command.environment["CUDA_VISIBLE_DEVICES"] for command in shown]
    assert devices == [",".join(map(str, range(len(shown))))] * len(shown)
    assert [command.environment["LOCAL_RANK"] for command in shown] == [
        str(rank) for rank in range(len(shown))
    ]
    assert run(["launch", "--dry-run", str(plan), str(script)]) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == len(shown)
    assert "this machine has 0: shown as on a machine that has all of them" in captured.err
