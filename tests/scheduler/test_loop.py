"""The live loop with a clock of its own and an engine that does nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetflow.cli.main import run
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler import leases, plans, sharing
from hetflow.clusters.scheduler.leases import PLAN, RUN
from hetflow.clusters.scheduler.loop import MOST_FAILURES, Scheduler
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit
from hetflow.clusters.scheduler.view import Wish, ask, queue
from hetflow.schema.errors import ProblemError
from hetflow.schema.files import read_plan, write
from hetflow.schema.jobs import Entity
from hetflow.schema.run import DeviceRun, MeasuredTerm, MeasuredTerms, RunRecord
from hetflow.tests.profiles import examples

from .conftest import FakeEngine
from .mortal import Died, MortalEngine, Points

ROUND = 10.0
RULES = RoundRules(round_seconds=ROUND, reset_seconds=0.0)
Asked = Callable[..., Submission]


class Cluster:
    """A scheduler, its state and the time."""

    def __init__(self, folder: Path, engine: FakeEngine, policy: str = "las_weighted") -> None:
        self.folder, self.engine, self.now = folder, engine, 1000.0
        self.settings = ClusterSettings(policy=policy, rules=RULES, grace_seconds=5)
        self.restart()

    def restart(self) -> None:
        self.store = ClusterStore.create(self.folder)
        self.scheduler = Scheduler(self.store, self.engine, self.settings)

    def submit(self, *jobs: Submission) -> list[int]:
        return [submit(self.store, job) for job in jobs]

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.scheduler.tick(self.now)

    def states(self) -> list[str]:
        return [row["state"] for row in self.store.rows("SELECT state FROM jobs ORDER BY number")]

    def job(self, number: int) -> dict[str, object]:
        return dict(self.store.rows("SELECT * FROM jobs WHERE number = ?", number)[0])

    def want(self, number: int, what: str) -> None:
        self.store.run("UPDATE jobs SET wanted = ? WHERE number = ?", what, number)


@pytest.fixture
def cluster(tmp_path: Path, engine: FakeEngine) -> Cluster:
    return Cluster(tmp_path / "state", engine)


def test_a_job_starts_at_once_on_an_idle_cluster_and_its_lease_is_renewed(
    cluster: Cluster, asked: Asked
) -> None:
    cluster.submit(asked("a", devices=2))
    cluster.tick()
    [work] = cluster.engine.running.values()
    assert [device.device_type for device in work.devices] == ["cpu:fast"] * 2
    assert "--determinism" in work.command
    assert work.command[work.command.index("--determinism") + 1] == "elastic"
    for _ in range(5):
        cluster.tick(ROUND)
    assert list(cluster.engine.running.values()) == [work]
    cluster.engine.end(work.folder, 0)
    cluster.tick(1.0)
    assert cluster.states() == ["done"]
    assert cluster.job(1)["device_seconds"] == pytest.approx(2 * (5 * ROUND + 1))


def test_what_a_lease_measured_stands_beside_what_was_predicted_for_it(
    cluster: Cluster, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.submit(asked("a"))
    cluster.tick()
    [folder] = cluster.engine.running
    plan = read_plan(folder / PLAN)
    record = RunRecord(
        plan=plan, status="interrupted", exit_code=143, world_size=1, wall_seconds=9.0,
        num_steps=40, predicted_step_seconds=plan.predicted.step_seconds,
        measured_step_seconds=2.0 * plan.predicted.step_seconds, step_seconds_error=None,
        final_loss=None, parameters_digest=None, devices=(),
    )  # fmt: skip
    (folder / RUN).mkdir()
    write(folder / RUN / "run.json", record)
    cluster.engine.end(folder, 143)
    cluster.tick(1.0)
    [job] = queue(cluster.store)
    assert job.measured is not None
    assert job.measured.error == pytest.approx(-0.5)
    assert job.measured.devices == ("cpu:fast:0",)
    assert run(["queue", "--state", str(cluster.folder)]) == 0
    assert f"{job.measured.steps_per_second:.3g} (-50.0 %)" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "is_measured"), [(9, False), (10, True)])
def test_a_lease_of_few_steps_measures_nothing(
    cluster: Cluster, asked: Asked, steps: int, is_measured: bool
) -> None:
    cluster.submit(asked("a"))
    cluster.tick()
    [folder] = cluster.engine.running
    plan, term = read_plan(folder / PLAN), MeasuredTerm(seconds=0.1)
    device = DeviceRun(
        rank=0, device_type="cpu:fast", host="h", num_samples=8, num_steps=steps + 3,
        predicted_compute_seconds=None, pass_seconds=None, compute_seconds=None, sync_seconds=None,
        update_seconds=None, step_seconds=0.1, step_seconds_spread=None, peak_memory_bytes=None,
        terms=MeasuredTerms(num_steps=steps, step=term, sync=term, update=term),
    )  # fmt: skip
    record = RunRecord(
        plan=plan, status="interrupted", exit_code=143, world_size=1, wall_seconds=9.0,
        num_steps=steps + 3, predicted_step_seconds=plan.predicted.step_seconds,
        measured_step_seconds=0.1, step_seconds_error=None, final_loss=None,
        parameters_digest=None, devices=(device,),
    )  # fmt: skip
    (folder / RUN).mkdir()
    write(folder / RUN / "run.json", record)
    cluster.engine.end(folder, 143)
    cluster.tick(1.0)
    [job] = queue(cluster.store)
    assert (job.measured is not None) == is_measured


def test_a_job_of_more_devices_than_the_policy_gives_is_held(tmp_path: Path, asked: Asked) -> None:
    """AlloX gives a job one device; with a larger one among the jobs no policy's round succeeds."""
    cluster = Cluster(tmp_path / "state", FakeEngine(number=2), policy="allox")
    cluster.submit(asked("large", devices=2, gpus="2xcpu:fast"), asked("a"), asked("b", devices=2))
    cluster.tick()
    assert cluster.states() == ["held", "running", "held"]
    said = "it asks for 2 devices, and allox gives a job 1 at most: submit it with devices=1"
    assert said in str(cluster.job(3)["reason"])
    cluster.want(3, "release")
    cluster.tick(1.0)
    assert cluster.states() == ["held", "running", "held"]


def test_jobs_that_another_policy_let_in_are_held_when_they_have_saved(
    cluster: Cluster, asked: Asked
) -> None:
    cluster.submit(asked("runs", devices=4), asked("waits", devices=4), asked("too", devices=4))
    cluster.tick()
    assert sorted(cluster.states()) == ["queued", "running", "running"]
    cluster.settings = replace(cluster.settings, policy="allox")
    cluster.restart()
    cluster.submit(asked("small"))
    for _ in range(3):
        cluster.tick(1.0)
    assert cluster.states() == ["held", "held", "held", "running"]
    assert sorted(cluster.engine.ended.values()) == [143, 143]
    cluster.settings = replace(cluster.settings, policy="las")
    cluster.restart()
    cluster.want(1, "release")
    cluster.tick(ROUND)
    assert cluster.states() == ["running", "held", "held", "running"]


def test_another_policy_shares_anew_though_no_job_came_or_went(
    tmp_path: Path, asked: Asked
) -> None:
    cluster = Cluster(tmp_path / "state", FakeEngine(number=1), policy="fifo")
    cluster.submit(*(asked(f"job {number}") for number in range(3)))
    for _ in range(4):
        cluster.tick(ROUND)
    assert cluster.states() == ["running", "running", "queued"]
    cluster.settings = replace(cluster.settings, policy="las")
    cluster.restart()
    ran = set[int]()
    for _ in range(4):
        cluster.tick(ROUND)
        cluster.tick()  # who was asked to leave has
        ran |= {number for number, state in enumerate(cluster.states()) if state == "running"}
    assert ran == {0, 1, 2}


@pytest.mark.parametrize("name", ["elastc", "foo"])
def test_an_unknown_policy_is_refused_with_those_that_a_live_cluster_has(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(ProblemError, match=f"no policy '{name}'.*elastic"):
        Cluster(tmp_path / "state", FakeEngine(), policy=name)


def test_more_jobs_than_devices_take_turns_by_weight(tmp_path: Path, asked: Asked) -> None:
    cluster = Cluster(tmp_path / "state", FakeEngine(number=1))
    cluster.submit(asked("heavy", priority_weight=2.0), asked("a"), asked("b"), asked("c"))
    served = dict.fromkeys(range(1, 5), 0)
    for _ in range(60):
        cluster.tick()
        cluster.tick(0.1)  # who was asked to stop has
        assert len(cluster.engine.running) == 2
        for job in cluster.engine.jobs():
            served[job] += 1
        cluster.tick(ROUND)
    assert min(served.values()) >= 15
    assert served[1] == max(served.values())
    assert set(cluster.engine.ended.values()) == {143}


def test_a_successor_waits_until_its_devices_are_free(tmp_path: Path, asked: Asked) -> None:
    engine = FakeEngine(number=1, heeds=False)
    cluster = Cluster(tmp_path / "state", engine)
    cluster.submit(*(asked(name) for name in "abc"))
    cluster.tick()
    before = engine.jobs()
    cluster.tick(ROUND)
    assert engine.jobs() == before
    assert engine.stopping
    cluster.tick(ROUND / 2)
    assert engine.jobs() == before
    late = set(engine.stopping)
    cluster.tick(ROUND + 1.0)  # grace 5 s and 10 s more have passed
    cluster.tick(0.1)
    assert engine.ended == dict.fromkeys(late, 137)
    assert len(engine.running) == 2
    assert engine.jobs() != before


def test_a_failing_job_is_tried_again_and_held_with_its_error(
    cluster: Cluster, asked: Asked
) -> None:
    cluster.submit(asked("bad"))
    for _ in range(MOST_FAILURES):
        assert cluster.states() in (["submitted"], ["queued"])
        cluster.tick(300.0)  # the longest wait after a failure
        [folder] = cluster.engine.running
        cluster.engine.end(folder, 1, "noise\nhetflow: worker 0 failed: boom\n")
        cluster.tick(0.1)
    assert cluster.states() == ["held"]
    assert cluster.job(1)["reason"] == "exit code 1: hetflow: worker 0 failed: boom"
    cluster.want(1, "release")
    cluster.tick(ROUND)
    assert cluster.states() == ["running"]


def test_a_launch_that_cannot_begin_is_no_failure_of_the_job(
    cluster: Cluster, asked: Asked
) -> None:
    """The server rests, twice as long each time; a scheduler that starts meanwhile knows it."""
    cluster.submit(asked("a"))
    cluster.tick()
    waits = []
    for _ in range(MOST_FAILURES + 2):
        [folder] = cluster.engine.running
        cluster.engine.fail_to_begin(folder)
        cluster.tick()
        assert cluster.states() == ["queued"]
        assert str(cluster.job(1)["reason"]).startswith("it could not begin on here, which is left")
        cluster.restart()
        before = cluster.now
        while not cluster.engine.running:
            cluster.tick(1.0)
        waits.append(cluster.now - before)
    assert waits == pytest.approx([10, 20, 40, 80, 160] + [300] * 7, abs=ROUND + 1)
    assert cluster.job(1)["failures"] == 0
    [folder] = cluster.engine.running
    cluster.engine.end(folder, 1)
    cluster.tick()
    cluster.tick(ROUND)  # it began, so the server works; only the job waits
    [folder] = cluster.engine.running
    assert cluster.job(1)["failures"] == 1


def test_others_go_on_beside_a_server_that_rests(cluster: Cluster, asked: Asked) -> None:
    cluster.engine.servers = {"cpu:fast": "left", "cpu:slow": "right"}
    cluster.restart()
    cluster.submit(asked("a"), asked("b"), asked("c"))
    cluster.tick()
    assert len(cluster.engine.running) == 3
    for folder in list(cluster.engine.running):
        cluster.engine.fail_to_begin(folder)
    cluster.tick()
    assert cluster.store.get("rests")["left"][1] == 10.0  # three at once count once
    held = {device.server for work in cluster.engine.running.values() for device in work.devices}
    assert held == {"right"}


def test_what_runs_on_a_server_that_rests_goes_on(cluster: Cluster, asked: Asked) -> None:
    cluster.submit(asked("a"))
    cluster.tick()
    [first] = cluster.engine.running
    cluster.submit(asked("b"))
    cluster.tick(ROUND)
    [second] = set(cluster.engine.running) - {first}
    cluster.engine.fail_to_begin(second)
    cluster.tick(1.0)
    cluster.tick(ROUND - 0.5)  # a round ends, and the server rests for half a second more
    assert cluster.states() == ["running", "queued"]
    assert set(cluster.engine.running) == {first}
    [lease] = cluster.store.rows("SELECT state FROM leases WHERE job = 1")
    assert lease["state"] == "running"
    cluster.tick(ROUND)
    assert cluster.states() == ["running", "running"]


def test_a_launch_that_makes_no_sense_is_held_at_once(cluster: Cluster, asked: Asked) -> None:
    cluster.submit(asked("bad"))
    cluster.tick()
    [folder] = cluster.engine.running
    cluster.engine.end(folder, 2, "hetflow: train.py: no such file\n")
    cluster.tick(0.1)
    assert cluster.states() == ["held"]


def test_jobs_that_can_never_run_are_held_and_hold_up_nobody(
    cluster: Cluster, asked: Asked, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    cluster.submit(
        asked("large", devices=16), asked("odd", batch_size=7), asked("good"),
        asked("unprofiled", profiles=str(tmp_path / "empty")),
    )  # fmt: skip
    cluster.tick()
    assert cluster.states() == ["held", "held", "running", "held"]
    assert "16 are asked for, the cluster has 4" in str(cluster.job(1)["reason"])


def test_hold_release_and_cancel(cluster: Cluster, asked: Asked) -> None:
    cluster.submit(asked("a"), asked("b"))
    cluster.tick()
    cluster.want(1, "hold")
    cluster.want(2, "cancel")
    cluster.tick(0.1)
    cluster.tick(0.1)
    assert cluster.states() == ["held", "cancelled"]
    assert not cluster.engine.running
    cluster.want(1, "release")
    cluster.tick(0.1)
    assert cluster.states() == ["running", "cancelled"]


@pytest.mark.parametrize(("wish", "state"), [("cancel", "cancelled"), ("hold", "held")])
@pytest.mark.parametrize("can_run", [True, False])
def test_a_wish_counts_that_was_made_before_the_scheduler_saw_the_job(
    cluster: Cluster, asked: Asked, wish: Wish, state: str, can_run: bool
) -> None:
    [number] = cluster.submit(asked("a", devices=1 if can_run else 9))
    ask(cluster.store, number, wish)
    for _ in range(3):
        cluster.tick(ROUND)
    assert cluster.states() == [state]
    assert cluster.job(number)["wanted"] is None


def test_users_need_not_wait_for_the_state_while_a_job_is_planned(
    cluster: Cluster, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ClusterStore.open(cluster.folder)
    others.rows("PRAGMA busy_timeout = 0")
    written = []

    def rates_of(*given: object) -> object:
        written.append(submit(others, asked("b")))
        return plans.rates_of(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sharing, "rates_of", rates_of)
    [number] = cluster.submit(asked("a", devices=9))
    cluster.tick()
    ask(cluster.store, number, "release")
    cluster.tick()
    assert len(written) == 3  # of both ticks, and of what was submitted in the first


def test_a_lease_begins_after_its_jobs_last_launch_also_where_some_never_began(
    tmp_path: Path, asked: Asked
) -> None:
    engine = FakeEngine(number=1)
    cluster = Cluster(tmp_path / "state", engine)
    [number] = cluster.submit(asked("a"))
    cluster.tick()
    [first] = engine.running
    lease = leases.open_leases(cluster.store)[0]
    leases.plan_lease(cluster.store, number, lease.devices, cluster.now)
    leases.drop_planned(cluster.store, number, cluster.now)
    engine.end(first, 143)
    cluster.tick(ROUND)
    [work] = engine.running.values()
    assert work.folder.name == "3"
    assert work.after == (first,)


def test_jobs_leave_devices_that_are_drained_or_down(cluster: Cluster, asked: Asked) -> None:
    cluster.submit(asked("a"))
    cluster.tick()
    with cluster.store.transaction():
        cluster.store.set("drained", ["cpu:fast"])
    cluster.tick(ROUND)
    cluster.tick(0.1)
    [work] = cluster.engine.running.values()
    assert work.devices[0].device_type == "cpu:slow"
    assert work.after == (cluster.store.lease_folder(1, 1),)
    cluster.engine.down = {device.name for device in cluster.engine.devices()}
    cluster.tick(ROUND)
    cluster.tick(0.1)
    assert not cluster.engine.running
    assert cluster.states() == ["queued"]
    cluster.engine.down = set()
    cluster.tick(ROUND)
    assert cluster.states() == ["running"]


def test_a_job_waits_where_its_engine_cannot_use_just_these_devices(
    cluster: Cluster, asked: Asked
) -> None:
    cluster.engine.refused = {f"cpu:fast:{number}" for number in range(4)}
    cluster.submit(asked("a"))
    cluster.tick()
    assert cluster.states() == ["queued"]
    assert cluster.job(1)["reason"] == "it waits for other devices"
    cluster.engine.refused = set()
    cluster.tick(ROUND)
    assert cluster.states() == ["running"]
    assert cluster.job(1)["reason"] is None


def test_stop_ends_all_leases_and_keeps_all_jobs(cluster: Cluster, asked: Asked) -> None:
    cluster.submit(*(asked(str(i)) for i in range(9)))
    cluster.tick()
    assert not cluster.scheduler.stop(cluster.now)
    assert cluster.scheduler.stop(cluster.now + 0.1)
    assert cluster.states() == ["queued"] * 9
    cluster.restart()
    cluster.tick(10_000.0)
    assert cluster.job(1)["target_seconds"] == pytest.approx(0.0, abs=1.0)  # while it was off
    assert len(cluster.engine.running) == 8


def test_a_policy_without_an_answer_moves_nobody_and_says_so(
    tmp_path: Path, engine: FakeEngine, asked: Asked, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path / "state", engine, policy="min_cost")  # it needs prices
    cluster.submit(asked("a"))
    for _ in range(3):
        cluster.tick(ROUND)
    assert cluster.states() == ["queued"]
    assert "nobody moves in this round" in caplog.text


def test_entities_share_by_weight_whatever_the_number_of_their_jobs(
    tmp_path: Path, asked: Asked
) -> None:
    cluster = Cluster(tmp_path / "state", FakeEngine(number=2))
    tree = (Entity(name="vision", weight=1.0), Entity(name="speech", weight=1.0))
    cluster.settings = replace(cluster.settings, policy="hierarchical", entities=tree)
    cluster.restart()
    cluster.submit(*(asked(f"v{i}", entity="vision", devices=2) for i in range(3)))
    cluster.submit(asked("s", entity="speech", devices=2), asked("lost", entity="nobody"))
    for _ in range(12):
        cluster.tick()
        cluster.tick(0.1)  # who was asked to stop has
        cluster.now += ROUND
    [*vision, speech, _] = queue(cluster.store)
    assert cluster.states()[-1] == "held"
    assert "belongs to 'nobody', which is none of the entities" in str(cluster.job(5)["reason"])
    had = sum(job.device_seconds for job in vision)
    assert speech.target_seconds == pytest.approx(
        sum(job.target_seconds for job in vision), rel=0.34
    )
    assert speech.target_seconds > 2 * max(job.target_seconds for job in vision)
    assert had > 0


def test_a_policy_of_prices_knows_those_of_the_pool(tmp_path: Path, asked: Asked) -> None:
    """The slow type is half as fast; what a policy leaves idle to save money stays idle."""
    engine = FakeEngine(number=1)
    cluster = Cluster(tmp_path / "state", engine)
    for dollars, kind in ((0.1, "cpu:slow"), (10.0, "cpu:fast")):
        prices = {"cpu:fast": 1.0, "cpu:slow": dollars}
        cluster.settings = replace(
            cluster.settings, policy="min_cost_ratio", dollars_per_hour=prices
        )
        cluster.restart()
        cluster.submit(asked("a"))
        cluster.tick(ROUND)
        cluster.tick(0.1)
        [work] = engine.running.values()
        assert [device.device_type for device in work.devices] == [kind]
        engine.end(work.folder, 0)
        cluster.tick(0.1)


def test_a_state_of_other_devices_is_refused(cluster: Cluster, engine: FakeEngine) -> None:
    engine.number = 2
    with pytest.raises(ProblemError, match="other devices"):
        cluster.restart()


@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0, 143, 1, None])), min_size=1,
                max_size=12))  # fmt: skip
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_scheduler_killed_anywhere_loses_no_job_and_runs_none_twice(
    tmp_path_factory: pytest.TempPathFactory, asked: Asked,
    history: list[tuple[int, int | None]],
) -> None:  # fmt: skip
    """The fake engine asserts that no device and no job is in two leases at once."""
    points = Points()
    engine = MortalEngine(FakeEngine(number=1), points)
    cluster = Cluster(tmp_path_factory.mktemp("state"), engine)  # type: ignore[arg-type]
    cluster.submit(*(asked(str(i)) for i in range(4)))
    for left, code in history:
        points.fatal = points.passed + left
        try:
            cluster.tick(ROUND)
            cluster.tick(0.1)
        except Died:
            cluster.store.close()
            cluster.restart()
        if engine.inner.running and code is not None:
            engine.inner.end(next(iter(engine.inner.running)), code)
    points.fatal = None
    for _ in range(20):
        for folder in list(engine.inner.running):
            engine.inner.end(folder, 0)
        cluster.tick(ROUND)
        cluster.tick(0.1)
    assert cluster.states() == ["done"] * 4
    done = [folder.parent.parent.name for folder, code in engine.inner.ended.items() if code == 0]
    assert sorted(done) == ["1", "2", "3", "4"]
