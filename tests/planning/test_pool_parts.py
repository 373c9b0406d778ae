"""More devices never make a proved plan slower, also behind slow links."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hetflow
from hetflow.planning.pool_parts import is_part_of, parts_of
from hetflow.schema.cluster import Cluster, DeviceType, ServerGroup
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.profile import (
    BatchPoint,
    LayerGraph,
    LayerNode,
    Profile,
    Sync,
    TensorLayers,
)
from hetflow.tests.profiles import examples

LAYERS = ("a", "b", "c")


def graph(size: int, seconds: float, weight_bytes: int) -> LayerGraph:
    return LayerGraph(
        microbatch_size=size,
        nodes=tuple(
            LayerNode(
                id=name, op="Linear", forward_seconds=seconds * size, backward_seconds=2 * seconds,
                activation_bytes=20_000 * size, weight_bytes=weight_bytes,
            )
            for name in LAYERS
        ),
        edges=tuple(zip(LAYERS, LAYERS[1:], strict=False)),
    )  # fmt: skip


def profile(name: str, slowness: float) -> Profile:
    layers = graph(2, 0.01 * slowness, 4_000_000)
    halves = graph(2, 0.006 * slowness, 2_000_000)
    return Profile(
        model="m", device_type=name, device_memory_bytes=10**9, weight_bytes=12_000_000,
        update_seconds=0.001, layers=layers,
        batch_curve=(BatchPoint(batch_size=2, step_seconds=0.1, peak_memory_bytes=10**6),),
        tensor_layers=(TensorLayers(tensor_parallel_size=2, layers=halves),),
        optimizer=named_optimizer("sgd"),
    )  # fmt: skip


PROFILES = (profile("A", 1.0), profile("B", 2.5))
RATES = (1e9, 1e10)  # at least those of the network


def step_of(pool: Cluster) -> float:
    plan = hetflow.solve(PROFILES, pool, batch_size=16, strategy="parallel")
    assert plan.proof.termination == "optimal"
    assert hetflow.check(plan, PROFILES) == []
    assert hetflow.check(plan, PROFILES, pool) == []
    return plan.predicted.step_seconds


def cluster(*servers: ServerGroup, inter: float) -> Cluster:
    return Cluster(
        device_types={"A": DeviceType(), "B": DeviceType()},
        servers=servers,
        inter_bytes_per_second=inter,
    )


GROUPS = st.builds(
    ServerGroup,
    count=st.integers(1, 2),
    devices=st.dictionaries(st.sampled_from("AB"), st.integers(1, 2), min_size=1),
    intra_bytes_per_second=st.sampled_from(RATES),
)


@st.composite
def grown(draw: st.DrawFn) -> tuple[Cluster, Cluster]:
    """A pool, and the same with a device, a server or a kind of servers more."""
    servers = draw(st.lists(GROUPS, min_size=1, max_size=2))
    inter = draw(st.sampled_from((1e6, 1e9)))
    how = draw(st.sampled_from(("device", "server", "kind")))
    first, *others = servers
    if how == "device":
        name = draw(st.sampled_from("AB"))
        first = replace(first, devices={**first.devices, name: first.devices.get(name, 0) + 1})
    elif how == "server":
        first = replace(first, count=first.count + 1)
    else:
        others = [*others, draw(GROUPS)]
    return cluster(*servers, inter=inter), cluster(first, *others, inter=inter)


@settings(max_examples=examples(30))
@given(grown())
def test_more_devices_never_make_a_proved_plan_slower(pools: tuple[Cluster, Cluster]) -> None:
    smaller, larger = pools
    assert step_of(larger) <= step_of(smaller) * (1 + 1e-9)


def test_devices_behind_a_slow_link_are_left_alone() -> None:
    near = ServerGroup(count=1, devices={"A": 4}, intra_bytes_per_second=1e10)
    far = ServerGroup(count=1, devices={"B": 4}, intra_bytes_per_second=1e10)
    alone = cluster(near, inter=1e5)
    both = cluster(near, far, inter=1e5)
    plan = hetflow.solve(PROFILES, both, batch_size=16, strategy="parallel")
    assert plan.devices_by_type == {"A": 4}
    assert plan.cluster is not None
    assert plan.cluster.servers == (near,)
    assert plan.predicted.step_seconds == pytest.approx(step_of(alone))
    assert "a part with faster links" in plan.proof.space


def test_equal_links_need_no_parts() -> None:
    pool = Cluster.parse("2x(2xA,2xB)")
    assert parts_of(pool, lambda part: dict.fromkeys(part.num_devices, 1e9)) == [pool]


def test_a_part_has_the_servers_and_the_links_of_its_pool() -> None:
    pool = Cluster.parse("2x(4xA),1x(2xB)")
    assert is_part_of(Cluster.parse("1x(4xA)"), pool)
    assert is_part_of(Cluster.parse("2x(2xA)"), pool)
    assert not is_part_of(Cluster.parse("3x(4xA)"), pool)
    assert not is_part_of(Cluster.parse("1x(5xA)"), pool)
    faster = replace(pool, servers=(replace(pool.servers[0], intra_bytes_per_second=1e9),))
    assert not is_part_of(faster, pool)


def test_a_split_leaves_a_slow_network_alone() -> None:
    sync = Sync(num_devices=2, sync_seconds=0.01, latency_seconds=1e-5, bytes_per_second=1e9)
    profiles = [replace(whole, sync=sync, layers=None, tensor_layers=()) for whole in PROFILES]
    near = ServerGroup(count=1, devices={"A": 4})
    far = ServerGroup(count=1, devices={"A": 4, "B": 4})
    both = cluster(near, far, inter=1e6)  # 12 MB of gradients take 20 s
    plan = hetflow.solve(profiles, both, batch_size=64, strategy="split")
    assert plan.cluster is not None
    assert plan.cluster.num_servers == 1
    alone = hetflow.solve(profiles, plan.cluster, batch_size=64, strategy="split")
    assert plan.predicted.step_seconds == alone.predicted.step_seconds < 1.0
    assert hetflow.check(plan, profiles, both) == []
    fast = replace(both, inter_bytes_per_second=1e9)
    faults = hetflow.check(replace(alone, cluster=plan.cluster), profiles, fast)
    assert any("lower_bound" in fault for fault in faults)
