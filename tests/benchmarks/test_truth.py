"""The pure parts of benchmarks/truth.py: its plans, and the figures that it draws from runs."""

import dataclasses

import pytest
from truth_parts import figures, plans
from truth_parts.load import Load

from hetflow.planning.checks.batch_split import check as split_faults
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Links, Profile, Sync
from hetflow.schema.run import DeviceRun, RunRecord

MODEL = plans.Model("cnn", 8)
NODES = tuple(
    LayerNode(
        id=f"l{i}", op="Linear", forward_seconds=seconds, backward_seconds=2 * seconds,
        activation_bytes=100, weight_bytes=1000, stashed_bytes=150, workspace_bytes=10,
    )
    for i, seconds in enumerate((0.1, 0.2, 0.1, 0.5, 0.1))
)  # fmt: skip
EDGES = tuple((f"l{i}", f"l{i + 1}") for i in range(4))
PROFILE = Profile(
    model="m", device_type="cpu", device_memory_bytes=10**6, weight_bytes=5000,
    update_seconds=0.01, optimizer=named_optimizer("sgd"), base_memory_bytes=30_000,
    batch_curve=tuple(
        BatchPoint(batch_size=n, step_seconds=0.1 * n + 0.05, peak_memory_bytes=40_000 + n)
        for n in MODEL.batch_sizes
    ),
    sync=Sync(num_devices=2, sync_seconds=0.2, latency_seconds=0.0, bytes_per_second=1e5),
    links=Links(latency_seconds=0.0, bytes_per_second=1e5, points=()),
    layers=LayerGraph(microbatch_size=8, nodes=NODES, edges=EDGES),
    more_layers=(LayerGraph(microbatch_size=16, nodes=NODES, edges=EDGES),),
)  # fmt: skip


def run_of(plan: Plan, *devices: dict[str, object]) -> RunRecord:
    """A record of a launch in which each worker measured what is given."""
    blank: dict[str, object] = dict.fromkeys(
        field.name for field in dataclasses.fields(DeviceRun) if field.name.endswith("_seconds")
    )
    blank |= {"device_type": "cpu", "host": "h", "num_samples": 1, "num_steps": 9}
    blank |= {"step_seconds_spread": None, "peak_memory_bytes": None}
    found = tuple(DeviceRun(**{**blank, "rank": n, **own}) for n, own in enumerate(devices))
    return RunRecord(
        plan=plan, status="done", exit_code=0, world_size=len(devices), wall_seconds=1.0,
        num_steps=9, predicted_step_seconds=plan.predicted.step_seconds,
        measured_step_seconds=max(device.step_seconds or 0.0 for device in found),
        step_seconds_error=None, final_loss=None, parameters_digest=None, devices=found,
    )  # fmt: skip


@pytest.mark.parametrize("split", plans.SPLITS, ids=lambda split: split.name)
def test_a_stated_split_is_what_it_says_and_priced_by_the_tool(split: plans.Split) -> None:
    plan = plans.split_plan(PROFILE, MODEL, split)
    assert plan.num_devices == sum(number for number, _, _ in split.groups)
    if plan.num_devices == 2:
        assert plan.global_batch_size == 96
    pool = Cluster.parse(f"{plan.num_devices}xcpu")
    problem = split_problem(Problem((PROFILE,), pool, plan.global_batch_size))
    assert split_faults(plan, problem) == []


@pytest.mark.parametrize("pipeline", plans.PIPELINES, ids=lambda pipeline: pipeline.name)
def test_a_stated_pipeline_holds_all_layers_on_two_devices(pipeline: plans.Pipeline) -> None:
    plan = plans.pipeline_plan(PROFILE, MODEL, pipeline)
    assert [layer for stage in plan.stages for layer in stage.layers] == [n.id for n in NODES]
    assert plan.num_devices == 2
    assert plan.global_batch_size == 96
    assert plan.microbatch_size == 8 * pipeline.merged
    assert plan.predicted.step_seconds > 0


def test_stages_end_where_their_share_of_the_time_does() -> None:
    cut = plans.pipeline_plan(PROFILE, MODEL, plans.PIPELINES[0])
    # Of 1.0 s forward the layers end at 0.1, 0.3, 0.4, 0.9 and 1.0.
    assert [len(stage.layers) for stage in cut.stages] == [3, 2]
    third = plans.pipeline_plan(PROFILE, MODEL, plans.PIPELINES[1])
    assert [len(stage.layers) for stage in third.stages] == [2, 3]


def test_no_stage_is_empty_where_one_layer_takes_all_the_time() -> None:
    heavy = (dataclasses.replace(NODES[0], forward_seconds=9.0), *NODES[1:])
    table = LayerGraph(microbatch_size=8, nodes=heavy, edges=EDGES)
    profile = dataclasses.replace(PROFILE, layers=table)
    plan = plans.pipeline_plan(profile, MODEL, plans.PIPELINES[1])
    assert [len(stage.layers) for stage in plan.stages] == [1, 4]


def test_equal_plans_have_one_signature() -> None:
    made = [plans.split_plan(PROFILE, MODEL, split) for split in plans.SPLITS]
    made += [plans.pipeline_plan(PROFILE, MODEL, entry) for entry in plans.PIPELINES]
    assert len({plans.signature(plan) for plan in made}) == len(made)
    other = dataclasses.replace(
        made[0], predicted=dataclasses.replace(made[0].predicted, step_seconds=1.0)
    )
    assert plans.signature(other) == plans.signature(made[0])


def test_peaks_are_those_of_the_size_and_of_whole_workers() -> None:
    uneven = plans.split_plan(PROFILE, MODEL, plans.SPLITS[-1])
    assert plans.peaks_of(PROFILE, uneven) == [40_008, 40_016]
    stages = plans.pipeline_plan(PROFILE, MODEL, plans.PIPELINES[0])
    assert plans.peaks_of(PROFILE, stages) == [stage.memory_bytes for stage in stages.stages]
    assert all(stage.memory_bytes > 30_000 for stage in stages.stages)
    old = dataclasses.replace(PROFILE, base_memory_bytes=None)
    assert plans.peaks_of(old, plans.pipeline_plan(old, MODEL, plans.PIPELINES[0])) == [None, None]
    twice = plans.pipeline_plan(PROFILE, MODEL, plans.PIPELINES[-1])
    assert len(plans.peaks_of(PROFILE, twice)) == 2


def test_a_row_takes_medians_over_launches_and_the_busiest_worker_s_terms() -> None:
    plan = plans.split_plan(PROFILE, MODEL, plans.SPLITS[2])
    runs = [
        run_of(
            plan,
            {"step_seconds": step, "compute_seconds": 1.0, "sync_seconds": 9.0},
            {"step_seconds": step, "compute_seconds": 5.0, "sync_seconds": 0.5,
             "update_seconds": 0.1, "peak_memory_bytes": 50_000 + step},
        )
        for step in (7, 6, 8)
    ]  # fmt: skip
    row = figures.row_of(plan, runs, [40_000, 40_000], "even")
    assert row["measured_step_seconds"] == 7
    assert row["error"] == pytest.approx(plan.predicted.step_seconds / 7 - 1)
    assert row["terms"]["sync"] == {"predicted_seconds": 0.2, "measured_seconds": 0.5}
    # 6 passes of 0.85 s.
    assert row["terms"]["compute"]["predicted_seconds"] == pytest.approx(5.1)
    assert row["worst_term"] == "sync"
    # The highest peak of the launches; the first worker's is not known.
    assert figures.memory_errors(row) == [40_000 / 50_008 - 1]


def test_what_a_record_does_not_tell_apart_is_in_its_compute() -> None:
    plan = plans.split_plan(PROFILE, MODEL, plans.SPLITS[0])
    told = dataclasses.replace(
        plan.predicted, compute_seconds=4.0, load_seconds=0.6, fixed_seconds=0.4
    )
    plan = dataclasses.replace(plan, predicted=told)
    run = run_of(plan, {"step_seconds": 6.0, "compute_seconds": 5.5})
    terms = figures.terms_of(plan, [run])
    assert terms["compute"]["measured_seconds"] == 5.5
    untold = (plan.predicted.sync_seconds or 0) + (plan.predicted.update_seconds or 0)
    assert terms["compute"]["predicted_seconds"] == pytest.approx(5.0 + untold)
    assert set(terms) == {"compute"}


def row(**changes: object) -> dict[str, object]:
    made = {
        "kind": "split", "is_solved": False, "global_batch_size": 96, "error": 0.0, "peaks": [],
        "predicted_step_seconds": 1.0, "measured_step_seconds": 1.0,
    }  # fmt: skip
    return {**made, **changes}


def test_a_summary_keeps_kinds_apart_and_the_worst_underestimate() -> None:
    def peak(predicted: int) -> list[dict[str, int]]:
        return [{"predicted_bytes": predicted, "measured_bytes": 100}]

    found = figures.summary_of(
        [
            row(error=-0.2, peaks=peak(97)),
            row(error=0.1, peaks=peak(120)),
            row(kind="pipeline", error=0.3),
        ]
    )
    assert found["split"]["mean_error"] == pytest.approx(0.15)
    assert found["split"]["worst_error"] == pytest.approx(0.2)
    assert found["split"]["mean_memory_error"] == pytest.approx(0.115)
    assert found["split"]["most_under_memory"] == pytest.approx(0.03)
    assert found["pipeline"]["mean_error"] == pytest.approx(0.3)
    assert found["pipeline"]["mean_memory_error"] is None


def test_regret_is_against_the_best_measured_at_the_same_batch() -> None:
    rows = [
        row(is_solved=True, measured_step_seconds=1.1),
        row(measured_step_seconds=1.0),
        row(measured_step_seconds=0.2, global_batch_size=48),
        row(measured_step_seconds=0.1, kind="pipeline"),
    ]
    assert figures.regret_of(rows, "split") == pytest.approx(0.1)
    assert figures.regret_of(rows, "pipeline") is None
    assert figures.regret_of(rows[:1], "split") == 0.0


def test_a_repeat_compares_stated_plans_that_were_measured_in_both_turns() -> None:
    def row(plan: str, seconds: float, kind: str = "split") -> dict[str, object]:
        return {"plan": plan, "kind": kind, "measured_step_seconds": seconds}

    first = {"m": [row("a", 1.1), row("b", 0.8), row("solved split", 5.0), row("c", 1.0)]}
    again = {"m": [row("a", 1.0), row("b", 1.0), row("solved split", 1.0)]}
    (found,) = figures.repeat_of(first, again).items()
    assert found[0] == "split"
    assert found[1] == pytest.approx({"num_plans": 2, "mean_error": 0.15, "worst_error": 0.2})


def test_launches_have_enough_steps_and_end() -> None:
    assert figures.steps_of(0.01, 2.5) == 250
    assert figures.steps_of(0.1, 2.5) == 40
    assert figures.steps_of(0.25, 2.5) == 20
    assert figures.steps_of(3.0, 2.5) == 8


def test_the_load_tells_own_work_from_others() -> None:
    with Load() as load:
        sum(number * number for number in range(500_000))
    found = load.figures
    assert found["own_cores"] > 0
    assert found["others_cores"] is None or found["others_cores"] >= 0
    assert found["wall_seconds"] > 0
