"""Piper's inputs: judged as Piper judges, and planned no worse."""

import json
from pathlib import Path
from typing import Any

import pytest
from piper_parts.check import check, counted_seconds
from piper_parts.problem import (
    SteadyPlan,
    SteadyProblem,
    SteadyStage,
    read_problem,
)
from piper_parts.solve import solve

from hetflow.cli.main import run
from hetflow.papers.piper import read_layers, read_tensor_layers
from hetflow.schema.errors import FileError
from hetflow.schema.files import from_json
from hetflow.schema.plan import Plan, Proof
from hetflow.tests.data.reference import planners

FILES = {"bert": "bert32a100.json", "resnet": "resnet.json"}


def answers() -> list[dict[str, Any]]:
    text = (planners() / "piper" / "results.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def problem_of(answer: dict[str, Any]) -> SteadyProblem:
    return read_problem(
        planners() / "piper" / FILES[answer["model"]],
        num_devices=answer["devices"],
        memory_bytes=int(answer["memory_gib"] * 2**30),
    )


def plan_of(answer: dict[str, Any]) -> SteadyPlan:
    """Piper's own plan; what it predicts is not judged."""
    stages = tuple(
        SteadyStage(
            layers=tuple(number for number, _ in stage["TMPCids"]),
            choices=tuple(name for _, name in stage["TMPCids"]),
            tensor_parallel_size=stage["tensorParallelDegree"],
            num_replicas=stage["dataParallelDegree"],
            sample_seconds=0.0,
            memory_bytes=0,
        )
        for stage in answer["piper_plan"]["stages"]
    )
    proof = Proof(termination="feasible", objective=0.0, lower_bound=None, gap=None, method="")
    return SteadyPlan(model="m", stages=stages, sample_seconds=0.0, proof=proof)


def test_the_checker_counts_as_piper_does() -> None:
    for answer in answers():
        problem, plan = problem_of(answer), plan_of(answer)
        counted = max(counted_seconds(plan, problem, i) for i in range(len(plan.stages)))
        assert counted == pytest.approx(answer["piper_tps"], rel=1e-9)


@pytest.mark.parametrize(("model", "devices"), [("bert", 8), ("bert", 32), ("resnet", 16)])
@pytest.mark.slow
def test_plans_are_no_worse_than_piper_s(model: str, devices: int) -> None:
    answer = next(a for a in answers() if (a["model"], a["devices"]) == (model, devices))
    problem = problem_of(answer)
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.sample_seconds <= answer["piper_tps"] * (1 + 1e-9)
    assert plan.proof.gap is not None
    assert plan.proof.gap < 0.05


def test_layers_of_a_profile() -> None:
    """BERT-32: a transformer layer takes 30.492 ms, and 40.685 ms where it recomputes."""
    text = (planners() / "piper" / FILES["bert"]).read_text()
    graph = read_layers(text, microbatch_size=2, name="bert")
    assert (len(graph.nodes), len(graph.edges)) == (37, 67)
    node = graph.nodes[3]
    assert (node.id, node.op) == ("ParallelTransformerLayer 3", "ParallelTransformerLayer")
    assert node.forward_seconds == pytest.approx(0.040685 - 0.030492)
    assert node.forward_seconds + node.backward_seconds == pytest.approx(0.030492)
    assert (node.weight_bytes, node.stashed_bytes) == (176_997_120, 606_478_336)
    assert node.activation_bytes == 16_777_216  # of its edges
    groups = read_tensor_layers(text, microbatch_size=2, name="bert")
    assert [group.tensor_parallel_size for group in groups] == [2, 4, 8]
    half = groups[0].layers.nodes[3]
    assert half.forward_seconds + half.backward_seconds == pytest.approx(0.018696)
    assert half.weight_bytes == 88_510_080


@pytest.mark.slow
def test_an_imported_profile_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, profile = planners() / "piper" / FILES["bert"], tmp_path / "v100.json"
    device = ("--device-type", "V100", "--device-memory", "8GB", "-o", str(profile))
    assert run(["import", str(source), "--format", "piper", *device]) == 0
    pool = ("--profiles", str(profile), "--gpus", "2x(8xV100)", "--batch-size", "64")
    link = ("--link-bytes-per-second", "25e9", "--optimizer", "sgd")
    capsys.readouterr()
    assert run(["solve", "parallel", *pool, *link]) == 0
    plan = from_json(capsys.readouterr().out, Plan)
    # Weights and gradients of all layers take 11 GB, so no device holds them alone.
    assert len(plan.stages) > 1 or plan.stages[0].replicas[0].tensor_parallel_size > 1
    assert 4 << 30 < max(stage.memory_bytes or 0 for stage in plan.stages) <= 8 << 30
    assert plan.stages[0].layers[:2] == ("tensor 0", "tensor 2")
    broken = tmp_path / "broken.json"
    broken.write_text('{"nodes": [{}]}')
    assert run(["import", str(broken), "--format", "piper", *device[:4]]) == 2
    assert "broken.json: not an input of Piper" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not JSON"), ("{}", "not an input of Piper"), ('{"nodes": []}', "not an input")],
)
def test_files_that_are_none(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(FileError, match=said):
        read_problem(path, num_devices=1, memory_bytes=1)
    with pytest.raises(FileError, match="cannot be read"):
        read_problem(tmp_path / "none.json", num_devices=1, memory_bytes=1)
