"""A broken state: what is copied, and how a cluster goes on from the copy."""

from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.engines.protocol import WORK, Work, document_of, write_atomically
from hetflow.clusters.scheduler.copies import COPY, EVERY_SECONDS, Copies
from hetflow.clusters.scheduler.store import FILE, ClusterStore
from hetflow.schema.errors import FileError

from .conftest import FakeEngine
from .test_loop import ROUND, Asked, Cluster


class _Written(FakeEngine):
    """Writes down what it starts, as engines do."""

    def start(self, work: Work) -> None:
        super().start(work)
        write_atomically(work.folder / WORK, document_of(work))


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "state", _Written(number=1))


def spoil(cluster: Cluster) -> None:
    """Overwrite the middle of the file, as a bad disk does."""
    cluster.store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
    cluster.store.close()
    path = cluster.folder / FILE
    whole = path.read_bytes()
    path.write_bytes(b"\0" * len(whole))


def test_a_cluster_goes_on_from_the_copy_and_runs_no_job_twice(
    cluster: Cluster, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    copies = Copies(cluster.store, said.append)
    cluster.submit(asked("a"), asked("b"), asked("c"))
    cluster.tick()
    copies.keep(0.0)
    assert (cluster.folder / COPY).stat().st_mode & 0o077 == 0
    for _ in range(2):  # others have the devices than those that the copy knows of
        cluster.tick(ROUND)
        cluster.tick(0.1)
    running = dict(cluster.engine.jobs())
    assert 3 in running
    spoil(cluster)
    with pytest.raises(FileError, match="not a cluster's state") as refused:
        cluster.restart()
    assert "hetflow cluster recover" in str(refused.value.hint)
    assert run(["cluster", "recover", "--state", str(cluster.folder)]) == 0
    assert "goes on from the copy of" in capsys.readouterr().out
    assert (cluster.folder / f"{FILE}.broken-1").is_file()
    cluster.restart()
    cluster.tick()
    cluster.tick(0.1)
    assert set(running.values()) <= cluster.engine.stopping
    for _ in range(12):  # the engine asserts that no job and no device is used twice
        cluster.tick(ROUND)
        cluster.tick(0.1)
        for folder in list(cluster.engine.running):
            cluster.engine.end(folder, 0)
        cluster.tick(0.1)
    assert cluster.states() == ["done"] * 3
    assert said == []
    assert run(["cluster", "recover", "--state", str(cluster.folder)]) == 2  # it is whole


def test_a_job_that_the_copy_does_not_know_is_named_and_its_number_is_not_used_again(
    cluster: Cluster, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = Copies(cluster.store, print)
    cluster.submit(asked("a"))
    cluster.tick()
    copies.keep(0.0)
    cluster.submit(asked("b"))
    cluster.tick(1.0)
    copies.keep(EVERY_SECONDS - 1.0)  # too soon
    spoil(cluster)
    assert run(["cluster", "recover", "--state", str(cluster.folder)]) == 0
    assert "the copy does not know job 2" in capsys.readouterr().out
    cluster.restart()
    assert cluster.submit(asked("c")) == [3]


def test_a_broken_state_never_replaces_a_good_copy(cluster: Cluster, asked: Asked) -> None:
    said: list[str] = []
    copies = Copies(cluster.store, said.append)
    cluster.submit(asked("a"))
    copies.keep(0.0)
    before = (cluster.folder / COPY).read_bytes()
    copies.keep(EVERY_SECONDS)
    assert (cluster.folder / COPY).read_bytes() == before  # nothing has changed
    cluster.submit(asked("b"))
    spoil(cluster)
    cluster.store = ClusterStore(cluster.folder, cluster.store._connection)
    for turn in range(2, 5):
        copies.keep(turn * EVERY_SECONDS)
    assert (cluster.folder / COPY).read_bytes() == before
    assert len(said) == 1
    assert not list(cluster.folder.glob(f".{COPY}*"))


def test_without_a_copy_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "recover", "--state", str(tmp_path)]) == 2
    assert "has no copy of a state" in capsys.readouterr().err
