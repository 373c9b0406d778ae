"""More devices never make a proved plan slower, also behind slow links."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, islice, pairwise, product
from math import gcd, inf

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import hetflow
from hetflow.planning.apart import states_devices
from hetflow.planning.limits import SolveLimits, TimeShares
from hetflow.planning.parallel_problem import parallel_keys
from hetflow.planning.pool_parts import MOST_PARTS, Parts, best_of_parts, is_part_of, parts_of
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.cluster import Cluster, DeviceType, Link, ServerGroup
from hetflow.schema.errors import InfeasibleError
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan, Proof
from hetflow.schema.problem import Problem
from hetflow.schema.profile import BatchPoint, LayerGraph, LayerNode, Profile, Sync, TensorLayers
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
RATES = (1e7, 1e9, 1e10)
STRATEGIES = ("split", "pipeline", "parallel", "auto")


def solved(pool: Cluster, strategy: str, batch_size: int = 16) -> tuple[float, bool]:
    """The step of the best plan found, and whether it is proved; infinite where none fits."""
    given = PROFILES
    if strategy == "split":
        sync = Sync(num_devices=2, sync_seconds=0.01, latency_seconds=1e-5, bytes_per_second=1e10)
        given = tuple(replace(each, sync=sync) for each in PROFILES)
    schedule = {"schedule": "1f1b"} if strategy == "pipeline" else {}
    try:
        plan = hetflow.solve(given, pool, batch_size=batch_size, strategy=strategy, **schedule)
    except InfeasibleError:
        return inf, True
    assert hetflow.check(plan, given) == []
    assert hetflow.check(plan, given, pool) == []
    return plan.predicted.step_seconds, plan.proof.termination == "optimal"


def cluster(
    *servers: ServerGroup,
    inter: float,
    links: tuple[Link, ...] = (),
    memory_bytes: int | None = None,
) -> Cluster:
    return Cluster(
        schema="hetflow.cluster/2",
        device_types={name: DeviceType(memory_bytes=memory_bytes) for name in "AB"},
        servers=servers,
        inter_bytes_per_second=inter,
        links=links,
    )


def groups(most_servers: int, most_devices: int, most_types: int) -> st.SearchStrategy[ServerGroup]:
    """Servers of up to so many devices of each type."""
    return st.builds(
        ServerGroup,
        count=st.integers(1, most_servers),
        devices=st.dictionaries(
            st.sampled_from("AB"), st.integers(1, most_devices), min_size=1, max_size=most_types
        ),
        intra_bytes_per_second=st.sampled_from(RATES),
        rack=st.sampled_from((None, "r")),
    )


GROUPS = {
    "split": groups(2, 4, 2),
    "parallel": groups(1, 3, 2),
    "pipeline": groups(1, 2, 1),  # four devices take long
    "auto": groups(1, 2, 2),
}
LINKS = st.lists(
    st.builds(
        Link,
        bytes_per_second=st.sampled_from(RATES),
        latency_seconds=st.sampled_from((0.0, 1e-3)),
        level=st.sampled_from(("server", "rack", "pool")),
        between=st.sampled_from((None, ("A", "B"), ("A", "A"))),
    ),
    max_size=2,
    unique_by=lambda link: (link.level, link.between),
)


@st.composite
def grown(draw: st.DrawFn, strategy: str = "parallel") -> tuple[Cluster, Cluster]:
    """A pool, and the same with a device, a server or a kind more, faster links or more memory."""
    servers = draw(st.lists(GROUPS[strategy], min_size=1, max_size=2))
    inter, links = draw(st.sampled_from((1e6, 1e9))), tuple(draw(LINKS))
    memory = draw(st.sampled_from((None, None, 30_000_000, 50_000_000)))
    before = cluster(*servers, inter=inter, links=links, memory_bytes=memory)
    how = draw(st.sampled_from(("device", "server", "kind", "link", "network", "memory")))
    first, *others = servers
    if how == "device":
        name = draw(st.sampled_from("AB"))
        first = replace(first, devices={**first.devices, name: first.devices.get(name, 0) + 1})
    elif how == "server":
        first = replace(first, count=first.count + 1)
    elif how == "kind":
        others = [*others, draw(GROUPS[strategy])]
    elif how == "link":
        rate = first.intra_bytes_per_second or 0.0
        first = replace(first, intra_bytes_per_second=10 * rate)
        links = tuple(replace(link, bytes_per_second=2 * link.bytes_per_second) for link in links)
    elif how == "network":
        inter *= 5
    else:
        memory = None if memory is None else memory + 15_000_000
    return before, cluster(first, *others, inter=inter, links=links, memory_bytes=memory)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=examples(5))
@given(data=st.data(), batch_size=st.sampled_from((8, 16, 18)))
@pytest.mark.slow
def test_more_devices_memory_and_faster_links_never_make_a_proved_plan_slower(
    data: st.DataObject, strategy: str, batch_size: int
) -> None:
    before, after = data.draw(grown(strategy))
    sooner, is_proved = solved(after, strategy, batch_size)
    later, _ = solved(before, strategy, batch_size)
    assume(is_proved)  # not where a pool has too many parts
    assert sooner <= later * (1 + 1e-9)


def test_devices_behind_a_slow_link_are_left_alone() -> None:
    near = ServerGroup(count=1, devices={"A": 4}, intra_bytes_per_second=1e10)
    far = ServerGroup(count=1, devices={"B": 4}, intra_bytes_per_second=1e10)
    alone = cluster(near, inter=1e5)
    both = cluster(near, far, inter=1e5)
    plan = hetflow.solve(PROFILES, both, batch_size=16, strategy="parallel")
    assert plan.devices_by_type == {"A": 4}
    assert plan.predicted.step_seconds == pytest.approx(solved(alone, "parallel")[0])


@pytest.mark.slow
def test_one_more_server_than_parts_can_be_planned_for_is_left_alone() -> None:
    near = ServerGroup(count=2, devices={"B": 3, "A": 4}, intra_bytes_per_second=1e9, rack="r")
    others = ServerGroup(count=2, devices={"A": 1, "B": 4}, intra_bytes_per_second=1e9, rack="r")
    slow = ServerGroup(count=1, devices={"B": 4, "A": 4}, intra_bytes_per_second=1e7)
    links = (Link(bytes_per_second=1e9, latency_seconds=1e-3, level="pool", between=("A", "B")),)
    before, _ = solved(cluster(near, others, inter=1e9, links=links), "parallel")
    after, is_proved = solved(cluster(near, others, slow, inter=1e9, links=links), "parallel")
    assert after <= before * (1 + 1e-9)
    assert not is_proved  # of 72 parts 16 are planned


def test_equal_links_need_no_parts() -> None:
    pool = Cluster.parse("2x(2xA,2xB)")
    problem = Problem(PROFILES, pool, 8, link_bytes_per_second=1e9)
    assert parts_of(pool, partial(parallel_keys, problem)) == Parts([pool], are_all=True)


def test_parts_that_are_not_planned_leave_their_bounds_in_the_proof() -> None:
    pool = Cluster.parse("2xA")
    plan = hetflow.solve(PROFILES, pool, batch_size=16, strategy="split")
    half = plan.proof.objective / 2
    pools = [replace(pool) for _ in range(MOST_PARTS)]

    def proof_of(parts: Parts) -> Proof:
        clock = TimeShares(SolveLimits())
        return best_of_parts(parts, clock, lambda *_: plan, lambda _: half)[1].proof

    assert proof_of(Parts(pools, are_all=True)).termination == "optimal"
    for parts in (Parts(pools, are_all=False), Parts([*pools, pool], are_all=True)):
        proof = proof_of(parts)
        assert (proof.termination, proof.lower_bound, proof.gap) == ("feasible", half, 0.5)


def test_a_part_has_the_servers_and_the_links_of_its_pool() -> None:
    pool = Cluster.parse("2x(4xA),1x(2xB)")
    assert is_part_of(Cluster.parse("1x(4xA)"), pool)
    assert is_part_of(Cluster.parse("2x(2xA)"), pool)
    assert not is_part_of(Cluster.parse("3x(4xA)"), pool)
    assert not is_part_of(Cluster.parse("1x(5xA)"), pool)
    faster = replace(pool, servers=(replace(pool.servers[0], intra_bytes_per_second=1e9),))
    assert not is_part_of(faster, pool)


def stated(pool: Cluster, one: tuple[int, str], other: tuple[int, str]) -> tuple[float, float]:
    """Rate and latency between devices of two types on two servers, by the page of formats."""
    each = [group for group in pool.servers for _ in range(group.count)]
    here, there = each[one[0]], each[other[0]]
    level = "server" if one[0] == other[0] else "pool"
    if level == "pool" and here.rack is not None and here.rack == there.rack:
        level = "rack"
    types = {one[1], other[1]}
    for link in pool.links:
        if link.between is not None and set(link.between) == types and link.level == level:
            return link.bytes_per_second, link.latency_seconds
    if level == "server" and here.intra_bytes_per_second is not None:
        return here.intra_bytes_per_second, 0.0
    for link in pool.links:
        if link.between is None and link.level == level:
            return link.bytes_per_second, link.latency_seconds
    assert pool.inter_bytes_per_second is not None
    return pool.inter_bytes_per_second, 0.0


def best_split(pool: Cluster, batch: int) -> float:
    """The least step over all sets of devices and ways to share out the batch in passes of 2."""
    each = [group for group in pool.servers for _ in range(group.count)]
    devices = [
        (server, name)
        for server, group in enumerate(each)
        for name, number in group.devices.items()
        for _ in range(number)
    ]
    seconds = {"A": 0.1, "B": 0.03}
    least = inf
    for number in range(1, min(len(devices), batch // 2) + 1):
        for used in set(combinations(devices, number)):
            step = 0.001 + min(
                max(n * seconds[name] for n, (_, name) in zip(passes, used, strict=True))
                for passes in product(range(1, batch // 2 + 1), repeat=number)
                if sum(passes) == batch // 2
            )
            if number > 1:
                links = [stated(pool, *pair) for pair in combinations(used, 2)]
                rate = min(1e10, *(rate for rate, _ in links))
                late = max(1e-5, *(late for _, late in links))
                ring = 2 * (number - 1) * (late + 12e6 / number / rate)
                step += max(0.0, 0.01 + ring - 2 * (1e-5 + 6e6 / 1e10))
            least = min(least, step)
    return least


@settings(max_examples=examples(24))
@given(grown())
def test_a_split_is_the_best_over_all_sets_of_devices(pools: tuple[Cluster, Cluster]) -> None:
    pool, _ = pools
    assume(sum(pool.num_devices.values()) <= 6)
    sync = Sync(num_devices=2, sync_seconds=0.01, latency_seconds=1e-5, bytes_per_second=1e10)
    given = [replace(each, sync=sync) for each in PROFILES]
    curve = (BatchPoint(batch_size=2, step_seconds=0.03, peak_memory_bytes=10**6),)
    given[1] = replace(given[1], batch_curve=curve)
    plan = hetflow.solve(given, pool, batch_size=8, strategy="split")
    assert plan.predicted.step_seconds == pytest.approx(best_split(pool, 8))
    assert plan.proof.termination == "optimal"


def best_of_three_dimensions(pool: Cluster, batch: int) -> float:
    """The least step over all sets of devices, cuts, replicas and places; degree 1."""
    each = [group for group in pool.servers for _ in range(group.count)]
    slots = [(server, name, n) for server, g in enumerate(each) for name, n in g.devices.items()]
    least = inf
    for counts in product(*(range(n + 1) for *_, n in slots)):
        kept = [
            (at, name) for (at, name, _), n in zip(slots, counts, strict=True) for _ in range(n)
        ]
        if kept:
            widths = {
                name: [n for (_, own, _), n in zip(slots, counts, strict=True) if own == name and n]
                for name in "AB"
            }
            least = min(least, best_on(pool, kept, widths, batch))
    return least


def best_on(
    pool: Cluster, kept: list[tuple[int, str]], widths: dict[str, list[int]], batch: int
) -> float:
    """The same on these devices [(server, type)], all links of a kind as slow as the slowest."""
    rates: dict[tuple[str, ...], float] = {}
    late = 0.0
    for one, other in combinations(kept, 2):
        rate, latency = stated(pool, one, other)
        late = max(late, latency)
        key = tuple(sorted({one[1], other[1]}))
        kinds = [key, ("near", *key)] if one[0] == other[0] else [key]
        for kind in kinds:
            rates[kind] = min(rates.get(kind, inf), rate)

    def link(types: set[str]) -> float:
        pairs = [("A",), ("B",), ("A", "B")]
        return min((rates.get(pair, inf) for pair in pairs if set(pair) <= types), default=inf)

    def reduce(types: set[str], layers: int, d: int) -> float:
        rate = link(types)
        if len(types) == 1 and gcd(*widths[min(types)]) % d == 0:
            rate = max(rate, rates.get(("near", *types), 0.0))
        return 2 * (d - 1) * (late + 4e6 * layers / d / rate) if d > 1 else 0.0

    seconds, mixes = {"A": 0.04, "B": 0.1}, [{"A"}, {"B"}, {"A", "B"}]
    least = inf
    for d in range(1, len(kept) + 1):
        m = -(-batch // (2 * d))
        for cuts in ((3,), (1, 2), (2, 1), (1, 1, 1)):
            for stages in product(mixes, repeat=len(cuts)):
                if not holds(stages, d, {name: sum(widths[name]) for name in "AB"}):
                    continue
                own = [n * max(seconds[t] for t in ts) for n, ts in zip(cuts, stages, strict=True)]
                links = [late + 40_000 / link(a | b) for a, b in pairwise(stages)]
                rings = [reduce(ts, n, d) for n, ts in zip(cuts, stages, strict=True)]
                step = passes(own, links, m) + max(rings) + 0.001 * max(cuts) / 3
                least = min(least, step)
    return least


def passes(own: list[float], links: list[float], m: int) -> float:
    """Seconds of m microbatches in stages of so many each, with messages beside passes."""
    most = (m - 1) * max(*own, *links) if links else (m - 1) * own[0]
    for first in range(len(own)):
        trips, rest = divmod(m - 1, min(len(own) - first, m))
        trip = sum(own[first:]) + 2 * sum(links[first:])
        most = max(most, trips * trip + rest * max([*own[first:], *links[first:]]))
        if m > len(own) - first > 1:
            pairs, rest = divmod(m - 1 - len(own) + first, 2)
            both = own[first] + own[first + 1] + 2 * links[first]
            most = max(most, trip + pairs * both + rest * own[first])
    return sum(own) + 2 * sum(links) + most


def holds(stages: Sequence[set[str]], d: int, number: dict[str, int]) -> bool:
    """Whether so many devices are enough for d replicas of each stage, of all its types."""
    least = {t: sum(1 if len(ts) > 1 else d for ts in stages if t in ts) for t in "AB"}
    free = sum(d - 2 for ts in stages if len(ts) > 1)
    room = [number[t] - least[t] for t in "AB"]
    return min(room) >= 0 and sum(room) >= free and (d > 1 or all(len(ts) == 1 for ts in stages))


@settings(max_examples=examples(24))
@given(grown())
def test_a_parallel_plan_is_the_best_over_all_sets_of_devices(
    pools: tuple[Cluster, Cluster],
) -> None:
    pool, _ = pools
    assume(sum(pool.num_devices.values()) <= 6)
    given = [replace(each, tensor_layers=()) for each in PROFILES]
    plan = hetflow.solve(given, pool, batch_size=16, strategy="parallel", num_model_chunks=1)
    step, least = plan.predicted.step_seconds, best_of_three_dimensions(pool, 16)
    assert plan.proof.termination == "optimal"
    if states_devices(plan):  # then links of a kind need not be alike: test_apart.py
        assert step <= least * (1 + 1e-9)
    else:
        assert step == pytest.approx(least)
        assert lowers_inside_servers(plan)


def lowers_inside_servers(plan: Plan) -> bool:
    """Whether a launch puts each stage that the plan's pool can hold in one server into one."""
    assert plan.cluster is not None
    workers = iter(lower(plan).workers)
    for stage in plan.stages:
        own = list(islice(workers, sum(group.num_devices for group in stage.replicas)))
        (name, *others) = {worker.device_type for worker in own}
        width = gcd(*(g.devices[name] for g in plan.cluster.servers if name in g.devices))
        places = {worker.device // width for worker in own if worker.device is not None}
        if not others and width % len(own) == 0 and len(places) > 1:
            return False
    return True


def test_a_server_of_three_holds_a_group_and_a_device() -> None:
    server = ServerGroup(count=2, devices={"A": 3}, intra_bytes_per_second=1e9)
    pool = cluster(server, inter=1e9)
    plan = hetflow.solve(PROFILES[:1], pool, batch_size=16, strategy="parallel")
    degrees = [g.tensor_parallel_size for stage in plan.stages for g in stage.replicas]
    assert {1, 2} <= {*degrees}
    assert hetflow.check(plan, PROFILES[:1], pool) == []
    workers = iter(lower(plan).workers)
    for degree in (
        n
        for stage in plan.stages
        for g in stage.replicas
        for n in [g.tensor_parallel_size] * g.num_replicas
    ):
        places = {
            worker.device // 3 for worker in islice(workers, degree) if worker.device is not None
        }
        assert len(places) == 1


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
