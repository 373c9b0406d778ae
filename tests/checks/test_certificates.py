"""A certificate that replays proves its bound; one of which something is missing does not."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checks import tampered
from tests.checks.test_split_bound import drawn

import hetflow
from hetflow.planning.checks import parallel, parallel_bound, split_bound
from hetflow.planning.checks.batch_split import check
from hetflow.planning.checks.pipeline_bound import is_proved
from hetflow.planning.checks.split_bound import replay_faults
from hetflow.planning.judging import pool_of_plan, view_of_plan
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.files import from_json, to_json
from hetflow.schema.parallel import ParallelProblem
from hetflow.schema.plan import (
    ParallelCertificate,
    Plan,
    PricedPlans,
    RefutedSplits,
    Restrictions,
    SplitCertificate,
)
from hetflow.schema.problem import Problem, SplitProblem
from hetflow.schema.profile import Sync
from hetflow.solvers.parallel.solve import solve as solve_parallel
from hetflow.solvers.split.solve import solve
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.parallel.every_plan import problems


def ringed(seed: int) -> SplitProblem:
    """A drawn problem whose synchronisation, on odd seeds, grows with the number of devices."""
    draw = random.Random(seed)
    problem = drawn(draw)
    if not seed % 2:
        return problem
    sync = Sync(
        num_devices=2, sync_seconds=draw.random(), latency_seconds=draw.random() / 5,
        bytes_per_second=draw.choice((300.0, 3000.0)),
    )  # fmt: skip
    devices = tuple(
        replace(o, num_devices=o.num_devices * draw.choice((1, 4)), weight_bytes=1000, sync=sync)
        for o in problem.devices
    )
    return replace(problem, devices=devices, global_batch_size=5 * problem.global_batch_size)


# Of the first seeds, those whose batch some split does.
@pytest.mark.parametrize("seed", sorted({*range(33)} - {3, 4, 18}))
def test_a_split_is_proved_by_its_certificate_and_no_more(seed: int) -> None:
    problem = ringed(seed)
    plan = solve(problem, fastest=True)
    verdict = check(plan, problem)
    assert (verdict, verdict.bound) == ([], "replayed")
    certificate = plan.proof.certificate
    assert certificate is not None
    sets, step = certificate.refuted, plan.proof.objective
    # A bound that is too high is proved by no certificate, whatever was done to it.
    draw = random.Random(seed)
    for changed in (sets, *(_changed(sets, draw) for _ in range(5))):
        assert replay_faults(problem, step * (1 + 1e-6), changed) != []


def _changed(sets: tuple[RefutedSplits, ...], draw: random.Random) -> tuple[RefutedSplits, ...]:
    """A certificate without a set, or with another number of devices or other types in one."""
    if not sets:
        return sets
    place = draw.randrange(len(sets))
    one, others = sets[place], (*sets[:place], *sets[place + 1 :])
    types = one.device_types[: draw.randint(1, len(one.device_types))]
    most = max(1, one.most_devices + draw.choice((-1, 0, 3)))
    return draw.choice((others, (*others, replace(one, most_devices=most, device_types=types))))


@settings(max_examples=examples(100))
@given(problems(), st.randoms(use_true_random=False))
def test_a_parallel_plan_is_proved_and_no_more(
    problem: ParallelProblem, draw: random.Random
) -> None:
    try:
        plan = solve_parallel(problem)
    except (InfeasibleError, ProblemError):
        return
    stated = plan.proof.certificate
    assert isinstance(stated, ParallelCertificate)
    verdict = parallel.check(plan, problem)
    # The judge knows the rule of costs by which passes hide messages, not Sailor's.
    assert (verdict, verdict.bound) == ([], "replayed" if problem.hides_messages else "stated")
    bare = replace(plan, proof=replace(plan.proof, certificate=None))
    assert parallel.check(bare, problem).bound in ("recomputed", "stated")
    too_high = plan.proof.objective * (1 + 1e-6)
    for nodes in (stated.priced, (), *(_repriced(stated.priced, draw) for _ in range(4))):
        assert not parallel_bound.is_proved(problem, too_high, nodes)


def _repriced(nodes: tuple[PricedPlans, ...], draw: random.Random) -> tuple[PricedPlans, ...]:
    """Nodes of which one is lost, reaches elsewhere, or has other prices."""
    if not nodes:
        return nodes
    place, factor = draw.randrange(len(nodes)), draw.choice((0.0, 0.5, 1.5, 1e9))
    one, others = nodes[place], (*nodes[:place], *nodes[place + 1 :])
    return draw.choice(
        (
            others,
            (*others, replace(one, device_prices=tuple(factor * p for p in one.device_prices))),
            (*others, replace(one, most_stage_seconds=factor * one.most_stage_seconds)),
            (*others, replace(one, most_exchange_seconds=factor * one.most_exchange_seconds)),
        )
    )


def test_a_certificate_of_parallel_plans_prices_each_type() -> None:
    answer = tampered.answer("parallel")
    stated = answer.plan.proof.certificate
    assert isinstance(stated, ParallelCertificate)
    assert hetflow.check(answer.plan, answer.profiles, answer.pool).bound == "replayed"
    bare = tuple(replace(node, device_prices=node.device_prices[1:]) for node in stated.priced)
    for wrong in (ParallelCertificate(priced=bare), SplitCertificate(refuted=())):
        proof = replace(answer.plan.proof, certificate=wrong)
        faults = hetflow.check(replace(answer.plan, proof=proof), answer.profiles, answer.pool)
        assert any(fault.startswith("proof.certificate: ") for fault in faults)


def test_the_bound_of_a_part_of_the_pool_is_only_stated_for_all_of_it() -> None:
    answer = tampered.answer("parallel")
    verdict = hetflow.check(answer.plan, answer.profiles, Cluster.parse("4xA,4xB"))
    assert verdict.bound == "stated"


def split(name: str = "fastest split") -> tuple[Plan, tampered.Answer]:
    answer = tampered.answer(name)
    assert answer.plan.kind == "split"
    return answer.plan, answer


def test_the_certificate_of_another_pool_is_refused() -> None:
    """Solved for fewer devices, stated for all: the judge finds splits that it leaves out."""
    plan, answer = split()
    fewer = hetflow.solve(answer.profiles, "1xA,1xB", batch_size=48, fastest=True)
    wrong = replace(fewer, cluster=plan.cluster, predicted=fewer.predicted)
    assert wrong.kind == "split"
    faults = hetflow.check(wrong, answer.profiles, answer.pool)
    assert any("lower_bound" in fault or "certificate" in fault for fault in faults)


@pytest.mark.parametrize("name", ["split", "fastest split", "equal virtual nodes"])
def test_files_without_certificates_load_and_their_bound_is_found_again(name: str) -> None:
    plan, answer = split(name)
    plain = json.loads(to_json(plan))
    del plain["proof"]["certificate"]
    older = from_json(json.dumps(plain), Plan)
    verdict = hetflow.check(older, answer.profiles, answer.pool)
    assert (verdict, verdict.bound) == ([], "recomputed")


def test_what_is_too_large_to_replay_is_only_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [(problem, solve(problem, fastest=True)) for problem in map(ringed, (11, 12))]
    monkeypatch.setattr(split_bound, "MOST_STEPS", 0.0)
    assert [check(plan, problem).bound for problem, plan in plans].count("stated") > 0


def test_a_slower_plan_is_not_proved_by_an_empty_certificate() -> None:
    plan, answer = split()
    proof = replace(plan.proof, certificate=SplitCertificate(refuted=()))
    faults = hetflow.check(replace(plan, proof=proof), answer.profiles, answer.pool)
    assert any("leaves out splits on" in fault for fault in faults)


def test_check_says_optimal_only_where_it_saw_the_proof(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from hetflow.cli.main import run

    plan, answer = split()
    folder = str(tmp_path)
    (tmp_path / "profiles").mkdir()
    for profile in answer.profiles:
        hetflow.write(f"{folder}/profiles/{profile.device_type}.json", profile)
    said = []
    for certificate in (plan.proof.certificate, None):
        proof = replace(plan.proof, certificate=certificate)
        hetflow.write(f"{folder}/plan.json", replace(plan, proof=proof), force=True)
        assert run(["check", f"{folder}/plan.json", "--profiles", f"{folder}/profiles"]) == 0
        said.append(capsys.readouterr().out)
    assert "valid (optimal)" in said[0]
    assert "valid (optimal; the judge found the bound by itself)" in said[1]


@pytest.mark.parametrize("name", ["1f1b", "vertical sync", "pipedream", "2bw", "repetitive"])
def test_a_chain_s_bound_is_found_again_and_no_higher_one(name: str) -> None:
    answer = tampered.answer(name)
    assert hetflow.check(answer.plan, answer.profiles, answer.pool).bound == "recomputed"
    assert answer.plan.kind == "pipeline"
    plan, pool = answer.plan, pool_of_plan(answer.plan)
    link, optimizer, batch = plan.link_bytes_per_second, plan.optimizer, plan.global_batch_size
    problem = view_of_plan(plan, Problem(answer.profiles, pool, batch, optimizer, 0, link))
    asked, bound = plan.restrictions or Restrictions(), plan.proof.lower_bound or 0.0
    assert is_proved(problem, bound, asked)
    assert not is_proved(problem, bound * (1 + 1e-6), asked)


@pytest.mark.parametrize("name", ["nested", "zero bubble"])
def test_a_bound_that_the_judge_cannot_show_is_only_stated(name: str) -> None:
    answer = tampered.answer(name)
    assert answer.plan.proof.termination == "optimal"
    assert hetflow.check(answer.plan, answer.profiles, answer.pool).bound == "stated"
