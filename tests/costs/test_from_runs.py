"""Runs correct profiles: the corrected terms give the run's step, and nothing else moves."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.planning.correcting import Correction, correct
from hetflow.planning.costs.observed import Run
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.profile import (
    BatchPoint,
    BusyHost,
    Emulation,
    GradientSum,
    Profile,
    Sync,
    SyncPoint,
)
from hetflow.schema.run import DeviceRun, Generation, MeasuredTerm, MeasuredTerms, RunRecord
from hetflow.tests.parallel_plans import parallel_plan
from hetflow.tests.plan_parts import split_plan, whole_group

SGD = OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0)
ADAM = OptimizerState(name="adam", state_bytes_per_weight_byte=2.0)


def point(size: int, seconds: float, **fields: Any) -> BatchPoint:
    given = {"peak_memory_bytes": 100 * size, **fields}
    return BatchPoint(batch_size=size, step_seconds=seconds, **given)


def profile(name: str = "A", **fields: Any) -> Profile:
    given = {
        "batch_curve": (point(4, 0.4), point(8, 0.6), point(16, 1.0)),
        "update_seconds": 0.05,
        "fixed_seconds": 0.2,
        "optimizer": SGD,
        **fields,
    }
    return Profile(
        model="m", device_type=name, device_memory_bytes=1 << 20, weight_bytes=400, **given
    )


BUSY = BusyHost(
    num_devices=2,
    batch_curve=(point(4, 0.5), point(8, 0.8), point(16, 1.3)),
    update_seconds=0.07,
    fixed_seconds=0.3,
)
SYNC = Sync(num_devices=2, sync_seconds=0.1)

Group = tuple[str, int, int, int]
"""Device type, devices, virtual nodes of each, samples of one."""


def plan(*groups: Group, **fields: Any) -> Plan:
    made = tuple(
        whole_group(
            device_type=name,
            num_devices=number,
            device_batch_size=nodes * size,
            virtual_nodes=nodes,
            virtual_node_batch_size=size,
        )
        for name, number, nodes, size in groups
    )
    samples = sum(group.num_devices * group.device_batch_size for group in made)
    given = {"model": "m", "optimizer": SGD, **fields}
    return split_plan(
        global_batch_size=samples,
        groups=made,
        predicted=Prediction(step_seconds=1.0, samples_per_second=float(samples)),
        proof=Proof(termination="feasible", objective=1.0, lower_bound=None, gap=None, method="-"),
        **given,
    )


def device(
    rank: int,
    name: str,
    nodes: int,
    node: float | None,
    *,
    fixed: float,
    sync: float = 0.0,
    update: float = 0.05,
    step: float | None = None,
    interval: float | None = None,
    host: str = "h",
    peak: int | None = None,
    steps: int = 30,
) -> DeviceRun:
    """A worker whose terms add up; without ``node`` it tells of its whole step only."""
    seconds = nodes * (node or 0.0) + fixed + sync + update if step is None else step

    def term(value: float) -> MeasuredTerm:
        return MeasuredTerm(seconds=value, interval_seconds=interval)

    known = {"virtual_node": term(node), "fixed": term(fixed)} if node is not None else {}
    return DeviceRun(
        rank=rank,
        device_type=name,
        host=host,
        num_samples=1,
        num_steps=steps + 3,
        predicted_compute_seconds=None,
        pass_seconds=None,
        compute_seconds=None,
        sync_seconds=sync,
        update_seconds=update,
        step_seconds=seconds,
        step_seconds_spread=None,
        peak_memory_bytes=peak,
        terms=MeasuredTerms(
            num_steps=steps, step=term(seconds), sync=term(sync), update=term(update), **known
        ),
    )


def run_of(plan: Plan, *devices: DeviceRun, name: str = "r", **fields: Any) -> Run:
    step = max(d.step_seconds for d in devices if d.step_seconds is not None)
    given = {
        "status": "done",
        "exit_code": 0,
        "wall_seconds": 9.0,
        "num_steps": 33,
        "predicted_step_seconds": None,
        "measured_step_seconds": step,
        "step_seconds_error": None,
        "final_loss": None,
        "parameters_digest": None,
        **fields,
    }
    record = RunRecord(plan=plan, world_size=len(devices), devices=devices, **given)
    return Run(name=name, record=record)


def corrected(profiles: Profile | list[Profile], *runs: Run) -> Correction:
    asked = [profiles] if isinstance(profiles, Profile) else profiles
    return correct(asked, runs, corrected_at="now", retime=lambda plan, profiles: None)


def predicted(profiles: tuple[Profile, ...], plan: Plan) -> float:
    """The step by its definition, all devices on one host."""
    own, syncs = [], [0.0]
    for group in plan.groups:
        found = next(p for p in profiles if p.device_type == group.device_type)
        busy = found.busy if plan.num_devices > 1 else None
        costs = busy or found
        points = {p.batch_size: p.step_seconds for p in costs.batch_curve}
        seconds = group.virtual_nodes * points[group.virtual_node_batch_size]
        own.append(seconds + (costs.fixed_seconds or 0.0) + costs.update_seconds)
        if plan.num_devices > 1 and found.sync is not None:
            syncs.append(found.sync.sync_seconds)
    return max(own) + max(syncs)


def test_a_run_as_predicted_changes_nothing() -> None:
    before = profile(busy=BUSY, sync=SYNC)
    alone = run_of(plan(("A", 1, 3, 8)), device(0, "A", 3, 0.6, fixed=0.2))
    two = run_of(
        plan(("A", 2, 3, 8)),
        *(device(n, "A", 3, 0.8, fixed=0.3, sync=0.1, update=0.07) for n in (0, 1)),
    )
    old = run_of(plan(("A", 1, 2, 16)), device(0, "A", 2, None, fixed=0.2, step=2.25))
    found = corrected(before, alone, two, old)
    assert found.profiles == (before,)
    assert len(found.used) == 3
    assert found.remarks == ()


def test_a_measured_size_replaces_its_point_and_scales_the_others() -> None:
    run = run_of(plan(("A", 1, 3, 8)), device(0, "A", 3, 0.9, fixed=0.4, update=0.1))
    (after,) = corrected(profile(), run).profiles
    assert [p.step_seconds for p in after.batch_curve] == pytest.approx([0.6, 0.9, 1.5])
    assert after.fixed_seconds == pytest.approx(0.4)
    assert after.update_seconds == 0.1
    assert after.busy is None


def test_sizes_between_two_measured_ones_take_a_ratio_between_theirs() -> None:
    runs = [
        run_of(plan(("A", 1, 2, 4)), device(0, "A", 2, 0.8, fixed=0.2), name="a"),
        run_of(plan(("A", 1, 2, 16)), device(0, "A", 2, 1.0, fixed=0.2), name="b"),
    ]
    (after,) = corrected(profile(), *runs).profiles
    assert [p.step_seconds for p in after.batch_curve] == pytest.approx([0.8, 0.6 * 5 / 3, 1.0])


def test_a_size_that_was_interpolated_becomes_a_point() -> None:
    run = run_of(plan(("A", 1, 2, 12)), device(0, "A", 2, 0.8 * 1.5, fixed=0.2))
    (after,) = corrected(profile(), run).profiles
    assert {p.batch_size: p.step_seconds for p in after.batch_curve} == pytest.approx(
        {4: 0.6, 8: 0.9, 12: 1.2, 16: 1.5}
    )


def test_overlapping_intervals_are_weighted_and_others_give_way() -> None:
    curve = (point(4, 0.4), point(8, 0.6, step_seconds_error=0.1), point(16, 1.0))
    near = device(0, "A", 3, 0.68, fixed=0.2, interval=0.06)
    (after,) = corrected(profile(batch_curve=curve), run_of(plan(("A", 1, 3, 8)), near)).profiles
    joined = after.batch_curve[1]
    assert joined.step_seconds == pytest.approx(0.64)
    assert joined.step_seconds_error == pytest.approx(0.06 / 2**0.5 / 0.64)
    assert predicted((after,), plan(("A", 1, 3, 8))) == pytest.approx(near.step_seconds)
    far = device(0, "A", 3, 0.9, fixed=0.2, interval=0.06)
    (after,) = corrected(profile(batch_curve=curve), run_of(plan(("A", 1, 3, 8)), far)).profiles
    assert after.batch_curve[1].step_seconds == pytest.approx(0.9)


def test_several_devices_of_a_host_correct_the_busy_numbers_and_synchronisation() -> None:
    two = plan(("A", 2, 3, 8))
    workers = (
        device(0, "A", 3, 0.9, fixed=0.4, sync=0.2, update=0.1, step=3.4),
        device(1, "A", 3, 0.9, fixed=0.3, sync=0.3, update=0.1, step=3.4),
    )
    before = profile(sync=Sync(num_devices=4, sync_seconds=9.0))
    (after,) = corrected(before, run_of(two, *workers)).profiles
    assert (after.batch_curve, after.fixed_seconds) == (before.batch_curve, before.fixed_seconds)
    assert after.busy is not None
    assert after.busy.num_devices == 2
    assert [p.step_seconds for p in after.busy.batch_curve] == pytest.approx([0.6, 0.9, 1.5])
    assert after.busy.fixed_seconds == pytest.approx(0.35)
    assert after.sync is not None
    assert after.sync.num_devices == 2
    assert predicted((after,), two) == pytest.approx(3.4)
    assert after.provenance is not None
    changes = {c["term"]: c["before"] for c in after.provenance["corrections"][0]["changes"]}
    assert changes["busy.batch_curve[8].step_seconds"] == 0.6
    assert changes["busy.fixed_seconds"] == 0.2
    assert changes["sync.sync_seconds"] == 9.0
    assert "busy.batch_curve[8].peak_memory_bytes" not in changes
    apart = [replace(worker, host=f"h{worker.rank}") for worker in workers]
    (after,) = corrected(before, run_of(two, *apart)).profiles
    assert after.busy is None
    assert after.batch_curve[1].step_seconds == pytest.approx(0.9)


def test_sizes_that_differ_in_synchronisation_move_together() -> None:
    two = plan(("A", 2, 3, 8))
    workers = [device(n, "A", 3, 0.9, fixed=0.4, sync=0.2, update=0.1, step=3.4) for n in (0, 1)]
    points = (SyncPoint(batch_size=8, sync_seconds=0.9), SyncPoint(batch_size=16, sync_seconds=0.5))
    before = profile(sync=Sync(num_devices=2, sync_seconds=0.7, by_batch_size=points))
    (after,) = corrected(before, run_of(two, *workers)).profiles
    assert after.sync is not None
    assert after.busy is not None
    small, large = after.sync.by_batch_size
    step = 3 * 0.9 + after.busy.fixed_seconds + small.sync_seconds + after.busy.update_seconds
    assert step == pytest.approx(3.4)
    assert (small.sync_seconds, large.sync_seconds) == pytest.approx((0.4, 0.0))
    assert after.sync.sync_seconds == pytest.approx(0.2)


def test_a_measured_sum_takes_the_place_of_those_that_passes_were_to_hide() -> None:
    sums = (
        GradientSum(num_bytes=100, seconds_left=0.1),
        GradientSum(num_bytes=300, seconds_left=0.0),
    )
    sync = Sync(num_devices=2, sync_seconds=0.4, latency_seconds=0.0, bytes_per_second=1_000.0)
    before = profile(batch_curve=(point(4, 0.4), point(8, 0.6, sums=sums)), sync=sync)
    before = replace(before, batch_curve=tuple(replace(p, sums=sums) for p in before.batch_curve))
    two = plan(("A", 2, 1, 8))
    # All but the last 0.3 s are hidden.
    for took, has_sums in ((0.3, True), (0.5, False)):
        step = 0.6 + 0.2 + took + 0.05
        workers = [
            device(n, "A", 1, 0.6, fixed=0.2, sync=took, update=0.05, step=step) for n in (0, 1)
        ]
        (after,) = corrected(before, run_of(two, *workers)).profiles
        assert all(bool(one.sums) == has_sums for one in after.batch_curve)
        assert after.sync is not None
        assert after.sync.sync_seconds == pytest.approx(0.4 if has_sums else took)


def test_an_emulated_type_keeps_its_passes_and_says_so() -> None:
    before = profile(emulation=Emulation(speed=0.5), fixed_seconds=None)
    workers = [device(n, "A", 3, 0.7, fixed=0.2, sync=0.3, step=2.5) for n in (0, 1)]
    found = corrected(before, run_of(plan(("A", 2, 3, 8)), *workers))
    (after,) = found.profiles
    assert after.batch_curve == before.batch_curve
    assert after.busy is None
    assert after.fixed_seconds == pytest.approx(2.5 - 0.3 - 0.05 - 1.8)
    assert after.sync is not None
    assert after.sync.sync_seconds == pytest.approx(0.3)
    assert any("emulated" in remark for remark in found.remarks)


def test_the_largest_peak_counts_alone_and_busy() -> None:
    low = device(0, "A", 3, 0.6, fixed=0.2, peak=700)
    high = device(0, "A", 3, 0.6, fixed=0.2, peak=900)
    runs = [run_of(plan(("A", 1, 3, 8)), d, name=str(n)) for n, d in enumerate((high, low))]
    (after,) = corrected(profile(busy=BUSY), *runs).profiles
    assert [p.peak_memory_bytes for p in after.batch_curve] == [400, 900, 1600]
    assert after.busy is not None
    assert after.busy.batch_curve[1].peak_memory_bytes == 900


def test_an_older_record_is_shared_out_as_predicted() -> None:
    whole = device(0, "A", 3, None, fixed=0.0, step=4.05)
    old = replace(whole, terms=None, num_steps=13)
    (after,) = corrected(profile(), run_of(plan(("A", 1, 3, 8)), old)).profiles
    assert after.batch_curve[1].step_seconds == pytest.approx(1.2)
    assert after.fixed_seconds == pytest.approx(0.4)


def test_the_origin_stands_in_provenance() -> None:
    run = run_of(plan(("A", 1, 3, 8)), device(0, "A", 3, 0.6, fixed=0.5), name="runs/first")
    (once,) = corrected(profile(provenance={"command": "c"}), run).profiles
    assert once.provenance is not None
    (entry,) = once.provenance["corrections"]
    assert once.provenance["command"] == "c"
    assert entry["corrected_at"] == "now"
    assert entry["runs"] == [{"run": "runs/first", "num_steps": 33, "plan": "split"}]
    (change,) = entry["changes"]
    assert (change["term"], change["before"]) == ("fixed_seconds", 0.2)
    assert change["after"] == pytest.approx(0.5)
    (twice,) = corrected(once, run).profiles
    assert twice == once


SPLIT = plan(("A", 1, 3, 8))
GOOD = device(0, "A", 3, 0.9, fixed=0.4)
MOVED = Generation(number=1, kind="resize", at_seconds=1.0, detail="-", workers=())


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (run_of(SPLIT, GOOD, status="failed"), "failed"),
        (run_of(SPLIT, GOOD, generations=(MOVED, MOVED)), "workers changed"),
        (run_of(plan(("A", 1, 3, 8), model="other"), GOOD), "it is of other"),
        (run_of(plan(("A", 1, 3, 8), optimizer=ADAM), GOOD), "adam"),
        (run_of(plan(("B", 1, 3, 8)), device(0, "B", 3, 0.9, fixed=0.4)), "no profile of B"),
        (run_of(plan(("A", 1, 3, 32)), GOOD), "outside the sizes"),
        (run_of(SPLIT, device(0, "A", 3, 0.9, fixed=0.4, steps=9)), "fewer than 10"),
        (run_of(SPLIT, replace(GOOD, terms=None, num_steps=12)), "fewer than 10"),
        (run_of(parallel_plan([(("0",), (2,))]), GOOD), "a parallel plan's run"),
    ],
)
def test_what_cannot_correct_is_left_out_with_a_reason(run: Run, why: str) -> None:
    before = profile()
    found = corrected(before, run)
    assert found.profiles == (before,)
    assert found.used == ()
    assert len(found.remarks) == 1
    assert why in found.remarks[0]


def test_an_interrupted_run_corrects_like_one_that_is_done_if_all_its_workers_told() -> None:
    split, devices = plan(("A", 2, 3, 8)), [device(n, "A", 3, 0.9, fixed=0.4) for n in range(2)]
    stopped = run_of(split, *devices, status="interrupted", exit_code=143)
    assert corrected(profile(), stopped) == corrected(profile(), run_of(split, *devices))
    untold = Run(name="r", record=replace(stopped.record, devices=(devices[0],)))
    found = corrected(profile(), untold)
    assert found.used == ()
    assert "before all of its workers" in found.remarks[0]


seconds = st.floats(min_value=1e-3, max_value=5.0)
maybe = st.none() | st.floats(min_value=1e-3, max_value=1.0)


@st.composite
def profiles(draw: st.DrawFn) -> list[Profile]:
    made = []
    for name in ("A", "B"):
        curve = tuple(point(s, draw(seconds), step_seconds_error=draw(maybe)) for s in (4, 8, 16))
        busy = None
        if draw(st.booleans()):
            busy = replace(BUSY, batch_curve=curve, fixed_seconds=draw(seconds))
        made.append(
            profile(name, batch_curve=curve, fixed_seconds=draw(maybe), busy=busy, sync=SYNC)
        )
    return made


@st.composite
def runs(draw: st.DrawFn, name: str = "r") -> Run:
    groups = [
        ("A", draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.sampled_from((4, 8))))
    ]
    if draw(st.booleans()):
        groups.append(("B", 1, draw(st.integers(1, 4)), 16))
    workers, step = [], draw(seconds) + 20
    types = [(kind, nodes) for kind, number, nodes, _ in groups for _ in range(number)]
    interval = draw(maybe)
    for rank, (kind, nodes) in enumerate(types):
        node = draw(seconds) if nodes > 1 else None
        sync, update = draw(seconds) / 4, draw(seconds) / 4
        whole = dict(fixed=0.0, sync=sync, update=update, step=step, interval=interval)
        if node is not None:
            node = min(node, (step - sync - update) / nodes)
        workers.append(device(rank, kind, nodes, node, **whole))  # type: ignore[arg-type]
    return run_of(plan(*groups), *workers, name=name)


@given(profiles(), runs())
def test_one_run_gives_its_plan_the_step_that_it_measured(before: list[Profile], run: Run) -> None:
    found = corrected(before, run)
    assert found.used == ("r",)
    assert run.record.plan.kind == "split"
    assert run.record.measured_step_seconds is not None
    got = predicted(found.profiles, run.record.plan)
    assert got == pytest.approx(run.record.measured_step_seconds)


@given(profiles(), runs("a"), runs("b"), runs("c"))
def test_the_order_of_runs_does_not_matter(
    before: list[Profile], first: Run, second: Run, third: Run
) -> None:
    found = [
        corrected(before, *order).profiles
        for order in itertools.permutations((first, second, third))
    ]
    assert all(one == found[0] for one in found)
