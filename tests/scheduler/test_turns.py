"""A lease counts from its first step, by a clock that may be set back; no device idles for long."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.clusters.engines.protocol import FIRST_STEP
from hetflow.clusters.scheduler.leases import PLAN, RUN
from hetflow.clusters.scheduler.serve import steady_time
from hetflow.clusters.scheduler.view import drain, queue
from hetflow.schema.files import read_plan, write
from hetflow.schema.run import RunRecord

from .conftest import FakeEngine
from .resizable import OneTypeEngine
from .test_loop import ROUND, Asked, Cluster
from .test_resizes import held, step


@pytest.fixture
def one(tmp_path: Path) -> Cluster:
    """A fast device and a slow one."""
    return Cluster(tmp_path / "state", FakeEngine(number=1))


def left(cluster: Cluster) -> float:
    """Estimated steps that the only job still has to make."""
    [job] = cluster.store.get("rounds")["jobs"]
    return float(job["left"])


def test_a_job_is_charged_and_its_steps_are_counted_from_its_first_step(
    one: Cluster, asked: Asked
) -> None:
    """It waited in a batch system's queue for an hour, and was shown as nearly done."""
    one.engine.waiting = {1}
    one.submit(asked("a", steps=2000.0))
    for _ in range(360):
        one.tick(ROUND)
    assert queue(one.store)[0].state == "waiting"
    one.engine.waiting, one.engine.starting = set(), {1}
    one.tick(1.0)
    one.tick(ROUND)
    [job] = queue(one.store)
    assert (job.state, left(one)) == ("starting", 2000.0)
    one.engine.starting = set()
    one.tick(1.0)
    one.tick(ROUND)
    [job] = queue(one.store)
    assert job.state == "running"
    assert 0.0 < 2000.0 - left(one) < 2.0 * ROUND / 0.08
    [folder] = one.engine.running
    one.engine.end(folder, 0)
    one.tick(1.0)
    [job] = queue(one.store)
    assert (job.state, job.leases) == ("done", 1)
    assert job.device_seconds == pytest.approx(ROUND + 1.0)


def test_no_lease_is_moved_before_its_first_step_and_a_round_counts_from_it(
    one: Cluster, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    """Starts of 2.5 rounds: each job trains for a round after each, and somebody says so."""
    one.engine.starting = {1, 2, 3}
    one.submit(*(asked(name) for name in "abc"))
    one.tick()
    first = set(one.engine.running)
    for _ in range(25):
        one.tick(ROUND / 10)
    assert set(one.engine.running) == first
    one.engine.starting = set()
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            one.tick(ROUND / 10)
            assert set(one.engine.running) == first
    assert "a launch took 26 s to its first step, and a round lasts 10 s" in caplog.text
    assert "round=260" in caplog.text
    one.tick(ROUND / 10)
    one.tick()
    assert not first & set(one.engine.running)
    assert not one.engine.stopping - set(one.engine.ended)


def test_a_first_step_puts_off_a_rounds_end_to_twice_its_length_at_most(
    one: Cluster, asked: Asked
) -> None:
    one.submit(asked("a"), asked("b"), asked("c"))
    one.engine.starting = {1, 2, 3}
    one.tick()
    [a, b] = sorted(one.engine.jobs())
    one.engine.starting -= {a}
    one.tick(0.5 * ROUND)
    assert one.store.get("round_ends") == one.now + ROUND
    one.engine.starting -= {b}
    one.tick(0.9 * ROUND)
    assert one.store.get("round_ends") == one.store.get("round_began") + 2.0 * ROUND


@pytest.mark.parametrize("policy", ["elastic", "easyscale"])
def test_who_grows_and_shrinks_waits_for_the_first_step_too(
    tmp_path: Path, asked: Asked, policy: str
) -> None:
    engine = OneTypeEngine(2)
    cluster = Cluster(tmp_path / "state", engine, policy)
    engine.starting = {1}
    cluster.submit(asked("a", devices=2, devices_at_most=2))
    step(cluster, engine)
    cluster.submit(asked("b"))
    for _ in range(3):
        step(cluster, engine, ROUND)
    assert list(held(cluster)) == [1]
    assert not engine.stopping
    engine.starting = set()
    for _ in range(5):
        step(cluster, engine)
    assert {job: len(names.split()) for job, names in held(cluster).items()} == {1: 1, 2: 1}
    for launch in list(engine.running):
        engine.end(launch, 0)


def test_a_clock_that_was_set_back_stops_no_round_and_charges_nobody(
    one: Cluster, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins goes on by the clock as it is; who runs does not see that it was set."""
    one.submit(*(asked(name) for name in "abc"))
    one.tick()
    one.tick(1.0)
    before = set(one.engine.running)
    one.now -= 7200.0
    one.restart()
    one.tick()
    assert one.store.get("round_ends") == one.now + ROUND
    one.tick(ROUND)
    one.tick(0.1)
    assert not before & set(one.engine.running)
    assert 2 * ROUND <= sum(job.device_seconds for job in queue(one.store)) <= 2 * ROUND + 2.0
    now = steady_time()
    monkeypatch.setattr(time, "time", lambda: now + 7200.0)
    assert now <= steady_time() < now + 60.0


def test_jobs_of_a_clock_that_was_ahead_do_not_hang_finish_time_fairness(
    tmp_path: Path, asked: Asked
) -> None:
    """They came two hours after now, and it looked for a ratio below zero for ever."""
    cluster = Cluster(tmp_path / "state", FakeEngine(number=1), "finish_time_fairness")
    cluster.now = steady_time() - 7200.0
    cluster.submit(asked("a"), asked("b", steps=10.0))
    cluster.tick()
    cluster.tick(1.0)
    assert cluster.states() == ["running", "running"]


def test_a_device_that_falls_free_is_given_to_who_waits_within_the_round(
    one: Cluster, asked: Asked
) -> None:
    one.submit(asked("a"), asked("b"))
    one.tick()
    stays = dict(one.engine.jobs())
    one.submit(asked("c"))
    one.tick(1.0)
    assert one.states() == ["running", "running", "queued"]
    one.engine.end(stays.pop(1), 0)
    one.tick(1.0)
    assert one.states() == ["done", "running", "running"]
    assert one.engine.jobs()[2] == stays[2]
    assert not one.engine.stopping  # nobody was moved for it
    assert one.store.get("round_began") == one.now - 2.0  # the same round


def test_a_job_that_comes_gets_an_idle_device_and_one_that_fails_waits_for_a_while(
    one: Cluster, asked: Asked
) -> None:
    one.submit(asked("a"))
    one.tick()
    one.submit(asked("b"))
    one.tick(1.0)
    assert one.states() == ["running", "running"]
    one.engine.end(one.engine.jobs()[2], 1)
    one.tick(1.0)
    one.tick(1.0)
    assert one.states() == ["running", "queued"]
    one.submit(asked("c"))
    one.tick(1.0)
    assert one.states() == ["running", "queued", "running"]
    one.engine.end(one.engine.jobs()[3], 143)  # by somebody else; it goes on at once
    one.tick(1.0)
    assert one.states() == ["running", "queued", "running"]


@pytest.mark.parametrize("policy", ["fifo", "las_weighted", "easyscale"])
@pytest.mark.parametrize("why", ["drained", "down"])
def test_a_device_that_comes_back_is_given_to_who_waits_within_the_round(
    tmp_path: Path, asked: Asked, policy: str, why: str
) -> None:
    """It stood idle beside the queue to the round's end."""
    cluster = Cluster(tmp_path / "state", FakeEngine(number=1), policy)
    if why == "drained":
        drain(cluster.store, "cpu:fast", undo=False)
    else:
        cluster.engine.down = {"cpu:fast:0"}
    cluster.submit(asked("a"), asked("b"))
    cluster.tick()
    cluster.tick(0.1)
    assert sorted(cluster.states()) == ["queued", "running"]
    if why == "drained":
        drain(cluster.store, "cpu:fast", undo=True)
    else:
        cluster.engine.down = set()
    cluster.tick(ROUND / 2)
    cluster.tick(0.1)
    assert cluster.states() == ["running", "running"]
    assert not cluster.engine.stopping


@pytest.mark.parametrize("policy", ["las_weighted", "fifo", "easyscale", "elastic"])
@pytest.mark.parametrize("round_seconds", [5.0, 3600.0])
def test_a_job_that_failed_is_tried_again_after_a_while_that_grows(
    tmp_path: Path, asked: Asked, policy: str, round_seconds: float
) -> None:
    """Its launch was killed. Neither a round nor a scheduler that begins ends its wait, or adds."""
    cluster = Cluster(tmp_path / "state", FakeEngine(1, kinds=("cpu:fast",)), policy)
    cluster.settings = replace(
        cluster.settings, rules=replace(cluster.settings.rules, round_seconds=round_seconds)
    )
    cluster.restart()
    cluster.submit(asked("a"))
    cluster.tick()
    for seconds in (10.0, 20.0, 40.0):
        cluster.engine.end(cluster.engine.jobs()[1], 137)
        cluster.tick(0.1)
        cluster.tick(seconds / 2)
        cluster.restart()
        cluster.tick(seconds / 2 - 0.1)
        assert cluster.states() == ["queued"]
        cluster.tick(0.2)
        assert cluster.states() == ["running"]


def test_a_job_that_does_not_fit_what_is_idle_is_not_tried_again_and_again(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path / "state", FakeEngine(number=2))
    cluster.submit(asked("a"), asked("b", devices=2), asked("large", devices=2))
    cluster.tick()
    decisions = []
    decide = cluster.scheduler._decide
    monkeypatch.setattr(
        cluster.scheduler, "_decide",
        lambda now, **more: (decisions.append(now), decide(now, **more)),
    )  # fmt: skip
    for _ in range(50):
        cluster.tick(0.1)
    assert len(decisions) <= 1
    assert sorted(cluster.states()) == ["queued", "running", "running"]


def test_a_worker_makes_the_file_of_the_first_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hetflow.runtime.protocol import environment

    path = tmp_path / FIRST_STEP
    path.parent.mkdir()
    monkeypatch.setenv(environment.FIRST_STEP, str(path))
    environment.tell_first_step()
    assert path.exists()
    path.unlink()
    environment.tell_first_step()
    assert not path.exists()


@pytest.mark.parametrize("code", [143, 137, None, 1])
def test_a_job_whose_script_has_ended_is_never_queued_again(
    one: Cluster, asked: Asked, code: int | None
) -> None:
    """Its launch was asked to stop, or was killed, or its keeper was, after the last line."""
    one.submit(asked("a"))
    one.tick()
    [folder] = one.engine.running
    plan = read_plan(folder / PLAN)
    record = RunRecord(
        plan=plan, status="done", exit_code=0, world_size=1, wall_seconds=9.0, num_steps=40,
        predicted_step_seconds=plan.predicted.step_seconds, measured_step_seconds=0.1,
        step_seconds_error=None, final_loss=None, parameters_digest="d" * 64, devices=(),
    )  # fmt: skip
    (folder / RUN).mkdir()
    write(folder / RUN / "run.json", record)
    one.engine.end(folder, code)
    for _ in range(3):
        one.tick(ROUND)
    [job] = queue(one.store)
    assert (job.state, job.digest, job.leases) == ("done", "d" * 64, 1)


def test_a_job_whose_launch_was_killed_before_it_could_write_its_record_is_done(
    one: Cluster, asked: Asked
) -> None:
    """All that its workers had to do was done, the last save too; of another's, only one's was."""
    one.submit(asked("a"), asked("b"))
    one.tick()
    for job, left in ((1, (0, 1)), (2, (0,))):
        folder = one.engine.jobs()[job]
        logs = folder / RUN / "logs"
        logs.mkdir(parents=True)
        for rank in range(2):
            (logs / f"rank{rank}.out").touch()
        for rank in left:
            (logs / f"rank{rank}.left").touch()
        one.engine.end(folder, 137)
    one.tick(1.0)
    one.tick(10.0)  # a job that failed waits that long
    found = {job.number: (job.state, job.leases) for job in queue(one.store)}
    assert found == {1: ("done", 1), 2: ("running", 2)}
