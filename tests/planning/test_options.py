"""Every option of a request has an effect on the plans that are said to read it, or is refused."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import pytest

import hetflow
from hetflow.planning.options import Planner, given
from hetflow.planning.request import (
    SolveRequest,
)
from hetflow.planning.solve import solve
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import HetflowError, ProblemError
from hetflow.schema.files import to_plain
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.profile import (
    BatchPoint,
    LayerGraph,
    LayerNode,
    PipelineCosts,
    Profile,
    TensorLayers,
)
from hetflow.tests.handmade import profile

PLANNERS = get_args(Planner)
GIVEN = {"profiles", "pool", "pool_name", "batch_size", "strategy", "corrected_by", "stated"}
"""Fields of a request that are no options: what every plan is made from."""


def leaves(record: Any = SolveRequest, path: str = "") -> Iterator[str]:
    """The request's options as paths: ``pipeline.num_stages``."""
    for entry in fields(record):
        if is_dataclass(entry.type) and "read_by" not in entry.metadata:
            if entry.name != "pool":
                yield from leaves(entry.type, f"{path}{entry.name}.")
        elif path or entry.name not in GIVEN:
            yield path + entry.name


def changed(record: Any, values: dict[str, Any]) -> Any:
    """The record with the options at these paths set."""
    for path, value in values.items():
        head, _, rest = path.partition(".")
        record = replace(record, **{head: changed(getattr(record, head), {rest: value}) if rest
                                    else value})  # fmt: skip
    return record


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


LINK = {"pipeline.link_bytes_per_second": 1e9}
BY = {
    "split": {"strategy": "split"},
    "milp": {"strategy": "split", "split.method": "highs"},
    "waste": {"strategy": "split", "objective": "waste", "split.virtual_nodes": 4},
    "pipeline": {"strategy": "pipeline", **LINK},
    "repetitive": {
        "strategy": "pipeline", "pipeline.schedule": "2bw", "pipeline.repetitive": True, **LINK,
    },
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
UNEVEN = Case(True, {"split.virtual_nodes": 4}, batch_size=48)
CASES: dict[str, dict[str, Case]] = {
    "objective": {"waste": Case("waste", {}), "pipeline": Case("bottleneck", {})},
    "top": {"waste": Case(3, {}), "parallel": Case(4, {})},
    "split.method": {"milp": Case("highs", {})},
    "split.virtual_nodes": dict.fromkeys(("split", "milp", "waste"), Case(2, {})),
    "split.interpolate": dict.fromkeys(("split", "milp", "waste"), UNEVEN),
    "pipeline.schedule": {"pipeline": Case("gpipe", {}), "repetitive": Case("2bw", {})},
    "pipeline.stage_cost": {"pipeline": Case("thesis", {})},
    "pipeline.num_stages": {"pipeline": Case(2, {})},
    "pipeline.replication": {"pipeline": Case(False, {"pipeline.num_stages": 1})},
    "pipeline.link_bytes_per_second": dict.fromkeys(
        ("pipeline", "repetitive", "parallel"), Case(1e6, {})
    ),
    "pipeline.microbatch_size": dict.fromkeys(("pipeline", "repetitive", "parallel"), Case(8, {})),
    "pipeline.num_model_chunks": {
        "pipeline": Case(3, {"pipeline.schedule": "interleaved"}, gpus="2xV100"),
        "parallel": Case(1, {}),
    },
    "pipeline.repetitive": {"repetitive": Case(True, {})},
    "pipeline.cost_model": {"repetitive": Case("closed-form", {})},
    "pipeline.runs": {"repetitive": Case(Path("absent"), {"pipeline.cost_model": "measured"})},
    "parallel.recompute": {"parallel": Case(False, {}, KEEPS, "1xV100")},
    "parallel.sequence_parallel": {"parallel": Case(True, {})},
    "parallel.shard_optimizer": {"parallel": Case(True, {})},
    "optimizer": dict.fromkeys(PLANNERS, Case(named_optimizer("adam"), {}, TIGHT)),
    "memory_reserve_bytes": dict.fromkeys(PLANNERS, Case(1 << 30, {})),
    "fastest": {
        "split": Case(True, {}, (NOISY,), "2xV100", 256),
        "pipeline": Case(True, {}, (NOISY,)),
    },
    "limits.time_limit_seconds": dict.fromkeys(("milp", "pipeline", "parallel"), Case(1e-9, {})),
    "limits.gap": dict.fromkeys(("pipeline", "parallel"), Case(0.9, {})),
}


def unset_value(path: str) -> Any:
    """What the option is where it was not given."""
    head, _, rest = path.partition(".")
    kinds = {entry.name: entry for entry in fields(SolveRequest)}
    record = kinds[head].type if rest else SolveRequest
    return next(entry.default for entry in fields(record) if entry.name == (rest or head))


def outcome(request: SolveRequest) -> object:
    """The plan, or why there is none."""
    try:
        return to_plain(solve(request))
    except HetflowError as error:
        return str(error)


def asked(planner: str, case: Case = Case(None, {})) -> SolveRequest:
    request = SolveRequest(case.profiles, Cluster.parse(case.gpus), case.gpus, case.batch_size)
    return changed(request, {**BY[planner], **case.beside})


def test_every_option_has_a_case() -> None:
    assert CASES.keys() == set(leaves())


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("path", CASES)
def test_an_option_has_an_effect_or_is_refused(path: str, planner: Planner) -> None:
    case = CASES[path].get(planner)
    if case is not None:
        base = asked(planner, case)
        unset = changed(base, {path: unset_value(path)})
        assert outcome(changed(base, {path: case.value})) != outcome(unset)
        return
    request = asked(planner)
    case = next(iter(CASES[path].values()))
    asks = changed(request, {path: case.value})
    if planner in asks.planners.values():  # else the option itself chooses another planner
        [option] = set(given(asks)) - set(given(request))
        assert planner not in option.read_by
        with pytest.raises(ProblemError, match="it has no effect on") as refused:
            solve(asks)
        assert refused.value.message.startswith(f"{option.flag} is for ")
        assert "leave it out, or " in (refused.value.hint or "")


SPLIT_OR_SAID = [path for path in CASES if "split" not in CASES[path] and path != "objective"]


@pytest.mark.parametrize("path", SPLIT_OR_SAID)
def test_profiles_without_layers_refuse_what_only_layers_can_use(path: str) -> None:
    """The README's own example: options of pipelines had no effect, without a word."""
    flat = replace(typed("V100", 1.0), layers=None, more_layers=(), tensor_layers=())
    request = SolveRequest((flat,), Cluster.parse("4xV100"), "4xV100", 64)
    case = next(iter(CASES[path].values()))
    asks = changed(request, {path: case.value})
    if "milp" in asks.planners.values():
        return
    with pytest.raises(ProblemError, match="is for .* it has no effect on") as refused:
        solve(asks)
    if not {"split", "milp", "waste"} & CASES[path].keys():
        known = f"{refused.value.message} {refused.value.hint}"
        assert "profiles hold no layers" in known or "--repetitive" in known


def test_auto_compares_the_kinds_that_read_what_is_asked() -> None:
    def compared(values: dict[str, Any]) -> set[str]:
        plan: Any = to_plain(solve(changed(base, values)))
        others = plan["provenance"].get("compared_with", [])
        return {plan["kind"], *(other["kind"] for other in others)}

    base = changed(asked("split"), {"strategy": "auto"})
    assert compared(LINK) == {"split", "pipeline", "parallel"}
    assert compared({**LINK, "pipeline.num_stages": 2}) == {"pipeline"}
    assert compared({"split.virtual_nodes": 8}) == {"split"}
    assert compared({**LINK, "parallel.shard_optimizer": True}) == {"parallel"}
    with pytest.raises(ProblemError, match="--virtual-nodes and --num-stages: no kind of plan"):
        solve(changed(base, {"split.virtual_nodes": 8, "pipeline.num_stages": 2}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"schedule": "1f1b"}, "schedule 1f1b is for pipelines"),
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
