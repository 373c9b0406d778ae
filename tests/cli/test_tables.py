"""Results as CSV tables, and commands where a library is not installed."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.simulation import SimulationRun

SMALL = ["--num-jobs", "5", "--gpus", "2xv100,2xp100"]


@pytest.fixture
def simulated(tmp_path: Path) -> list[str]:
    rows = ["model,device_type,steps_per_second", "a,v100,4", "a,p100,1", "b,v100,3", "b,p100,2"]
    path = tmp_path / "throughputs.csv"
    path.write_text("\n".join(rows), encoding="utf-8")
    return ["simulate", "continuous-single", "--throughputs", str(path), *SMALL]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_a_run_is_a_row_a_job_and_shows_the_same(simulated: list[str], tmp_path: Path) -> None:
    table, output, again = (tmp_path / name for name in ("jobs.csv", "run.json", "again.csv"))
    assert run([*simulated, "--loads", "2", "--csv", str(table), "-o", str(output)]) == 0
    jobs = files.read(output, SimulationRun).jobs
    rows = rows_of(table)
    assert [row["id"] for row in rows] == [job.id for job in jobs]
    assert [float(row["finish_seconds"]) for row in rows] == [job.finish_seconds for job in jobs]
    found = [float(row["completion_seconds"]) for row in rows]
    assert found == [job.completion_seconds for job in jobs]
    assert run(["show", str(output), "--csv", str(again)]) == 0
    assert again.read_bytes() == table.read_bytes()


def test_a_sweep_is_a_row_a_run(
    simulated: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "runs.csv"
    assert run([*simulated, "--loads", "1,2", "--seeds", "2", "--csv", str(table), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    rows = rows_of(table)
    assert [(float(row["jobs_per_hour"]), int(row["seed"])) for row in rows] == [
        (1.0, 0), (1.0, 1), (2.0, 0), (2.0, 1)
    ]  # fmt: skip
    found = [float(row["average_jct_seconds"]) for row in rows]
    assert found == [run["metrics"]["average_jct_seconds"] for run in runs]


def test_a_table_is_refused_before_the_run(
    simulated: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    table = tmp_path / "jobs.csv"
    table.write_text("mine", encoding="utf-8")
    asked = [*simulated, "--loads", "2", "--csv", str(table)]
    assert run(asked) == 2
    assert "exists already" in capsys.readouterr().err
    assert table.read_text(encoding="utf-8") == "mine"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert run([*asked, "--force"]) == 2
    assert "pip install pandas" in capsys.readouterr().err
    assert table.read_text(encoding="utf-8") == "mine"


def test_only_runs_are_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pool = tmp_path / "pool.json"
    pool.write_text(
        json.dumps({"schema": "hetflow.cluster/1", "servers": [{"count": 1, "devices": {"V": 1}}],
                    "device_types": {"V": {}}}), encoding="utf-8",
    )  # fmt: skip
    assert run(["show", str(pool), "--csv", str(tmp_path / "a.csv")]) == 2
    assert "--csv is for runs, launched or simulated" in capsys.readouterr().err
    assert not (tmp_path / "a.csv").exists()


@pytest.mark.parametrize("command", [["devices"], ["profile", "zoo:mlp"], ["demo", "-o", "kept"]])
def test_what_needs_torch_says_so(command: list[str], tmp_path: Path) -> None:
    missing = """raise ModuleNotFoundError("No module named 'torch'", name="torch")"""
    (tmp_path / "torch.py").write_text(missing, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, "-m", "hetflow.cli.main", *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr == (
        "hetflow: this needs torch, which is not installed\nhint: pip install torch\n"
    )
    assert not (tmp_path / "kept").exists()


def test_the_demo_says_that_its_dataset_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert run(["demo", "-o", str(tmp_path / "kept")]) == 2
    assert "scikit-learn, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "kept").exists()


def test_a_run_without_its_jobs_is_no_table(
    simulated: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*simulated, "--loads", "2", "--json"]) == 0
    kept = tmp_path / "run.json"
    kept.write_text(capsys.readouterr().out, encoding="utf-8")
    assert run(["show", str(kept), "--csv", str(tmp_path / "jobs.csv")]) == 2
    assert "kept without them" in capsys.readouterr().err
    assert not (tmp_path / "jobs.csv").exists()
