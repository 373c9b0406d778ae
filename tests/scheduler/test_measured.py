"""What jobs measured corrects the throughputs that the next decisions see."""

from pathlib import Path

import pytest

from hetflow.clusters.scheduler.known_jobs import MOST_RATIOS, corrected, note, ratio_on, ratios_of
from hetflow.clusters.scheduler.leases import PLAN, RUN
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.schema.files import read_plan, write
from hetflow.schema.jobs import MixThroughput, ModelThroughput
from hetflow.schema.run import RunRecord

from .conftest import FakeEngine
from .test_easyscale import ranged
from .test_loop import ROUND, Asked, Cluster


def measure(folder: Path, slower: float) -> None:
    """Write the record of a launch whose steps took so much longer than planned."""
    plan = read_plan(folder / PLAN)
    seconds = plan.predicted.step_seconds
    (folder / RUN).mkdir(exist_ok=True)
    record = RunRecord(
        plan=plan, status="interrupted", exit_code=143, world_size=1, wall_seconds=9.0,
        num_steps=40, predicted_step_seconds=seconds, measured_step_seconds=slower * seconds,
        step_seconds_error=None, final_loss=None, parameters_digest=None, devices=(),
    )  # fmt: skip
    write(folder / RUN / "run.json", record, force=True)


def rates(cluster: Cluster, number: int) -> list[float]:
    """Steps per second of a job by type, as policies see them."""
    active = cluster.scheduler._state.active
    place = [job.id for job in active.jobs].index(str(number))
    found: list[float] = active.rate[:, place].tolist()
    return found


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_that_is_slow_on_the_fast_type_goes_to_the_other_one(
    tmp_path: Path, asked: Asked, restarts: bool
) -> None:
    """By its profile a job is twice as fast on the fast type; it turns out to be half as fast."""
    engine = FakeEngine(number=1)
    cluster = Cluster(tmp_path / "state", engine, "max_throughput")
    cluster.submit(asked("a", steps=1e6))
    cluster.tick()
    fast, slow = rates(cluster, 1)
    assert fast > slow
    assert [d.device_type for d in engine.running[engine.jobs()[1]].devices] == ["cpu:fast"]
    cluster.submit(asked("its twin"))
    cluster.tick(ROUND)
    left = cluster.scheduler._state.active.left[0]
    assert left == pytest.approx(1e6 - ROUND * fast)
    measure(engine.jobs()[1], slower=4.0)
    measure(engine.jobs()[2], slower=1.0)
    engine.end(engine.jobs()[1], 1)
    engine.end(engine.jobs()[2], 0)
    cluster.tick(0.1)
    if restarts:
        cluster.restart()
    cluster.submit(asked("of another kind", batch_size=32))  # the policy shares anew
    cluster.tick(ROUND)
    cluster.tick(0.1)
    assert rates(cluster, 1) == pytest.approx([fast / 4, slow])
    types = {job: engine.running[folder].devices[0].device_type
             for job, folder in engine.jobs().items()}  # fmt: skip
    assert types == {1: "cpu:slow", 3: "cpu:fast"}
    left = cluster.scheduler._state.active.left[0]
    cluster.tick(2 * ROUND)
    steps = left - cluster.scheduler._state.active.left[0]
    assert steps == pytest.approx(2 * ROUND * slow, rel=0.02)


def test_proposals_are_made_by_what_was_measured(tmp_path: Path, asked: Asked) -> None:
    engine = FakeEngine(number=2)
    cluster = Cluster(tmp_path / "state", engine, "easyscale")
    cluster.submit(ranged(asked, "a"))
    cluster.tick()
    wish = cluster.scheduler._known.wish("1")
    alone, both = wish.rate((0, 2)), wish.rate((2, 2))  # type: ignore[union-attr]
    measure(engine.jobs()[1], slower=2.0)  # on both types
    engine.end(engine.jobs()[1], 1)
    cluster.tick(0.1)
    cluster.tick(ROUND)
    wish = cluster.scheduler._known.wish("1")
    assert wish.rate((0, 2)) == pytest.approx(alone / 2)  # type: ignore[union-attr]
    assert wish.rate((2, 2)) == pytest.approx(both / 2)  # type: ignore[union-attr]


def test_the_last_ratios_count_by_their_median_and_a_mix_by_its_slowest_part(
    tmp_path: Path,
) -> None:
    store = ClusterStore.create(tmp_path)
    assert not note(store, "kind", ["a"], None, 1.0)
    assert not note(store, "kind", ["a"], 1.0, None)
    for ratio in (9.0, 9.0, 9.0, *range(1, MOST_RATIOS + 1)):
        assert note(store, "kind", ["a"], 2.0, 2.0 * ratio)
    assert note(store, "kind", ["b", "a"], 1.0, 0.25)
    assert note(store, "other", ["b"], 1.0, 7.0)
    known = ratios_of(store, "kind")
    assert known == {"a": 3.0, "a,b": 0.25}
    assert ratio_on(known, ["b", "a", "b"]) == 0.25
    assert ratio_on({"a": 3.0, "b": 2.0}, ["a", "b", "c"]) == 2.0
    assert ratio_on(known, ["c"]) == 3.0  # as on the types that are known
    assert ratio_on({"a,b": 0.25}, ["c"]) == 0.25
    assert ratio_on({}, ["c"]) == 1.0
    alone = ModelThroughput(model="kind", scale_factor=2, steps_per_second={"a": 1.0, "b": 5.0})
    assert corrected(alone, known).steps_per_second == {"a": 3.0, "b": 15.0}
    mix = MixThroughput(
        model="kind", scale_factor=3, devices={"a": 1, "b": 2}, steps_per_second=4.0
    )
    assert corrected(mix, known).steps_per_second == 1.0
