"""Plans of three dimensions on the command line: solve, check, show, and what is refused."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.formats.reports.explain import explain, group_terms
from hetflow.formats.reports.grid import milliseconds
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import LayerCore, LayerGraph, LayerNode, Profile, TensorLayers
from hetflow.tests.plan_parts import kind_of

Hetflow = Callable[..., Any]
LINK = ("--link-bytes-per-second", "1e9")


def graph(slowness: float, degree: int, size: int) -> LayerGraph:
    nodes = tuple(
        LayerNode(
            id=f"blocks.{i}",
            op="Block",
            forward_seconds=slowness * 0.01 * size / degree,
            backward_seconds=slowness * 0.02 * size / degree,
            activation_bytes=size << 16,
            weight_bytes=(64 << 20) // degree,
            stashed_bytes=size * (32 << 20) // degree,
        )
        for i in range(6)
    )
    edges = tuple((f"blocks.{i}", f"blocks.{i + 1}") for i in range(5))
    return LayerGraph(microbatch_size=size, nodes=nodes, edges=edges)


def layered(profile: Profile, slowness: float) -> Profile:
    return replace(
        profile,
        layers=graph(slowness, 1, 1),
        more_layers=(graph(slowness, 1, 2),),
        tensor_layers=tuple(
            TensorLayers(tensor_parallel_size=2, layers=graph(slowness, 2, size)) for size in (1, 2)
        ),
    )


@pytest.fixture
def folder(tmp_path: Path, make_profile: Callable[..., Profile]) -> Path:
    target = tmp_path / "layered"
    target.mkdir()
    files.write(target / "v100.json", layered(make_profile("V100", 1.0), 1.0))
    files.write(target / "p100.json", layered(make_profile("P100", 4.0), 2.0))
    return target


def solve(hetflow: Hetflow, folder: Path, *more: object) -> Any:
    pool = ("--gpus", "4xV100,4xP100", "--batch-size", 32, "--profiles", folder)
    return hetflow("solve", "parallel", *pool, *more)


def test_solve_check_show(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    answer = solve(hetflow, folder, *LINK, "-o", plan)
    assert answer.code == 0, answer.stderr
    document = json.loads(plan.read_text())
    assert kind_of(document) == "parallel"
    assert document["proof"]["termination"] == "optimal"
    assert "equally many replicas" in document["proof"]["space"]
    promised = {
        "schema", "model", "global_batch_size", "microbatch_size", "num_microbatches",
        "schedule", "num_model_chunks", "stages", "predicted", "proof",
    }  # fmt: skip
    assert promised <= document.keys()
    group = document["stages"][0]["replicas"][0]
    assert {"device_type", "tensor_parallel_size", "num_replicas", "samples"} <= group.keys()
    types = {g["device_type"] for stage in document["stages"] for g in stage["replicas"]}
    assert types == {"V100", "P100"}  # neither is left idle: together they are worth 6 V100
    pool = ("--profiles", folder, "--gpus", "4xV100,4xP100")
    assert "valid (optimal)" in hetflow("check", plan, *pool).stdout
    assert "valid (optimal)" in hetflow("check", plan, "--profiles", folder).stdout
    assert document["cluster"]["servers"]  # also of a flat pool: degrees depend on its servers
    shown = hetflow("show", plan).stdout
    assert "searched: 1F1B" in shown
    assert "blocks.0" in shown


def test_a_changed_plan_is_refused(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    assert solve(hetflow, folder, *LINK, "-o", plan).code == 0
    document = json.loads(plan.read_text())
    document["predicted"]["step_seconds"] *= 0.9
    plan.write_text(json.dumps(document))
    answer = hetflow("check", plan, "--profiles", folder, "--gpus", "4xV100,4xP100")
    assert answer.code == 2
    assert "step_seconds is" in answer.stderr


def test_cores_are_recomputed_where_memory_asks_for_it(hetflow: Hetflow, folder: Path) -> None:
    """Six blocks with 768 MiB of weights and gradients keep 192 MiB, or 48 without their cores."""
    path, plan = folder / "v100.json", folder.parent / "plan.json"
    core = LayerCore(forward_seconds=1e-3, made_bytes=24 << 20, stashed_bytes=8 << 20)
    nodes = tuple(replace(node, core=core) for node in graph(1.0, 1, 1).nodes)
    profile = replace(
        files.read(path, Profile),
        device_memory_bytes=768 + 48 + 24 << 20,
        layers=replace(graph(1.0, 1, 1), nodes=nodes),
        more_layers=(),
        tensor_layers=(),
    )
    files.write(path, profile, force=True)
    pool = ("--gpus", "1xV100", "--batch-size", 4, "--profiles", folder, *LINK)
    answer = hetflow("solve", "parallel", *pool, "-o", plan)
    assert answer.code == 0, answer.stderr
    (stage,) = json.loads(plan.read_text())["stages"]
    assert stage["recompute"] == "selective"
    assert stage["compute_seconds"] == pytest.approx(6 * 0.031)
    assert "valid (optimal)" in hetflow("check", plan, "--profiles", folder).stdout
    assert "selective" in hetflow("show", plan).stdout
    lowered = lower(files.read(plan, Plan)).pipeline
    assert lowered is not None
    assert (lowered.recomputes(0), lowered.stages[0].recompute_cores) == (False, True)
    assert hetflow("solve", "parallel", *pool, "--no-recompute").code == 3
    files.write(path, replace(profile, layers=graph(1.0, 1, 1)), force=True)
    assert hetflow("solve", "parallel", *pool).code == 3  # the profile knows no cores


def test_tokens_are_spread_where_memory_asks_for_it(hetflow: Hetflow, folder: Path) -> None:
    path, plan = folder / "v100.json", folder.parent / "plan.json"
    known = files.read(path, Profile)
    nodes = tuple(replace(n, stashed_bytes=1 << 20) for n in graph(1.1, 2, 1).nodes)
    spread = TensorLayers(tensor_parallel_size=2, layers=replace(graph(1.1, 2, 1), nodes=nodes))

    def solved(memory_bytes: int, spreads: bool, *more: str) -> Any:
        tables = (spread,) if spreads else ()
        profile = replace(known, device_memory_bytes=memory_bytes, sequence_layers=tables)
        files.write(path, profile, force=True)
        pool = ("--gpus", "2xV100", "--batch-size", 32, "--profiles", folder, *LINK)
        return hetflow("solve", "parallel", *pool, "--no-recompute", *more, "-o", plan, "--force")

    def spreads_tokens() -> bool:
        return json.loads(plan.read_text()).get("sequence_parallel", False)

    # Half of the weights, their gradients and no state; a sample's stash is 96 MiB, or 6.
    tight = 2 * 192 + 50 << 20
    assert solved(8 << 30, True).code == 0
    assert not spreads_tokens()
    assert solved(8 << 30, True, "--sequence-parallel").code == 0
    assert spreads_tokens()
    assert solved(tight, False).code == 3
    assert solved(tight, True, "--no-sequence-parallel").code == 3
    assert solved(tight, True).code == 0
    assert spreads_tokens()
    assert "valid" in hetflow("check", plan, "--profiles", folder).stdout
    refused = solved(tight, False, "--sequence-parallel")
    assert refused.code == 2
    assert "the profile of resnet50 on V100 has no sequence_layers" in refused.stderr


def test_replicas_may_share_the_optimizer_s_state(hetflow: Hetflow, folder: Path) -> None:
    plan, adam = folder.parent / "plan.json", ("--optimizer", "adam")
    fast = ("--link-bytes-per-second", "1e12")
    asked = ("--gpus", "4xV100", "--batch-size", 32, "--profiles", folder, *fast, *adam)
    memory = {}
    for shards in ((), ("--shard-optimizer",)):
        answer = hetflow("solve", "parallel", *asked, *shards, "-o", plan, "--force")
        assert answer.code == 0, answer.stderr
        document = json.loads(plan.read_text())
        assert document.get("shard_optimizer", False) is bool(shards)
        (group,) = document["stages"][0]["replicas"]
        assert (group["num_replicas"], group["tensor_parallel_size"]) == (2, 2)
        memory[bool(shards)] = document["stages"][0]["replicas"][0]["memory_bytes"]
        work = lower(files.read(plan, Plan)).pipeline
        assert work is not None
        assert bool(work.shard_optimizer) is bool(shards)
    # Of 6 blocks with 64 MiB of state on a device, each of 2 replicas keeps at most (6 + 1) / 2.
    assert memory[False] - memory[True] == (6 * 64 - 7 * 32) << 20
    assert "valid" in hetflow("check", plan, "--profiles", folder, *adam).stdout
    assert "shared by the replicas of a stage" in hetflow("show", plan).stdout
    asked_alone = hetflow("solve", *asked, "--shard-optimizer")
    assert kind_of(json.loads(asked_alone.stdout)) == "parallel"
    refused = hetflow("solve", "--strategy", "split", *asked[:-4], "--shard-optimizer")
    assert refused.stderr == (
        "hetflow: --shard-optimizer is for parallel plans: it has no effect on splits\n"
        "hint: leave it out, or add --strategy parallel\n"
    )


def test_a_smaller_replica_keeps_less_of_the_state(
    hetflow: Hetflow, folder: Path, make_profile: Callable[..., Profile]
) -> None:
    plan, weights, sample = folder.parent / "plan.json", 6 * 64 << 20, 6 * 32 << 20
    # Weights and gradients, a sample, and the state (twice the weights); or a third of it.
    for name, ratio in (("V100", 4.0), ("P100", 2 + 2 / 3)):
        profile = layered(make_profile(name, 1.0), 1.0)
        memory = int(ratio * weights) + sample
        files.write(
            folder / f"{name.lower()}.json",
            replace(profile, device_memory_bytes=memory),
            force=True,
        )
    pool = ("--gpus", "1xV100,1xP100", "--profiles", folder, "--optimizer", "adam")
    asked = (*pool, "--batch-size", 32, "--link-bytes-per-second", "1e12", "--microbatch-size", 1)
    answer = hetflow(
        "solve", "parallel", *asked, "--shard", "gradients", "--no-recompute", "-o", plan
    )
    assert answer.code == 0, answer.stderr
    document = json.loads(plan.read_text())
    shares = {g["device_type"]: g["state_share_bytes"] for g in document["stages"][0]["replicas"]}
    # Layers are dealt whole, so half of one more counts.
    least = weights / 3 - (32 << 20)
    assert shares == {"P100": pytest.approx(least, abs=2), "V100": weights - shares["P100"]}
    assert "valid" in hetflow("check", plan, *pool).stdout
    assert "which share gradients too" in hetflow("show", plan).stdout
    config = lower(files.read(plan, Plan))
    assert {s.device_type: s.state_share_bytes for s in config.workers} == shares
    assert config.pipeline is not None
    assert config.pipeline.shard_gradients


def test_replicas_of_stages_share_weights(hetflow: Hetflow, folder: Path) -> None:
    plan, free = folder.parent / "plan.json", folder.parent / "free.json"
    asked = ("--gpus", "4xV100", "--batch-size", 32, "--profiles", folder, "--optimizer", "adam")
    fast = ("--link-bytes-per-second", "1e12", "--chunks-per-device", 1)
    for shard, file in (("all", plan), ("auto", free)):
        answer = hetflow("solve", "parallel", *asked, *fast, "--shard", shard, "-o", file)
        assert answer.code == 0, answer.stderr
        assert "valid (optimal" in hetflow("check", file, *asked[4:]).stdout
    document = json.loads(plan.read_text())
    (stage,) = document["stages"]
    (group,) = stage["replicas"]
    assert (stage["shard"], group["num_replicas"], group["tensor_parallel_size"]) == ("all", 2, 2)
    assert group["state_share_bytes"] == (6 * 32 << 20) / 2  # of a device's half of each block
    kept, whole = 4 * group["state_share_bytes"], 2 * 2 * (32 << 20)  # two blocks, and gradients
    assert group["memory_bytes"] >= kept + whole
    assert stage["gather_seconds"] > 0
    assert document["restrictions"]["shard"] == "all"
    assert "which share gradients and weights too" in hetflow("show", plan).stdout
    assert "gathers of weights" in hetflow("show", plan, "--explain").stdout
    document = json.loads(free.read_text())
    assert document["proof"]["certificate"]["shards"] == [None, "gradients", "all"]
    assert "shard" not in document["stages"][0]  # all fits


@pytest.mark.slow
def test_what_fewer_devices_would_cost(hetflow: Hetflow, folder: Path) -> None:
    answer = solve(hetflow, folder, *LINK, "--top", 4, "--json")
    assert answer.code == 0, answer.stderr
    document = json.loads(answer.stdout)
    steps = [document["predicted"]["step_seconds"]]
    steps += [one["predicted"]["step_seconds"] for one in document["alternatives"]]
    assert 1 < len(steps) <= 4
    assert steps == sorted(steps)
    more = {
        (g["device_type"], g["num_devices"]): g["step_seconds"]
        for g in document["with_more_devices"]
    }
    assert more.keys() == {("V100", 1), ("V100", 4), ("P100", 1), ("P100", 4)}
    assert all(step <= steps[0] for step in more.values())
    wider = ("--gpus", "8xV100,4xP100", "--batch-size", 32, "--profiles", folder, *LINK)
    eight = json.loads(hetflow("solve", "parallel", *wider, "--json").stdout)
    assert more["V100", 4] == pytest.approx(eight["predicted"]["step_seconds"])
    assert more["V100", 4] < steps[0]
    plan = files.from_json(answer.stdout, Plan)
    assert [p for p in plan.alternatives if p.stages == plan.stages] == []
    for one in (plan, *plan.alternatives):
        terms = group_terms(one.num_rounds, one.stages, one.num_model_chunks)
        assert terms is not None
        assert sum(terms.values()) == pytest.approx(one.predicted.step_seconds, rel=1e-9)
    told = {term.name: (term.count, term.seconds) for term in explain(plan).terms}
    best = group_terms(plan.num_rounds, plan.stages, plan.num_model_chunks)
    assert best is not None
    assert {name: seconds for name, (_, seconds) in told.items()} == best
    assert told["passes"][0] == plan.num_rounds


def test_the_table_says_which_term_made_a_plan_slower(hetflow: Hetflow, folder: Path) -> None:
    plan = folder.parent / "plan.json"
    pool = ("--gpus", "2x(2xV100)", "--batch-size", 32, "--profiles", folder, *LINK)
    assert hetflow("solve", "parallel", *pool, "--top", 3, "-o", plan).code == 0
    document = json.loads(plan.read_text())
    (head,) = (line for line in hetflow("show", plan).stdout.splitlines() if "slower by" in line)
    table = hetflow("show", plan).stdout.split(head)[1].splitlines()[2:]
    assert " - " in table[0]  # the plan itself
    # Fewer devices of one type take more time for the same passes.
    own, *others = [
        one["stages"][0]["replicas"][0]["virtual_nodes"]
        * one["num_model_chunks"]
        * max(stage["compute_seconds"] for stage in one["stages"])
        for one in (document, *document["alternatives"])
    ]
    assert others
    for passes, row in zip(others, table[1:], strict=False):
        assert f"passes +{milliseconds(passes - own)}" in row


def test_interleaving_is_a_choice(hetflow: Hetflow, folder: Path) -> None:
    pool = ("--gpus", "4xV100", "--batch-size", 8, "--profiles", folder, *LINK, "--json")
    fitting = ("--gpus", "V100:4:700MB", *pool[2:])
    found = [
        json.loads(hetflow("solve", "parallel", *fitting, *more).stdout)
        for more in ((), ("--chunks-per-device", "1"), ("--chunks-per-device", "3"))
    ]
    assert [one["num_model_chunks"] for one in found[1:]] == [1, 3]
    assert [one["schedule"] for one in found[1:]] == ["1f1b", "interleaved"]
    steps = [one["predicted"]["step_seconds"] for one in found]
    assert steps[0] <= min(steps[1:])
    assert "interleaved 1F1B with 2, 3, 4 chunks" in found[0]["proof"]["space"]
    plan = folder.parent / "chunks.json"
    plan.write_text(json.dumps(found[2]))
    assert "valid" in hetflow("check", plan, "--profiles", folder).stdout
    assert "interleaved (3 stages a device: 0, 2, ... on the same)" in hetflow("show", plan).stdout
    for chunks, more, said in (
        ("7", (), "6 layers cannot fill 7 chunks on each of 2 devices"),
        ("7", (), "ask for at most 3"),
        ("2", ("--gpus", "1xV100"), "it needs 2 devices of one type"),
        ("2", ("--batch-size", 1), "1 microbatch(es) of 1 do not divide over 2 to 4 positions"),
        ("2", ("--batch-size", 7, "--microbatch-size", 1), "batches that do: 6 and 8"),
        ("2", ("--gpus", "V100:4:200MB"), "was found that fits the memory"),
    ):
        answer = hetflow("solve", "parallel", *pool, *more, "--chunks-per-device", chunks)
        assert answer.code == 3
        assert said in answer.stderr
        assert len(answer.stderr.splitlines()) == 2


def test_a_dry_run_shows_a_worker_a_device(hetflow: Hetflow, folder: Path) -> None:
    plan, script = folder.parent / "plan.json", folder.parent / "train.py"
    assert solve(hetflow, folder, *LINK, "-o", plan).code == 0
    script.write_text("")
    answer = hetflow("launch", "--dry-run", plan, script, "--devices", "4xV100,4xP100")
    assert answer.code == 0, answer.stderr
    found = files.read(plan, Plan)
    assert len(answer.stdout.splitlines()) == found.num_devices


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((*LINK, "--microbatch-size", "3"), "layers are profiled at 1, 2"),
        ((), "bandwidth"),
    ],
)
def test_what_does_not_go(hetflow: Hetflow, folder: Path, more: tuple[str, ...], said: str) -> None:
    answer = solve(hetflow, folder, *more)
    assert answer.code == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr


def test_options_of_other_kinds_are_refused(hetflow: Hetflow, folder: Path) -> None:
    pool = ("--gpus", "4xV100", "--batch-size", 32, "--profiles", folder, *LINK)
    for flag in (("--num-stages", "2"), ("--virtual-nodes", "4"), ("--objective", "waste")):
        answer = hetflow("solve", "--strategy", "parallel", *pool, *flag)
        assert answer.code == 2
        assert f"{flag[0]}" in answer.stderr
        assert "it has no effect on parallel plans" in answer.stderr


def test_a_pool_too_small_says_what_to_relax(hetflow: Hetflow, folder: Path) -> None:
    pool = ("--gpus", "V100:1:600MB", "--batch-size", 32, "--profiles", folder, *LINK)
    answer = hetflow("solve", "parallel", *pool)
    assert answer.code == 3
    assert "every device lacks at least" in answer.stderr
    assert "take 2 V100 (the fewest that do)" in answer.stderr
    enough = ("--gpus", "V100:2:600MB", *pool[2:])
    assert hetflow("solve", "parallel", *enough).code == 0


def test_degrees_that_fit_no_server_are_named(hetflow: Hetflow, folder: Path) -> None:
    pool = ("--gpus", "2x(1xV100)", "--batch-size", 32, "--profiles", folder, *LINK)
    answer = hetflow("solve", "parallel", *pool)
    assert answer.code == 0
    assert (
        "V100: tensor-parallel degrees 2 do not fit into servers of 1; planned: 1" in answer.stderr
    )


def test_a_model_that_is_no_transformer_says_so(
    hetflow: Hetflow, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reason = (
        folder / "v100.json",
        "no layers of ResNet are known that a tensor-parallel group could share",
    )
    known = files.read(path, Profile)
    origin = {**(known.provenance or {}), "tensor_layers": f"none: {reason}"}
    files.write(path, replace(known, tensor_layers=(), provenance=origin), force=True)
    pool = ("--gpus", "4xV100", "--batch-size", 32, "--profiles", folder, *LINK)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    answer = hetflow("solve", "parallel", *pool)
    assert answer.code == 0
    said = f"no tensor_layers ({reason}): tensor-parallel degrees above 1 are not tried"
    assert said in answer.stderr


def test_a_batch_that_holds_no_microbatch(hetflow: Hetflow, folder: Path) -> None:
    pool = ("--gpus", "4xV100", "--batch-size", 1, "--profiles", folder, *LINK)
    answer = hetflow("solve", "parallel", *pool, "--microbatch-size", 2)
    assert answer.code == 2
    assert "a batch of 1 can hold (timed: 2)" in answer.stderr
