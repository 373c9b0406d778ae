"""The example of a queue at its smallest: jobs take turns and end with the bits of each alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hetflow.examples
from hetflow.tests import programs

SCRIPT = Path(hetflow.examples.__file__).parent / "live_cluster" / "run.py"


@pytest.mark.slow
@pytest.mark.measures
def test_jobs_take_turns_and_end_with_the_bits_that_they_have_alone(tmp_path: Path) -> None:
    jobs = _queue(tmp_path / "first")
    # Where starts take long, on busy cores, rounds do too, and all may end in their first one.
    if all(job["leases"] == 1 for job in jobs):
        jobs = _queue(tmp_path / "again")
    assert any(job["leases"] > 1 for job in jobs)


def _queue(folder: Path) -> list[dict[str, Any]]:
    """The jobs of one run of the example, which have ended well."""
    told = folder.with_suffix(".json")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "-o", str(folder), "--json", str(told)],
        env={**os.environ, programs.VARIABLE: programs.preloaded()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    jobs: list[dict[str, Any]] = json.loads(told.read_text())
    assert [job["state"] for job in jobs] == ["done"] * 3
    assert [job["digest"] for job in jobs] == [job["alone"] for job in jobs]
    assert jobs[0]["digest"] == jobs[1]["digest"] != jobs[2]["digest"]
    return jobs
