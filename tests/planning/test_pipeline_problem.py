"""From profiles and a pool to a pipeline problem, and what is refused on the way."""

import dataclasses

import pytest

import hetflow
from hetflow.formats.reports.tables import plan_table
from hetflow.planning.checks.profiled import parallel_faults, pipeline_faults
from hetflow.planning.links import links_of
from hetflow.planning.parallel_problem import parallel_problem
from hetflow.planning.pipeline_problem import layers_of_graph, pipeline_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.schema.profile import (
    BatchPoint,
    BusyHost,
    Emulation,
    LayerGraph,
    LayerNode,
    LinkPoint,
    Links,
    PipelineCosts,
    Profile,
    Sync,
    TypeLink,
)


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
    problem = pipeline_problem(
        Problem([profile(), profile("P100")], pool, 32, link_bytes_per_second=1e9)
    )
    assert [p.device_type for p in problem.pools] == ["V100", "P100"]
    assert [level.num_components for level in problem.pools[0].levels] == [2, 4]
    assert [level.num_components for level in problem.pools[1].levels] == [4]
    assert problem.inter_bytes_per_second == 1e9
    assert (problem.microbatch_size, problem.num_microbatches) == (4, 8)


def test_layers_are_ordered_so_that_no_edge_goes_back():
    layers, edges, _ = layers_of_graph(graph(("c", "a"), ("a", "b")))
    assert [layer.id for layer in layers] == ["c", "a", "b"]
    assert edges == ((0, 1), (1, 2))


def planned(profiles: list[Profile], pool: str) -> Plan:
    return hetflow.solve(profiles, pool, batch_size=8, strategy="pipeline", schedule="1f1b")


def test_the_plan_of_the_command_names_its_pool():
    plan = planned([profile()], "1xV100")
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
        ([profile()], "1xP100", 8, "no profile of device type 'P100'"),
        ([dataclasses.replace(profile(), layers=None)], "1xV100", 8, "has no layers"),
    ],
)
def test_what_does_not_go_together(profiles, gpus, batch, message):
    with pytest.raises(ProblemError, match=message):
        pipeline_problem(Problem(profiles, Cluster.parse(gpus), batch))


def test_unlike_layers_are_refused():
    other = profile("P100", graph(("a", "b"), ("b", "x")))
    with pytest.raises(ProblemError, match="the layers on P100 are not those on V100"):
        pipeline_problem(
            Problem(
                [profile(), other], Cluster.parse("1xV100,1xP100"), 8, link_bytes_per_second=1e9
            )
        )


def test_measured_stashes_and_workspace_bound_the_memory():
    made = graph(("a", "b"), ("b", "c"))
    measured = tuple(
        dataclasses.replace(node, stashed_bytes=300, workspace_bytes=space)
        for node, space in zip(made.nodes, (10, 50, 0), strict=True)
    )
    told = profile(layers=dataclasses.replace(made, nodes=measured))
    problem = pipeline_problem(Problem([told], Cluster.parse("1xV100:5TB"), 8))
    # Each layer's workspace, with the gradients of its output and input; of the last its output,
    # two copies and what the loss makes of it, when the loss is tested.
    assert problem.pools[0].memory_bytes == 5 * 2**40
    assert problem.pools[0].layer_workspace_bytes == (10 + 1000, 50 + 2000, 4 * 1000)
    # Where the last reads the first's output too, its gradient waits while the second runs back.
    skips = dataclasses.replace(told.layers, edges=(*told.layers.edges, ("a", "c")))
    asked = Problem([profile(layers=skips)], Cluster.parse("1xV100:5TB"), 8)
    beside = pipeline_problem(asked).pools[0].layer_workspace_bytes
    assert beside == (10 + 1000, 50 + 3000, 4 * 1000)
    plan = planned([told], "1xV100")
    # Weights and gradients of three layers, one microbatch in flight; no base was measured.
    assert plan.stages[0].memory_bytes == 2 * 3 * 2000 + 3 * 300
    (pool,) = problem.pools
    assert (pool.copies_messages, pool.waiting_bytes) == (True, 25 << 20)


@pytest.mark.parametrize(("update_workspace_bytes", "waiting"), [(None, 25 << 20), (0, 0)])
def test_first_gradients_wait_on_gpus_also_where_a_base_is_stated(
    update_workspace_bytes: int | None, waiting: int
) -> None:
    """Estimates of GPUs state a base, as profiles of processors do, but no update's workspace."""
    told = profile(base_memory_bytes=1, update_workspace_bytes=update_workspace_bytes)
    view = parallel_problem(Problem([told], Cluster.parse("1xV100"), 8))
    assert view.waiting_bytes == waiting
    assert parallel_faults(view, Problem([told], Cluster.parse("1xV100"), 8)) == []


def test_shared_weights_are_told_apart_from_a_layer_s_own():
    made = graph(("a", "b"), ("b", "c"))
    tied = dataclasses.replace(
        made.nodes[2], weight_bytes=0, shared_with=("a",), shared_weight_bytes=2000
    )
    told = profile(layers=dataclasses.replace(made, nodes=(*made.nodes[:2], tied)))
    problem = pipeline_problem(Problem([told], Cluster.parse("1xV100"), 8))
    assert [layer.weight_bytes for layer in problem.layers] == [2000, 2000, 0]
    assert problem.layers[2].shared_with == ("a",)
    assert problem.layers[2].shared_weight_bytes == 2000
    # The gradients of both users, and their sum: the holder's own is its workspace.
    spaced = tuple(dataclasses.replace(node, workspace_bytes=10) for node in told.layers.nodes)
    told = dataclasses.replace(told, layers=dataclasses.replace(made, nodes=spaced))
    asked = Problem([told], Cluster.parse("1xV100"), 8)
    problem = pipeline_problem(asked)
    assert problem.pools[0].layer_workspace_bytes == (10 + 1000 + 2000, 10 + 2000, 4 * 1000)
    assert pipeline_faults(problem, asked) == []


def test_a_device_smaller_than_one_layers_workspace_is_refused():
    made = graph(("a", "b"))
    wide = tuple(dataclasses.replace(node, workspace_bytes=10**9) for node in made.nodes)
    told = profile(layers=dataclasses.replace(made, nodes=wide))
    with pytest.raises(InfeasibleError, match="1000142288 bytes of workspace"):
        pipeline_problem(Problem([told], Cluster.parse("1xV100"), 8))


def links(rate: float) -> Links:
    point = LinkPoint(num_bytes=1024, there_seconds=1e-4, back_seconds=1e-4, both_seconds=2e-4)
    return Links(latency_seconds=1e-4, bytes_per_second=rate, points=(point,))


@pytest.mark.parametrize(
    "sync",
    [
        # The CNN: 57,000 parameters, whose synchronisation looks like 86 MB/s.
        Sync(num_devices=2, sync_seconds=0.00265),
        # The same with a ring fitted to all-reduces.
        Sync(num_devices=2, sync_seconds=0.00265, latency_seconds=2e-4, bytes_per_second=4e8),
    ],
)
def test_synchronisation_never_becomes_a_link(sync: Sync) -> None:
    told = profile(sync=sync, weight_bytes=228_000)
    with pytest.raises(ProblemError, match="the bandwidth inside V100 servers is missing") as error:
        pipeline_problem(Problem([told], Cluster.parse("2xV100"), 8))
    assert error.value.hint is not None
    assert "hetflow.profile(links=True)" in error.value.hint
    assert "link_bytes_per_second" in error.value.hint
    measured = dataclasses.replace(told, links=links(1.1e9))
    problem = pipeline_problem(Problem([measured], Cluster.parse("2xV100"), 8))
    assert problem.pools[0].levels[0].bytes_per_second == 1.1e9


def rates(profiles: list[Profile], pool: Cluster, said: float | None = None) -> tuple:
    problem = pipeline_problem(Problem(profiles, pool, 8, link_bytes_per_second=said))
    inside = [tuple(level.bytes_per_second for level in p.levels) for p in problem.pools]
    return (*inside, problem.inter_bytes_per_second)


def test_a_link_is_the_pool_s_then_the_flag_s_then_the_profile_s() -> None:
    both = [profile(links=links(1e9)), profile("P100", links=links(2e9))]
    pool = Cluster.parse("2x(2xV100,2xP100)")
    assert rates(both, pool) == ((1e9, 1e9), (2e9, 1e9), 1e9)
    assert rates(both, pool, said=5e8) == ((5e8, 5e8), (5e8, 5e8), 5e8)
    group = dataclasses.replace(pool.servers[0], intra_bytes_per_second=3e9)
    stated = dataclasses.replace(pool, servers=(group,), inter_bytes_per_second=1e8)
    assert rates(both, stated, said=5e8) == ((3e9, 1e8), (3e9, 1e8), 1e8)
    assert links_of(both, stated, 5e8).assumed == ()
    assert rates(both, Cluster.parse("1xV100,2xP100")) == ((1e9,), (2e9,), 1e9)


def test_what_was_measured_elsewhere_is_an_assumption() -> None:
    both = [profile(links=links(1e9)), profile("P100")]
    found = links_of(both, Cluster.parse("1xV100,1xP100"), None)
    assert found.between_types == 1e9
    assert found.assumed == ("links between device types: 1000 MB/s, that between two V100",)
    (network,) = links_of(both[:1], Cluster.parse("2x(2xV100)"), None).assumed
    assert network == "links between servers: 1000 MB/s, that between two V100 of one host"
    (inside,) = links_of(both[:1], Cluster.parse("2xV100"), None).measured
    assert inside == "links inside V100 servers: 1000 MB/s, as measured"
    (said,) = links_of(both[:1], Cluster.parse("2xV100"), 2e9).assumed
    assert said == "links inside V100 servers: 2000 MB/s, by link_bytes_per_second"
    with pytest.raises(ProblemError, match="inside P100 servers is missing"):
        links_of(both, Cluster.parse("1xV100,2xP100"), None)


SLOWER_AND_SLOWER = (("V100", 3e9), ("P100", 2e9), ("T4", 1e8))


def across(name: str, bytes_per_second: float) -> TypeLink:
    return TypeLink(device_type=name, links=links(bytes_per_second))


def test_the_measured_link_between_two_types_counts_and_the_slowest_pair_of_several() -> None:
    one = profile(links=links(1e9), links_to=(across("P100", 3e8),))
    other = profile("P100", links=links(2e9))
    found = links_of([one, other], Cluster.parse("1xV100,2xP100"), None)
    assert (found.between_types, found.assumed) == (3e8, ())
    assert "links between V100 and P100: 300 MB/s, as measured" in found.measured
    third = profile("T4", links=links(2e8))
    found = links_of([one, other, third], Cluster.parse("1xV100,2xP100,1xT4"), None)
    assert found.between_types == 2e8
    assert found.assumed == (
        "links between V100 and T4: 200 MB/s, that between two T4",
        "links between P100 and T4: 200 MB/s, that between two T4",
    )
    unmeasured = [profile(name, links=links(rate)) for name, rate in SLOWER_AND_SLOWER]
    found = links_of(unmeasured, Cluster.parse("1xV100,2xP100,1xT4"), None)
    assert found.between == {("V100", "P100"): 2e9, ("V100", "T4"): 1e8, ("P100", "T4"): 1e8}
    # Stated bandwidths come first. A slow link inside servers counts beside a faster network.
    assert links_of([one, other], Cluster.parse("1xV100,2xP100"), 5e8).between_types == 5e8
    apart = links_of([one, other], Cluster.parse("2x(1xV100,2xP100)"), None)
    assert apart.between_types == 3e8
    # Two lone devices need no link of their own type, and a slow link has a late message.
    lone = [profile(links_to=(across("P100", 3e8),)), profile("P100")]
    problem = pipeline_problem(Problem(lone, Cluster.parse("1xV100,1xP100"), 8))
    assert problem.inter_bytes_per_second == 3e8
    assert problem.message_seconds == lone[0].links_to[0].links.latency_seconds > 0


def test_emulated_types_of_one_device_share_its_links() -> None:
    shared = links(1e9)
    types = [
        profile(name, links=shared, emulation=Emulation(speed=0.5)) for name in ("cpu:a", "cpu:b")
    ]
    found = links_of(types, Cluster.parse("1xcpu:a,1xcpu:b"), None)
    assert (found.between_types, found.assumed) == (1e9, ())


def test_the_command_s_plan_says_what_it_assumed() -> None:
    told = profile(links=links(1e9))
    here = planned([told], "2xV100")
    assert here.assumptions == ()
    network = planned([told], "2x(1xV100)")
    assert network.assumptions == (
        "links between servers: 1000 MB/s, that between two V100 of one host",
    )
    assert "assumed: links between servers: 1000 MB/s" in plan_table(network)


def curve(*points: tuple[int, float]) -> tuple[BatchPoint, ...]:
    return tuple(
        BatchPoint(batch_size=size, step_seconds=seconds, peak_memory_bytes=10**6)
        for size, seconds in points
    )


def test_devices_that_share_a_host_are_as_slow_as_on_a_busy_one() -> None:
    busy = BusyHost(num_devices=2, batch_curve=curve((2, 0.12), (6, 0.27)), update_seconds=0.003)
    told = profile(links=links(1e9), batch_curve=curve((2, 0.1), (6, 0.15)), busy=busy)
    shared, alone = Cluster.parse("2xV100"), Cluster.parse("1xV100")
    pool = pipeline_problem(Problem([told], shared, 8)).pools[0]
    # 1.2 times at 2 samples and 1.8 times at 6: 1.5 times at the microbatch of 4.
    assert pool.forward_seconds == pytest.approx((0.015, 0.015, 0.015))
    assert pool.backward_seconds == pytest.approx((0.03, 0.03, 0.03))
    assert pool.update_seconds == 0.003
    for hosts in (alone, Cluster.parse("2x(1xV100)")):
        pool = pipeline_problem(Problem([told], hosts, 8)).pools[0]
        assert (pool.forward_seconds[0], pool.update_seconds) == (0.01, 0.001)


def test_loading_does_not_slow_layers() -> None:
    alone = dataclasses.replace(curve((4, 0.1))[0], load_seconds=0.05)
    slower = dataclasses.replace(curve((4, 0.2))[0], load_seconds=0.15)
    busy = BusyHost(num_devices=2, batch_curve=(slower,), update_seconds=0.003)
    told = profile(links=links(1e9), batch_curve=(alone,), busy=busy)
    pool = pipeline_problem(Problem([told], Cluster.parse("2xV100"), 8)).pools[0]
    assert pool.forward_seconds == pytest.approx((0.01, 0.01, 0.01))


def test_costs_of_passes_messages_and_steps_are_the_profile_s() -> None:
    costs = PipelineCosts(
        pass_seconds=1e-3, message_seconds=2e-3, fixed_seconds=3e-3, step_error=0.04,
        reduce_latency_seconds=4e-3, reduce_bytes_per_second=5e8,
    )  # fmt: skip
    told = profile(links=links(1e9), pipeline=costs)
    other = profile("P100", links=links(1e9))
    problem = pipeline_problem(Problem([told, other], Cluster.parse("1xV100,1xP100"), 8))
    first, second = problem.pools
    assert (first.pass_seconds, first.fixed_seconds) == (1e-3, 3e-3)
    assert (second.pass_seconds, second.fixed_seconds) == (0.0, 0.0)
    assert (first.reduce_latency_seconds, first.reduce_bytes_per_second) == (4e-3, 5e8)
    assert (second.reduce_latency_seconds, second.reduce_bytes_per_second) == (0.0, None)
    assert (problem.message_seconds, problem.step_error) == (2e-3, 0.04)
    # Where no pipeline was rehearsed, a message costs the latency of the link.
    alone = pipeline_problem(Problem([other], Cluster.parse("2xP100"), 8))
    assert (alone.message_seconds, alone.step_error) == (1e-4, None)
    old = pipeline_problem(
        Problem([profile()], Cluster.parse("2xV100"), 8, link_bytes_per_second=1e9)
    )
    assert (old.message_seconds, old.step_error, old.pools[0].pass_seconds) == (0.0, None, 0.0)


@pytest.mark.parametrize(
    "changes",
    [{"forward_seconds": (0.01, 0.01, 0.01)}, {"update_seconds": 0.001}, {"pass_seconds": 0.0}],
)
def test_a_problem_that_forgot_the_busy_host_is_refused(changes: dict) -> None:
    busy = BusyHost(num_devices=2, batch_curve=curve((4, 0.15)), update_seconds=0.003)
    costs = PipelineCosts(pass_seconds=1e-3, message_seconds=2e-3, fixed_seconds=3e-3)
    told, pool = profile(links=links(1e9), busy=busy, pipeline=costs), Cluster.parse("2xV100")
    problem = pipeline_problem(Problem([told], pool, 8))
    assert pipeline_faults(problem, Problem([told], pool, 8)) == []
    forgot = dataclasses.replace(problem.pools[0], **changes)
    assert pipeline_faults(dataclasses.replace(problem, pools=(forgot,)), Problem([told], pool, 8))
