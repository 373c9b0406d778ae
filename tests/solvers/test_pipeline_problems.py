"""From profiles and a pool to a pipeline problem, and what is refused on the way."""

import dataclasses

import pytest

from hetflow.cli.solve_pipeline import solve_pipeline
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile
from hetflow.solvers.pipeline_problems import layers_of_graph, pipeline_problem


def node(name: str, seconds: float = 0.01) -> LayerNode:
    return LayerNode(
        id=name, op="Linear", forward_seconds=seconds, backward_seconds=2 * seconds,
        activation_bytes=1000, weight_bytes=2000,
    )  # fmt: skip


def graph(*edges: tuple[str, str], seconds: float = 0.01) -> LayerGraph:
    names = sorted({name for edge in edges for name in edge})
    return LayerGraph(
        microbatch_size=4, nodes=tuple(node(name, seconds) for name in names), edges=edges
    )


def profile(device: str = "V100", layers: LayerGraph | None = None, **changes) -> Profile:
    made = Profile(
        model="m", device_type=device, device_memory_bytes=10**9, weight_bytes=6000,
        update_seconds=0.001, batch_curve=(
            BatchPoint(batch_size=4, step_seconds=0.1, peak_memory_bytes=10**6),
        ),
        layers=layers or graph(("a", "b"), ("b", "c")), optimizer=named_optimizer("sgd"),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def test_servers_become_levels_and_types_pools():
    pool = Cluster.parse("4x(2xV100,1xP100)")
    problem = pipeline_problem([profile(), profile("P100")], pool, 32, link_bytes_per_second=1e9)
    assert [p.device_type for p in problem.pools] == ["V100", "P100"]
    assert [level.num_components for level in problem.pools[0].levels] == [2, 4]
    assert [level.num_components for level in problem.pools[1].levels] == [4]
    assert problem.inter_bytes_per_second == 1e9
    assert (problem.microbatch_size, problem.num_microbatches) == (4, 8)


def test_layers_are_ordered_so_that_no_edge_goes_back():
    layers, edges, _ = layers_of_graph(graph(("c", "a"), ("a", "b")))
    assert [layer.id for layer in layers] == ["c", "a", "b"]
    assert edges == ((0, 1), (1, 2))


def test_the_plan_of_the_command_names_its_pool():
    plan = solve_pipeline([profile()], Cluster.parse("1xV100"), 8, pool_name="1xV100")
    assert plan.provenance == {"pool": "1xV100"}
    assert plan.config == "1"


@pytest.mark.parametrize(
    ("profiles", "gpus", "batch", "message"),
    [
        ([profile(layers=graph(("a", "b"), ("b", "a")))], "1xV100", 8, "has a cycle: a waits"),
        ([profile(layers=graph(("a", "b"), ("c", "d")))], "1xV100", 8, "falls into 2 parts"),
        ([profile()], "1xV100", 9, "microbatches of 4 samples do not divide"),
        ([profile()], "2xV100", 8, "the bandwidth inside V100 servers is missing"),
        ([profile()], "2x(1xV100)", 8, "the bandwidth between servers is missing"),
        ([profile()], "1xP100", 8, "no profile of P100"),
        ([dataclasses.replace(profile(), layers=None)], "1xV100", 8, "has no layers"),
    ],
)
def test_what_does_not_go_together(profiles, gpus, batch, message):
    with pytest.raises(ProblemError, match=message):
        pipeline_problem(profiles, Cluster.parse(gpus), batch)


def test_unlike_layers_are_refused():
    other = profile("P100", graph(("a", "b"), ("b", "x")))
    with pytest.raises(ProblemError, match="the layers on P100 are not those on V100"):
        pipeline_problem(
            [profile(), other], Cluster.parse("1xV100,1xP100"), 8, link_bytes_per_second=1e9
        )


def test_measured_stashes_and_workspace_bound_the_memory():
    made = graph(("a", "b"), ("b", "c"))
    measured = tuple(
        dataclasses.replace(node, stashed_bytes=300, workspace_bytes=space)
        for node, space in zip(made.nodes, (10, 50, 0), strict=True)
    )
    told = profile(layers=dataclasses.replace(made, nodes=measured))
    problem = pipeline_problem([told], Cluster.parse("1xV100:5TB"), 8)
    # Set aside: the dearest workspace, with the gradients of that layer's output and input.
    assert problem.pools[0].memory_bytes == 5 * 2**40
    assert problem.pools[0].workspace_bytes == 50 + 1000 + 1000
    plan = solve_pipeline([told], Cluster.parse("1xV100"), 8, pool_name="1xV100")
    # Weights and gradients of three layers, and one microbatch in flight.
    assert plan.stages[0].memory_bytes == 2 * 3 * 2000 + 3 * 300


def test_shared_weights_are_told_apart_from_a_layer_s_own():
    made = graph(("a", "b"), ("b", "c"))
    tied = dataclasses.replace(
        made.nodes[2], weight_bytes=0, shared_with=("a",), shared_weight_bytes=2000
    )
    told = profile(layers=dataclasses.replace(made, nodes=(*made.nodes[:2], tied)))
    problem = pipeline_problem([told], Cluster.parse("1xV100"), 8)
    assert [layer.weight_bytes for layer in problem.layers] == [2000, 2000, 0]
    assert problem.layers[2].shared_with == ("a",)
    assert problem.layers[2].shared_weight_bytes == 2000


def test_a_device_smaller_than_one_layers_workspace_is_refused():
    made = graph(("a", "b"))
    wide = tuple(dataclasses.replace(node, workspace_bytes=10**9) for node in made.nodes)
    told = profile(layers=dataclasses.replace(made, nodes=wide))
    with pytest.raises(InfeasibleError, match="1000002000 bytes of workspace"):
        pipeline_problem([told], Cluster.parse("1xV100"), 8)
