"""A live cluster's jobs in the simulator: the same mechanism decides alike."""

import json
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.scheduler.history import history
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.errors import ProblemError
from hetflow.schema.files import to_json

from .conftest import FakeEngine
from .test_loop import ROUND, Asked, Cluster


def started(cluster: Cluster, gpus: str) -> None:
    """What ``serve`` notes of how a cluster was started."""
    with cluster.store.transaction():
        cluster.store.set(
            "started_with",
            {"pool": to_json(Pool.parse(gpus)), "engine": "fake", "policy": "las_weighted",
             "round_seconds": ROUND, "grace_seconds": 5},
        )  # fmt: skip


def live(tmp_path: Path, asked: Asked, *each: float) -> Cluster:
    """Jobs of so many steps on two devices, in virtual time, at their predicted speed."""
    engine = FakeEngine(number=1)
    cluster = Cluster(tmp_path / "state", engine)
    started(cluster, "1xcpu:fast,1xcpu:slow")
    steps = dict(enumerate(each, start=1))
    cluster.submit(*(asked(f"job {number}", steps=steps[number]) for number in steps))
    cluster.store.run("UPDATE jobs SET submitted = ?", cluster.now)
    had = dict.fromkeys(steps, 0.0)
    while any(state != "done" for state in cluster.states()):
        cluster.tick()
        cluster.tick()  # who was asked to leave has
        for row in cluster.store.rows(
            "SELECT job, predicted_steps_per_second AS rate FROM leases WHERE state = 'running'"
        ):
            had[row["job"]] += row["rate"] * 0.5
            if had[row["job"]] >= steps[row["job"]]:
                engine.end(engine.jobs()[row["job"]], 0)
        cluster.now += 0.5
        assert cluster.now < 2000.0
    return cluster


def test_live_and_simulated_rounds_decide_alike(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = live(tmp_path, asked, 200.0, 400.0, 600.0, 800.0, 1000.0)
    assert run(["cluster", "replay", "--state", str(cluster.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_done"] == 5
    # Simulated devices that fall free within a round are given away at its end.
    assert found["average_jct_seconds"] == pytest.approx(
        found["simulated_average_jct_seconds"], rel=0.1
    )
    assert found["average_jct_seconds"] < found["simulated_average_jct_seconds"]
    assert found["makespan_seconds"] == pytest.approx(found["simulated_makespan_seconds"], rel=0.05)
    had = [row["device_seconds"] for row in found["jobs"]]
    target = [row["target_device_seconds"] for row in found["jobs"]]
    assert had == pytest.approx(target, abs=3 * ROUND)
    assert sum(had) == pytest.approx(sum(target), rel=0.05)
    assert run(["cluster", "replay", "--state", str(cluster.folder), "--policy", "fifo"]) == 0
    assert "of 5 jobs that are done" in capsys.readouterr().out


def test_a_round_ends_early_when_nobody_holds_a_device_and_live_before(
    tmp_path: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs of 2 s and 4 s in rounds of 10 s: three simulated rounds that last 4 s each.

    Live no device waits for the other one: four jobs run on the fast one, and two on the slow one.
    """
    cluster = live(tmp_path, asked, *[24.0] * 6)
    assert run(["cluster", "replay", "--state", str(cluster.folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["simulated_makespan_seconds"] == pytest.approx(3 * 24 * 0.161, abs=0.1)
    assert found["makespan_seconds"] == pytest.approx(2 * 24 * 0.161, abs=1.5)


def test_a_state_without_jobs_is_refused(tmp_path: Path, engine: FakeEngine) -> None:
    cluster = Cluster(tmp_path / "state", engine)
    with pytest.raises(ProblemError, match="no job has run there yet"):
        history(cluster.store)
