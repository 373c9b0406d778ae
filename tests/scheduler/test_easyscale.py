"""EasyScale's schedulers on a live cluster: launches with real control folders."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.mechanisms.easyscale import Elastic, Variant
from hetflow.clusters.mechanisms.seats import DeviceLayout
from hetflow.clusters.scheduler import view
from hetflow.clusters.scheduler.leases import PLAN
from hetflow.clusters.scheduler.plans import may_mix, plan_on, rates_and_wish
from hetflow.clusters.scheduler.submission import Submission
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.files import read_plan

from .conftest import FakeEngine, profile
from .resizable import ResizableEngine
from .test_loop import ROUND, Asked, Cluster
from .test_replay import started
from .test_resizes import held, step


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[ResizableEngine]:
    """Two fast devices and two slow ones, and launches that can be resized."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    made = ResizableEngine(number=2)
    yield made
    for launch in made.launches.values():
        launch.box.close()


def ranged(asked: Asked, name: str, most: int = 4, **given: object) -> Submission:
    sizes = {"batch_size": 32, "virtual_nodes": 8}
    return asked(name, devices=most, devices_at_most=most, **{**sizes, **given})


def types(cluster: Cluster) -> dict[int, str]:
    """What each job holds, f and s, by the state file."""
    return {
        job: "".join(sorted(name.removeprefix("cpu:")[0] for name in names.split()))
        for job, names in held(cluster).items()
    }


@pytest.mark.parametrize("restarts", [False, True])
def test_an_elastic_job_grows_over_both_types_and_gives_back_what_fixed_jobs_need(
    tmp_path: Path, engine: ResizableEngine, asked: Asked, restarts: bool
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "easyscale")

    def settle() -> dict[int, str]:
        """What each job holds long before the round ends."""
        for _ in range(4):
            step(cluster, engine)
            if restarts:
                cluster.restart()
        return types(cluster)

    cluster.submit(ranged(asked, "a"))
    assert settle() == {1: "ffss"}
    slots = engine.launches[engine.jobs()[1]].config.workers
    assert Counter(slot.device_type for slot in slots) == {"cpu:fast": 2, "cpu:slow": 2}
    cluster.submit(asked("fixed", devices=2))
    assert settle() == {1: "ss", 2: "ff"}
    pair = ranged(asked, "pair", 2, devices_at_least=2)
    cluster.submit(pair, asked("named", gpus="1xcpu:slow"))
    assert settle() == {1: "s", 2: "ff", 4: "s"}
    assert cluster.states() == ["running", "running", "queued", "running"]
    engine.end(engine.jobs()[2], 0)
    assert settle() == {1: "s", 3: "ff", 4: "s"}  # its speed-up per device is higher
    engine.end(engine.jobs()[4], 0)
    assert settle() == {1: "ss", 3: "ff"}
    engine.end(engine.jobs()[3], 0)
    assert settle() == {1: "ffss"}
    engine.end(engine.jobs()[1], 0)
    cluster.tick()
    assert cluster.states() == ["done"] * 4
    rows = {row.number: row for row in view.queue(cluster.store)}
    assert (rows[1].leases, rows[1].resizes) == (1, 4)  # never stopped
    assert rows[1].device_seconds == pytest.approx(rows[1].target_seconds, abs=4.0)


def test_a_job_that_cannot_be_resized_saves_and_starts_on_what_is_left(
    tmp_path: Path, asked: Asked
) -> None:
    """The fake engine fails the test where a device is given away twice."""
    fake = FakeEngine(number=2)
    cluster = Cluster(tmp_path / "state", fake, "easyscale")
    cluster.submit(ranged(asked, "a"))
    cluster.tick()
    first = fake.jobs()[1]
    cluster.submit(asked("fixed", devices=2))
    for _ in range(3):
        cluster.tick(0.1)
    assert fake.ended == {first: 143}
    assert {job: [d.device_type for d in fake.running[folder].devices]
            for job, folder in fake.jobs().items()} == {
        1: ["cpu:slow"] * 2, 2: ["cpu:fast"] * 2
    }  # fmt: skip
    used = [w.device_type for w in lower(read_plan(first / PLAN)).workers]
    assert sorted(used) == ["cpu:fast"] * 2 + ["cpu:slow"] * 2
    [row] = cluster.store.rows("SELECT predicted_steps_per_second AS rate FROM leases "
                               "WHERE job = 1 AND number = 1")  # fmt: skip
    assert row["rate"] == 1.0 / read_plan(first / PLAN).predicted.step_seconds


def test_another_policy_goes_on_with_a_job_on_two_types_and_counts_what_it_did(
    tmp_path: Path, engine: ResizableEngine, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "easyscale")
    started(cluster, "2xcpu:fast,2xcpu:slow")
    cluster.submit(ranged(asked, "a", steps=1e6), asked("b", steps=1e6))
    step(cluster, engine)
    step(cluster, engine)
    assert types(cluster) == {1: "fss", 2: "f"}
    steps = 1.0 / plan_on(ranged(asked, "a"), {"cpu:fast": 1, "cpu:slow": 2}).predicted.step_seconds
    step(cluster, engine, ROUND)
    cluster.settings = replace(cluster.settings, policy="las")
    cluster.restart()
    for seconds in (ROUND, ROUND, 0.1, 0.1, 0.1, 0.1):
        step(cluster, engine, seconds)
    active = cluster.scheduler._state.active
    place = [job.id for job in active.jobs].index("1")
    assert active.left[place] < 1e6 - ROUND * steps
    assert set(map(len, types(cluster).values())) == {1, 2}
    with cluster.store.transaction():
        known = cluster.store.get("started_with")
        cluster.store.set("started_with", known | {"policy": "easyscale"})
    assert run(["cluster", "replay", "--state", str(cluster.folder)]) == 2
    assert "not simulated under easyscale" in capsys.readouterr().err


def test_all_devices_of_a_job_are_on_one_server_and_one_that_none_can_hold_is_held(
    tmp_path: Path, asked: Asked
) -> None:
    engine = FakeEngine(number=2, servers={"cpu:slow": "there"})
    cluster = Cluster(tmp_path / "state", engine, "easyscale")
    cluster.submit(
        *(ranged(asked, name) for name in "abc"), ranged(asked, "large", devices_at_least=3),
        asked("both", gpus="1xcpu:fast,1xcpu:slow", devices=2), asked("huge", devices=3),
    )  # fmt: skip
    cluster.tick()
    held = {job: [d.name for d in engine.running[folder].devices]
            for job, folder in engine.jobs().items()}  # fmt: skip
    assert held == {1: ["cpu:fast:0"], 2: ["cpu:fast:1"], 3: ["cpu:slow:0", "cpu:slow:1"]}
    assert cluster.states() == ["running"] * 3 + ["held"] * 3
    reasons = [str(cluster.job(number)["reason"]) for number in (4, 5, 6)]
    assert "3 are asked for, the cluster has 2" in reasons[0]
    assert "1xcpu:fast,1xcpu:slow on one server, and none can hold it" in reasons[1]
    assert "3 are asked for, the cluster has 2" in reasons[2]


def test_a_job_too_large_for_each_type_begins_on_both(
    tmp_path: Path, engine: ResizableEngine, asked: Asked
) -> None:
    cluster = Cluster(tmp_path / "state", engine, "easyscale")
    cluster.submit(ranged(asked, "large", devices_at_least=3))
    step(cluster, engine)
    cluster.submit(ranged(asked, "a"))
    step(cluster, engine)
    assert types(cluster) == {1: "ffss"}
    cluster.restart()
    step(cluster, engine, ROUND)
    assert types(cluster) == {1: "ffss"}
    assert cluster.store.get("rounds")["mixes"]


@pytest.mark.parametrize(
    ("level", "emulated", "mixes"),
    [
        ("elastic", True, True),  # all on this host's processors
        ("elastic", False, False),
        ("static", False, False),
        ("heterogeneous", False, True),
        ("none", False, True),
    ],
)
def test_the_level_of_determinism_says_who_may_hold_several_types(
    tmp_path: Path, asked: Asked, level: str, emulated: bool, mixes: bool
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for number, seconds in enumerate((0.02, 0.04)):
        document = profile(f"gpu{number}", seconds, 0.1)
        if not emulated:
            del document["emulation"]
        (folder / f"{number}.json").write_text(json.dumps(document))
    job = ranged(asked, "a", profiles=str(folder), determinism=level)
    assert may_mix(job, ["gpu0", "gpu1"]) is mixes
    assert may_mix(job, ["gpu0"])
    layout = DeviceLayout(((2,), (2,)), ((0,), (0,)))
    rates, wish = rates_and_wish(job, {"gpu0": 2, "gpu1": 2}, layout, Variant())
    assert isinstance(wish, Elastic)
    assert wish.mixes is mixes
    assert [rate.scale_factor for rate in rates] == [1, 2]
    expected = plan_on(job, {"gpu0": 1, "gpu1": 1}).predicted.step_seconds
    assert wish.rate((1, 1)) == 1.0 / expected
    assert wish.rate((2, 0)) == 1.0 / plan_on(job, {"gpu0": 2}).predicted.step_seconds
    large = replace(job, devices_at_least=3)
    if mixes:
        assert (
            rates_and_wish(large, {"gpu0": 2, "gpu1": 2}, layout, Variant())[0][0].scale_factor == 4
        )
    else:
        with pytest.raises(InfeasibleError, match="3 are asked for"):
            rates_and_wish(large, {"gpu0": 2, "gpu1": 2}, layout, Variant())
