"""The example plug-ins, installed from outside the package and used through the command line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.runtime.lower_pipeline import lower_pipeline, schedule_of
from hetflow.schedules.counting import peak_in_flight
from hetflow.schedules.validate import validate
from hetflow.schema import files
from hetflow.schema.pipeline import PipelinePlan
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile
from hetflow.schema.schedule_traits import SCHEDULES
from hetflow.tests.examples.plugins import PLUGINS, forget, install

Hetflow = Callable[..., tuple[int, str, str]]


@pytest.fixture
def hetflow(capsys: pytest.CaptureFixture[str]) -> Hetflow:
    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that distributions are installed into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def eager(site: Path) -> Iterator[str]:
    install(PLUGINS / "eager_1f1b", site)
    yield "eager-1f1b"
    forget(SCHEDULES, "eager-1f1b", modules=("eager_1f1b",))


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    folder = tmp_path / "profiles"
    folder.mkdir()
    nodes = tuple(
        LayerNode(
            id=f"layer{number}", op="Linear", forward_seconds=0.01, backward_seconds=0.02,
            activation_bytes=4_000_000, weight_bytes=1 << 20,
        )
        for number in range(4)
    )  # fmt: skip
    profile = Profile(
        model="line",
        device_type="V100",
        device_memory_bytes=16 << 30,
        weight_bytes=4 << 20,
        update_seconds=0.001,
        batch_curve=(BatchPoint(batch_size=8, step_seconds=0.12, peak_memory_bytes=1 << 30),),
        layers=LayerGraph(
            microbatch_size=8,
            nodes=nodes,
            edges=tuple((f"layer{i}", f"layer{i + 1}") for i in range(3)),
        ),
    )
    files.write(folder / "v100.json", profile)
    return folder


def solve(hetflow: Hetflow, profiles: Path, schedule: str, plan: Path) -> tuple[int, str, str]:
    return hetflow(
        "solve", "--profiles", profiles, "--gpus", "4xV100", "--batch-size", 64,
        "--strategy", "pipeline", "--schedule", schedule, "--num-stages", 4,
        "--link-bytes-per-second", "4e8", "--optimizer", "sgd", "-o", plan,
    )  # fmt: skip


def test_a_schedule_from_outside_is_planned_checked_shown_and_lowered(
    hetflow: Hetflow, eager: str, profiles: Path, tmp_path: Path
) -> None:
    own, plain = tmp_path / "eager.json", tmp_path / "1f1b.json"
    assert solve(hetflow, profiles, eager, own)[0] == 0
    assert solve(hetflow, profiles, "1f1b", plain)[0] == 0
    plan, before = files.read(own, PipelinePlan), files.read(plain, PipelinePlan)
    assert plan.schedule == eager
    # What it is for: transfers of a tenth of a second hide behind passes.
    assert plan.predicted.step_seconds < before.predicted.step_seconds
    code, _, errors = hetflow("check", own, "--profiles", profiles, "--gpus", "4xV100")
    assert (code, errors.count("fault")) == (0, 0)
    code, shown, _ = hetflow("show", own)
    assert code == 0
    assert eager in shown
    work = lower_pipeline(plan).pipeline
    assert work is not None
    schedule = schedule_of(work, plan.microbatches)
    assert validate(schedule) == []
    assert peak_in_flight(schedule) == (7, 5, 3, 1)


def test_auto_tries_installed_schedules_too(
    hetflow: Hetflow, eager: str, profiles: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    assert solve(hetflow, profiles, "auto", plan)[0] == 0
    found = json.loads(plan.read_text())
    tried = {found["schedule"]} | {
        other["schedule"] for other in found["provenance"]["compared_schedules"]
    }
    assert eager in tried


def test_a_plan_needs_the_plug_in_of_its_schedule(
    hetflow: Hetflow, site: Path, profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    install(PLUGINS / "eager_1f1b", site)
    assert solve(hetflow, profiles, "eager-1f1b", plan)[0] == 0
    forget(SCHEDULES, "eager-1f1b", modules=("eager_1f1b",))
    monkeypatch.undo()  # the folder is no longer on the path
    code, _, errors = hetflow("check", plan, "--profiles", profiles, "--gpus", "4xV100")
    assert code == 2
    first, *hint = errors.splitlines()
    assert "unknown schedule 'eager-1f1b'; known are gpipe, 1f1b" in first
    assert len(hint) <= 1
    code, _, errors = solve(hetflow, profiles, "eager-1f1b", tmp_path / "other.json")
    assert code == 2
    assert "'eager-1f1b' is not one of 'auto', 'gpipe'" in errors
