"""Piper's inputs: judged as Piper judges, and planned no worse."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetflow.checks.steady import check, counted_seconds
from hetflow.importers.piper import read_problem
from hetflow.schema.errors import FileError
from hetflow.schema.plan import Proof
from hetflow.schema.steady import SteadyPlan, SteadyProblem, SteadyStage
from hetflow.solvers.parallel.steady import solve
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
def test_plans_are_no_worse_than_piper_s(model: str, devices: int) -> None:
    answer = next(a for a in answers() if (a["model"], a["devices"]) == (model, devices))
    problem = problem_of(answer)
    plan = solve(problem)
    assert check(plan, problem) == []
    assert plan.sample_seconds <= answer["piper_tps"] * (1 + 1e-9)
    assert plan.proof.gap is not None
    assert plan.proof.gap < 0.05


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
