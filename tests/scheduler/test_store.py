"""The state's file: what is refused, and what is brought up to date."""

import sqlite3
from pathlib import Path

import pytest

from hetflow.clusters.scheduler.serve import request_stop, serve
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import FILE, FORMAT, ClusterStore
from hetflow.clusters.scheduler.view import queue
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.errors import FileError, ProblemError

from .conftest import FakeEngine
from .test_loop import ROUND, Asked, Cluster


def test_another_database_is_no_state(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("CREATE TABLE other (x)")
    with pytest.raises(FileError, match=f"{FILE}: not a cluster's state: no such table: meta"):
        ClusterStore.open(tmp_path)


def test_an_older_state_goes_on(tmp_path: Path, engine: FakeEngine, asked: Asked) -> None:
    cluster = Cluster(tmp_path / "state", engine)
    cluster.submit(asked("a"))
    cluster.store.close()
    with sqlite3.connect(cluster.folder / FILE) as connection:
        connection.execute("ALTER TABLE jobs DROP COLUMN target_seconds")
        connection.execute("ALTER TABLE leases DROP COLUMN resizing_to")
        connection.execute("DROP TABLE measured")
        connection.execute(
            "UPDATE meta SET value = '\"hetflow.cluster-state/1\"' WHERE key = 'format'"
        )
    with pytest.raises(FileError, match="an older hetflow wrote it"):
        ClusterStore.read(cluster.folder)
    cluster.restart()
    cluster.tick()
    cluster.tick(ROUND)
    [row] = ClusterStore.open(cluster.folder).rows("SELECT state, target_seconds FROM jobs")
    assert (row["state"], row["target_seconds"]) == ("running", ROUND)
    assert ClusterStore.read(cluster.folder).get("format") == FORMAT


def test_a_state_of_before_users_and_first_steps_goes_on(
    tmp_path: Path, engine: FakeEngine, asked: Asked
) -> None:
    """A lease that began under that hetflow counts from its start, as it did there."""
    cluster = Cluster(tmp_path / "state", engine)
    cluster.submit(asked("a"))
    cluster.tick()
    cluster.store.close()
    with sqlite3.connect(cluster.folder / FILE) as connection:
        for table, column in (
            ("jobs", "user"), ("jobs", "uid"), ("jobs", "released"), ("leases", "began"),
            ("leases", "trained"),
        ):  # fmt: skip
            connection.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    engine.starting = {1}
    cluster.restart()
    cluster.tick(ROUND)
    [lease] = cluster.store.rows("SELECT * FROM leases")
    assert lease["began"] == lease["trained"] == lease["started"]
    assert (cluster.job(1)["user"], cluster.job(1)["uid"]) == (None, None)
    [row] = queue(cluster.store)
    assert (row.state, row.user) == ("running", None)
    cluster.engine.end(cluster.engine.jobs()[1], 0)
    cluster.tick()
    [row] = queue(cluster.store)
    assert (row.state, row.device_seconds) == ("done", ROUND)


def test_a_start_that_is_refused_leaves_the_state_as_it_was(
    tmp_path: Path, engine: FakeEngine
) -> None:
    store = Cluster(tmp_path, engine).store
    with store.transaction():
        store.set("started_with", {"policy": "las"})
    for pool, policy in (("1xcpu:fast", "las"), ("4xcpu:fast,4xcpu:slow", "no such policy")):
        with pytest.raises(ProblemError):
            serve(tmp_path, Pool.parse(pool), "local", ClusterSettings(policy=policy), print)
    assert store.get("started_with") == {"policy": "las"}


@pytest.mark.parametrize(
    ("engine", "policy", "said"),
    [
        ("local", "no such policy", "no such policy"),
        ("local", "elastic", "elastic shares devices of one type"),
        ("no such engine", "las", "no such engine"),
    ],
)
def test_a_first_start_that_is_refused_leaves_no_state(
    tmp_path: Path, engine: str, policy: str, said: str
) -> None:
    """`queue` then showed a cluster that never was, and `submit` queued jobs for it."""
    pool = Pool.parse("1xcpu:fast,1xcpu:slow")
    with pytest.raises(ProblemError, match=said):
        serve(tmp_path / "state", pool, engine, ClusterSettings(policy=policy), print)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_cannot_be_begun_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk an empty file stayed, which was no state: nothing could start there again."""
    monkeypatch.setattr(
        "hetflow.clusters.scheduler.store._TABLES", "CREATE TABLE meta (key);\nno SQL"
    )
    with pytest.raises(FileError, match="syntax error"):
        ClusterStore.create(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_no_scheduler_has_run_on_is_not_stopped(tmp_path: Path) -> None:
    ClusterStore.create(tmp_path).close()
    with pytest.raises(ProblemError, match="no scheduler has run on this state yet"):
        request_stop(tmp_path)
