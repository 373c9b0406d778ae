"""A launch whose workers never meet."""

import time
from pathlib import Path

import pytest

from .test_launch import here, run, write_script

pytestmark = pytest.mark.processes

__all__ = ["here"]

ONE_PREPARES = """
import os, torch
from hetflow import runtime as hf
if os.environ["RANK"] == "0":
    model = torch.nn.Linear(2, 1)
    hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""


def test_a_worker_that_ends_without_preparing_ends_the_launch_with_its_name(here: Path) -> None:
    write_script(here, ONE_PREPARES)
    began = time.monotonic()
    done = run("-o", "run", "plan.json", "script.py")
    assert done.returncode == 1
    assert time.monotonic() - began < 60  # before: ten minutes
    last = [line for line in done.stderr.splitlines() if line.startswith("hetflow: ")][-1]
    assert last.startswith("hetflow: worker 0 (cpu:fast) failed with exit code 1: ")
    assert "rank 1 (cpu:slow) ended without coming to hf.prepare" in last
