"""Targets and the time of leases are counted once, and no targets while a cluster is stopped."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.clusters.engines.protocol import EngineDevice
from hetflow.clusters.mechanisms.round_state import RoundState
from hetflow.clusters.scheduler.known_jobs import KnownJobs, Ledger
from hetflow.clusters.scheduler.leases import open_leases, plan_lease
from hetflow.clusters.scheduler.occupancy import Places
from hetflow.clusters.scheduler.plans import as_job, rates_of
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit

PLACES = Places(EngineDevice(f"f{i}", "cpu:fast", "here", True) for i in range(2))


def test_time_is_counted_once(tmp_path: Path, asked: Callable[..., Submission]) -> None:
    store = ClusterStore.create(tmp_path / "state")
    job = submit(store, asked("a", devices=2, steps=1e6))
    rates = rates_of(asked("a", devices=2), PLACES.num_devices)
    known = KnownJobs(store, PLACES.num_devices, {})
    assert known.admit({job: rates}, ())
    assert not known.admit({job: rates}, ())
    state = RoundState.empty(known.pool())
    state.admit([as_job(job, known.submission(job), 0.0, rates)], 0.0)
    state.active.share[0, 0] = 0.5
    ledger = Ledger(store, PLACES, known)

    def target() -> float:
        [row] = store.rows("SELECT target_seconds FROM jobs")
        return float(row["target_seconds"])

    ledger.count_targets(state, 100.0)
    assert target() == 0.0  # nobody knows since when
    ledger.count_targets(state, 110.0)
    ledger.pause_targets(state, 114.0)
    ledger.count_targets(state, 200.0)
    assert target() == pytest.approx(2 * 0.5 * 14.0)

    plan_lease(store, job, ["f0", "f1"], 100.0)
    ledger.count_leases(state, open_leases(store), 150.0)  # it has not started
    assert state.active.left[0] == 1e6
    store.run("UPDATE leases SET state = 'running', started = 90")
    ledger.count_leases(state, open_leases(store), 150.0)  # it has made no step
    assert state.active.left[0] == 1e6
    store.run("UPDATE leases SET trained = 100")
    for now in (130.0, 130.0, 140.0, 135.0):  # a clock may be set back
        ledger.count_leases(state, open_leases(store), now)
    seconds = 40.0
    [rate] = [one.steps_per_second["cpu:fast"] for one in rates]  # type: ignore[index]
    assert state.active.held[0, 0] == pytest.approx(seconds)
    assert state.active.received[0, 0] == pytest.approx(seconds)
    assert state.active.left[0] == pytest.approx(1e6 - seconds * rate)
    known.leave(job)
    state.leave({str(job)})
    ledger.count_leases(state, open_leases(store), 500.0)  # of a job that is gone
    assert known.numbers == {}
