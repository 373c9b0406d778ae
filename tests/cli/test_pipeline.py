"""Pipelines on the command line: import, solve, check, show, and auto's choice."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.layers import LayerTrace
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.profile import LayerGraph, LayerNode, Links, Profile, TensorLayers
from hetflow.tests.plan_parts import kind_of

Hetflow = Callable[..., Any]
LINK = ("--link-bytes-per-second", "1e9")
GRAPH = """node1 -- Input -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=0.0, parameter_size=0.0
node2 -- Conv2d(3, 8) -- forward_compute_time=4.0, backward_compute_time=8.0, activation_size=1000.0, parameter_size=400.0
node3 -- Linear(8, 8) -- forward_compute_time=4.0, backward_compute_time=8.0, activation_size=1000.0, parameter_size=4000000.0
\tnode1 -- node2
\tnode2 -- node3
"""  # noqa: E501


def layered(profile: Profile) -> Profile:
    nodes = tuple(
        LayerNode(
            id=f"layer{i}",
            op="Linear",
            forward_seconds=0.01,
            backward_seconds=0.02,
            activation_bytes=1000,
            weight_bytes=25 << 20,
        )
        for i in range(4)
    )
    edges = tuple((f"layer{i}", f"layer{i + 1}") for i in range(3))
    return replace(profile, layers=LayerGraph(microbatch_size=8, nodes=nodes, edges=edges))


@pytest.fixture
def folder(tmp_path: Path, make_profile: Callable[..., Profile]) -> Path:
    target = tmp_path / "layered"
    target.mkdir()
    files.write(target / "v100.json", layered(make_profile("V100", 1.0)))
    return target


def solve(hetflow: Hetflow, folder: Path, *more: object) -> Any:
    pool = ("--gpus", "2xV100", "--batch-size", 64)
    return hetflow("solve", "--profiles", folder, *pool, *more)


def test_import_solve_check_show(hetflow: Hetflow, tmp_path: Path) -> None:
    (tmp_path / "g.graph.txt").write_text(GRAPH)
    profile, plan = tmp_path / "v100.json", tmp_path / "plan.json"
    memory = ("--device-type", "V100", "--device-memory", "16GB")
    assert hetflow("import", tmp_path / "g.graph.txt", *memory, "-o", profile).code == 0
    pool = ("--profiles", profile, "--gpus", "2xV100")
    asked = ("--batch-size", 8, "--strategy", "pipeline", "--no-replication", *LINK)
    unsaid = hetflow("solve", *pool, *asked)
    assert unsaid.code == 2
    assert "the profile of g on V100 does not say what the optimizer keeps" in unsaid.stderr
    assert "--optimizer sgd|sgd-momentum|adam" in unsaid.stderr
    assert hetflow("solve", *pool, *asked, "--optimizer", "adam", "-o", plan).code == 0
    assert [s["layers"] for s in json.loads(plan.read_text())["stages"]] == [["node2"], ["node3"]]
    assert "valid" in hetflow("check", plan, *pool).stdout
    assert "1-1, 1f1b" in hetflow("show", plan).stdout
    explained = hetflow("show", plan, "--explain").stdout
    assert "bytes on links" in explained
    assert "fixed cost of a step was not measured" in explained
    assert "said to carry" in explained
    assert "Linear(8, 8)" in hetflow("export", profile).stdout


def test_a_plan_says_all_that_its_check_needs(hetflow: Hetflow, folder: Path) -> None:
    """Links and optimizer of every kind of plan; another value is judged against, and refused."""
    profile = files.read(folder / "v100.json", Profile)
    bare = replace(profile, sync=None, optimizer=None)
    files.write(folder / "v100.json", bare, force=True)
    pool = ("--profiles", folder, "--gpus", "2xV100")
    asked = (*pool, "--batch-size", 64, "--strategy", "pipeline", *LINK, "--optimizer", "adam")
    kinds: list[tuple[object, ...]] = [
        ("--schedule", "1f1b"),
        ("--schedule", "interleaved", "--no-replication"),
        ("--schedule", "pipedream", "--num-stages", 2),
        ("--schedule", "2bw", "--repetitive"),
        ("--schedule", "pipedream", "--stage-cost", "published"),
    ]
    for number, kind in enumerate(kinds):
        plan = folder.parent / f"plan{number}.json"
        made = hetflow("solve", *asked, *kind, "-o", plan)
        assert made.code in (0, 4), made.stderr
        judged = hetflow("check", plan, *pool)
        assert judged.code == 0, (kind, judged.stderr)
        assert "valid" in judged.stdout
    plan = folder.parent / "plan1.json"
    document = json.loads(plan.read_text())
    assert document["link_bytes_per_second"] == 1e9
    assert document["optimizer"] == {
        "name": "adam", "state_bytes_per_weight_byte": 2.0, "is_default": False,
    }  # fmt: skip
    other = hetflow("check", plan, *pool, "--link-bytes-per-second", "2e9")
    assert other.code == 2
    assert "link_bytes_per_second is 1000000000.0, the problem says 2000000000.0" in other.stderr
    other = hetflow("check", plan, *pool, "--optimizer", "sgd")
    assert other.code == 2
    assert "memory is planned for adam (2 bytes" in other.stderr
    # Plans of before say neither, and load; what is not known is asked for.
    del document["link_bytes_per_second"], document["optimizer"]
    plan.write_text(json.dumps(document))
    for flags, said in (
        ((), "--link-bytes-per-second"),
        (LINK, "--optimizer sgd|"),
        ((*LINK, "--state-bytes-per-weight-byte", "2"), None),
        ((*LINK, "--state-bytes-per-weight-byte", "1"), "it needs"),
        ((*LINK, "--state-bytes-per-weight-byte", "1", "--optimizer", "sgd"), "give one of them"),
    ):
        answer = hetflow("check", plan, *pool, *flags)
        assert (said is None) == (answer.code == 0), answer.stderr
        assert said is None or said in answer.stderr


@pytest.mark.parametrize("said", ["cluster", "4GB", "servers"])
def test_a_plan_carries_the_pool_that_says_more_than_numbers(
    hetflow: Hetflow, folder: Path, tmp_path: Path, said: str
) -> None:
    """Its links, memory and servers; they had to be named again for the check."""
    cluster, plan = tmp_path / "cluster.json", tmp_path / "plan.json"
    document = {
        "schema": "hetflow.cluster/1",
        "device_types": {"V100": {}},
        "servers": [{"count": 2, "devices": {"V100": 1}}],
        "inter_bytes_per_second": 1e9,
    }
    cluster.write_text(json.dumps(document))
    pools = {
        "cluster": ("--cluster", cluster),
        "4GB": ("--gpus", "V100:2:4GB", *LINK),
        "servers": ("--gpus", "2x(1xV100)", *LINK),
    }
    asked = ("--profiles", folder, "--batch-size", 64, *pools[said], "-o", plan)
    assert hetflow("solve", "pipeline", *asked).code == 0
    assert files.read_any(plan).cluster.num_devices == {"V100": 2}
    assert hetflow("check", plan, "--profiles", folder).code == 0
    assert hetflow("solve", "split", *asked[:4], *pools[said][:2], "-o", plan, "--force").code == 0
    assert hetflow("check", plan, "--profiles", folder).code == 0
    flat = hetflow("solve", "--profiles", folder, "--gpus", "2xV100", "--batch-size", 64, *LINK)
    assert "cluster" not in json.loads(flat.stdout)


def test_what_the_optimizer_keeps_is_never_assumed(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]
) -> None:
    by_default = OptimizerState(
        name="sgd-momentum", state_bytes_per_weight_byte=1.0, is_default=True
    )
    whole = layered(make_profile("V100", 1.0))
    asked = ("--strategy", "pipeline", "--no-replication", *LINK)

    def told(optimizer: OptimizerState | None, *flags: object) -> Any:
        files.write(folder / "v100.json", replace(whole, optimizer=optimizer), force=True)
        return solve(hetflow, folder, *asked, *flags)

    for unknown, said in ((None, "does not say"), (by_default, "because none was chosen")):
        answer = told(unknown)
        assert answer.code == 2
        assert said in answer.stderr
        assert "--optimizer sgd|sgd-momentum|adam|" in answer.stderr
        assert answer.stdout == ""
        # The split is still compared with nothing, and says so in a pipe too.
        chosen = solve(hetflow, folder, *LINK)
        assert kind_of(json.loads(chosen.stdout)) == "split"
        assert "warning: there is no pipeline plan to compare with" in chosen.stderr
    stages = {
        name: json.loads(told(by_default, "--optimizer", name).stdout)["stages"]
        for name in ("sgd", "sgd-momentum", "adamw")
    }
    # Two layers of 25 MiB a stage: weights, gradients and 0, 1 or 2 tensors of state.
    for name, copies in (("sgd", 2), ("sgd-momentum", 3), ("adamw", 4)):
        assert stages[name][1]["replicas"][0]["memory_bytes"] // (50 << 20) == copies
    measured = OptimizerState(name="Lion", state_bytes_per_weight_byte=1.0)
    assert json.loads(told(measured).stdout)["optimizer"]["name"] == "Lion"
    said = told(measured, "--optimizer", "adam").stderr
    assert "update_seconds are those of Lion, as profiled" in said
    assert "must be one of sgd" in told(measured, "--optimizer", "adamm").stderr


def test_the_memory_that_is_named_is_the_device_s(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]
) -> None:
    whole = layered(make_profile("V100", 1.0))
    nodes = tuple(replace(node, workspace_bytes=1000) for node in whole.layers.nodes)
    graph = replace(whole.layers, nodes=nodes)
    files.write(folder / "v100.json", replace(whole, layers=graph), force=True)
    pool = ("--profiles", folder, "--batch-size", 64, "--gpus", "V100:2:60MB")
    for more in ((), ("--schedule", "zb-h1"), ("--schedule", "2bw", "--repetitive")):
        answer = hetflow("solve", *pool, "--strategy", "pipeline", *LINK, *more)
        assert answer.code == 3, answer.stderr
        assert re.search(
            r"needs \d+ bytes .*on a V100 of 62914560, \d+ bytes too many", answer.stderr
        )


def test_a_tampered_pipeline_plan_fails_its_check(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    document = json.loads(solve(hetflow, folder, "--strategy", "pipeline", *LINK).stdout)
    document["stages"][0]["replicas"][0]["memory_bytes"] = 1
    plan.write_text(json.dumps(document))
    answer = hetflow("check", plan, "--profiles", folder, "--gpus", "2xV100")
    assert answer.code == 2
    assert "memory" in answer.stderr


def test_auto_takes_the_faster_kind_and_says_what_it_beat(hetflow: Hetflow, folder: Path) -> None:
    steps = {
        kind: json.loads(solve(hetflow, folder, "--strategy", kind, *link).stdout)["predicted"][
            "step_seconds"
        ]
        for kind, link in (("split", ()), ("pipeline", LINK), ("parallel", LINK))
    }
    chosen = json.loads(solve(hetflow, folder, *LINK).stdout)
    best = kind_of(chosen)
    others = compared(chosen)
    assert others.keys() == steps.keys() - {best}
    for kind, other in others.items():
        assert other["step_seconds"] == steps[kind]
        if "faster_by" not in other:  # two stages on one device each
            assert "shares no layer and is a pipeline" in other["reason"]
            continue
        assert other["faster_by"] == pytest.approx(steps[kind] / steps[best] - 1)
        assert other["faster_by"] >= 0
        assert f"{best} is {other['faster_by']:.1%} faster than {kind} (" in other["reason"]


def compared(plan: dict[str, Any]) -> dict[str, Any]:
    """What a plan says of the other kinds of plans."""
    return {other["kind"]: other for other in plan["provenance"]["compared_with"]}


def test_auto_takes_a_parallel_plan_that_no_other_kind_is(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]
) -> None:
    """Layers that a group of two runs in half the time; no profiled batch fits a device."""
    whole = small_layers(make_profile("V100", 1.0), device_memory_bytes=1 << 30)
    assert whole.layers is not None
    halves = tuple(
        replace(n, forward_seconds=0.00025, backward_seconds=0.0005, weight_bytes=2)
        for n in whole.layers.nodes
    )
    cut = TensorLayers(tensor_parallel_size=2, layers=replace(whole.layers, nodes=halves))
    files.write(folder / "v100.json", replace(whole, tensor_layers=(cut,)), force=True)
    answer = solve(hetflow, folder, "--link-bytes-per-second", "1e12")
    chosen = json.loads(answer.stdout)
    assert kind_of(chosen) == "parallel", answer.stderr
    assert {g["tensor_parallel_size"] for s in chosen["stages"] for g in s["replicas"]} == {2}
    assert compared(chosen).keys() == {"split", "pipeline"}
    # An option of pipelines leaves the other kinds out.
    alone = solve(hetflow, folder, "--num-stages", "2", *LINK)
    document = json.loads(alone.stdout)
    assert kind_of(document) == "pipeline"
    assert "compared_with" not in document["provenance"]


@pytest.fixture
def several(folder: Path) -> Path:
    """The profile with layers at microbatches of 4 too, which are dearer by the sample."""
    profile = files.read(folder / "v100.json", Profile)
    assert profile.layers is not None
    small = tuple(replace(n, forward_seconds=0.008) for n in profile.layers.nodes)
    tables = (replace(profile.layers, microbatch_size=4, nodes=small),)
    files.write(folder / "v100.json", replace(profile, more_layers=tables), force=True)
    return folder


def test_the_fastest_profiled_microbatch_is_taken(hetflow: Hetflow, several: Path) -> None:
    asked = ("--strategy", "pipeline", "--no-replication", *LINK)
    steps = {}
    for size in (4, 8):
        made = json.loads(solve(hetflow, several, *asked, "--microbatch-size", size).stdout)
        assert made["microbatch_size"] == size
        steps[size] = made["predicted"]["step_seconds"]
    best = json.loads(solve(hetflow, several, *asked).stdout)
    assert best["microbatch_size"] == min(steps, key=lambda size: steps[size])
    plan = several.parent / "plan.json"
    plan.write_text(json.dumps(best))
    judged = hetflow("check", plan, "--profiles", several, "--gpus", "2xV100")
    assert judged.code == 0, judged.stderr


def test_the_nearest_profiled_microbatch_is_named(hetflow: Hetflow, several: Path) -> None:
    asked = ("--strategy", "pipeline", "--microbatch-size", 5, *LINK)
    answer = solve(hetflow, several, *asked)
    assert json.loads(answer.stdout)["microbatch_size"] == 4
    assert "layers are profiled at 4, 8: took microbatches of 4, not 5" in answer.stderr


def small_layers(profile: Profile, **changes: Any) -> Profile:
    """Four equal layers of 0.5 + 1 ms and no weights to speak of."""
    made = layered(profile)
    nodes = tuple(
        replace(node, forward_seconds=0.0005, backward_seconds=0.001, weight_bytes=4)
        for node in made.layers.nodes
    )
    return replace(made, layers=replace(made.layers, nodes=nodes), **changes)


def test_auto_by_hand(hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]) -> None:
    files.write(folder / "v100.json", small_layers(make_profile("V100", 1.0)), force=True)
    chosen = json.loads(solve(hetflow, folder, "--no-replication", *LINK).stdout)
    # Two stages of 3 ms, 8 microbatches: (8 + 1) * 3 ms, transfers of 2 us, half an update each.
    assert kind_of(chosen) == "pipeline"
    by_hand = 9 * 0.003 + 0.002
    assert chosen["predicted"]["step_seconds"] == pytest.approx(by_hand, rel=1e-3)
    # Two devices of 32 samples: 34 ms, 20 ms of synchronisation, 4 ms of update.
    fastest = json.loads(solve(hetflow, folder, *LINK).stdout)
    other = compared(fastest)["split"]
    assert other["step_seconds"] == pytest.approx(0.034 + 0.020 + 0.004)
    seconds = fastest["predicted"]["step_seconds"]
    assert seconds <= chosen["predicted"]["step_seconds"]
    assert other["faster_by"] == pytest.approx(0.058 / seconds - 1, rel=1e-3)


def test_auto_takes_the_only_kind_there_is(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]
) -> None:
    # 1 GiB holds no profiled batch, but each half of the layers.
    tight = small_layers(make_profile("V100", 1.0), device_memory_bytes=1 << 30)
    files.write(folder / "v100.json", tight, force=True)
    chosen = json.loads(solve(hetflow, folder, *LINK).stdout)
    assert kind_of(chosen) == "pipeline"
    assert "refused" in compared(chosen)["split"]
    # 1 MiB of memory holds neither: both reasons are told.
    heavy = replace(layered(make_profile("V100", 1.0)), device_memory_bytes=1 << 20)
    files.write(folder / "v100.json", heavy, force=True)
    answer = solve(hetflow, folder, *LINK)
    assert answer.code == 3
    assert "split: " in answer.stderr
    assert "pipeline: " in answer.stderr


def test_auto_refuses_flags_that_do_not_go_together(hetflow: Hetflow, folder: Path) -> None:
    answer = solve(hetflow, folder, "--cost-model", "closed-form", *LINK)
    assert answer.code == 2
    assert "add --repetitive" in answer.stderr


def test_auto_without_a_bandwidth_still_splits(hetflow: Hetflow, folder: Path) -> None:
    profile = files.read(folder / "v100.json", Profile)
    files.write(folder / "v100.json", replace(profile, sync=None), force=True)
    made = json.loads(solve(hetflow, folder).stdout)
    assert kind_of(made) == "split"
    refused = compared(made)["pipeline"]["refused"]
    assert "bandwidth inside V100 servers is missing" in refused


def test_auto_compares_over_the_links_that_were_measured(hetflow: Hetflow, folder: Path) -> None:
    links = Links(latency_seconds=0.0, bytes_per_second=5e9, points=())
    profile = files.read(folder / "v100.json", Profile)
    files.write(folder / "v100.json", replace(profile, links=links), force=True)
    unsaid, said = (solve(hetflow, folder, *rate) for rate in ((), (LINK[0], "5e9")))
    assert json.loads(unsaid.stdout) == json.loads(said.stdout)
    (split,) = (o for o in compared(json.loads(unsaid.stdout)).values() if "faster_by" in o)
    assert split["faster_by"] > 0


def test_more_stages_than_layers_is_one_line(hetflow: Hetflow, folder: Path) -> None:
    answer = solve(hetflow, folder, "--strategy", "pipeline", "--num-stages", 9, *LINK)
    assert answer.code == 2
    assert "4 layers cannot fill 9 stages" in answer.stderr
    assert answer.stdout == ""


def test_a_plan_without_a_kind_is_refused(hetflow: Hetflow, folder: Path) -> None:
    document = json.loads(solve(hetflow, folder, "--strategy", "split").stdout)
    document["schema"] = "hetflow.plan/1"
    path = folder.parent / "plan.json"
    path.write_text(json.dumps(document))
    answer = hetflow("show", path)
    assert answer.code == 2
    assert "$.kind: missing" in answer.stderr


def test_a_pipeline_plan_has_timelines(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    asked = ("--strategy", "pipeline", "--no-replication", *LINK, "-o", plan)
    assert solve(hetflow, folder, *asked).code == 0
    html, trace = folder.parent / "t.html", folder.parent / "t.json"
    svg = folder.parent / "t.svg"
    shown = hetflow("show", plan, "--timeline", "--html", html, "--trace", trace, "--plot", svg)
    assert shown.code == 0, shown.stderr
    assert "bubble" in shown.stdout
    assert html.read_text().startswith("<!")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "<svg" in svg.read_text()
    split = folder.parent / "split.json"
    solve(hetflow, folder, "--strategy", "split", "-o", split)
    for flag in (("--timeline",), ("--html", html), ("--trace", trace), ("--csv", svg)):
        refused = hetflow("show", split, *flag)
        assert (refused.code, refused.stdout) == (2, "")
        assert refused.stderr.startswith(f"hetflow: {flag[0]} is for ")
        assert "it has no effect on this file (hetflow.plan/2 split)" in refused.stderr
        assert f"hint: leave {flag[0]} out" in refused.stderr
    for more in (("--by-cloud",), ("--timeline", "--json"), ("--timeline", "--explain")):
        assert hetflow("show", plan, *more).code == 2


def test_schedule_auto_takes_the_fastest_and_says_by_how_much(
    hetflow: Hetflow, folder: Path
) -> None:
    asked = ("--strategy", "pipeline", "--no-replication", *LINK)
    chosen = json.loads(solve(hetflow, folder, *asked, "--schedule", "auto").stdout)
    compared = chosen["provenance"]["compared_schedules"]
    assert {chosen["schedule"], *(entry["schedule"] for entry in compared)} == {
        "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v",
    }  # fmt: skip
    best = chosen["predicted"]["step_seconds"]
    assert all(entry["step_seconds"] >= best for entry in compared)
    alone = json.loads(solve(hetflow, folder, *asked, "--schedule", "1f1b").stdout)
    assert alone["predicted"]["step_seconds"] in [entry["step_seconds"] for entry in compared]
    one = ("--strategy", "pipeline", "--num-stages", 1, "--schedule", "auto", *LINK)
    assert json.loads(solve(hetflow, folder, *one).stdout)["schedule"] == "1f1b"


def test_an_interleaved_plan_is_checked_shown_and_lowered(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    asked = ("--strategy", "pipeline", "--schedule", "interleaved", "--chunks-per-device", 2)
    assert solve(hetflow, folder, *asked, "--no-replication", *LINK, "-o", plan).code == 0
    stages = json.loads(plan.read_text())["stages"]
    assert [stage["replicas"][0]["first_device"] for stage in stages] == [0, 1, 0, 1]
    assert "valid" in hetflow("check", plan, "--profiles", folder, "--gpus", "2xV100").stdout
    assert "valid" in hetflow("check", plan, "--profiles", folder).stdout
    assert "rank 1" in hetflow("show", plan, "--timeline").stdout
    lowered = lower(files.read_any(plan))
    assert lowered.world_size == 2
    assert [list(stage.ranks) for stage in lowered.pipeline.stages] == [[0], [1], [0], [1]]


def test_the_objective_is_said_and_can_be_the_bottleneck(hetflow: Hetflow, folder: Path) -> None:
    asked = ("--strategy", "pipeline", "--no-replication", *LINK)
    step = json.loads(solve(hetflow, folder, *asked).stdout)
    assert step["objective"] == "step_seconds"
    assert step["proof"]["objective"] == step["predicted"]["step_seconds"]
    steady = json.loads(solve(hetflow, folder, *asked, "--objective", "bottleneck").stdout)
    assert steady["objective"] == "bottleneck"
    refused = solve(hetflow, folder, "--strategy", "split", "--objective", "bottleneck")
    assert refused.code == 2
    assert "is for pipelines" in refused.stderr
    refused = solve(hetflow, folder, "--strategy", "pipeline", "--objective", "waste", *LINK)
    assert refused.code == 2
    assert "is for splits" in refused.stderr


def test_a_plan_that_cannot_be_launched_says_so_when_it_is_made(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile], tmp_path: Path
) -> None:
    """Two types, of which one was only seen by hooks (another torch there, say)."""
    trace = LayerTrace(way="hooks", reason="torch.export: decides by values")
    profile = layered(make_profile("P100", 1.0))
    assert profile.layers is not None
    files.write(folder / "p100.json", replace(profile, layers=replace(profile.layers, trace=trace)))
    pool = ("--profiles", folder, "--gpus", "1xV100,1xP100", "--batch-size", 64, *LINK)
    said = "not launched, because torch.export: decides by values"
    plan = tmp_path / "plan.json"
    made = hetflow("solve", *pool, "--strategy", "pipeline", "-o", plan)
    assert made.code == 0
    assert said in made.stderr
    assert said in hetflow("show", plan).stdout
    # With the choice left open, only what can be launched is chosen.
    chosen = hetflow("solve", *pool[: -len(LINK)])
    assert kind_of(json.loads(chosen.stdout)) == "split"


@pytest.mark.slow
def test_limits_of_a_search_and_their_exit_codes(
    hetflow: Hetflow, tmp_path: Path, make_profile: Callable[..., Profile]
) -> None:
    nodes = tuple(
        LayerNode(
            id=f"layer{i}",
            op="Linear",
            forward_seconds=0.001 * (1 + i % 5),
            backward_seconds=0.001 * (2 + i % 3),
            activation_bytes=400_000 * (1 + i % 4),
            weight_bytes=8 << 20,
        )
        for i in range(24)
    )
    edges = tuple((f"layer{i}", f"layer{i + 1}") for i in range(23))
    graph = LayerGraph(microbatch_size=8, nodes=nodes, edges=edges)
    files.write(tmp_path / "v.json", replace(make_profile("V100", 1.0), layers=graph))

    def asked(*limits: object, strategy: str = "pipeline") -> Any:
        return hetflow(
            "solve", "--profiles", tmp_path / "v.json", "--gpus", "2x(4xV100)", "--batch-size", 128,
            "--strategy", strategy, *(LINK if strategy == "pipeline" else ()), *limits,
        )  # fmt: skip

    by_itself = asked()
    proof = json.loads(by_itself.stdout)["proof"]
    assert by_itself.code == 0
    assert proof["gap"] > 0.02  # which no limit was asked for
    assert asked("--gap", 0.9).code == 0
    missed = asked("--gap", 0.0)
    assert missed.code == 4
    assert json.loads(missed.stdout)["proof"] == proof
    stopped = asked("--time-limit", 0.001)
    assert stopped.code == 4
    assert json.loads(stopped.stdout)["proof"]["termination"] == "feasible"
    assert asked("--time-limit", 0.001, "--gap", 0.9).code == 0
    assert asked("--objective", "bottleneck", "--time-limit", 60).code == 0
    for flag, value in (("--time-limit", 5), ("--gap", 0.1)):
        refused = asked(flag, value, strategy="split")
        assert refused.code == 2
        assert f"hetflow: {flag} is for " in refused.stderr
        assert "it has no effect on " in refused.stderr
