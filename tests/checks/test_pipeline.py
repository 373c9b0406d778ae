"""The judge finds each kind of fault in a good plan that was tampered with."""

import dataclasses
import json

import pytest

from hetflow.planning.checks.pipeline import check, crossing_bytes
from hetflow.schema.errors import FileError, ProblemError
from hetflow.schema.files import from_json, read_any, to_json
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.schema.plan import Plan, ReplicaGroup
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.plan_parts import with_replicas

SIZES = [(8, 1), (4, 2), (2, 4), (1, 8)]


def problem(**options) -> PipelineProblem:
    pools = tuple(
        DevicePool(
            device_type=name,
            levels=(TopologyLevel(num_components=2, bytes_per_second=10.0),),
            forward_seconds=(1.0 * slow, 2.0 * slow, 2.0 * slow, 1.0 * slow),
            backward_seconds=(2.0 * slow, 4.0 * slow, 4.0 * slow, 2.0 * slow),
            memory_bytes=400,
        )
        for name, slow in (("V100", 1), ("P100", 2))
    )
    filled = {"schedule": "pipedream", "num_stages": 3, **options}
    return PipelineProblem(
        model="m",
        layers=tuple(
            PipelineLayer(id=f"l{i}", activation_bytes=a, weight_bytes=w)
            for i, (a, w) in enumerate(SIZES)
        ),
        edges=((0, 1), (1, 2), (2, 3), (0, 3)),
        pools=pools,
        inter_bytes_per_second=5.0,
        microbatch_size=2,
        num_microbatches=8,
        optimizer=OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0),
        **filled,
    )


@pytest.fixture
def plan() -> Plan:
    return solve(problem())


def with_stage(plan: Plan, index: int, **changes) -> Plan:
    stages = list(plan.stages)
    of_replicas = {field.name for field in dataclasses.fields(ReplicaGroup)} & changes.keys()
    moved = with_replicas(stages[index], **{name: changes.pop(name) for name in of_replicas})
    stages[index] = dataclasses.replace(moved, **changes)
    return dataclasses.replace(plan, stages=tuple(stages))


def test_a_good_plan_holds(plan):
    assert check(plan, problem()) == []


def test_a_skip_connection_crosses_every_cut_it_spans(plan):
    # Behind each stage: what layer 0 made is still needed by layer 3.
    for index in range(1, len(plan.stages)):
        last = plan.stages[index - 1].layers[-1]
        own = 0 if last == "l0" else SIZES[int(last[1:])][0]
        assert crossing_bytes(plan, problem(), index) == 8 + own


def test_tampered_layers(plan):
    short = with_stage(plan, 0, layers=("nowhere",))
    assert any("is in no stage" in fault for fault in check(short, problem()))
    assert any("not in the problem" in fault for fault in check(short, problem()))
    swapped = dataclasses.replace(plan, stages=plan.stages[::-1])
    assert any("in an earlier stage" in fault for fault in check(swapped, problem()))


def test_tampered_devices(plan):
    many = with_stage(plan, 0, num_replicas=9)
    assert any("are used, there are 2" in fault for fault in check(many, problem()))
    odd = with_stage(plan, 0, device_type="K80")
    assert any("no pool of K80" in fault for fault in check(odd, problem()))
    far = with_stage(plan, 0, first_device=7)
    assert any("the last is" in fault for fault in check(far, problem()))


def test_memory_is_recounted(plan):
    wrong = with_stage(plan, 0, memory_bytes=plan.stages[0].memory_bytes + 50)
    assert any("memory_bytes is" in fault for fault in check(wrong, problem()))
    tight = problem()
    pools = tuple(dataclasses.replace(pool, memory_bytes=5) for pool in tight.pools)
    faults = check(plan, dataclasses.replace(tight, pools=pools))
    assert any("too many" in fault for fault in faults)


def test_claims_are_recounted(plan):
    better = dataclasses.replace(plan.proof, objective=plan.proof.objective / 2, lower_bound=0.0)
    assert any(
        "proof.objective is" in f for f in check(dataclasses.replace(plan, proof=better), problem())
    )
    above = dataclasses.replace(plan.proof, lower_bound=plan.proof.objective * 2)
    assert any(
        "above the objective" in f for f in check(dataclasses.replace(plan, proof=above), problem())
    )
    hasty = dataclasses.replace(plan.predicted, step_seconds=0.1)
    assert any(
        "step_seconds" in f for f in check(dataclasses.replace(plan, predicted=hasty), problem())
    )
    assert any("noam" in f for f in check(dataclasses.replace(plan, noam=9), problem()))


@pytest.mark.parametrize(
    "change", [{"schedule": "gpipe"}, {"recompute": True}, {"num_stages": 2}, {"model": "other"}]
)
def test_a_plan_for_another_problem(plan, change):
    assert check(plan, dataclasses.replace(problem(), **change)) != []


def test_a_nested_plan_must_say_where_its_stages_are():
    pool = dataclasses.replace(problem().pools[0], memory_bytes=None)
    asked = dataclasses.replace(problem(num_stages=None), solved="nested", pools=(pool,))
    plan = solve(asked)
    assert check(plan, asked) == []
    assert any("nesting must name" in f for f in check(with_stage(plan, 0, nesting=()), asked))


def test_json_round_trip_and_dispatch(plan, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(to_json(plan))
    assert read_any(path) == plan
    assert from_json(path.read_text(), Plan) == plan


def test_a_plan_of_one_layer_twice_is_refused(plan):
    with pytest.raises(ProblemError, match="in two stages"):
        with_stage(plan, 1, layers=plan.stages[0].layers)


def test_a_mistyped_kind_is_refused(plan, tmp_path):
    path = tmp_path / "plan.json"
    older = {**json.loads(to_json(plan)), "schema": "hetflow.plan/1", "kind": "piepline"}
    path.write_text(json.dumps(older))
    with pytest.raises(FileError, match="must be one of split, pipeline"):
        read_any(path)
