"""The local engine: leases as processes that outlive whoever started them."""

import os
import signal
import sys
from pathlib import Path

import pytest

from hetflow.clusters.engines.local import LocalEngine
from hetflow.clusters.engines.protocol import ENGINES, FIRST_STEP, Fate, ResizingEngine, Work
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError

from .leases import output, until, work

pytestmark = pytest.mark.processes
POOL = Cluster.parse("1xcpu:fast,2xcpu:slow")
SAVES = """
import signal, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a launch: at a second one it ends
    time.sleep(0.3)
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_lease_is_absent_then_runs_then_has_ended(tmp_path: Path) -> None:
    engine, lease = LocalEngine(POOL), tmp_path / "a lease's; $(touch x)\n"
    lease.mkdir()
    assert engine.fate(lease) == Fate("absent")
    engine.start(
        work(engine, lease, sys.executable, "-c", "print('$(hi) `x`'); raise SystemExit(7)")
    )
    assert engine.fate(lease).is_open
    until(lambda: engine.fate(lease).state == "ended")
    assert engine.fate(lease) == Fate("ended", 7)
    assert output(lease) == "$(hi) `x`\n"
    assert not (tmp_path / "x").exists()


def test_another_scheduler_adopts_a_lease_and_starts_it_no_second_time(tmp_path: Path) -> None:
    first, lease = LocalEngine(POOL), tmp_path / "lease"
    given = work(first, lease, sys.executable, "-c", SAVES)
    first.start(given)
    until(lambda: output(lease) == "ready\n")
    second = LocalEngine(POOL)
    second.start(given)
    assert second.fate(lease) == Fate("running")
    (lease / FIRST_STEP).parent.mkdir()
    (lease / FIRST_STEP).touch()
    assert first.fate(lease) == second.fate(lease) == Fate("training")
    for _ in range(3):
        second.stop(lease)
    until(lambda: second.fate(lease).state == "ended")
    assert second.fate(lease) == Fate("ended", 143)
    second.start(given)
    assert first.fate(lease) == second.fate(lease) == Fate("ended", 143)
    assert output(lease) == "ready\nsaved\n"


def test_a_lease_whose_keeper_is_killed_runs_until_it_has_saved(tmp_path: Path) -> None:
    engine, lease = LocalEngine(POOL), tmp_path / "lease"
    engine.start(work(engine, lease, sys.executable, "-c", SAVES))
    until(lambda: output(lease) == "ready\n")
    os.kill(engine.keepers[lease].pid, signal.SIGKILL)
    until(lambda: engine.fate(lease).state == "ended")
    assert engine.fate(lease) == Fate("ended", None)
    assert output(lease) == "ready\nsaved\n"


def test_what_heeds_no_signal_is_killed(tmp_path: Path) -> None:
    engine, lease = LocalEngine(POOL), tmp_path / "lease"
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    engine.start(work(engine, lease, sys.executable, "-c", deaf + "time.sleep(60)"))
    until(lambda: output(lease) == "1\n")
    engine.stop(lease)
    assert engine.fate(lease) == Fate("running")
    engine.kill(lease)
    until(lambda: engine.fate(lease).state == "ended")
    assert engine.fate(lease) == Fate("ended", 137)


def test_a_program_that_is_not_there_ends_and_says_so(tmp_path: Path) -> None:
    engine, lease = LocalEngine(POOL), tmp_path / "lease"
    engine.start(work(engine, lease, "/no such program"))
    until(lambda: engine.fate(lease).state == "ended")
    assert engine.fate(lease) == Fate("ended", 127)
    assert "No such file" in output(lease)


@pytest.mark.slow
def test_devices_are_named_and_servers_refused() -> None:
    names = [device.name for device in ENGINES.get("local")(POOL).devices()]
    assert names == ["cpu:fast:0", "cpu:slow:0", "cpu:slow:1"]
    with pytest.raises(ProblemError, match="this host has 0"):
        LocalEngine(Cluster.parse("1xNoSuchDevice"))
    with pytest.raises(ProblemError, match="2 servers"):
        LocalEngine(Cluster.parse("2x(1xcpu:fast)"))


def test_a_launch_sees_its_own_accelerators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = {f"V100:{number}": ("cuda", f"cuda:{number}") for number in range(3)}
    monkeypatch.setattr("hetflow.clusters.engines.local._accelerators", lambda pool: gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    engine = LocalEngine(Cluster.parse("3xV100,1xcpu:fast"))
    devices = engine.devices()
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    for name, held, expected in (("a", devices[1:3], "5,6\n"), ("b", devices[3:], "\n")):
        lease = tmp_path / name
        lease.mkdir()
        command = (sys.executable, "-c", show)
        engine.start(Work(folder=lease, command=command, directory=lease, devices=held))
        until(lambda lease=lease: engine.fate(lease).state == "ended")  # type: ignore[misc]
        assert output(lease) == expected


def test_a_launch_changes_among_the_hosts_own_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = {f"V100:{number}": ("cuda", f"cuda:{number}") for number in range(2)}
    monkeypatch.setattr("hetflow.clusters.engines.local._accelerators", lambda pool: gpus)
    engine = LocalEngine(Cluster.parse("2xV100,2xcpu:fast"))
    assert isinstance(engine, ResizingEngine)
    gpu, other, fast, faster = engine.devices()
    assert engine.can_resize([fast], [fast, faster])
    for held, wanted in (([gpu], [other]), ([gpu], [fast]), ([fast], [gpu]), ([gpu, other], [gpu])):
        assert not engine.can_resize(held, wanted)
