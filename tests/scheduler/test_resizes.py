"""Jobs that change devices while they run: launches with real control folders, a clock of its own.

``decide`` says who is to sit where; the rest is the scheduler's.
"""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.dashboard.snapshot import snapshot
from hetflow.clusters.mechanisms.seats import Seat
from hetflow.clusters.scheduler import leases, sharing, view
from hetflow.clusters.scheduler.leases import PLAN, RUN, open_leases
from hetflow.runtime.protocol.control import FOLDER
from hetflow.schema.errors import ProblemError
from hetflow.tests.parallel_plans import parallel_plan

from .resizable import ResizableEngine
from .test_loop import ROUND, Asked, Cluster
from .test_replay import started

Decide = Callable[..., None]
Made = Callable[..., tuple[Cluster, ResizableEngine]]


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Decide:
    """Say which devices each job gets from the next round on, whatever the policy."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def on(**seats: str) -> None:
        def next_round(*given: object, **more: object) -> dict[str, Seat]:
            return {
                name.removeprefix("job"): tuple(
                    (0 if kind == "f" else 1, 0, int(number)) for kind, number in devices.split()
                )
                for name, devices in seats.items()
            }

        monkeypatch.setattr(sharing, "next_round", next_round)

    return on


@pytest.fixture
def made(tmp_path: Path, asked: Asked) -> Iterator[Made]:
    """Make a cluster of four fast devices and four slow ones, f0 to s3, with some jobs."""
    engine = ResizableEngine()

    def make(*jobs: str) -> tuple[Cluster, ResizableEngine]:
        cluster = Cluster(tmp_path / "state", engine)
        started(cluster, "4xcpu:fast,4xcpu:slow")
        cluster.submit(*(asked(name) for name in jobs))
        cluster.store.run("UPDATE jobs SET submitted = ?", cluster.now)
        cluster.tick()
        return cluster, engine

    yield make
    for launch in engine.launches.values():
        launch.box.close()


def held(cluster: Cluster) -> dict[int, str]:
    """What each job may be on, by the state; ``f0>s1`` where it is being resized."""
    short = lambda names: " ".join(f"{name[4]}{name[-1]}" for name in names)  # noqa: E731
    return {
        lease.job: short(lease.devices) + (f">{short(lease.resizing_to)}"
                                           if lease.resizing_to else "")
        for lease in open_leases(cluster.store) if lease.holds_devices
    }  # fmt: skip


def step(cluster: Cluster, engine: ResizableEngine, seconds: float = 0.1) -> None:
    """The scheduler's turn, then the launches'."""
    cluster.tick(seconds)
    engine.check(cluster.store)
    engine.serve()
    engine.check(cluster.store)


def test_a_job_that_changes_devices_trains_on_and_its_record_follows(
    made: Made, decide: Decide, capsys: pytest.CaptureFixture[str]
) -> None:
    decide(job1="f0")
    cluster, engine = made("a")
    [launch] = engine.running
    decide(job1="s1 s2")
    step(cluster, engine, ROUND)
    assert held(cluster) == {1: "f0>s1 s2"}
    [row] = view.queue(cluster.store)
    assert row.resizing_to == ("cpu:slow:1", "cpu:slow:2")
    assert run(["queue", "--state", str(cluster.folder)]) == 0
    assert "cpu:fast:0 -> cpu:slow:1, cpu:slow:2" in capsys.readouterr().out
    step(cluster, engine)  # the launch is about to answer
    assert held(cluster) == {1: "f0>s1 s2"}
    step(cluster, engine)
    assert held(cluster) == {1: "s1 s2"}
    assert list(engine.running) == [launch]
    assert engine.launches[launch].config.world_size == 2
    assert not list((launch / RUN / FOLDER).glob("*request*"))
    [row] = view.queue(cluster.store)
    assert (row.leases, row.resizes, row.state) == (1, 1, "running")
    assert row.device_seconds == pytest.approx(ROUND + 0.2)
    assert row.predicted_steps_per_second is not None
    for _ in range(3):
        step(cluster, engine, ROUND)  # renewed
    assert engine.stopping == set()
    shown = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    assert [(one.number, one.is_resized) for one in sorted(shown.leases, key=lambda o: o.number)] \
        == [(1, False), (2, True)]  # fmt: skip
    engine.end(launch, 0)
    cluster.tick()
    assert cluster.states() == ["done"]
    assert cluster.job(1)["device_seconds"] == pytest.approx(
        ROUND + 0.2 + 2 * (3 * ROUND), abs=0.01
    )
    assert [path.parent for _, path in view.outputs(cluster.store, 1)] == [launch]
    assert view.outputs(cluster.store, 1)[0][0] == "cpu:fast:0, then cpu:slow:1, cpu:slow:2"
    assert run(["cluster", "replay", "--state", str(cluster.folder), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["jobs"]
    assert (row["starts"], row["resizes"]) == (1, 1)


@pytest.mark.parametrize("why", ["refused", "failed", "silent", "starting"])
def test_a_job_that_cannot_be_resized_is_stopped_and_started(
    made: Made, asked: Asked, decide: Decide, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    decide(job1="f0")
    cluster, engine = made()
    if why == "starting":
        engine.is_starting = True
    else:
        engine.answer = why  # type: ignore[assignment]
    cluster.submit(asked("a"))
    step(cluster, engine)
    decide(job1="s0")
    step(cluster, engine, ROUND)
    if why == "silent":
        engine.heeds = False
        step(cluster, engine, leases.LONGEST_RESIZE_SECONDS + 1.0)
        assert held(cluster) == {1: "f0>s0"}  # it may be on either until it is over
        [launch] = engine.running
        engine.end(launch, 143)
    for _ in range(4):
        step(cluster, engine)
    assert held(cluster) == {1: "s0"}
    assert "stopped and started again, not resized" in caplog.text
    [row] = view.queue(cluster.store)
    assert (row.leases, row.resizes, row.failures) == (2, 0, 0)
    assert set(engine.ended.values()) == {143}


def test_jobs_that_exchange_devices_end_up_there_with_one_stop(made: Made, decide: Decide) -> None:
    decide(job1="f0 f1", job2="s0", job3="f2 f3")
    cluster, engine = made("a", "b", "c")
    decide(job1="s0", job2="f0", job3="f1 f2")
    step(cluster, engine, ROUND)
    assert held(cluster) == {1: "f0 f1", 2: "s0", 3: "f2 f3"}  # 3 needs f1, and 1 is still on it
    for _ in range(12):
        step(cluster, engine)
    assert held(cluster) == {1: "s0", 2: "f0", 3: "f1 f2"}
    rows = {row.number: (row.leases, row.resizes) for row in view.queue(cluster.store)}
    assert rows == {1: (1, 1), 2: (2, 0), 3: (1, 1)}


def test_a_round_that_wants_something_else_waits_for_the_answer(made: Made, decide: Decide) -> None:
    decide(job1="f0")
    cluster, engine = made("a")
    decide(job1="s0")
    cluster.tick(ROUND)
    decide(job1="s2 s3")
    cluster.tick(ROUND)
    assert held(cluster) == {1: "f0>s0"}
    for _ in range(3):
        step(cluster, engine)
    assert held(cluster) == {1: "s0>s2 s3"}
    decide(job1="s0")  # where it is
    engine.answer = "refused"
    step(cluster, engine, ROUND)
    step(cluster, engine)
    assert held(cluster) == {1: "s0"}
    assert engine.stopping == set()
    [row] = view.queue(cluster.store)
    assert (row.leases, row.resizes) == (1, 1)


def test_a_job_that_ends_or_is_held_in_a_resize_frees_all_its_devices(
    made: Made, decide: Decide
) -> None:
    decide(job1="f0", job2="f1", job3="f2")
    cluster, engine = made("a", "b", "c")
    decide(job1="s0", job2="s1", job3="s2")
    cluster.tick(ROUND)
    assert held(cluster) == {1: "f0>s0", 2: "f1>s1", 3: "f2>s2"}
    lease = {job: folder for job, folder in engine.jobs().items()}
    engine.end(lease[1], 0)
    engine.end(lease[2], 1, "hetflow: worker 0 failed: boom\n")
    cluster.want(3, "hold")
    decide(job2="s1")
    cluster.tick(0.1)
    cluster.tick(0.1)
    assert cluster.states() == ["done", "queued", "held"]
    assert held(cluster) == {}
    cluster.tick(10.0)  # it failed, and waits that long
    cluster.tick(0.1)
    assert cluster.states() == ["done", "running", "held"]
    assert held(cluster) == {2: "s1"}
    assert (engine.jobs()[2] / PLAN).is_file()  # a launch of its own
    assert engine.jobs()[2] != lease[2]


def test_an_engine_says_which_devices_a_launch_can_change_to(
    made: Made, decide: Decide, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide(job1="f0", job2="f1")
    cluster, engine = made("a", "b")
    monkeypatch.setattr(
        engine, "can_resize", lambda held, wanted: {held[0].name, wanted[0].name} != {
            "cpu:fast:0", "cpu:slow:0"}
    )  # fmt: skip
    decide(job1="s0", job2="s1")
    for seconds in (ROUND, 0.1, 0.1, 0.1):
        step(cluster, engine, seconds)
    rows = {row.number: (row.leases, row.resizes) for row in view.queue(cluster.store)}
    assert rows == {1: (2, 0), 2: (1, 1)}


def test_a_parallel_plan_is_not_changed_while_it_runs(made: Made, decide: Decide) -> None:
    """As ``hetflow resize`` does, which takes splits and pipelines."""
    decide(job1="f0")
    cluster, _ = made("a")
    [lease] = open_leases(cluster.store)
    with pytest.raises(ProblemError, match="a parallel plan is not changed while it runs"):
        leases.resized_config(cluster.store, lease, parallel_plan([(("a",), (2,))]))
