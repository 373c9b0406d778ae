"""Sailor's inputs: read whole, judged as its simulator judges, and planned at least as well."""

import json
from pathlib import Path
from typing import Any

import pytest

from hetflow.papers.sailor import read_problem
from hetflow.planning.checks.parallel import check, counted_step
from hetflow.schema.errors import FileError
from hetflow.schema.plan import Plan
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.data import sailor_plans
from hetflow.tests.data.reference import planners

BATCH = 1024
JUDGED = ("homo_SAILOR", "homo_AMP", "homo_Piper", "het_AMP", "sailor_SAILOR", "small_AMP",
          "small_SAILOR")  # fmt: skip


def judged(name: str) -> dict[str, Any]:
    text = (planners() / "sailor" / "results" / f"{name}_OPT-350.json").read_text()
    answers: list[dict[str, Any]] = json.loads(text)
    return answers[0]


def plan_of(answer: dict[str, Any]) -> Plan:
    """One of Sailor's answers as a plan; what it predicts is not judged."""
    pipeline = answer["plan"]["pipelines"][0]
    return sailor_plans.plan_of(
        "OPT-350",
        pipeline["layers_per_stage"],
        pipeline["tmp_stages"],
        global_batch_size=BATCH,
        microbatch_size=answer["plan"]["mbs"],
        data_parallel_size=pipeline["dp_degrees"][0],
    )


def pool_of(answer: dict[str, Any]) -> dict[str, int]:
    return {name.split("_")[0]: number for name, number in answer["num_gpus"].items()}


@pytest.mark.parametrize("name", JUDGED)
def test_the_checker_counts_what_sailors_simulator_says(name: str) -> None:
    answer = judged(name)
    problem = read_problem(
        planners() / "sailor", "OPT-350", pool_of(answer), global_batch_size=BATCH
    )
    assert counted_step(plan_of(answer), problem) == pytest.approx(
        1 / answer["throughput"], rel=1e-9
    )


@pytest.mark.parametrize(
    ("pool", "best_known"),
    [
        ({"A100-40": 32}, 0.12970),  # an enumeration's; Sailor 0.12511
        ({"A100-40": 8, "V100-16": 8}, 0.043496),  # Sailor's own
        # an enumeration's; Sailor 0.16996
        ({"A100-40": 32, "V100-16": 96}, 0.17237),
    ],
)
@pytest.mark.slow
def test_plans_are_no_slower_than_the_best_known(pool: dict[str, int], best_known: float) -> None:
    problem = read_problem(planners() / "sailor", "OPT-350", pool, global_batch_size=BATCH)
    plan = solve(problem)
    assert check(plan, problem) == []
    assert 1 / plan.predicted.step_seconds >= best_known
    assert plan.proof.termination == "optimal"


@pytest.mark.parametrize(
    ("model", "pool", "said"),
    [
        ("OPT-35", {"A100-40": 1}, "did you mean 'OPT-350'"),
        ("OPT-350", {"A100": 1}, "did you mean 'A100-80'"),
    ],
)
def test_what_is_not_there(model: str, pool: dict[str, int], said: str) -> None:
    with pytest.raises(FileError, match=said):
        read_problem(planners() / "sailor", model, pool, global_batch_size=BATCH)


def test_hetflow_s_rule_counts_the_update_of_the_model_once() -> None:
    both = [
        read_problem(
            planners() / "sailor", "OPT-350", {"GH-96": 4}, global_batch_size=4, cost_rule=rule
        )
        for rule in ("sailor", "hetflow")
    ]
    sailor, hetflow = (problem.pools[0].times[0].update_seconds for problem in both)
    assert len(set(sailor)) == 1  # one value for unlike layers
    assert sum(hetflow) == pytest.approx(sailor[0])
    weights = both[1].sizes[0].weight_bytes
    assert hetflow[0] / hetflow[1] == pytest.approx(weights[0] / weights[1])


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"profiles_tmp.json: cannot be read"):
        read_problem(tmp_path, "OPT-350", {"A100-40": 1}, global_batch_size=1)
    (tmp_path / "profiles_tmp.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        read_problem(tmp_path, "OPT-350", {"A100-40": 1}, global_batch_size=1)


def test_degrees_without_a_curve_of_their_own_take_the_next_lower_one() -> None:
    """Bandwidths are given for 1, 2 and 4 GPUs, and some types were profiled at degree 8."""
    pool = {"A100-40": 8}
    problem = read_problem(planners() / "sailor", "OPT-350", pool, global_batch_size=64)
    known = {size.tensor_parallel_size for size in problem.sizes}
    assert {link.tensor_parallel_size for link in problem.pools[0].links} == known
    assert max(known) == 8
    assert problem.pools[0].link(8) == problem.pools[0].link(4)
