"""A run's terms beside those of its plan: which were off, and by how much of the step."""

from dataclasses import replace
from typing import Any

import pytest

from hetflow.formats.reports.tables import run_table
from hetflow.runtime.protocol.record import WorkerReport, assemble
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.run import DeviceRun, MeasuredTerm, MeasuredTerms, RunRecord
from hetflow.tests.plan_parts import split_plan, whole_group, with_groups

PLAN = split_plan(
    model="m",
    global_batch_size=80,
    groups=(
        whole_group(
            device_type="fast",
            num_devices=1,
            device_batch_size=48,
            virtual_nodes=3,
            virtual_node_batch_size=16,
            pass_seconds=0.1,
        ),
        whole_group(
            device_type="slow",
            num_devices=2,
            device_batch_size=16,
            virtual_nodes=2,
            virtual_node_batch_size=8,
            pass_seconds=0.14,
        ),
    ),
    predicted=Prediction(
        step_seconds=0.35,
        samples_per_second=200.0,
        compute_seconds=0.3,
        sync_seconds=0.03,
        update_seconds=0.02,
    ),
    proof=Proof(termination="feasible", objective=0.35, lower_bound=None, gap=None, method="-"),
)


def report(
    rank: int, name: str, nodes: int, node: float, sync: float, **other: Any
) -> WorkerReport:
    fixed, update = 0.01, 0.02
    step = nodes * node + fixed + sync + update
    values = {"step": step, "sync": sync, "update": update, "virtual_node": node, "fixed": fixed}
    terms = {key: MeasuredTerm(seconds=value) for key, value in values.items()}
    device = DeviceRun(
        rank=rank,
        device_type=name,
        host="h" if rank else "other",
        num_samples=1,
        num_steps=20,
        predicted_compute_seconds=None,
        pass_seconds=node,
        compute_seconds=nodes * node,
        sync_seconds=sync,
        update_seconds=update,
        step_seconds=step,
        step_seconds_spread=None,
        peak_memory_bytes=None,
        terms=MeasuredTerms(num_steps=17, load=MeasuredTerm(seconds=0.01), **terms),
    )
    return WorkerReport(device=replace(device, **other), final_loss=None, parameters_digest=None)


def assembled(plan: Plan = PLAN) -> RunRecord:
    reports = [
        report(0, "fast", 3, 0.101, 0.127),
        report(1, "slow", 2, 0.15, 0.13),
        report(2, "slow", 2, 0.19, 0.05),
    ]
    return assemble(plan, reports, status="done", exit_code=0, wall_seconds=1.0)


def test_each_type_by_its_slowest_worker_and_the_rest_once() -> None:
    record = assembled()
    assert [device.num_host_devices for device in record.devices] == [1, 2, 2]
    found = {(t.term, t.device_type): t for t in record.terms}
    assert list(found) == [
        ("3 virtual nodes of 16", "fast"),
        ("2 virtual nodes of 8", "slow"),
        ("fixed cost", None),
        ("sync", None),
        ("update", None),
    ]
    fast, slow, fixed, sync, update = found.values()
    assert (fast.predicted_seconds, fast.measured_seconds) == pytest.approx((0.3, 0.303))
    assert (slow.predicted_seconds, slow.measured_seconds) == pytest.approx((0.28, 0.38))
    assert (fixed.predicted_seconds, fixed.measured_seconds) == (None, 0.01)
    assert (sync.predicted_seconds, sync.measured_seconds) == (0.03, 0.05)
    assert [t.is_off for t in (fast, slow, fixed, sync, update)] == [False, True] + [False] * 3
    table = run_table(record)
    (marked,) = [line for line in table.splitlines() if line.endswith("off")]
    assert "2 virtual nodes of 8" in marked
    assert "-21.7 %" in marked


def test_loading_is_shown_where_the_plan_tells_it() -> None:
    plan = replace(PLAN, predicted=replace(PLAN.predicted, load_seconds=0.1, fixed_seconds=0.0))
    found = {t.term: t for t in assembled(plan).terms}
    loading = found["of these, loading"]
    assert (loading.predicted_seconds, loading.measured_seconds) == (0.1, 0.02)
    assert loading.is_off
    assert found["fixed cost"].predicted_seconds == 0.0


def test_medians_of_parts_above_the_median_step_are_a_record_all_the_same() -> None:
    group = replace(
        PLAN.groups[0], num_replicas=1, samples=80, virtual_nodes=1, virtual_node_batch_size=80
    )
    plan = with_groups(PLAN, groups=(group,))
    terms = MeasuredTerms(
        num_steps=17,
        step=MeasuredTerm(seconds=0.0100),
        sync=MeasuredTerm(seconds=0.0080),
        update=MeasuredTerm(seconds=0.0020017),
    )
    alone = report(0, "fast", 1, 0.1, 0.0, terms=terms)
    record = assemble(plan, [alone], status="done", exit_code=0, wall_seconds=1.0)
    assert record.terms[0].measured_seconds == 0.0


def test_a_device_that_has_become_slower_is_a_term_of_its_own() -> None:
    plan = replace(PLAN, reference_seconds={"fast": 0.002, "slow": 0.001})
    reports = [
        report(0, "fast", 3, 0.1, 0.1, reference_seconds=0.002),
        report(1, "slow", 2, 0.14, 0.1, reference_seconds=0.0011),
        report(2, "slow", 2, 0.14, 0.1, reference_seconds=0.0015),
    ]
    record = assemble(plan, reports, status="done", exit_code=0, wall_seconds=1.0)
    found = [entry for entry in record.terms if "speed" in entry.term]
    assert [(entry.device_type, entry.is_off) for entry in found] == [
        ("fast", False),
        ("slow", True),
    ]
    assert found[0].measured_seconds == found[0].predicted_seconds == pytest.approx(0.3)
    assert found[1].predicted_seconds == pytest.approx(0.28)
    assert found[1].measured_seconds == pytest.approx(0.42)  # of the slower one
    assert found[1].term in run_table(record)
    without = assemble(PLAN, reports, status="done", exit_code=0, wall_seconds=1.0)
    assert not any("speed" in entry.term for entry in without.terms)
