"""The ray engine: which devices it finds, and leases on a real cluster."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetflow.clusters.engines.protocol import ENGINES, Fate, UnsuitableDevicesError, claim
from hetflow.clusters.engines.ray import RayEngine, actor_name, devices_of
from hetflow.runtime.preload import VARIABLE as PRELOAD
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError
from hetflow.tests.engines import ray_nodes
from hetflow.tests.exporters import launch_cases
from hetflow.tests.programs import preloaded
from hetflow.tests.scheduler.conftest import write_workplace
from hetflow.tests.scheduler.test_engines import LONG_SCRIPT, run_two_jobs
from hetflow.tests.scheduler.test_live import left_over

from .leases import output, until, work
from .test_local import SAVES

POOL = Cluster.parse("2xcpu:fast,2xcpu:slow")


def node(name: str, *, is_up: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ``ray.nodes()`` lists it."""
    return {"NodeName": name, "NodeID": "1f", "Alive": is_up, "Resources": resources}


def test_devices_are_accelerators_or_resources_of_their_types_name() -> None:
    nodes = [
        node("n0", CPU=96.0, GPU=8.0, **{"accelerator_type:V100": 1.0}),
        node("n1", CPU=96.0, **{"cpu:slow": 2.0}),
        node("n2", is_up=False),
    ]
    found = devices_of(nodes, ["V100", "cpu:slow", "P100"])
    assert found == {("n0", "V100"): 8, ("n1", "cpu:slow"): 2}
    with pytest.raises(ProblemError, match="2 of Ray's nodes are called n0"):
        devices_of([nodes[0], nodes[0]], ["V100"])


def test_a_lease_is_found_by_its_folder_alone(tmp_path: Path) -> None:
    assert actor_name(tmp_path / "a") == actor_name(tmp_path / "b" / ".." / "a")
    assert actor_name(tmp_path / "a") != actor_name(tmp_path / "b")


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProblemError, match="needs Ray"):
        ENGINES.get("ray")(POOL)


@pytest.mark.skipif(ray_nodes.why_not() is not None, reason="Ray is not installed")
def test_without_a_cluster_it_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # Ray itself tries for many minutes
    with pytest.raises(ProblemError, match="no Ray cluster answers at 127.0.0.1:1"):
        ENGINES.get("ray")(POOL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[dict[str, str], Any]]:
    """The variables that find a cluster which lasts as long as these tests, and its 2nd node."""
    reason = ray_nodes.why_not()
    if reason:
        pytest.skip(reason)
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with ray_nodes.ray_cluster() as made:
        yield made
        ray.shutdown()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def engine(cluster: tuple[dict[str, str], Any], monkeypatch: pytest.MonkeyPatch) -> RayEngine:
    for name, value in cluster[0].items():
        monkeypatch.setenv(name, value)
    return RayEngine(POOL)


@pytest.mark.slow
@pytest.mark.processes
def test_a_lease_runs_on_its_devices_and_ends_with_its_code(
    engine: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [device.name for device in engine.devices()] == [
        "fast0/cpu:fast:0", "fast0/cpu:fast:1", "slow0/cpu:slow:0", "slow0/cpu:slow:1"
    ]  # fmt: skip
    monkeypatch.setenv("OF_THE_SCHEDULER", "$(hi)")
    show = "import os; print(os.environ['OF_THE_SCHEDULER']); raise SystemExit(7)"
    for device, lease in ((0, tmp_path / "a lease's; $(touch x)\n%j"), (2, tmp_path / "b")):
        given = work(engine, lease, sys.executable, "-c", show, device=device)
        assert engine.fate(lease) == Fate("absent")
        engine.start(given)
        until(lambda lease=lease: engine.fate(lease).state == "ended")  # type: ignore[misc]
        assert engine.fate(lease) == Fate("ended", 7)
        assert output(lease) == "$(hi)\n"
    assert not (tmp_path / "x").exists()
    with pytest.raises(UnsuitableDevicesError, match="one node"):
        engine.start(work(engine, tmp_path / "c", "true", device=1, number=2))
    with pytest.raises(ProblemError, match="3 x cpu:slow, Ray's nodes have 2"):
        RayEngine(Cluster.parse("3xcpu:slow"))


@pytest.mark.slow
@pytest.mark.processes
def test_another_scheduler_adopts_a_lease_which_saves_and_is_run_once(
    engine: RayEngine, tmp_path: Path
) -> None:
    lease = tmp_path / "lease"
    given = work(engine, lease, sys.executable, "-c", SAVES)
    engine.start(given)
    until(lambda: output(lease) == "ready\n")
    (lease / "submitted.json").unlink()  # as if it was killed before it had noted that
    second = RayEngine(POOL)
    second.start(given)
    assert second.fate(lease) == Fate("running")
    for _ in range(3):
        second.stop(lease)
    until(lambda: second.fate(lease).state == "ended")
    assert second.fate(lease) == Fate("ended", 143)
    second.start(given)
    assert engine.fate(lease) == Fate("ended", 143)
    assert output(lease) == "ready\nsaved\n"


@pytest.mark.slow
@pytest.mark.processes
def test_what_heeds_no_signal_is_killed_and_what_waits_never_begins(
    engine: RayEngine, tmp_path: Path
) -> None:
    deaf, waits, then = tmp_path / "deaf", tmp_path / "waits", tmp_path / "then"
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    engine.start(work(engine, deaf, sys.executable, "-c", program + "time.sleep(60)", number=2))
    until(lambda: output(deaf) == "1\n")
    for lease in (waits, then):
        engine.start(work(engine, lease, "touch", str(lease / "ran")))
        assert engine.fate(lease) == Fate("waiting")  # Ray keeps it until devices are free
    engine.stop(waits)
    assert engine.fate(waits) == Fate("ended", 143)
    engine.stop(deaf)
    time.sleep(0.5)
    assert engine.fate(deaf) == Fate("running")
    assert not (then / "ran").exists()
    engine.kill(deaf)
    until(lambda: engine.fate(deaf).state == "ended")
    assert engine.fate(deaf) == Fate("ended", 137)
    until(lambda: engine.fate(then).state == "ended")
    assert (then / "ran").exists()
    assert not (waits / "ran").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_an_exported_script_trains_the_plan_on_unlike_nodes(
    cluster: tuple[dict[str, str], Any], tmp_path: Path
) -> None:
    alone = launch_cases.write_case(tmp_path)
    script = launch_cases.write_script(
        tmp_path, "ray", directory=str(tmp_path), setup=[f"export {PRELOAD}={preloaded()}"],
        names={name: f"resource:{name}" for name in ("cpu:fast", "cpu:slow")},
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)], env=launch_cases.environment(**cluster[0]), timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    found = [run.parent for run in tmp_path.glob("hetflow-runs/*/run.json")]
    assert [launch_cases.digest_of(run) for run in found] == [alone]
    assert launch_cases.types_of(found[0]) == ["cpu:fast", "cpu:slow", "cpu:slow"]


@pytest.mark.slow
@pytest.mark.processes
def test_two_jobs_of_a_scheduler_are_moved_and_adopted_and_none_is_left_behind(
    cluster: tuple[dict[str, str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_workplace(tmp_path, LONG_SCRIPT, monkeypatch)
    for name, value in cluster[0].items():
        monkeypatch.setenv(name, value)
    run_two_jobs(tmp_path, "ray")
    assert not left_over(tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_a_lease_of_a_lost_node_has_ended_when_its_launch_has(
    engine: RayEngine, cluster: tuple[dict[str, str], Any], tmp_path: Path
) -> None:
    # The last test of the cluster, which has one node from here on.
    lease = tmp_path / "lease"
    engine.start(work(engine, lease, sys.executable, "-c", SAVES, device=2))
    until(lambda: output(lease) == "ready\n")
    cluster[1].lose()
    until(lambda: engine.fate(lease).state == "ended")
    assert output(lease) == "ready\nsaved\n"  # asked to end by the kernel, when its actor was gone
    until(lambda: [one.is_up for one in engine.devices()] == [True, True, False, False])
    with pytest.raises(UnsuitableDevicesError, match="slow0, which is down"):
        engine.start(work(engine, tmp_path / "next", "true", device=2))
    assert engine.fate(lease) == Fate("ended", None)  # Ray kills what its workers have started
    assert not claim(lease, "engine")
