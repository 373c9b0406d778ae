"""The builder matches profiles to a pool, applies memory, and interpolates only when asked."""

from dataclasses import replace
from typing import Any

import pytest

import hetflow
from hetflow.planning.checks.profiled import split_view_faults, stated_faults
from hetflow.planning.split_problem import MAX_INTERPOLATED_SIZES, split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import InfeasibleError, ProblemError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem, ShardedDevices, ShardedProblem
from hetflow.schema.profile import BatchPoint, BusyHost, LayerGraph, LayerNode, Profile
from hetflow.solvers.split.solve import solve

GIB = 1 << 30


def profile(name: str, sizes: tuple[int, ...] = (8, 16, 32), model: str = "m") -> Profile:
    return Profile(
        model=model,
        device_type=name,
        device_memory_bytes=16 * GIB,
        weight_bytes=100,
        update_seconds=0.1,
        batch_curve=tuple(
            BatchPoint(batch_size=s, step_seconds=1.0 + s / 8, peak_memory_bytes=s * GIB // 2)
            for s in sizes
        ),
    )


def sizes_of(problem: object, index: int = 0) -> list[int]:
    return [point.batch_size for point in problem.devices[index].batch_curve]


def test_profiles_are_matched_and_others_ignored() -> None:
    problem = split_problem(
        Problem(
            [profile("V100"), profile("P100"), profile("K80")], Cluster.parse("2xP100,V100:3"), 64
        )
    )
    assert [(o.device_type, o.num_devices) for o in problem.devices] == [("P100", 2), ("V100", 3)]
    assert sizes_of(problem) == [8, 16, 32]
    assert problem.devices[0].link_bytes_per_second is None


def test_the_clusters_memory_wins_over_the_profiles() -> None:
    assert sizes_of(split_problem(Problem([profile("V100")], Cluster.parse("V100:2:8GB"), 64))) == [
        8,
        16,
    ]


def test_a_type_where_nothing_fits_is_left_out() -> None:
    problem = split_problem(
        Problem([profile("V100"), profile("T4")], Cluster.parse("2xV100,T4:2:2GB"), 64)
    )
    assert [option.device_type for option in problem.devices] == ["V100"]


def test_nothing_fits_anywhere_says_by_how_much() -> None:
    with pytest.raises(InfeasibleError) as caught:
        split_problem(
            Problem([profile("V100"), profile("T4")], Cluster.parse("V100:1:3GB,T4:2:2GB"), 64)
        )
    assert f"on V100 its smallest profiled batch of 8 needs {4 * GIB}" in caught.value.message
    assert f"{GIB} more than the {3 * GIB}" in caught.value.message


def test_an_unknown_device_gets_the_nearest_name() -> None:
    with pytest.raises(ProblemError, match="'V1000'; did you mean 'V100'") as caught:
        split_problem(Problem([profile("V100"), profile("P100")], Cluster.parse("2xV1000"), 64))
    assert caught.value.hint == "profiled types: P100, V100"


def test_several_models_or_none_are_refused() -> None:
    with pytest.raises(ProblemError, match="several models: a, b"):
        split_problem(
            Problem([profile("A", model="a"), profile("B", model="b")], Cluster.parse("A,B"), 8)
        )
    with pytest.raises(ProblemError, match="no profiles"):
        split_problem(Problem([], Cluster.parse("1xA"), 8))
    with pytest.raises(ProblemError, match="two profiles of m on A"):
        split_problem(Problem([profile("A"), profile("A")], Cluster.parse("1xA"), 8))


def test_virtual_nodes_must_divide_the_batch() -> None:
    with pytest.raises(ProblemError, match="5 virtual nodes do not divide"):
        split_problem(Problem([profile("A")], Cluster.parse("1xA"), 64), virtual_nodes=5)


def test_several_servers_pass_on_their_link() -> None:
    servers = Cluster.parse("2x(2xV100)")
    slow = Cluster(
        device_types=servers.device_types, servers=servers.servers, inter_bytes_per_second=1e9
    )
    assert (
        split_problem(Problem([profile("V100")], slow, 64)).devices[0].link_bytes_per_second == 1e9
    )


def test_interpolation_is_off_unless_asked() -> None:
    with pytest.raises(InfeasibleError):
        solve(split_problem(Problem([profile("A")], Cluster.parse("1xA"), 20)))


def test_interpolated_sizes_are_marked_and_linear() -> None:
    problem = split_problem(Problem([profile("A")], Cluster.parse("1xA"), 20), interpolate=True)
    assert sizes_of(problem) == [8, 12, 16, 20, 24, 28, 32]  # multiples of gcd(20, 8, 16, 32)
    assert problem.devices[0].interpolated_sizes == (12, 20, 24, 28)
    plan = solve(problem)
    assert plan.groups[0].virtual_node_batch_size == 20
    assert plan.groups[0].interpolated
    assert plan.groups[0].pass_seconds == pytest.approx(3.5)
    assert problem.devices[0].batch_curve[3].peak_memory_bytes == 10 * GIB


def test_interpolated_passes_hold_what_sharing_states_adds() -> None:
    kept = [replace(profile(name), optimizer=named_optimizer("sgd")) for name in "AB"]
    problem = Problem(kept, Cluster.parse("1xA,1xB"), 20)
    sharing = split_problem(problem, interpolate=True, shards=("all",))
    assert sizes_of(sharing) == [8, 12, 16, 20, 24, 28, 32]
    assert not split_view_faults(sharing, problem)


def test_interpolation_in_the_uniform_regime_adds_the_one_size() -> None:
    problem = split_problem(
        Problem([profile("A"), profile("B", (20, 40))], Cluster.parse("1xA,1xB"), 80),
        virtual_nodes=4,
        interpolate=True,
    )
    assert [option.interpolated_sizes for option in problem.devices] == [(20,), ()]


def test_interpolation_does_not_explode() -> None:
    wide = [profile("A", (1, 5_000))]
    huge = [
        Profile(
            model="m",
            device_type="A",
            device_memory_bytes=10_000 * GIB,
            weight_bytes=1,
            update_seconds=0.0,
            batch_curve=wide[0].batch_curve,
        )
    ]
    problem = split_problem(Problem(huge, Cluster.parse("4xA"), 9_999), interpolate=True)
    assert MAX_INTERPOLATED_SIZES // 2 <= len(sizes_of(problem)) <= MAX_INTERPOLATED_SIZES + 2


def busy_profile(name: str, sizes: tuple[int, ...] = (8, 32)) -> Profile:
    """Passes take twice as long on a busy host, and peaks are 1 GiB higher."""
    plain = profile(name)
    curve = tuple(
        BatchPoint(
            batch_size=s,
            step_seconds=2.0 + s / 4,
            peak_memory_bytes=s * GIB // 2 + GIB,
            step_seconds_error=0.01,
        )
        for s in sizes
    )
    busy = BusyHost(num_devices=2, batch_curve=curve, update_seconds=0.3, fixed_seconds=0.05)
    return replace(plain, busy=busy, fixed_seconds=0.02, step_error=0.03)


def test_devices_that_share_a_host_go_by_the_busy_numbers() -> None:
    (option,) = split_problem(
        Problem([busy_profile("V100")], Cluster.parse("V100:2:32GB"), 64)
    ).devices
    assert [p.step_seconds for p in option.batch_curve] == [4.0, 10.0]
    assert (option.update_seconds, option.fixed_seconds, option.step_error) == (0.3, 0.05, 0.03)
    alone = option.measured_with(1)
    assert [p.step_seconds for p in alone.batch_curve] == [2.0, 3.0, 5.0]
    assert (alone.update_seconds, alone.fixed_seconds) == (0.1, 0.02)
    assert option.measured_with(2) is option


@pytest.mark.parametrize(
    ("pool", "busy"),
    [
        ("1xV100", False),
        ("4x(1xV100)", False),
        ("1xV100,1xP100", True),  # a flat pool is one host, whatever the types
        ("3x(1xV100),1x(2xV100)", True),
        ("2x(1xV100),1x(4xP100)", False),
    ],
)
def test_company_is_counted_by_server(pool: str, busy: bool) -> None:
    problem = split_problem(
        Problem([busy_profile("V100"), profile("P100")], Cluster.parse(pool), 64)
    )
    assert (problem.devices[0].alone is not None) == busy


def test_memory_and_optimizer_concern_both_curves() -> None:
    sgd, adam = named_optimizer("sgd"), named_optimizer("adam")
    told = replace(busy_profile("V100"), weight_bytes=GIB, optimizer=sgd)
    (option,) = split_problem(Problem([told], Cluster.parse("V100:2:16GB"), 64)).devices
    assert [p.batch_size for p in option.batch_curve] == [8]
    assert [p.batch_size for p in option.alone.batch_curve] == [8, 16, 32]
    (option,) = split_problem(
        Problem([told], Cluster.parse("V100:2:16GB"), 64, optimizer=adam)
    ).devices
    assert option.batch_curve[0].peak_memory_bytes == 7 * GIB
    assert [p.batch_size for p in option.alone.batch_curve] == [8, 16]


def test_where_no_busy_size_fits_the_numbers_of_a_device_alone_serve() -> None:
    told = busy_profile("V100", sizes=(32,))
    (option,) = split_problem(Problem([told], Cluster.parse("V100:2:8GB"), 64)).devices
    assert option.alone is None
    assert [p.batch_size for p in option.batch_curve] == [8, 16]
    assert option.update_seconds == 0.1


def test_sizes_between_join_each_curve() -> None:
    pool = Cluster.parse("V100:2:32GB")
    (option,) = split_problem(Problem([busy_profile("V100")], pool, 64), interpolate=True).devices
    assert option.interpolated_sizes == (16, 24)
    assert option.alone.interpolated_sizes == (24,)
    between = {p.batch_size: p for p in option.batch_curve}[16]
    assert between.step_seconds == pytest.approx(6.0)
    assert between.step_seconds_error == 0.01


@pytest.mark.parametrize(
    ("stated", "profiled", "pool", "fits"),
    [
        (None, None, "4xV100", True),  # not known
        (None, 4 * GIB, "4xV100", True),  # a GiB for each device of the server
        (None, 4 * GIB - 1, "4xV100", False),
        (None, 4 * GIB - 1, "3xV100", True),
        (4 * GIB, 1, "4xV100", True),  # the pool's word counts
        (2 * GIB - 1, 8 * GIB, "2x(2xV100)", False),
        (None, 2 * GIB, "2x(2xV100)", True),
    ],
)
def test_offloaded_activations_share_their_hosts_memory(
    stated: int | None, profiled: int | None, pool: str, fits: bool
) -> None:
    parsed = Cluster.parse(pool)
    servers = tuple(replace(server, host_memory_bytes=stated) for server in parsed.servers)
    offloaded = BatchPoint(batch_size=8, step_seconds=1.0, peak_memory_bytes=GIB, pinned_bytes=GIB)
    measured = replace(
        profile("V100"),
        optimizer=named_optimizer("adamw"),
        offloaded_curve=(offloaded,),
        host_memory_bytes=profiled,
    )
    problem = Problem([measured], replace(parsed, servers=servers), 64)
    view = split_problem(problem, shards=("all",))
    (kind,) = view.devices
    assert isinstance(kind, ShardedDevices)
    assert bool(kind.offloaded_curve) is fits
    assert split_view_faults(view, problem) == []
    anyhow = replace(measured, host_memory_bytes=None)
    unlimited = replace(problem, profiles=[anyhow], pool=parsed)
    (free,) = split_problem(unlimited, shards=("all",)).devices
    assert isinstance(free, ShardedDevices)
    other = replace(kind, offloaded_curve=() if fits else free.offloaded_curve)
    assert split_view_faults(replace(view, devices=(other,)), problem)


def test_plans_repeat_the_blocks_that_their_memory_counts() -> None:
    sizes = {"a.up": 10, "a.down": 20, "b": 30, "c_1": 40}
    nodes = tuple(
        LayerNode(
            id=name, op="Linear", forward_seconds=1.0, backward_seconds=1.0, activation_bytes=1,
            weight_bytes=size,
        )
        for name, size in sizes.items()
    )  # fmt: skip
    graph = LayerGraph(microbatch_size=8, nodes=nodes, edges=())
    adam = named_optimizer("adam")
    known = replace(profile("V100"), optimizer=adam, layers=graph, blocks=("a", "b"))
    pool = Cluster.parse("2xV100")
    problem = Problem([known], pool, 64)
    view = split_problem(problem, shards=("all",))
    assert isinstance(view, ShardedProblem)
    assert (view.gathered_bytes, view.edge_bytes, view.num_units) == (40 + 30 + 30, 40, 3)
    assert split_view_faults(view, problem) == []
    assert split_view_faults(replace(view, gathered_bytes=99), problem)

    def solved(profile: Profile, **shared: Any) -> Plan:
        return hetflow.solve([profile], pool, strategy="split", batch_size=64, **shared)

    plan = solved(known, shard="all")
    assert plan.blocks == ("a", "b")
    assert stated_faults(plan, [known]) == []
    assert stated_faults(replace(plan, blocks=("a",)), [known])
    assert solved(known).blocks is None
    assert solved(replace(known, layers=None), shard="all").blocks is None
    other = replace(known, device_type="P100", blocks=("a",))
    with pytest.raises(ProblemError, match="list unlike blocks"):
        split_problem(Problem([known, other], Cluster.parse("V100,P100"), 64), shards=("all",))
