"""The state of a cluster whose jobs have hostile names, made by a scheduler in virtual time."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.clusters.scheduler.submission import Submission
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.files import to_json
from hetflow.tests.scheduler.conftest import FakeEngine, asked, profiles
from hetflow.tests.scheduler.test_loop import ROUND, Cluster

__all__ = ["asked", "profiles"]
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "' onmouseover=\"document.title='owned'\" x='",
    "</title><h1>owned</h1>",
)


@pytest.fixture
def cluster(
    tmp_path: Path, asked: Callable[..., Submission], monkeypatch: pytest.MonkeyPatch
) -> Cluster:
    """Four hostile jobs on two devices, 100 s after they came; one has ended, one has failed."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = Cluster(tmp_path / "state", FakeEngine(number=1, servers={"cpu:slow": "lab 2"}))
    made.store.run("PRAGMA synchronous = OFF")
    made.now = time.time() - 10 * (ROUND + 0.1)
    with made.store.transaction():
        made.store.set(
            "started_with",
            {"pool": to_json(Pool.parse("1xcpu:fast,1xcpu:slow")), "engine": "fake",
             "policy": "las_weighted", "round_seconds": ROUND, "grace_seconds": 5},
        )  # fmt: skip
    made.submit(*(asked(name) for name in HOSTILE))
    made.store.run("UPDATE jobs SET submitted = ?", made.now)
    for turn in range(10):
        made.tick()
        made.tick(0.1)  # who was asked to leave has
        if turn == 5:
            job, folder = min(made.engine.jobs().items())
            made.engine.end(folder, 0)
            made.tick()
            made.store.run(
                "UPDATE leases SET measured_steps_per_second = 0.9 * predicted_steps_per_second "
                "WHERE job = ? AND predicted_steps_per_second IS NOT NULL", job
            )  # fmt: skip
        if turn == 8:
            _, folder = min(made.engine.jobs().items())
            made.engine.end(folder, 2, f"hetflow: {HOSTILE[0]} failed")
            made.tick()
        made.now += ROUND  # from the first steps on, 0.1 s after the decision
    return made
