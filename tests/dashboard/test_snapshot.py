"""What the page is told: it must agree with the state, and stay small."""

import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.clusters.dashboard import snapshot as module
from hetflow.clusters.dashboard.snapshot import ShownDevice, ShownLease, snapshot, uses
from hetflow.clusters.scheduler.store import FILE, ClusterStore
from hetflow.clusters.scheduler.view import queue
from hetflow.schema.errors import FileError
from hetflow.tests.profiles import examples
from hetflow.tests.scheduler.test_loop import Cluster

from .conftest import HOSTILE


def test_a_snapshot_agrees_with_the_state(cluster: Cluster) -> None:
    found = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    assert dict(found.names) == dict(enumerate(HOSTILE, 1))
    assert sum(found.counts.values()) == 4
    assert found.counts["done"] == found.counts["held"] == 1
    assert [(d.name, d.server) for d in found.devices] == [
        ("cpu:fast:0", "here"), ("cpu:slow:0", "lab 2"),
    ]  # fmt: skip
    running = {folder.parent.parent.name: work.devices[0].name
               for folder, work in cluster.engine.running.items()}  # fmt: skip
    assert {str(d.job): d.name for d in found.devices if d.job is not None} == running
    rows = cluster.store.rows("SELECT * FROM leases WHERE started IS NOT NULL")
    assert len(found.leases) == len(rows) > 10
    seconds = sum((row["ended"] or cluster.now) - row["started"] for row in rows)
    shown = sum(one.utilisation * one.num_devices for one in found.types)
    assert shown * (found.now - found.since) == pytest.approx(seconds)
    json.dumps(found.to_plain(), allow_nan=False)


def test_received_and_target_are_those_that_the_scheduler_counts_later(cluster: Cluster) -> None:
    cluster.tick()  # at the end of a round
    now = cluster.now + 7.0
    before = snapshot(cluster.store, now=now, window_seconds=None)
    cluster.scheduler.stop(now)  # all leases end now, and what was to be received is counted
    cluster.scheduler.stop(now)
    after = {row.number: row for row in queue(cluster.store)}
    assert any(job.share_devices for job in before.jobs)
    for job in before.jobs:
        row = after[job.queued.number]
        assert job.received_seconds == pytest.approx(row.device_seconds)
        assert job.target_seconds == pytest.approx(row.target_seconds)


def test_a_measured_rate_stands_beside_the_prediction_of_the_same_lease(cluster: Cluster) -> None:
    found = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    [measured] = [job.queued.measured for job in found.jobs if job.queued.measured is not None]
    assert measured.error == pytest.approx(-0.1)
    assert set(measured.devices) <= {device.name for device in found.devices}


def test_what_is_drained_or_down_is_said(cluster: Cluster) -> None:
    with cluster.store.transaction():
        cluster.store.set("drained", ["lab 2"])
    cluster.engine.down.add("cpu:fast:0")
    cluster.tick()
    found = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    assert [(d.is_up, d.is_drained) for d in found.devices] == [(False, False), (True, True)]
    assert [one.num_up for one in found.types] == [0, 0]


def test_the_axis_begins_where_all_turns_are_shown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    monkeypatch.setattr(module, "MOST_LEASES", 6)
    found = snapshot(cluster.store, now=cluster.now, window_seconds=None)
    assert len(found.leases) == 6
    assert found.num_leases_left_out == len(whole.leases) - 6
    assert {one.job for one in found.leases if one.ended is None} == {
        one.job for one in whole.leases if one.ended is None
    }
    late = [one for one in whole.leases if one.ended is None or one.ended > found.since]
    assert uses(found.devices, found.leases, since=found.since, now=found.now) == uses(
        whole.devices, late, since=found.since, now=found.now
    )


def test_a_long_queue_is_cut_and_what_runs_comes_first(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_OPEN_JOBS", 1)
    cluster.tick()
    found = snapshot(cluster.store, now=cluster.now, window_seconds=600.0)
    assert [job.queued.state for job in found.jobs] == ["running", "done"]
    assert found.num_jobs_left_out == 2


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-50, 110), st.floats(0, 80)), max_size=12))
def test_utilisation_is_held_time_over_all_time(held: list[tuple[int, float, float]]) -> None:
    """Against overlaps that are summed one by one; devices may be held twice here."""
    kinds = ("a", "a", "b")
    devices = [
        ShownDevice(name=str(i), device_type=kind, server="", is_up=True, is_drained=False,
                    job=None)
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    leases = [
        ShownLease(job=1, number=i, devices=(place,), state="over", started=start,
                   ended=None if long > 70 else start + long)
        for i, (place, start, long) in enumerate(held)
    ]  # fmt: skip
    for one in uses(devices, leases, since=0.0, now=100.0):
        seconds = sum(
            max(0.0, min(100.0, 100.0 if lease.ended is None else lease.ended)
                - max(0.0, lease.started))
            for lease in leases if kinds[lease.devices[0]] == one.device_type
        )  # fmt: skip
        assert one.utilisation == pytest.approx(seconds / (100.0 * one.num_devices), abs=1e-9)
        assert sum(one.bins) / len(one.bins) == pytest.approx(one.utilisation, abs=1e-4)


def test_a_state_is_opened_for_reading_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a ? 100%41 #x"
    ClusterStore.create(folder).close()
    store = ClusterStore.read(folder)
    assert store.get("format")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store.run("DELETE FROM meta")
    store.close()
    found = snapshot(ClusterStore.read(folder), now=1000.0, window_seconds=600.0)
    assert (found.devices, found.jobs, found.leases) == ((), (), ())


def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no cluster was started there"):
        ClusterStore.read(tmp_path)
    (tmp_path / FILE).write_text("hello, this is no database at all")
    with pytest.raises(FileError, match="not a cluster's state"):
        ClusterStore.read(tmp_path)
    older = ClusterStore.create(tmp_path / "older")
    older.run("ALTER TABLE jobs DROP COLUMN target_seconds")
    older.close()
    with pytest.raises(FileError, match="an older hetflow wrote it"):
        ClusterStore.read(tmp_path / "older")
    ClusterStore.open(tmp_path / "older").close()  # brings it up to date
    ClusterStore.read(tmp_path / "older").close()
