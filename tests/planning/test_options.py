"""Every option of a request has an effect on the plans that are said to read it, or is refused."""

from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

import hetflow
from hetflow.planning.request import Planner, given, question_of
from hetflow.planning.solve import solve
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import HetflowError, ProblemError
from hetflow.schema.files import to_plain
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.options import asked_of
from hetflow.schema.plan import Restrictions
from hetflow.schema.profile import (
    BatchPoint,
    LayerGraph,
    LayerNode,
    PipelineCosts,
    Profile,
    TensorLayers,
)
from hetflow.schema.requests.solve import SolveRequest
from hetflow.tests.handmade import profile
from hetflow.tests.plan_parts import kind_of

PLANNERS = get_args(Planner)
OPTIONS = {each.name: each for each in asked_of(SolveRequest)}
LIMITED = {name for name, each in OPTIONS.items() if each.option.read_by or each.option.values}


def layered(size: int, degree: int, kept: int) -> LayerGraph:
    """Four unequal layers whose weights cost enough for every choice to matter."""
    nodes = tuple(
        LayerNode(
            id=f"layer{i}",
            op="Linear",
            forward_seconds=0.001 * size / degree * (1 + i % 2),
            backward_seconds=0.002 * size / degree,
            activation_bytes=size << 16,
            weight_bytes=(32 << 20) // degree,
            stashed_bytes=size * kept // degree,
        )
        for i in range(4)
    )
    edges = tuple((f"layer{i}", f"layer{i + 1}") for i in range(3))
    return LayerGraph(microbatch_size=size, nodes=nodes, edges=edges)


def typed(name: str, slowness: float, kept: int = 8 << 20) -> Profile:
    return replace(
        profile(name, slowness),
        layers=layered(8, 1, kept),
        more_layers=(layered(4, 1, kept),),
        tensor_layers=tuple(
            TensorLayers(tensor_parallel_size=2, layers=layered(size, 2, kept)) for size in (4, 8)
        ),
    )


@dataclass(frozen=True)
class Case:
    """What makes an option count: other options, profiles and a pool."""

    value: Any
    beside: dict[str, Any]
    profiles: tuple[Profile, ...] = (typed("V100", 1.0),)
    gpus: str = "4xV100"
    batch_size: int = 64


LINK = {"link_bytes_per_second": 1e9}
BY = {
    "split": {"strategy": "split"},
    "milp": {"strategy": "split", "method": "highs"},
    "waste": {"strategy": "split", "objective": "waste", "virtual_nodes": 4},
    "sharded": {"strategy": "split", "shard": "all"},
    "pipeline": {"strategy": "pipeline", **LINK},
    "repetitive": {
        "strategy": "pipeline", "schedule": "2bw", "repetitive": True, **LINK,
    },
    "stages": {"strategy": "pipeline", "shard": "gradients", **LINK},
    "parallel": {"strategy": "parallel", **LINK},
}  # fmt: skip
"""Options by which each planner is the one that is asked."""
TIGHT = (replace(typed("V100", 1.0, 64 << 20), device_memory_bytes=1 << 30),)
KEEPS = (replace(TIGHT[0], device_memory_bytes=3 << 29),)
_COSTS = PipelineCosts(pass_seconds=1e-3, message_seconds=0.0, fixed_seconds=0.0, step_error=0.5)
NOISY = replace(
    typed("V100", 1.0),
    pipeline=_COSTS,
    fixed_seconds=0.002,
    batch_curve=tuple(
        BatchPoint(
            batch_size=size,
            step_seconds=seconds,
            peak_memory_bytes=1,
            load_seconds=0.001,
            step_seconds_error=0.03,
        )  # fmt: skip
        for size, seconds in ((16, 0.020), (32, 0.0404))
    ),
)
UNEVEN = Case(True, {"virtual_nodes": 4}, batch_size=48)
CASES: dict[str, dict[str, Case]] = {
    "objective": {"waste": Case("waste", {}), "pipeline": Case("bottleneck", {})},
    "top": {"waste": Case(3, {}), "parallel": Case(4, {})},
    "method": {"milp": Case("highs", {})},
    "shard": {
        "sharded": Case("optimizer", {}),
        "stages": Case("optimizer", {}),
        "parallel": Case("gradients", {}),
    },
    "masters": {"sharded": Case(True, {})},
    "virtual_nodes": dict.fromkeys(("split", "milp", "waste", "sharded"), Case(4, {})),
    "interpolate": dict.fromkeys(("split", "milp", "waste", "sharded"), UNEVEN),
    "schedule": {
        "pipeline": Case("gpipe", {}),
        "repetitive": Case("2bw", {}),
        "stages": Case("auto", {}),
    },
    "stage_cost": {"pipeline": Case("thesis", {})},
    "num_stages": {"pipeline": Case(2, {})},
    "replication": {"pipeline": Case(False, {"num_stages": 1})},
    "link_bytes_per_second": dict.fromkeys(
        ("pipeline", "repetitive", "stages", "parallel"), Case(1e6, {})
    ),
    "microbatch_size": dict.fromkeys(("pipeline", "repetitive", "stages", "parallel"), Case(8, {})),
    "num_model_chunks": {
        "pipeline": Case(3, {"schedule": "interleaved"}, gpus="2xV100"),
        "stages": Case(2, {"schedule": "interleaved"}),
        "parallel": Case(1, {}),
    },
    "repetitive": {"repetitive": Case(True, {})},
    "cost_model": {"repetitive": Case("closed-form", {})},
    "recompute": dict.fromkeys(("stages", "parallel"), Case(False, {}, KEEPS, "1xV100")),
    "sequence_parallel": {"parallel": Case(True, {})},
    "shard_optimizer": {"parallel": Case(True, {})},
    "optimizer": dict.fromkeys(PLANNERS, Case(named_optimizer("adam"), {}, TIGHT)),
    "memory_reserve_bytes": dict.fromkeys(PLANNERS, Case(1 << 30, {})),
    "fastest": {
        "split": Case(True, {}, (NOISY,), "2xV100", 256),
        "pipeline": Case(True, {}, (NOISY,)),
    },
    "time_limit_seconds": dict.fromkeys(("milp", "pipeline", "stages", "parallel"), Case(1e-9, {})),
    "gap": dict.fromkeys(("pipeline", "stages", "parallel"), Case(0.9, {})),
}


def outcome(asks: SolveRequest) -> object:
    """The plan, or why there is none."""
    try:
        return to_plain(solve(question_of(asks)))
    except HetflowError as error:
        return str(error)


def asked(planner: str, case: Case = Case(None, {})) -> SolveRequest:
    request = SolveRequest(case.profiles, case.gpus, batch_size=case.batch_size)
    return replace(request, **{**BY[planner], **case.beside})


def test_every_option_has_a_case() -> None:
    assert CASES.keys() == LIMITED


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", CASES)
def test_an_option_has_an_effect_or_is_refused(name: str, planner: Planner) -> None:
    case = CASES[name].get(planner)
    if case is not None:
        base = asked(planner, case)
        unset = replace(base, **{name: OPTIONS[name].default})
        assert outcome(replace(base, **{name: case.value})) != outcome(unset)
        return
    request = asked(planner)
    case = next(iter(CASES[name].values()))
    asks = question_of(replace(request, **{name: case.value}))
    if planner in asks.planners.values():  # else the option itself chooses another planner
        [more] = set(given(asks.asked)) - set(given(request))
        assert planner not in more.read_by
        with pytest.raises(ProblemError, match="it has no effect on") as refused:
            solve(asks)
        assert refused.value.message.startswith(f"{more} is for ")
        assert "leave it out, or " in (refused.value.hint or "")


SPLIT_OR_SAID = [name for name in CASES if "split" not in CASES[name] and name != "objective"]


@pytest.mark.parametrize("name", SPLIT_OR_SAID)
def test_profiles_without_layers_refuse_what_only_layers_can_use(name: str) -> None:
    """The README's own example: options of pipelines had no effect, without a word."""
    flat = replace(typed("V100", 1.0), layers=None, more_layers=(), tensor_layers=())
    request = SolveRequest((flat,), "4xV100", batch_size=64)
    case = next(iter(CASES[name].values()))
    asks = question_of(replace(request, **{name: case.value}))
    if {"milp", "sharded"} & set(asks.planners.values()):
        return
    with pytest.raises(ProblemError, match="is for .* it has no effect on") as refused:
        solve(asks)
    if not {"split", "milp", "waste", "sharded"} & CASES[name].keys():
        known = f"{refused.value.message} {refused.value.hint}"
        assert "profiles hold no layers" in known or "repetitive" in known


def test_auto_compares_the_kinds_that_read_what_is_asked() -> None:
    def compared(values: dict[str, Any]) -> set[str]:
        plan: Any = to_plain(solve(question_of(replace(base, **values))))
        others = plan["provenance"].get("compared_with", [])
        return {kind_of(plan), *(other["kind"] for other in others)}

    base = replace(asked("split"), strategy="auto")
    assert compared(LINK) == {"split", "pipeline", "parallel"}
    assert compared({**LINK, "num_stages": 2}) == {"pipeline"}
    assert compared({"virtual_nodes": 8}) == {"split"}
    assert compared({**LINK, "shard_optimizer": True}) == {"parallel"}
    assert compared({**LINK, "shard": "optimizer"}) == {"split", "parallel"}
    assert compared({"shard": "all"}) == {"split", "parallel"}
    with pytest.raises(ProblemError, match="virtual_nodes and num_stages: no kind of plan"):
        solve(question_of(replace(base, virtual_nodes=8, num_stages=2)))


def test_a_pipeline_that_shares_states_is_a_parallel_plan_of_single_devices() -> None:
    base = asked("stages", Case(None, {"memory_reserve_bytes": 1 << 28}, TIGHT))
    chunked = replace(base, schedule="interleaved", num_model_chunks=2, shard="all")
    for request, config in ((base, "2-2"), (chunked, "2-2-2-2")):
        plan = solve(question_of(request))
        assert (plan.schedule, plan.shared_states) == (request.schedule, request.shard)
        assert {group.tensor_parallel_size for group in plan.groups} == {1}
        assert plan.config == config
        assert plan.restrictions is not None
        assert plan.restrictions.tensor_parallel is False
        assert lower(plan).shard == plan.shard
    free = solve(question_of(replace(base, strategy="parallel", shard="none")))
    assert {group.tensor_parallel_size for group in free.groups} == {2}
    wrong = replace(free, restrictions=Restrictions(tensor_parallel=False))
    assert any("shares layers" in fault for fault in hetflow.check(wrong, TIGHT, "4xV100"))


@pytest.mark.parametrize(
    ("schedule", "said"),
    [("2bw", "updates between passes"), ("pipedream", "updates"), ("gpipe", "planned for 1f1b")],
)
def test_other_schedules_share_no_states(schedule: str, said: str) -> None:
    with pytest.raises(ProblemError, match=f'shard="gradients" with .*"{schedule}": .*{said}'):
        solve(question_of(replace(asked("stages"), schedule=schedule)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, 'schedule="1f1b" is for pipelines'),
        ({"stage_cost": "ring"}, 'stage_cost="ring" is for pipelines'),
        ({"replication": True}, "replication is for pipelines"),
        ({"recompute": True}, "recompute is for parallel plans"),
        ({"cost_model": "profiled"}, 'cost_model="profiled" is for pipelines planned with'),
        ({"top": 1}, "top is for splits by waste and parallel plans"),
    ],
)
def test_the_value_of_the_default_is_refused_too_where_it_is_not_read(
    options: dict[str, Any], said: str
) -> None:
    """``--schedule 1f1b``, asked for in words, gave a split without a word."""
    flat = replace(typed("V100", 1.0), layers=None, more_layers=(), tensor_layers=())
    with pytest.raises(ProblemError, match=f"^{said}"):
        hetflow.solve([flat], "4xV100", batch_size=64, **options)


def test_the_value_of_the_default_asks_for_what_another_value_asks_for() -> None:
    pool = Cluster.parse("4xV100")
    pool = replace(pool, servers=(replace(pool.servers[0], intra_bytes_per_second=1e9),))

    def solved(**options: Any) -> Any:
        return hetflow.solve([typed("V100", 1.0)], pool, batch_size=64, **options)

    assert solved(schedule="1f1b").kind == "pipeline"
    assert solved(method="exact").kind == "split"
    assert solved(objective="step_seconds") == solved(top=1) == solved(recompute=True) == solved()
    with pytest.raises(ProblemError, match="no step to minimise"):
        solved(strategy="pipeline", schedule="2bw", objective="step_seconds")
