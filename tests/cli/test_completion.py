"""A shell completes commands, options, policies, schedules and the devices of profiles."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("sol", ["solve", "solve", "split", "solve", "pipeline", "solve", "parallel"]),
        ("allocate jobs.json --policy makes", ["makespan", "makespan_budget"]),
        ("simulate jobs.json --scheduler yar", ["yarn"]),
        ("solve --schedule zb-", ["zb-h1", "zb-h2", "zb-v"]),
        ("solve --profiles PROFILES --gpus 2xV100,4xP", ["2xV100,4xP100"]),
        ("check plan.json --link-b", ["--link-bytes-per-second"]),
    ],
)
def test_what_a_shell_completes(typed: str, found: list[str], profiles: Path) -> None:
    words = f"hetflow {typed}".replace("PROFILES", str(profiles))
    environment = {
        **os.environ,
        "_HETFLOW_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "hetflow"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (found, "")
