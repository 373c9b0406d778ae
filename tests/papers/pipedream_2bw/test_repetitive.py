"""The planner of repetitive models against every configuration, and its blocks."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.papers.pipedream_2bw import Repetition, Repetitive, repetition
from hetflow.papers.pipedream_2bw import solve as solve_repetitive
from hetflow.planning.checks.pipeline import check
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.pipeline import PipelineLayer, PipelineProblem
from hetflow.solvers.pipeline import solve as pipeline
from hetflow.tests.profiles import examples
from hetflow.tests.solvers.partition_cases import chain, levels

FEW = settings(max_examples=examples(60))


def layers(pattern: str) -> tuple[PipelineLayer, ...]:
    return tuple(
        PipelineLayer(id=f"{i}", activation_bytes=ord(kind), weight_bytes=1)
        for i, kind in enumerate(pattern)
    )


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("aaaa", Repetition(0, 1, 4)),
        ("eabababh", Repetition(1, 2, 3)),
        ("eabcabcabcabch", Repetition(1, 3, 4)),
        ("xyaab", Repetition(2, 1, 2)),
        ("ababa", Repetition(0, 2, 2)),
    ],
)
def test_blocks_are_found(pattern, found):
    assert repetition(layers(pattern)) == found


def test_nothing_repeats():
    with pytest.raises(ProblemError, match="do not repeat"):
        repetition(layers("abcd"))


@st.composite
def models(draw) -> dict[int, PipelineProblem]:
    period, blocks = draw(st.integers(1, 2)), draw(st.sampled_from([2, 4, 6]))
    small = st.integers(1, 9)
    block = [(draw(small), draw(small)) for _ in range(period)]
    sizes = [(20, draw(small)), *block * blocks, (1, 30)]
    times = [(float(draw(small)), float(draw(small))) for _ in sizes]
    memory = draw(st.sampled_from([None, 60, 150, 400]))
    shape = draw(st.sampled_from([((4, 8.0),), ((2, 8.0), (2, 1.0)), ((6, 2.0),)]))
    made = {}
    for size in draw(st.sampled_from([(1,), (1, 2)])):
        problem = chain(
            [(f * size, b * size) for f, b in times],
            [(a * size, w) for a, w in sizes],
            levels(*shape),
            memory_bytes=memory,
            schedule="2bw",
            recompute=None,
            microbatch_size=size,
            num_microbatches=24 // size,
        )
        made[size] = problem
    return made


@FEW
@given(models())
def test_the_plan_is_the_best_configuration(problems):
    model = Repetitive(problems)
    try:
        plan, rows = solve_repetitive(model)
    except InfeasibleError:
        assert not any(row.fits for row in model_rows(model))
        return
    assert check(plan, problems[plan.microbatch_size]) == []
    assert plan.proof.termination == "optimal"
    best = max(row.samples_per_second for row in rows if row.fits)
    assert plan.predicted.samples_per_second == pytest.approx(best)
    # A free choice of cuts and replicas is never slower.
    same_size = dataclasses.replace(problems[plan.microbatch_size], recompute=plan.recomputes)
    free = pipeline.solve(same_size)
    assert free.proof.objective <= plan.proof.objective * (1 + 1e-9)


def model_rows(model: Repetitive):
    from hetflow.papers.pipedream_2bw import sweep

    return sweep(model.question())


@FEW
@given(models())
def test_the_closed_form_s_choice_holds_its_check(problems):
    model = Repetitive(problems)
    try:
        plan, _ = solve_repetitive(model, model.closed_form())
    except InfeasibleError:
        return
    assert check(plan, problems[plan.microbatch_size]) == []
    assert plan.proof.lower_bound is None
    try:
        own, _ = solve_repetitive(model)
    except InfeasibleError:
        pytest.fail("the closed form's plan fits, so there is one of our own")
    assert own.predicted.samples_per_second >= plan.predicted.samples_per_second * (1 - 1e-9)


def test_only_2bw_on_one_type():
    problem = chain([(1.0, 1.0)] * 4, [(1, 1)] * 4, levels((4, 1.0)))
    with pytest.raises(ProblemError, match="schedule 2bw"):
        Repetitive({1: problem})
    two = dataclasses.replace(
        problem,
        schedule="2bw",
        pools=(problem.pools[0], dataclasses.replace(problem.pools[0], device_type="P100")),
        inter_bytes_per_second=1.0,
    )
    with pytest.raises(ProblemError, match="one device type"):
        Repetitive({1: two})
