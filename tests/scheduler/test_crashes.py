"""A scheduler that dies between any two of its statements; a disk that is full; a lost node.

Everything happens in one process: dying is an exception that nothing catches, and what was not
committed is rolled back, as SQLite does for a process that was killed.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetflow.clusters.engines.protocol import ENGINES, Fate, Work
from hetflow.clusters.scheduler.leases import folder_of, open_leases
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.serve import serve
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import submit
from hetflow.clusters.scheduler.view import ask, drain
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.errors import FileError

from .conftest import FakeEngine
from .mortal import Died, MortalEngine, Points
from .resizable import OneTypeEngine, ResizableEngine
from .test_loop import ROUND, RULES, Asked, Cluster

SHARE = int(os.environ.get("HETFLOW_DEATHS", "7"))
"""Of how many points at which a scheduler can die the slow tests try one; by hand, 1 tries all."""
Play = Callable[["Mortal", Asked], None]


class MortalStore(ClusterStore):
    """Dies before a statement that writes, before a commit, or after it."""

    points = Points()

    def run(self, statement: str, *values: object) -> int:
        self.points()
        return super().run(statement, *values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        with super().transaction():
            yield
            self.points()
        self.points()


class Mortal(Cluster):
    """A cluster whose scheduler dies at a point, and is started again."""

    def __init__(
        self, folder: Path, points: Points, fake: FakeEngine, policy: str = "las_weighted"
    ) -> None:
        self.points, self.fake = points, fake
        super().__init__(folder, MortalEngine(self.fake, points), policy)  # type: ignore[arg-type]

    def restart(self) -> None:
        MortalStore.points = self.points
        while True:
            try:
                self.store = MortalStore.create(self.folder)
                ClusterStore.run(self.store, "PRAGMA synchronous = OFF")  # no power is lost here
                self.scheduler = Scheduler(self.store, self.engine, self.settings)
            except Died:
                continue
            return

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        while True:
            try:
                self.scheduler.tick(self.now)
            except Died:
                self.store.close()
                self.now += ROUND  # nobody was there for a while
                self.restart()
                continue
            break
        if isinstance(self.fake, ResizableEngine):
            self.fake.serve()
        self.check()

    def check(self) -> None:
        """No launch that the state does not know, and no job twice (the engine looks, too)."""
        known = {folder_of(self.store, lease) for lease in open_leases(self.store)}
        assert set(self.fake.running) <= known
        if isinstance(self.fake, ResizableEngine):
            self.fake.check(self.store)
        assert len(self.states()) == 4

    def end_one(self, code: int | None) -> None:
        for folder in sorted(self.fake.running)[:1]:
            self.fake.end(folder, code, "hetflow: worker 0 failed: boom\n")


def play(cluster: Mortal, asked: Asked) -> None:
    """Turns, a failure, a launch that never begins, hold, cancel, release, drain, a lost node."""
    users = ClusterStore.open(cluster.folder)  # they do not die with the scheduler
    for job in (asked("a", priority_weight=2.0), asked("b"), asked("c"), asked("d")):
        submit(users, job)
    for _ in range(3):
        cluster.tick(ROUND)
        cluster.tick(0.1)
    cluster.end_one(1)
    ask(users, 2, "hold")
    cluster.tick(1.0)
    cluster.tick(ROUND)
    for folder in sorted(cluster.fake.running)[:1]:
        cluster.fake.fail_to_begin(folder)
    ask(users, 4, "cancel")
    cluster.tick(1.0)
    cluster.tick(2 * ROUND)
    drain(users, "cpu:slow", undo=False)
    cluster.tick(ROUND)
    ask(users, 2, "release")
    cluster.tick(0.1)
    cluster.end_one(None)  # its node is lost
    cluster.fake.down = {"cpu:fast:0"}
    cluster.tick(ROUND)
    drain(users, "cpu:slow", undo=True)
    cluster.fake.down = set()
    for _ in range(8):
        cluster.tick(ROUND)
        cluster.tick(0.1)
        cluster.end_one(0)
    cluster.tick(0.1)
    users.close()


def play_resizes(cluster: Mortal, asked: Asked) -> None:
    """Jobs exchange devices, wait for others', are refused, and go on somewhere else at last."""
    assert isinstance(cluster.fake, ResizableEngine)
    users = ClusterStore.open(cluster.folder)
    for job in (asked("a", priority_weight=2.0), asked("b"), asked("c"), asked("d")):
        submit(users, job)

    def rounds(number: int) -> None:
        for _ in range(number):
            cluster.tick(ROUND)
            for _ in range(3):  # asked, answered, recorded
                cluster.tick(0.1)

    rounds(3)
    ask(users, 4, "cancel")
    rounds(2)
    cluster.fake.answer = "refused"
    rounds(1)
    cluster.fake.answer = "done"
    drain(users, "cpu:fast", undo=False)
    rounds(1)
    drain(users, "cpu:fast", undo=True)
    cluster.tick(ROUND)
    cluster.end_one(1)  # in a resize
    cluster.tick(0.1)
    cluster.tick(ROUND)
    ask(users, 1, "hold")
    rounds(1)
    ask(users, 1, "release")
    rounds(2)
    while set(cluster.states()) - {"done", "cancelled"}:
        cluster.end_one(0)
        rounds(1)
    users.close()


def play_elastic(cluster: Mortal, asked: Asked) -> None:
    """Jobs shrink for others, wait, are refused once, and grow when others end."""
    assert isinstance(cluster.fake, ResizableEngine)
    users = ClusterStore.open(cluster.folder)
    most = {"devices": 4, "devices_at_most": 4, "batch_size": 32, "virtual_nodes": 8}
    for job in (asked("a", **most), asked("b", **most), asked("c"),
                asked("d", **most, devices_at_least=2)):  # fmt: skip
        submit(users, job)

    def settle(seconds: float = 0.1) -> None:
        cluster.tick(seconds)
        for _ in range(3):  # asked, answered, recorded
            cluster.tick(0.1)

    settle()
    ask(users, 2, "hold")
    settle()
    ask(users, 4, "cancel")
    settle()
    ask(users, 2, "release")
    settle()
    ask(users, 3, "hold")
    cluster.fake.answer = "refused"
    settle()
    cluster.fake.answer = "done"
    ask(users, 3, "release")
    cluster.tick(0.1)
    cluster.end_one(1)  # in a resize
    settle(ROUND)
    while set(cluster.states()) - {"done", "cancelled"}:
        cluster.end_one(0)
        settle(ROUND)
    users.close()


ENGINES_OF = {play: FakeEngine, play_resizes: ResizableEngine, play_elastic: ResizableEngine}


def dies_at(
    folder: Path, asked: Asked, fatal: int | None, play: Play = play, number: int = 1,
    policy: str = "las_weighted",
) -> tuple[int, int]:  # fmt: skip
    """Play it all with a death at a point; how many points and how many resizes there were."""
    points = Points(fatal)
    fake = (OneTypeEngine if policy == "elastic" else ENGINES_OF[play])(number)
    cluster = Mortal(folder, points, fake, policy)
    play(cluster, asked)
    assert cluster.states() == ["done", "done", "done", "cancelled"]
    done = sorted(int(one.parent.parent.name) for one, code in cluster.fake.ended.items()
                  if code == 0)  # fmt: skip
    assert done == [1, 2, 3]
    assert not cluster.fake.running
    [row] = cluster.store.rows("SELECT sum(resizes) AS number FROM jobs")
    cluster.store.close()
    return points.passed, row["number"]


@pytest.mark.parametrize(
    "share", [pytest.param(48), pytest.param(SHARE, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_a_scheduler_that_dies_at_any_statement_loses_no_job_and_runs_none_twice(
    tmp_path: Path, asked: Asked, share: int
) -> None:
    number, _ = dies_at(tmp_path / "whole", asked, None)
    assert number > 200
    for fatal in range(1, number + 1, share):
        dies_at(tmp_path / str(fatal), asked, fatal)


@pytest.mark.parametrize(
    "share",
    [pytest.param(480), pytest.param(8 * SHARE, marks=pytest.mark.slow)],
    ids=["some", "many"],
)
def test_a_scheduler_that_dies_in_a_resize_adopts_what_the_launch_holds(
    tmp_path: Path, asked: Asked, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    number, resizes = dies_at(tmp_path / "whole", asked, None, play_resizes, 2)
    assert resizes > 5
    for fatal in range(1, number + 1, share):
        dies_at(tmp_path / str(fatal), asked, fatal, play_resizes, 2)


@pytest.mark.parametrize(
    ("policy", "devices", "share"),
    [
        pytest.param("elastic", 4, 128, id="some"),
        pytest.param("elastic", 4, 40, id="many", marks=pytest.mark.slow),
        pytest.param("easyscale-taking", 2, 80, id="two-types", marks=pytest.mark.slow),
    ],
)
def test_a_scheduler_that_dies_while_jobs_grow_and_shrink_loses_none(
    tmp_path: Path, asked: Asked, policy: str, devices: int, share: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """``devices`` are those of each type."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    number, resizes = dies_at(tmp_path / "whole", asked, None, play_elastic, devices, policy)
    assert resizes > (3 if policy == "elastic" else 2)
    for fatal in range(1, number + 1, share):
        dies_at(tmp_path / str(fatal), asked, fatal, play_elastic, devices, policy)


def test_a_full_disk_under_the_state_loses_nothing(
    tmp_path: Path, engine: FakeEngine, asked: Asked
) -> None:
    """SQLite is told that its file may not grow, which is what it says of a full disk."""
    cluster = Cluster(tmp_path / "state", engine)
    cluster.submit(asked("before"))
    cluster.tick()
    others = ClusterStore.open(cluster.folder)
    numbers = [submit(others, asked(f"job {number}")) for number in range(30)]
    cluster.store.run("PRAGMA max_page_count = 1")  # that is: no more than there are
    for _ in range(2):
        with pytest.raises(FileError, match="full"):
            cluster.tick(ROUND)
    assert cluster.states() == ["running"] + ["submitted"] * len(numbers)
    assert len(engine.running) == 1
    cluster.store.close()
    cluster.restart()
    for _ in range(12):
        cluster.tick(ROUND)
        cluster.tick(0.1)  # who was asked to leave has
        for folder in list(engine.running):
            engine.end(folder, 0)
        cluster.tick(0.1)
    assert cluster.states() == ["done"] * 31


@dataclass
class FullEngine(FakeEngine):
    """Its disk has no room for the first launches; the last one ends, and with it the test."""

    tries: int = 0
    state: Path = Path()

    def start(self, work: Work) -> None:
        self.tries += 1
        if self.tries <= 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().start(work)

    def fate(self, folder: Path) -> Fate:
        if folder in self.running:
            self.end(folder, 0)
            store = ClusterStore.open(self.state)
            with store.transaction():
                store.set("stop", True)
        return super().fate(folder)


def test_a_scheduler_waits_for_room_and_goes_on(
    tmp_path: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetflow.clusters.scheduler.serve.AGAIN_SECONDS", 0.0)
    engine = FullEngine(state=tmp_path / "state")
    monkeypatch.setattr(ENGINES, "get", lambda name: lambda pool: engine)
    store = ClusterStore.create(engine.state)
    submit(store, asked("a"))
    said: list[str] = []
    serve(engine.state, Pool.parse("4xcpu:fast"), "full", ClusterSettings(rules=RULES), said.append)
    assert [line.partition(";")[0] for line in said[1:]] == [
        "[Errno 28] No space left on device", "the state can be written again",
        "all jobs have saved and ended",
    ]  # fmt: skip
    assert [row["state"] for row in store.rows("SELECT state FROM jobs")] == ["done"]
