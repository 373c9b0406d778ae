"""Slurm's log on the command line: replayed, and imported for a simulation."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetflow.schema import files
from hetflow.schema.jobs import Jobs
from hetflow.tests.importers.sacct_log import LOG


def test_a_log_is_replayed_and_imported(hetflow: Any, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    answer = hetflow("cluster", "replay", "--sacct", log, "--policy", "fifo", "--json")
    assert answer.code == 0, answer.stderr
    told = json.loads(answer.stdout)
    jobs = {job["number"]: job for job in told["jobs"]}
    assert jobs[7]["starts"] == 2
    assert jobs[7]["completion_seconds"] == 22
    # In the simulation it is not requeued: it waits for nobody, and runs its 11 seconds.
    assert jobs[7]["simulated_completion_seconds"] == pytest.approx(11)
    assert jobs["5_0"]["simulated_device_seconds"] == pytest.approx(2)
    assert told["average_jct_seconds"] == pytest.approx((3 + 3 + 5 + 6 + 7 + 22) / 6)
    assert "a|b c's" in hetflow("cluster", "replay", "--sacct", log).stdout
    rates, out = tmp_path / "rates.json", tmp_path / "jobs.json"
    answer = hetflow("import", log, "--format", "sacct", "--rate", "cpu_fast=4", "--rate", "gpu=1",
                     "--throughputs", rates, "-o", out)  # fmt: skip
    assert answer.code == 0, answer.stderr
    assert len(files.read(out, Jobs).jobs) == 6
    asked = ("simulate", out, "--throughputs", rates, "--gpus", "2xcpu_fast,2xgpu", "--json")
    run = hetflow(*asked, "--policy", "fifo")
    assert json.loads(run.stdout)["metrics"]["num_jobs"] == 6


def test_jobs_that_another_pool_cannot_hold_are_left_out_of_a_replay(
    hetflow: Any, tmp_path: Path
) -> None:
    """It ended with a traceback."""
    log = tmp_path / "log"
    log.write_text(LOG)
    asked = ("cluster", "replay", "--sacct", log, "--gpus", "2xcpu_fast", "--json")
    answer = hetflow(*asked)
    assert answer.code == 0, answer.stderr
    assert "job '2' is left out: " in answer.stderr
    jobs = {job["number"]: job for job in json.loads(answer.stdout)["jobs"]}
    assert jobs[2]["completion_seconds"] == 3
    assert jobs[2]["simulated_completion_seconds"] is None
    assert jobs[1]["simulated_completion_seconds"] is not None
    assert hetflow(*asked[:-1]).code == 0
