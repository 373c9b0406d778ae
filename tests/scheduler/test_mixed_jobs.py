"""Jobs that name their devices, of several types too: all at once, in turns with the others."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.scheduler.history import history
from hetflow.clusters.scheduler.leases import PLAN
from hetflow.clusters.scheduler.submission import Submission
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.files import read_plan

from .conftest import FakeEngine
from .test_loop import ROUND, Cluster
from .test_replay import started

Asked = Callable[..., Submission]
BOTH = "1xcpu:fast,1xcpu:slow"


def mixed(asked: Asked, name: str = "mixed", **given: object) -> Submission:
    return asked(name, **{"gpus": BOTH, "devices": 2, **given})


def types(cluster: Cluster, job: int) -> list[str]:
    """Of the devices that a job holds."""
    return sorted(d.device_type for d in cluster.engine.running[cluster.engine.jobs()[job]].devices)


def test_a_job_gets_the_types_that_it_named_and_a_plan_for_just_these(
    tmp_path: Path, asked: Asked
) -> None:
    cluster = Cluster(tmp_path / "state", FakeEngine(number=2))
    cluster.submit(mixed(asked), asked("slow", gpus="2xcpu:slow", devices=2))
    cluster.tick()
    assert types(cluster, 1) == ["cpu:fast", "cpu:slow"]
    workers = lower(read_plan(cluster.engine.jobs()[1] / PLAN)).workers
    assert sorted(w.device_type for w in workers) == ["cpu:fast", "cpu:slow"]
    nodes = {w.device_type: len(w.virtual_nodes) for w in workers}
    assert nodes == {"cpu:fast": 3, "cpu:slow": 1}  # it is twice as fast
    assert cluster.states() == ["running", "queued"]  # though both fast devices are left
    cluster.engine.end(cluster.engine.jobs()[1], 0)
    cluster.tick(1.0)
    cluster.tick(ROUND)
    assert cluster.states() == ["done", "running"]
    assert types(cluster, 2) == ["cpu:slow"] * 2


def test_jobs_on_several_types_take_turns_with_others_and_survive_the_scheduler(
    tmp_path: Path, asked: Asked
) -> None:
    """The fake engine fails the test where a device is given away twice."""
    cluster = Cluster(tmp_path / "state", FakeEngine(number=1))
    started(cluster, BOTH)
    steps = {1: 1500.0, 2: 1000.0, 3: 1000.0, 4: 1e6}
    cluster.submit(
        mixed(asked, steps=steps[1]), asked("a", steps=steps[2]), asked("b", steps=steps[3])
    )
    turns, left, late = Counter[int](), dict(steps), False
    for number in range(200):
        if number % 5 == 0:
            cluster.restart()  # with, and later without, a column for both types
        cluster.tick()
        cluster.tick(0.1)  # who was asked to stop has
        for job, folder in list(cluster.engine.jobs().items()):
            turns[job] += 1
            assert types(cluster, job) == (["cpu:fast", "cpu:slow"] if job == 1 else
                                           types(cluster, job)[:1])  # fmt: skip
            left[job] -= ROUND / read_plan(folder / PLAN).predicted.step_seconds
            if left[job] <= 0:
                cluster.engine.end(folder, 0)
        cluster.tick(ROUND)
        if cluster.states()[:3] == ["done"] * 3:
            if late:
                break
            late = True
            cluster.submit(asked("late", batch_size=32))  # a new kind: the old ones are forgotten
    assert cluster.states()[:3] == ["done"] * 3
    assert cluster.states()[3:] == ["running"]
    assert min(turns[job] for job in (1, 2, 3)) >= 2
    assert cluster.store.get("rounds")["columns"] == ["cpu:fast", "cpu:slow"]
    [had] = [one for one in history(cluster.store).jobs if one.name == "mixed"]
    assert had.device_seconds == pytest.approx(2 * turns[1] * ROUND, rel=0.1)
    assert had.target_seconds == pytest.approx(had.device_seconds, abs=8 * ROUND)
    assert run(["cluster", "replay", "--state", str(cluster.folder)]) == 0


@pytest.mark.parametrize(
    ("gpus", "policy", "apart", "said"),
    [
        (BOTH, "las", True, "on one server"),
        (BOTH, "fifo_greedy", False, "fifo_greedy gives a job devices of one type"),
        ("1xcpu:fast,3xcpu:slow", "las", False, "3xcpu:slow are asked for, the cluster has 2"),
        ("1xcpu:fast,1xV100", "las", False, "1xV100 are asked for, the cluster has 0"),
        ("2xcpu:fast,1xcpu:slow", "las", False, "uses 2xcpu:fast alone"),
    ],
)
def test_a_job_that_can_never_have_its_devices_is_held_with_the_reason(
    tmp_path: Path, asked: Asked, gpus: str, policy: str, apart: bool, said: str
) -> None:
    engine = FakeEngine(number=2, servers={"cpu:slow": "there"} if apart else {})
    cluster = Cluster(tmp_path / "state", engine, policy)
    number = sum(Pool.parse(gpus).num_devices.values())
    cluster.submit(mixed(asked, gpus=gpus, devices=number), asked("other"))
    cluster.tick()
    assert cluster.states() == ["held", "running"]
    assert said in str(cluster.job(1)["reason"])
