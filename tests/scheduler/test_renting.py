"""The agent that rents: in virtual time against the replay, and for real with kills."""

import random
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetflow.clusters.engines.protocol import EngineDevice, Fate, Work
from hetflow.clusters.scheduler.leases import CHECKPOINT
from hetflow.clusters.scheduler.renting import (
    LAUNCHES,
    Agent,
    Clock,
    RealFeed,
    RentedTraining,
    ReplayedFeed,
    machines_for,
    rents,
    saved_steps,
)
from hetflow.clusters.simulator.renting import Adviser, replay
from hetflow.schema.errors import LaunchError, ProblemError
from hetflow.schema.market import RentRun
from hetflow.solvers.market.job import RentJob

STEPS = 3600
JOB = RentJob(
    work_seconds=3600.0,
    deadline_seconds=7200.0,
    restart_seconds=60.0,
    tick_seconds=300.0,
    on_demand_dollars_per_hour=3.0,
    spot_dollars_per_hour=(1.0, 1.2),
    move_dollars=0.05,
)


@dataclass
class Cloud:
    """An engine in virtual time: a launch begins after its restart, and makes a step a second."""

    folder: Path
    every: int
    now: float = 0.0
    saving_seconds: float = 0.0
    name: str = "cloud"
    running: dict[Path, float] = field(default_factory=dict)
    ended: dict[Path, int | None] = field(default_factory=dict)
    stopping: dict[Path, float] = field(default_factory=dict)
    begun_at: int = 0
    never_began: set[Path] = field(default_factory=set)
    rented: list[tuple[str | None, bool]] = field(default_factory=list)
    machines: list[int] = field(default_factory=list)
    fails: bool = False
    refuses: str | None = None
    """A zone in which no machine can be had."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for path in list(self.running):
            done = self.steps(path)
            saved = done // self.every * self.every
            if saved > self.begun_at:
                self.save(saved)
            if self.fails and done:
                self.end(path, 1)
            elif done >= STEPS:
                self.end(path, 0)
            elif path in self.stopping and self.now >= self.stopping[path]:
                self.save(done)
                self.end(path, 143)

    def save(self, step: int) -> None:
        folder = self.folder / CHECKPOINT
        folder.mkdir(exist_ok=True)
        if not (folder / f"step-{step:09}").exists():
            old = list(folder.iterdir())
            (folder / f"step-{step:09}").mkdir()
            for path in old:
                path.rmdir()

    def steps(self, path: Path) -> int:
        worked = self.now - self.running[path] - JOB.restart_seconds
        return min(STEPS, self.begun_at + max(0, int(worked * self.machines[-1] + 1e-6)))

    def end(self, path: Path, code: int | None) -> None:
        del self.running[path]
        self.ended[path] = code
        if code == 0:
            (path / "run").mkdir()
            (path / "run" / "run.json").write_text(RUN)

    def start(self, work: Work) -> None:
        assert not self.running
        self.begun_at = saved_steps(self.folder)
        self.running[work.folder] = self.now
        self.rented.append((work.zone, work.is_spot))
        self.machines.append(len(work.devices))
        if work.zone == self.refuses:
            self.end(work.folder, None)
            self.never_began.add(work.folder)

    def stop(self, folder: Path) -> None:
        self.stopping.setdefault(folder, self.now + self.saving_seconds)

    def kill(self, folder: Path) -> None:
        self.end(folder, 137)

    def fate(self, folder: Path) -> Fate:
        if folder in self.running:
            begun = self.now - self.running[folder] >= JOB.restart_seconds
            return Fate("training" if begun else "running")
        if folder not in self.ended:
            return Fate("absent")
        return Fate("ended", self.ended[folder], has_begun=folder not in self.never_began)

    def devices(self) -> tuple:
        return ()


RUN = """{"schema": "hetflow.run/1", "status": "done"}"""


@pytest.fixture(autouse=True)
def _records(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's record is long; here only its end and its digest count."""
    from hetflow.clusters.scheduler import renting

    read = renting.files.read

    def short(path: Path, kind: type) -> object:
        if kind is renting.RunRecord and path.exists() and path.read_text() == RUN:
            return type("Record", (), {"status": "done", "parameters_digest": "abc"})()
        return read(path, kind)

    monkeypatch.setattr(renting.files, "read", short)


def agent_of(
    folder: Path,
    windows: list[list[int]],
    policy: str,
    *,
    notice: float = 0.0,
    every: int = 10,
    record: RentRun | None = None,
    cloud: Cloud | None = None,
    job: RentJob = JOB,
    of_one_kind: bool = False,
) -> tuple[Agent, Cloud]:
    """An agent in virtual time, of a new record that has the prediction."""
    zones = ("a", "b")
    adviser = Adviser(job, zones, policies=[policy], of_one_kind=of_one_kind)
    predicted = replay(job, adviser.policies[policy], windows)
    machines = [EngineDevice(f"cpu:{number}", "cpu", "here") for number in range(job.num_machines)]
    cloud = cloud or Cloud(folder, every)
    folder.mkdir(exist_ok=True)
    agent = Agent(
        training=RentedTraining(
            folder=folder, plans=(folder / "plan.json",) * job.num_machines,
            script=("train.py",), directory=folder,
            notice_seconds=notice, save_seconds=5.0, move_dollars=JOB.move_dollars,
        ),
        engine=cloud,
        devices=tuple(tuple(machines[: number + 1]) for number in range(job.num_machines)),
        speeds=job.speeds,
        feed=ReplayedFeed(
            zones=zones, tick_seconds=JOB.tick_seconds, available=windows,
            spot_dollars_per_hour=None,
        ),
        decide=adviser,
        num_ticks=JOB.num_ticks,
        tick_seconds=JOB.tick_seconds,
        record=record or RentRun(
            status="running", policy=policy, work_seconds=job.work_seconds,
            deadline_seconds=job.deadline_seconds, restart_seconds=JOB.restart_seconds,
            num_steps=STEPS, checkpoint_every=every, started_seconds=0.0,
            predicted_seconds=predicted.seconds,
            predicted_dollars=predicted.used_dollars,
            predicted_launches=predicted.num_launches,
        ),
        clock=Clock(lambda: cloud.now, cloud.sleep, 4.0),
    )  # fmt: skip
    return agent, cloud


def drawn(seed: int) -> list[list[int]]:
    """Two zones whose machines come and go."""
    draw = random.Random(seed)
    there = [1, 1]
    windows: list[list[int]] = [[], []]
    for _ in range(JOB.num_ticks):
        for zone in (0, 1):
            there[zone] = int(draw.random() < (0.8 if there[zone] else 0.3))
            windows[zone].append(there[zone])
    return windows


@pytest.mark.parametrize("policy", ["on_demand", "greedy", "uniform_progress", "time_sliced"])
@pytest.mark.parametrize("notice", [0.0, 120.0])
def test_a_run_pays_what_the_replay_predicts(tmp_path: Path, policy: str, notice: float) -> None:
    for seed in range(4):
        agent, cloud = agent_of(tmp_path / f"{seed}", drawn(seed), policy, notice=notice)
        run = agent.run()
        assert run.status == "done"
        assert run.parameters_digest == "abc"
        assert not run.is_late
        assert not cloud.running
        assert run.num_launches == run.predicted_launches == len(cloud.rented)
        assert run.dollars == pytest.approx(run.predicted_dollars, rel=0.02)
        assert run.seconds == pytest.approx(run.predicted_seconds, rel=0.02)
        assert run.num_steps_repeated <= 10 * run.num_preemptions
        assert run.longest_restart_seconds == pytest.approx(JOB.restart_seconds, abs=4)
        if notice:
            assert run.num_steps_repeated == 0


@pytest.mark.parametrize("policy", ["greedy", "uniform_progress"])
@pytest.mark.parametrize("notice", [0.0, 120.0])
def test_a_fleet_goes_on_with_what_is_left_and_pays_what_is_predicted(
    tmp_path: Path, policy: str, notice: float
) -> None:
    three = replace(JOB, speeds=(0.0, 1.0, 2.0, 3.0), deadline_seconds=3000.0)
    kept = 0
    for seed in range(2):
        draw = random.Random(seed)
        windows = [[draw.choice([0, 1, 2, 3, 3]) for _ in range(12)] for _ in range(2)]
        agent, cloud = agent_of(
            tmp_path / f"{seed}", windows, policy, notice=notice, every=20, job=three
        )
        run = agent.run()
        assert (run.status, run.is_late) == ("done", False)
        assert not cloud.running
        assert run.num_launches == run.predicted_launches
        assert run.dollars == pytest.approx(run.predicted_dollars, rel=0.04)
        assert run.seconds == pytest.approx(run.predicted_seconds, rel=0.04)
        held = [row for row in run.held if row.zone is not None]
        assert cloud.machines == [row.num_spot + row.num_on_demand for row in held]
        kept += sum(
            0 < after.num_spot < before.num_spot and after.zone == before.zone
            for before, after in pairwise(held)
        )
    assert kept  # some were taken away, and the rest went on


def test_a_lost_machine_repeats_what_was_not_saved(tmp_path: Path) -> None:
    windows = [[1, 1] + [0] * 22, [0] * 24]
    agent, cloud = agent_of(tmp_path / "run", windows, "greedy", every=100)
    run = agent.run()
    # 540 steps are made in two ticks of 300 s, of which 60 s are a restart; 500 are saved.
    assert run.num_preemptions == 1
    assert run.num_steps_repeated == 40
    assert cloud.rented[0] == ("a", True)
    assert cloud.rented[-1] == ("a", False)
    assert not run.is_late


def test_a_machine_that_is_gone_by_itself_is_no_failure(tmp_path: Path) -> None:
    agent, cloud = agent_of(tmp_path / "run", [[1] * 24, [0] * 24], "greedy")
    sleep = cloud.sleep

    def lose(seconds: float) -> None:
        sleep(seconds)
        if cloud.now > 1000 and len(cloud.rented) == 1:
            cloud.end(next(iter(cloud.running)), None)  # nobody saw how

    agent.clock = Clock(lambda: cloud.now, lose, 2.0)
    run = agent.run()
    assert (run.status, run.num_preemptions, run.num_launches) == ("done", 1, 2)


def test_a_zone_without_machines_is_left_alone_for_a_while(tmp_path: Path) -> None:
    agent, cloud = agent_of(tmp_path / "run", [[1] * 24, [1] * 24], "greedy")
    agent.feed = RealFeed(zones=("a", "b"), tick_seconds=JOB.tick_seconds, retry_seconds=900.0)
    cloud.refuses = "a"
    sleep = cloud.sleep

    def lose(seconds: float) -> None:
        sleep(seconds)
        if cloud.now > 1000 and len(cloud.rented) == 2:
            cloud.end(next(iter(cloud.running)), None)

    agent.clock = Clock(lambda: cloud.now, lose, 2.0)
    run = agent.run()
    # b is lost at 1,000 s, when a may be asked again; it refuses again, until b has machines.
    assert [zone for zone, _ in cloud.rented] == ["a", "b", "a", "b"]
    assert (run.status, run.num_preemptions, run.is_late) == ("done", 1, False)
    assert run.num_moves == 0
    # Two launches in b; a machine that never came is not paid.
    assert run.dollars == pytest.approx((3600 + 2 * 60) / 3600 * 1.2, rel=0.01)


@pytest.mark.parametrize("policy", ["greedy", "uniform_progress"])
def test_a_rented_fleet_is_of_one_kind_and_lost_at_once(tmp_path: Path, policy: str) -> None:
    """Three machines of SkyPilot are one cluster: spot or on demand, and gone with the first."""
    job = replace(JOB, speeds=(0.0, 1.0, 2.0, 3.0), work_seconds=3 * 3600.0)
    folder = tmp_path / "run"
    agent, cloud = agent_of(folder, [[1] * 24, [2] * 24], policy, job=job, of_one_kind=True)
    agent.feed = RealFeed(zones=("a", "b"), tick_seconds=JOB.tick_seconds, retry_seconds=1e6,
                          num_machines=3)  # fmt: skip
    sleep, lost = cloud.sleep, []

    def lose(seconds: float) -> None:
        sleep(seconds)
        if cloud.now > 400 * (len(lost) + 1) and len(lost) < 2 and cloud.running:
            lost.append(cloud.rented[-1])
            cloud.end(next(iter(cloud.running)), None)

    agent.clock = Clock(lambda: cloud.now, lose, 2.0)
    run = agent.run()
    assert (run.status, run.is_late, run.num_preemptions) == ("done", False, 2)
    assert lost == [("a", True), ("b", True)]
    assert not any(row.num_spot and row.num_on_demand for row in run.held)
    assert cloud.machines[0] == 3


def test_machines_that_are_rented_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sky", SimpleNamespace())  # type: ignore[arg-type]
    plans = [SimpleNamespace(devices_by_type={"V100": number}) for number in (2, 4, 6)]
    engine, devices = machines_for(plans, "skypilot")  # type: ignore[arg-type]
    assert rents(engine)
    assert [Counter(one.server for one in each) for each in devices] == [
        {f"rented-{place}": 2 for place in range(number)} for number in (1, 2, 3)
    ]
    plans[1] = SimpleNamespace(devices_by_type={"V100": 3})
    with pytest.raises(ProblemError, match="plan for 2 machines is on 3xV100; a machine has 2x"):
        machines_for(plans, "skypilot")  # type: ignore[arg-type]


def test_a_training_that_fails_ends_the_run(tmp_path: Path) -> None:
    agent, cloud = agent_of(tmp_path / "run", [[1] * 24, [0] * 24], "greedy")
    cloud.fails = True
    with pytest.raises(LaunchError, match="the training failed: exit code 1"):
        agent.run()
    assert not cloud.running


@pytest.mark.parametrize("seed", range(12))
def test_an_agent_that_was_killed_goes_on(tmp_path: Path, seed: int) -> None:
    """Its launch saves and ends, as on an engine that is bound to it; then it is started again."""
    windows = drawn(seed)
    agent, cloud = agent_of(tmp_path / "run", windows, "uniform_progress")
    cloud.saving_seconds = 3.0
    sleep, dies = cloud.sleep, random.Random(seed).uniform(1, 3000)

    class Killed(BaseException):
        pass

    def mortal(seconds: float) -> None:
        sleep(seconds)
        if cloud.now > dies:
            raise Killed

    def refuse(folder: Path) -> None:
        raise Killed  # who is dead asks for nothing

    agent.clock = Clock(lambda: cloud.now, mortal, 2.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.engine, "stop", refuse)
        with pytest.raises(Killed):
            agent.run()
    for path in list(cloud.running):
        cloud.stop(path)
    agent, _ = agent_of(
        tmp_path / "run", windows, "uniform_progress", record=agent.record, cloud=cloud
    )
    run = agent.run()
    assert run.status == "done"
    assert not cloud.running
    assert not run.is_late
    paid = sum(
        row.dollars_per_hour * (after.at_seconds - row.at_seconds) / 3600
        for row, after in zip(run.held, run.held[1:], strict=False)
    )
    moves = run.num_moves * JOB.move_dollars
    assert run.dollars == pytest.approx(paid + moves, rel=0.02, abs=0.002)
    assert (tmp_path / "run" / LAUNCHES / str(run.num_launches)).is_dir()
