"""Tables, pictures, throughputs and a cluster's queue from Python, as the commands give them."""

import json
from pathlib import Path

import pytest

import hetflow
from hetflow.cli.main import run
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.tests import handmade
from hetflow.tests.plan_parts import kind_of

PROFILES = [handmade.profile("V100", 1.0, model="m"), handmade.profile("P100", 2.0, model="m")]


def test_records_are_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = hetflow.solve(PROFILES, "2xV100", batch_size=64)
    hetflow.write(tmp_path / "plan.json", plan)
    text = hetflow.show(tmp_path / "plan.json", plot=tmp_path / "plan.svg")
    assert text == hetflow.show(plan)
    assert run(["show", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    hetflow.write(folder / "run.json", plan)  # as a launch writes its record
    assert hetflow.show(folder) == text
    assert run(["show", str(folder), "--json"]) == 0
    assert kind_of(json.loads(capsys.readouterr().out)) == "split"
    with pytest.raises(hetflow.FileError, match="is a folder of runs; show one of them") as caught:
        hetflow.show(tmp_path / "runs")
    assert caught.value.hint == f"for example {folder}"
    (folder / "run.json").rename(folder / "plan.json")
    (folder / "launch.json").write_text("{}")
    with pytest.raises(hetflow.FileError, match="run: this run has written no record yet"):
        hetflow.show(folder)
    with pytest.raises(hetflow.FileError, match="exists already"):
        hetflow.show(PROFILES, plot=tmp_path / "plan.svg")
    with pytest.raises(
        hetflow.HetflowError, match="plot is for profiles, split and pipeline plans"
    ):
        hetflow.show(hetflow.Cluster.parse("V100"), plot=tmp_path / "pool.svg")


def test_what_the_command_shows_python_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = hetflow.solve(PROFILES, "2xV100", batch_size=64)
    hetflow.write(tmp_path / "plan.json", plan)
    assert run(["show", str(tmp_path / "plan.json"), "--explain"]) == 0
    assert capsys.readouterr().out == hetflow.show(plan, explain=True) + "\n"
    for name in ("timeline", "presence"):
        with pytest.raises(hetflow.HetflowError, match=rf"^{name} (is for pipeline|says how)"):
            hetflow.show(plan, **{name: True})
    with pytest.raises(hetflow.HetflowError, match="csv is for runs"):
        hetflow.show(plan, csv=tmp_path / "plan.csv")
    assert not (tmp_path / "plan.csv").exists()


def test_throughputs_are_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for profile in PROFILES:
        hetflow.write(tmp_path / f"{profile.device_type}.json", profile)
    assert run(["throughputs", str(tmp_path), "--batch-size", "64", "--scale-factors", "1,2"]) == 0
    said = json.loads(capsys.readouterr().out)
    table = hetflow.throughputs(PROFILES, batch_size={"m": 64}, scale_factors=[1, 2])
    assert [model["steps_per_second"] for model in said["models"]] == [
        model.steps_per_second for model in table.models
    ]
    with pytest.raises(hetflow.ProblemError, match="batch_size: no profile of model 'n'"):
        hetflow.throughputs(PROFILES, batch_size={"n": 64})


def test_jobs_are_submitted_and_looked_after(tmp_path: Path) -> None:
    store, script = tmp_path / "state", tmp_path / "train.py"
    ClusterStore.create(store).close()
    script.touch()
    hetflow.write(tmp_path / "v100.json", PROFILES[0])
    options = {"profiles": tmp_path / "v100.json", "batch_size": 64, "steps": 10}
    number = hetflow.cluster.submit(script, ["--epochs", "3"], state=store, options=options)
    (job,) = hetflow.cluster.queue(state=store)
    assert (job.number, job.name, job.state) == (number, "train", "submitted")
    hetflow.cluster.hold(number, state=store)
    (job,) = hetflow.cluster.queue(state=store)
    assert job.wanted == "hold"
    with pytest.raises(hetflow.FileError, match="batch"):
        hetflow.cluster.submit(script, state=store, options={**options, "batch_size": "many"})
