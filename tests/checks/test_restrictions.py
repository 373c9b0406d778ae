"""What a plan was solved under stands in it, in what is printed of it, and before the judge."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checks.tampered import PROFILES, QUESTIONS, Answer, answer

import hetflow
from hetflow.cli.main import run
from hetflow.formats.reports.tables import plan_table
from hetflow.schema.cluster import Cluster
from hetflow.schema.files import from_json, to_json, write
from hetflow.schema.plan import Plan, Restrictions, claim_of

LINK = 1e9


def solved(pool: str = "2xA,2xB", **options: Any) -> Plan:
    return hetflow.solve(
        PROFILES,
        pool,
        batch_size=32,
        strategy="pipeline",
        link_bytes_per_second=LINK,
        fastest=True,
        **options,
    )


def test_a_plan_without_restrictions_states_none() -> None:
    plan = hetflow.solve(PROFILES, "2xA", batch_size=32, strategy="split", fastest=True)
    assert "restrictions" not in json.loads(to_json(plan))
    assert claim_of(plan) == "optimal"


def test_what_was_asked_for_stands_in_the_plan_and_in_its_proof() -> None:
    plan = solved(num_stages=2, replication=False)
    assert plan.restrictions == Restrictions(
        devices={"A": 2, "B": 2}, num_stages=2, replication=False
    )
    said = "optimal among plans with 2 stages, no replicas; the judge found the bound by itself"
    assert claim_of(plan) == said
    assert f"{claim_of(plan)}, gap" in plan_table(plan)
    assert from_json(to_json(plan), Plan) == plan
    assert hetflow.check(plan, PROFILES, "2xA,2xB") == []
    assert hetflow.check(plan, PROFILES) == []  # for the pool that it states


@pytest.mark.parametrize(
    ("number", "said", "fault"),
    [
        (2, Restrictions(num_stages=3), "num_stages is 3, the plan has 2"),
        (2, Restrictions(microbatch_size=8), "microbatch_size is 8, the plan has 4"),
        (2, Restrictions(num_model_chunks=2), "num_model_chunks is 2, the plan has 1"),
        (2, Restrictions(devices={"A": 1}), "2 A are used, the pool has 1"),
        (1, Restrictions(replication=False), "the plan has replicas"),
        (2, Restrictions(recompute=True), "recompute is stated"),
        (2, Restrictions(tensor_parallel=True), "tensor_parallel is stated"),
    ],
)
def test_a_plan_that_breaks_what_it_states_is_refused(
    number: int, said: Restrictions, fault: str
) -> None:
    plan = replace(solved("2xA", num_stages=number), restrictions=said)
    assert any(fault in found for found in hetflow.check(plan, PROFILES, "2xA"))


def test_check_says_among_which_plans_one_is_optimal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for profile in PROFILES:
        write(tmp_path / f"{profile.device_type}.json", profile)
    path = tmp_path.parent / "restricted.json"
    write(path, solved("1xA,1xB", num_stages=2))
    judged = ["check", str(path), "--profiles", str(tmp_path)]
    assert run(judged) == 0
    assert "valid (optimal among plans with 2 stages; the judge" in capsys.readouterr().out
    assert run([*judged, "--gpus", "2xA,1xB"]) == 0
    said = capsys.readouterr().out
    assert "unproved: 'optimal among plans with 2 stages, on 1xA, 1xB of 2xA, 1xB'" in said


@pytest.mark.parametrize("name", [*QUESTIONS, "a part of the pool"])
def test_solve_claims_what_check_says(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in QUESTIONS:
        asked = answer(name)
    else:  # best without other servers, more than are told apart: the judge sees one, the bound all
        profiles, pool = PROFILES[:1], Cluster.parse("7x(2xA)")
        pool = replace(pool, inter_bytes_per_second=1e4)
        plan = hetflow.solve(
            profiles, pool, strategy="parallel", batch_size=32, link_bytes_per_second=LINK
        )
        assert plan.cluster is not None
        assert plan.cluster != pool
        asked = Answer(plan, profiles, pool)
    (tmp_path / "profiles").mkdir()
    for profile in asked.profiles:
        write(tmp_path / "profiles" / f"{profile.device_type}.json", profile)
    path, pool = tmp_path / "plan.json", tmp_path / "pool.json"
    write(path, asked.plan)
    write(pool, asked.pool)
    judged = ["check", str(path), "--profiles", str(tmp_path / "profiles"), "--cluster", str(pool)]
    assert run(judged) == 0
    assert capsys.readouterr().out == f"{path}: valid ({claim_of(asked.plan, asked.pool)})\n"
    assert f"{claim_of(asked.plan)}, gap" in plan_table(asked.plan)
    assert asked.plan.proof.status in asked.plan.title
