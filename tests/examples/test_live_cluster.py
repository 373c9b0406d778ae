"""The example of a queue at its smallest: jobs take turns and end with the bits of each alone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hetflow.examples.live_cluster import run as example
from hetflow.tests import programs


@pytest.mark.slow
@pytest.mark.measures
def test_jobs_take_turns_and_end_with_the_bits_that_they_have_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    monkeypatch.setattr(example, "subprocess", programs.SUBPROCESS)
    told = tmp_path / "told.json"
    # Where starts take long, on busy cores, rounds do too, and all may end in their first one.
    for folder in (tmp_path / "first", tmp_path / "again"):
        words = ["run.py", "--quick", "-o", str(folder), "--json", str(told)]
        monkeypatch.setattr(sys, "argv", words)
        example.main()
        jobs: list[dict[str, Any]] = json.loads(told.read_text())
        assert [job["state"] for job in jobs] == ["done"] * 3
        assert [job["digest"] for job in jobs] == [job["alone"] for job in jobs]
        assert jobs[0]["digest"] != jobs[1]["digest"] == jobs[2]["digest"]
        if any(job["leases"] > 1 for job in jobs):
            return
    pytest.fail("all ended in their first round, twice")
