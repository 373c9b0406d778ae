"""The terms of a predicted step add up, and say what was not measured."""

from dataclasses import replace

import pytest

from hetflow.formats.reports.explain import (
    Explanation,
    Term,
    explain,
    explanation_document,
    explanation_table,
)
from hetflow.schema.errors import ProblemError
from hetflow.schema.plan import Prediction, Proof, Stage
from hetflow.tests.plan_parts import (
    pipeline_plan,
    pipeline_stage,
    split_plan,
    whole_group,
    with_groups,
)

FAST = whole_group(
    device_type="A",
    num_devices=2,
    device_batch_size=24,
    virtual_nodes=3,
    virtual_node_batch_size=8,
    pass_seconds=0.010,
    measured_busy=True,
)
SLOW = replace(
    FAST, device_type="B", num_replicas=1, samples=16, virtual_nodes=2, pass_seconds=0.02
)
STEP = 0.0524
PLAN = split_plan(
    model="m",
    global_batch_size=64,
    groups=(FAST, SLOW),
    predicted=Prediction(
        step_seconds=STEP,
        samples_per_second=64 / STEP,
        compute_seconds=0.036,
        load_seconds=0.003,
        virtual_node_seconds=0.001,
        fixed_seconds=0.0014,
        sync_seconds=0.007,
        update_seconds=0.004,
        step_seconds_low=0.051,
        step_seconds_high=0.054,
    ),
    proof=Proof(termination="optimal", objective=STEP, lower_bound=STEP, gap=0.0, method="x"),
)


def test_synchronisation_names_the_size_that_hides_it_where_sizes_differ() -> None:
    """The slowest device is the one whose sums come last: 4 x 10 ms and 12 more."""
    late = replace(FAST, pass_seconds=0.04 / 3, exposed_seconds=0.012)
    other = replace(SLOW, pass_seconds=0.021, exposed_seconds=0.001)
    found = explain(with_groups(PLAN, groups=(other, late)))
    assert found.terms[0].name == "passes on the slowest A"
    assert [t.note for t in found.terms if "synchron" in t.name] == ["behind passes of 8 samples"]
    assert [t.note for t in explain(PLAN).terms if "synchron" in t.name] == [""]


def test_terms_of_a_split_are_the_slowest_device_and_the_step() -> None:
    found = explain(PLAN)
    told = [(term.name, term.count, term.seconds) for term in found.terms]
    assert told == [
        ("passes on the slowest B", 2, 0.036),
        ("waiting for samples", 2, 0.003),
        ("the runtime's part of a virtual node", 2, 0.001),
        ("fixed cost of the step", 1, 0.0014),
        ("synchronisation over 3 devices", 1, 0.007),
        ("update", 1, 0.004),
    ]
    assert found.remarks == ()


def test_the_table_adds_up_and_tells_the_interval() -> None:
    table = explanation_table(explain(PLAN))
    rows = {line.split("  ")[0]: line for line in table.splitlines()}
    assert "18 ms" in rows["passes on the slowest B (8 samples)"]
    assert "36 ms" in rows["passes on the slowest B (8 samples)"]
    assert rows["step"].split() == ["step", "52.4", "ms", "100.0", "%"]
    assert "allow 51 ms to 54 ms" in table


def test_the_document_holds_the_same_numbers() -> None:
    document = explanation_document(explain(PLAN))
    assert sum(term["seconds"] for term in document["terms"]) == pytest.approx(STEP)
    assert sum(term["share"] for term in document["terms"]) == pytest.approx(1)
    assert document["terms"][0]["each_seconds"] == pytest.approx(0.018)


def test_what_was_not_measured_is_said() -> None:
    """An older plan: everything in compute, no spread, nothing of busy hosts."""
    plain = Prediction(
        step_seconds=0.04,
        samples_per_second=1600.0,
        compute_seconds=0.04,
        sync_seconds=0.0,
        update_seconds=0.0,
    )
    groups = tuple(replace(group, measured_busy=False) for group in PLAN.groups)
    table = explanation_table(explain(with_groups(PLAN, groups=groups, predicted=plain)))
    for said in (
        "waiting for samples was not measured apart",
        "fixed cost of a step was not measured",
        "synchronisation was not measured",
        "A, B: measured alone",
        "how far off this may be is unknown",
    ):
        assert said in table


def test_a_plan_without_parts_is_one_term() -> None:
    whole = Prediction(step_seconds=STEP, samples_per_second=64 / STEP)
    found = explain(replace(PLAN, predicted=whole))
    assert [term.seconds for term in found.terms] == [STEP]


def test_terms_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ProblemError, match="add up to 1.5 s"):
        Explanation(title="m", step_seconds=2.0, terms=(Term("a", 1.0), Term("b", 0.5)))


def stage(name: str, **changes: object) -> Stage:
    given = {
        "layers": (name,), "num_replicas": 1, "device_type": "A", "first_device": ord(name) - 97,
        "num_in_flight": 1, "weight_versions": 1, "seconds_per_input": 0.0, "memory_bytes": 0,
        "compute_seconds": 0.035, "forward_seconds": 0.0125, "output_seconds": 0.0,
        "reduce_seconds": 0.0, "update_seconds": 0.001, "pass_seconds": 0.0025,
        "message_seconds": 0.0, **changes,
    }  # fmt: skip
    return pipeline_stage(**given)


SENDING = stage("a", output_seconds=0.025, message_seconds=0.0075)
PIPELINE = pipeline_plan(
    model="m",
    global_batch_size=4,
    microbatch_size=4,
    num_microbatches=1,
    schedule="1f1b",
    recompute=False,
    stages=(SENDING, stage("b")),
    predicted=Prediction(step_seconds=0.101, samples_per_second=39.6, fixed_seconds=0.005),
    proof=Proof(termination="optimal", objective=0.101, lower_bound=0.1, gap=0.0099, method="x"),
    noam=1,
    stage_cost="ring",
    solved="flat",
)


def test_terms_of_a_pipeline_are_what_the_step_gets_shorter_by() -> None:
    found = explain(PIPELINE)
    told = {term.name: pytest.approx(term.seconds) for term in found.terms}
    assert told == {
        "passes of layers on the busiest device": 0.03,
        "waiting for other stages": 0.03,
        "what passes cost beside layers": 0.01,
        "what messages cost beside bytes": 0.015,
        "bytes on links": 0.01,
        "all-reduce of replicas": 0.0,
        "update": 0.001,
        "fixed cost of the step": 0.005,
    }
    assert found.remarks == ()
    rows = explanation_table(found).splitlines()
    assert any("what messages cost beside bytes (7.5 ms a message)" in row for row in rows)
    assert any(row.split() == ["step", "101", "ms", "100.0", "%"] for row in rows)


def test_what_a_pipeline_s_step_leaves_open_is_said() -> None:
    stages = tuple(replace(one, pass_seconds=None, message_seconds=None) for one in PIPELINE.stages)
    older = replace(
        PIPELINE,
        stages=stages,
        predicted=Prediction(step_seconds=0.096, samples_per_second=41.7),
        link_bytes_per_second=86e6,
        assumptions=("both ways at once was not measured",),
        proof=replace(PIPELINE.proof, tolerance=0.05),
    )
    table = explanation_table(explain(older))
    for said in (
        "said to carry 86 MB/s",
        "both ways at once was not measured",
        "what passes cost beside their layers was not measured",
        "what a message costs beside its bytes was not measured",
        "fixed cost of a step was not measured",
        "plans within 5.0% of the least step cannot be told apart",
        "how far off this may be is unknown",
    ):
        assert said in table


def test_a_pipeline_whose_stages_do_not_tell_the_step_is_one_term_and_its_fixed_cost() -> None:
    lacking = replace(
        PIPELINE, stages=tuple(replace(s, reduce_seconds=None) for s in PIPELINE.stages)
    )
    found = explain(lacking)
    assert [term.seconds for term in found.terms] == pytest.approx([0.096, 0.005])
