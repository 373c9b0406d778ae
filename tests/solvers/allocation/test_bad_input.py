"""Bad input: one clear line each."""

import math
from dataclasses import replace

import pytest

from hetflow.planning.checks.allocation import check
from hetflow.schema import files
from hetflow.schema.errors import FileError, InfeasibleError, ProblemError
from hetflow.schema.jobs import (
    Allocation,
    AllocationProblem,
    Entity,
    Job,
    Jobs,
    MixThroughput,
    ModelThroughput,
    PairThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import all_policies, allocate

RATES = {"V100": 10.0, "K80": 2.0}


def problem(*jobs, rates=RATES, devices=None, entities=(), pairs=(), scale=1, **options):
    jobs = jobs or (Job(id="a", model="m", steps=100.0, scale_factor=scale),)
    return AllocationProblem(
        jobs=Jobs(jobs=jobs, entities=entities),
        throughputs=Throughputs(
            models=(ModelThroughput(model="m", scale_factor=scale, steps_per_second=rates),),
            pairs=pairs,
        ),
        num_devices=devices or {"V100": 1, "K80": 2},
        **options,
    )


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_a_rate_must_be_finite_and_not_negative(rate):
    with pytest.raises(ProblemError, match=r"steps_per_second\.V100: must be (>= 0|finite)"):
        ModelThroughput(model="m", steps_per_second={"V100": rate})
    with pytest.raises(ProblemError, match="must be"):
        PairThroughput(models=("m", "n"), steps_per_second={"V100": (rate, 1.0)})


def test_pairs_and_mixes_say_one_thing():
    with pytest.raises(ProblemError, match="two jobs of 'm' on 'V100': .* got 9.0 and 6.0"):
        PairThroughput(models=("m", "m"), steps_per_second={"V100": (9.0, 6.0)})
    pairs = [
        PairThroughput(models=m, steps_per_second={"V100": (2.0, 1.0)})
        for m in (("m", "n"), ("n", "m"))
    ]
    with pytest.raises(ProblemError, match="pairs: 'n' and 'm' x1 on 'V100' appear twice"):
        Throughputs(models=(), pairs=tuple(pairs))
    turned = PairThroughput(models=("n", "m"), steps_per_second={"V100": (1.0, 2.0)})
    assert Throughputs(models=(), pairs=(pairs[0], turned)).pairs
    mix = MixThroughput(model="m", devices={"V100": 1, "K80": 2}, steps_per_second=9.0)
    other = MixThroughput(model="m", devices={"K80": 2, "V100": 1}, steps_per_second=8.0)
    with pytest.raises(ProblemError, match="mixes: .* appears twice"):
        Throughputs(models=(), mixes=(mix, other))


def test_nan_in_a_file_is_refused():
    text = files.to_json(Jobs(jobs=(Job(id="a", model="m", steps=1.0),)))
    with pytest.raises(FileError):
        files.from_json(text.replace("1.0", "NaN", 1), Jobs)


def test_a_job_that_runs_nowhere_is_named():
    with pytest.raises(InfeasibleError, match="job 'a' .* runs on none of V100, K80"):
        allocate(problem(rates={"V100": 0.0}), "las")


def test_a_scale_factor_larger_than_the_pool():
    with pytest.raises(InfeasibleError, match="job 'a' .* asks for 4 devices .* at most 2"):
        allocate(problem(scale=4), "las")


@pytest.mark.parametrize("policy", sorted(all_policies()))
def test_jobs_that_fit_nowhere_are_named_and_the_others_go_on(policy):
    """As if they were not there: the same allocation, and both pass their checks."""
    entities = (Entity(name="e"),)
    fits = [Job(id=f"a{i}", model="m", steps=100.0 + i, slo_seconds=90.0) for i in range(3)]
    large = Job(id="large", model="m", steps=100.0, scale_factor=64)
    alien = Job(id="alien", model="n", steps=100.0)
    tables = (
        ModelThroughput(model="m", steps_per_second=RATES),
        ModelThroughput(model="n", steps_per_second={"T4": 1.0}),
    )
    both = [
        AllocationProblem(
            jobs=Jobs(jobs=tuple(jobs), entities=entities), throughputs=Throughputs(models=tables),
            num_devices={"V100": 1, "K80": 2}, dollars_per_hour={"V100": 2.0, "K80": 0.5},
            budget_dollars=5.0,
        )
        for jobs in ([large, *fits[:2], alien, fits[2]], fits)
    ]  # fmt: skip
    found, alone = (allocate(each, policy) for each in both)
    assert check(found, both[0]) == check(alone, both[1]) == []
    assert (found.x, found.throughputs) == (alone.x, alone.throughputs)
    assert found.left_out.keys() == {"large", "alien"}
    assert "asks for 64 devices of one type" in found.left_out["large"]
    assert "its throughputs are for T4" in found.left_out["alien"]
    silent = replace(found, left_out={"large": "?", "a0": "?"})
    assert check(silent, both[0]) == [
        "job 'a0' is left out, but fits", "job 'alien' fits nowhere, and is not named",
    ]  # fmt: skip
    row = replace(found, x={**found.x, "large": {"V100": 0.1}})
    assert check(row, both[0]) == ["job 'large' fits nowhere, but has a row"]


def test_a_job_that_no_server_can_hold_together_is_left_out():
    """One of 3 devices where 2 can be had consolidated, and no throughput of spread devices."""
    rates = {"V100": 6.0}
    jobs = [Job(id=f"j{n}", model="m", steps=9.0, scale_factor=n) for n in (2, 3)]
    asked = AllocationProblem(
        jobs=Jobs(jobs=tuple(jobs)),
        throughputs=Throughputs(models=tuple(
            ModelThroughput(model="m", scale_factor=n, steps_per_second=rates) for n in (2, 3)
        )),
        num_devices={"V100": 4}, placement="mixed", consolidated_devices={"V100": 2},
    )  # fmt: skip
    found = allocate(asked, "las")
    assert check(found, asked) == []
    assert list(found.x) == ["j2"]
    assert "cannot be consolidated" in found.left_out["j3"]


def test_a_type_too_small_for_a_job_is_shut_to_it():
    found = allocate(problem(scale=2), "las")
    assert set(found.x["a"]) == {"K80"}


def test_an_unknown_model_gets_a_hint():
    with pytest.raises(ProblemError, match="did you mean 'm'"):
        problem(Job(id="a", model="M", steps=1.0))
    with pytest.raises(ProblemError, match="measured with 1"):
        problem(Job(id="a", model="m", steps=1.0, scale_factor=2))


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_weights_must_be_positive(weight):
    with pytest.raises(ProblemError, match=r"priority_weight: must be > 0"):
        Job(id="a", model="m", steps=1.0, priority_weight=weight)
    with pytest.raises(ProblemError, match=r"weight: must be > 0"):
        Entity(name="e", weight=weight)


def test_cyclic_hierarchies_are_drawn():
    cycle = (
        Entity(name="a", parent="b"),
        Entity(name="b", parent="c"),
        Entity(name="c", parent="a"),
    )
    with pytest.raises(ProblemError, match="cycle: a -> b -> c -> a"):
        Jobs(jobs=(), entities=cycle)


def test_unknown_entities_and_twins():
    with pytest.raises(ProblemError, match="did you mean 'research'"):
        Jobs(jobs=(Job(id="a", model="m", steps=1.0, entity="reserch"),),
             entities=(Entity(name="research"),))  # fmt: skip
    with pytest.raises(ProblemError, match="'a' appears twice"):
        Jobs(jobs=(Job(id="a", model="m", steps=1.0), Job(id="a", model="m", steps=1.0)))


@pytest.mark.parametrize("policy", sorted(all_policies()))
def test_no_jobs_have_an_empty_allocation(policy):
    asked = AllocationProblem(
        jobs=Jobs(jobs=()), throughputs=Throughputs(models=()), num_devices={"V100": 1}
    )
    found = allocate(asked, policy)
    assert check(found, asked) == []
    assert (found.x, found.certificate.objective) == ({}, 0.0)
    assert found.idle_devices == {"V100": 1.0}
    assert files.from_json(files.to_json(found), Allocation) == found


def test_no_devices():
    with pytest.raises(ProblemError, match="the pool is empty"):
        AllocationProblem(jobs=Jobs(jobs=()), throughputs=Throughputs(models=()), num_devices={})


def test_slos_that_cannot_be_met_name_the_job_and_the_lack():
    alone = Job(id="a", model="m", steps=100.0, slo_seconds=5.0)
    with pytest.raises(InfeasibleError, match="'a' needs 20 steps/s .* give 10") as error:
        allocate(problem(alone, dollars_per_hour={"V100": 1.0, "K80": 1.0}), "min_cost_slo")
    assert "2 times as long" in error.value.hint
    hasty = [Job(id=f"h{i}", model="m", steps=100.0, slo_seconds=5.0 - i) for i in range(3)]
    with pytest.raises(
        InfeasibleError, match="3 such jobs; times too much: 'h1' 2.5, 'h2' 3.333"
    ) as error:
        allocate(problem(*hasty, dollars_per_hour={"V100": 1.0, "K80": 1.0}), "min_cost_slo")
    assert error.value.hint == "make every SLO at least 3.333 times as long"
    jobs = [Job(id=f"j{i}", model="m", steps=100.0, slo_seconds=12.5) for i in range(2)]
    with pytest.raises(InfeasibleError, match="at best 75 % .* 2 jobs bind") as error:
        allocate(problem(*jobs, dollars_per_hour={"V100": 1.0, "K80": 1.0}), "min_cost_slo")
    assert "1.33333 times as long" in error.value.hint
    assert error.value.exit_code == 3


def test_a_budget_too_small_says_the_least():
    with pytest.raises(InfeasibleError, match=r"budget of 0\.001 .* cost 0\.00277778"):
        allocate(problem(dollars_per_hour={"V100": 1.0, "K80": 1.0}, budget_dollars=0.001),
                 "makespan_budget")  # fmt: skip


def test_what_a_policy_lacks_is_said():
    with pytest.raises(ProblemError, match="'K80' has none"):
        allocate(problem(dollars_per_hour={"V100": 1.0}), "min_cost")
    with pytest.raises(ProblemError, match="needs a budget"):
        allocate(problem(dollars_per_hour=dict.fromkeys(RATES, 1.0)), "makespan_budget")
    with pytest.raises(ProblemError, match="needs entities"):
        allocate(problem(), "hierarchical")
    with pytest.raises(ProblemError, match="did you mean 'makespan'"):
        allocate(problem(), "makespam")
    with pytest.raises(ProblemError, match="needs throughputs of pairs"):
        allocate(problem(space_sharing=True), "las")


def test_device_types_spelt_otherwise_are_shown():
    with pytest.raises(InfeasibleError, match=r"none of v100 \(its throughputs are for V100"):
        allocate(problem(devices={"v100": 1}), "las")
