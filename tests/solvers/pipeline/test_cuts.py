"""Layers without time and bytes: they change no optimum, and multiply no cuts."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import SGD, flat_problems, objective, same

from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.solvers.pipeline import cuts as pipeline_cuts
from hetflow.solvers.pipeline.cuts import cuts_of
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.profiles import examples

FEW = settings(max_examples=examples(40))


@st.composite
def with_weightless_layers(draw) -> PipelineProblem:
    """A graph of which some layers, sources among them, take nothing."""
    problem = draw(flat_problems())
    size = len(problem.layers)
    empty = draw(st.sets(st.integers(0, size - 1), max_size=size))
    edges = set(problem.links)
    if size > 2 and draw(st.booleans()):
        edges = {(source, size - 1) for source in range(size - 1)}
    layers = tuple(
        dataclasses.replace(layer, activation_bytes=0, weight_bytes=0) if index in empty else layer
        for index, layer in enumerate(problem.layers)
    )

    def times(seconds: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(0.0 if index in empty else each for index, each in enumerate(seconds))

    pools = tuple(
        dataclasses.replace(
            pool,
            forward_seconds=times(pool.forward_seconds),
            backward_seconds=times(pool.backward_seconds),
        )
        for pool in problem.pools
    )
    return dataclasses.replace(problem, layers=layers, pools=pools, edges=tuple(sorted(edges)))


@FEW
@given(with_weightless_layers())
def test_leaving_out_cuts_of_weightless_layers_changes_no_optimum(problem):
    found = objective(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_cuts, "_weightless", lambda problem: 0)
        assert same(found, objective(problem))


def picks(num_blocks: int, **options) -> PipelineProblem:
    """A chain whose every block also takes its own pick of one unused state."""
    names = ["state"]
    edges = []
    for block in range(num_blocks):
        names += [f"pick{block}", f"block{block}"]
        edges += [(0, 2 * block + 1), (2 * block + 1, 2 * block + 2)]
        if block:
            edges.append((2 * block, 2 * block + 2))
    heavy = [name.startswith("block") for name in names]
    pool = DevicePool(
        device_type="V100",
        levels=(
            TopologyLevel(num_components=4, bytes_per_second=64.0),
            TopologyLevel(num_components=2, bytes_per_second=4.0),
        ),
        forward_seconds=tuple((1.0 + n % 5) * heavy[n] for n in range(len(names))),
        backward_seconds=tuple(2.0 * is_heavy for is_heavy in heavy),
    )
    layers = tuple(
        PipelineLayer(id=name, activation_bytes=3 * is_heavy, weight_bytes=5 * is_heavy)
        for name, is_heavy in zip(names, heavy, strict=True)
    )
    asked = {"schedule": "pipedream", **options}
    return PipelineProblem(
        model="picks", layers=layers, edges=tuple(sorted(edges)), pools=(pool,),
        microbatch_size=1, num_microbatches=8, optimizer=SGD, **asked,
    )  # fmt: skip


def test_a_graph_of_many_picks_is_solved_to_the_end():
    # Each pick may be taken at any time before its block: 2^16 sets and more, 17 that count.
    problem = picks(16)
    assert cuts_of(problem).size == 17
    plan = solve(problem)
    assert plan.proof.termination == "optimal"
    assert "own order" not in plan.proof.method


@pytest.mark.parametrize("solved", ["flat", "nested"])
def test_one_order_of_the_layers_alone_is_never_called_optimal(solved, monkeypatch):
    monkeypatch.setattr(pipeline_cuts, "MAX_CUTS", 5)
    problem = picks(6, solved=solved, stage_cost="thesis")
    problem = dataclasses.replace(
        problem,
        layers=tuple(
            dataclasses.replace(layer, activation_bytes=max(layer.activation_bytes, 1))
            for layer in problem.layers
        ),
    )
    plan = solve(problem)
    assert plan.proof.termination == "feasible"
    assert "own order only" in plan.proof.method
