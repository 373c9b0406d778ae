"""Check plans and problems against the profiles and the pool that they come from.

Solvers get a problem that was built from profiles. A checker that trusted this problem would
miss errors made in building it. So memory, layers and times are read from the profiles again.
"""

import re
from collections.abc import Iterator, Sequence
from math import ceil, isclose

from ...schema.cluster import Cluster
from ...schema.optimizer import OptimizerState
from ...schema.parallel import ParallelPool, ParallelProblem
from ...schema.pipeline import DevicePool, PipelineProblem
from ...schema.plan import Plan, ReplicaGroup
from ...schema.problem import ShardedDevices, ShardedProblem
from ...schema.profile import BatchPoint, LayerGraph, Profile
from ...schema.schedule_traits import traits


def split_faults(
    plan: Plan,
    profiles: Sequence[Profile],
    cluster: Cluster,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int = 0,
) -> list[str]:
    """List the groups whose passes do not fit their devices, or differ from the measured time.

    A plan on one device uses the measurements made on one device alone. A plan on several devices
    uses those made on a busy host, if the type has such measurements, some server of the pool holds
    the type together with other devices, and a measured size fits the memory.

    Args:
        plan: The plan to check.
        profiles: Profiles of the plan's model.
        cluster: The pool. Device memory is the pool's if stated, else the profiled device's.
        optimizer: The optimizer that will train; None takes the profiles' optimizer.
        memory_reserve_bytes: Bytes of each device that were to stay free.

    Returns:
        One sentence per fault.
    """
    by_type = {profile.device_type: profile for profile in profiles}
    faults = [*_sync_bound_faults(plan, by_type)]
    for index, group in enumerate(plan.groups):
        profile = by_type.get(group.device_type)
        if profile is None or group.device_type not in cluster.device_types:
            continue  # checks.batch_split reports it
        has = _device_bytes(cluster, profile)
        more = _more_bytes(profile, optimizer)
        beside = memory_reserve_bytes + _context_bytes(profile)
        among = beside + (_group_bytes(profile) if sum(cluster.num_devices.values()) > 1 else 0)
        if profile.busy is None:
            beside = among
        curve = profile.batch_curve
        if plan.num_devices > 1 and _has_company(cluster, profile.device_type):
            busy = () if profile.busy is None else profile.busy.batch_curve
            if any(max(0, _held(point) + more) + among <= has for point in busy):
                curve, beside = busy, among
        around = _around(curve, group.virtual_node_batch_size)
        if around is None:
            continue
        seconds = _between(around, [point.step_seconds for point in around], group)
        if group.pass_seconds is not None and not isclose(group.pass_seconds, seconds):
            faults.append(
                f"groups[{index}]: pass_seconds is {group.pass_seconds}, measured for a plan on "
                f"{plan.num_devices} device(s) were {seconds}"
            )
        needs = ceil(_between(around, [_held(point) for point in around], group)) + more + beside
        if needs > has:
            faults.append(
                f"groups[{index}]: a pass of {group.virtual_node_batch_size} samples needs {needs} "
                f"bytes on a {group.device_type} of {has}: {needs - has} too many"
            )
    return faults


def sharded_faults(
    problem: ShardedProblem,
    profiles: Sequence[Profile],
    cluster: Cluster,
    optimizer: OptimizerState | None,
    memory_reserve_bytes: int = 0,
) -> list[str]:
    """List what a problem of shared states says of memory and weights, unlike its profiles.

    Args:
        problem: The problem that was solved.
        profiles: Profiles of its model.
        cluster: The pool.
        optimizer: The optimizer that will train; None takes the profiles' optimizer.
        memory_reserve_bytes: Bytes of each device that were to stay free.

    Returns:
        One sentence per fault.
    """
    by_type = {profile.device_type.lower(): profile for profile in reversed(profiles)}
    faults = []
    layers = None
    for kind in problem.devices:
        profile = by_type[kind.device_type.lower()]
        where = f"the problem's {kind.device_type}"
        if (profile.frozen_weight_bytes or 0) > problem.frozen_bytes:
            faults.append(f"{where} has more frozen weights than {problem.frozen_bytes} bytes")
        layers = layers or profile.layers
        faults += _memory_faults(kind, cluster, profile)
        beside = memory_reserve_bytes + _context_bytes(profile)
        curve = profile.batch_curve
        if profile.busy is not None and _has_company(cluster, profile.device_type):
            curve = profile.busy.batch_curve
        if profile.busy is None or curve is profile.busy.batch_curve:
            beside += _group_bytes(profile)
        beside += _more_bytes(profile, optimizer)
        found = {point.batch_size: point for point in kind.batch_curve}
        for point in curve:
            held = found[point.batch_size].peak_memory_bytes
            if held != max(0, _held(point) + beside):
                faults.append(f"{where}: a pass of {point.batch_size} does not hold {held} bytes")
    whole = [0, 0, 0]  # of what is no repeated layer, and of the two largest of these
    units: dict[str, int] = {}
    for node in () if layers is None else layers.nodes:
        path = re.split(r"[._]", node.id)
        deep = next((place for place, part in enumerate(path) if part.isdecimal()), None)
        if deep is None:
            whole[0] += node.weight_bytes + (node.frozen_weight_bytes or 0)
        else:
            name = node.id[: len("_".join(path[: deep + 1]))]
            units[name] = units.get(name, 0) + node.weight_bytes + (node.frozen_weight_bytes or 0)
    if layers is None:
        whole[0] = problem.weight_bytes
    whole[1:] = sorted([0, 0, *units.values()])[-2:]
    told = (problem.gathered_bytes, problem.edge_bytes)
    if told != (min(problem.weight_bytes, sum(whole)), max(whole)):
        faults.append(f"the problem's gathered_bytes and edge_bytes are {told}, not of {whole}")
    return faults


def _sync_bound_faults(plan: Plan, by_type: dict[str, Profile]) -> Iterator[str]:
    """A plan says of which types it counts a bound for synchronisation, and no others."""
    expected = {}
    for name in {group.device_type for group in plan.groups} & by_type.keys():
        sync = by_type[name].sync
        if sync is None or plan.num_devices == 1:
            continue
        counted = sync.by_batch_size or (sync,)
        bounds = [entry.at_most_seconds for entry in counted if entry.sync_seconds is None]
        if bounds:
            expected[name] = max(bound for bound in bounds if bound is not None)
    stated = {bound.device_type: bound.at_most_seconds for bound in plan.sync_bounds}
    if stated != expected:
        yield f"sync_bounds are {stated}, those of the profiles are {expected}"


def stated_faults(plan: Plan, profiles: Sequence[Profile]) -> list[str]:
    """List what a plan repeats of its profiles, and what they do not say.

    Args:
        plan: A plan of any kind.
        profiles: Profiles of its model.

    Returns:
        One sentence per fault.
    """
    used = [profile for profile in profiles if profile.device_type in plan.devices_by_type]
    faults = []
    estimated = [profile.estimate for profile in used if profile.estimate is not None]
    if sorted(map(repr, plan.estimates)) != sorted(map(repr, estimated)):
        names = [estimate.device_type for estimate in estimated]
        faults.append(
            f"estimates do not repeat the profiles, of which {', '.join(names) or 'none'} are "
            "estimated"
        )
    if not plan.layers:
        return faults + _emulation_faults(plan, used)
    traces = [profile.layers.trace for profile in profiles if profile.layers is not None]
    if plan.trace is not None and plan.trace not in traces:
        faults.append("trace is not how the profiles found the layers")
    return faults


def _emulation_faults(plan: Plan, used: Sequence[Profile]) -> list[str]:
    """List emulated types whose base, speed or times are not those of their profile."""
    stated = {
        device.device_type: (
            device.base_device_type,
            device.speed,
            [(each.batch_size, each.step_seconds) for each in device.passes],
        )
        for device in plan.emulated
    }
    emulated = {
        profile.device_type: (
            profile.emulation.base_device_type,
            profile.emulation.speed,
            [(point.batch_size, point.step_seconds) for point in profile.batch_curve],
        )
        for profile in used
        if profile.emulation is not None
    }
    names = sorted(stated.keys() | emulated.keys())
    return [
        f"emulated: {name} is not as in the profiles"
        for name in names
        if stated.get(name) != emulated.get(name)
    ]


def _held(point: BatchPoint) -> int:
    """Bytes that the allocator holds at a point's peak."""
    return point.peak_memory_bytes + (point.fragmentation_bytes or 0)


def _context_bytes(profile: Profile) -> int:
    return 0 if profile.beside_tensors is None else profile.beside_tensors.context_bytes


def _group_bytes(profile: Profile) -> int:
    return 0 if profile.beside_tensors is None else profile.beside_tensors.group_bytes or 0


def _most_beside(
    profile: Profile, cluster: Cluster, memory_reserve_bytes: int, channels_between: int
) -> int:
    """Bytes that a pipeline's worker may take beside tensors, with channels to all others."""
    others = sum(cluster.num_devices.values()) - 1
    found = memory_reserve_bytes + _context_bytes(profile)
    found += max((point.fragmentation_bytes or 0 for point in profile.batch_curve), default=0)
    if others and profile.beside_tensors is not None:
        found += _group_bytes(profile)
        ends = [profile.links] if profile.links is not None else []
        ends += [link.links for link in profile.links_to]
        found += others * channels_between * max((e.channel_bytes or 0 for e in ends), default=0)
    return found


def _memory_faults(
    pool: ShardedDevices | DevicePool | ParallelPool, cluster: Cluster, profile: Profile
) -> list[str]:
    has = _device_bytes(cluster, profile)
    if pool.memory_bytes == has:
        return []
    where = f"the problem's {pool.device_type}"
    return [f"{where}: memory_bytes is {pool.memory_bytes}, it has {has}"]


def _device_bytes(cluster: Cluster, profile: Profile) -> int:
    stated = cluster.device_types[profile.device_type].memory_bytes
    return profile.device_memory_bytes if stated is None else stated


def _more_bytes(profile: Profile, optimizer: OptimizerState | None) -> int:
    """Bytes that the optimizer keeps beyond the one that peak memory was measured with."""
    if optimizer is None or profile.optimizer is None:
        return 0
    more = optimizer.state_bytes_per_weight_byte - profile.optimizer.state_bytes_per_weight_byte
    return ceil(more * profile.weight_bytes)


def _has_company(cluster: Cluster, device_type: str) -> bool:
    """Whether a server of the pool holds this type together with other devices."""
    return any(
        device_type in group.devices and sum(group.devices.values()) >= 2
        for group in cluster.servers
    )


def _around(curve: Sequence[BatchPoint], size: int) -> tuple[BatchPoint, BatchPoint] | None:
    """Find the nearest measured points at or below, and at or above, a size; None if outside."""
    below = [point for point in curve if point.batch_size <= size]
    above = [point for point in curve if point.batch_size >= size]
    return (below[-1], above[0]) if below and above else None


def _between(
    around: tuple[BatchPoint, BatchPoint], values: Sequence[float], group: ReplicaGroup
) -> float:
    """Interpolate linearly between the values of two points, at a group's size."""
    low, high = around
    if low is high:
        return values[0]
    rise = (values[1] - values[0]) / (high.batch_size - low.batch_size)
    return values[0] + rise * (group.virtual_node_batch_size - low.batch_size)


def parallel_faults(
    problem: ParallelProblem,
    profiles: Sequence[Profile],
    cluster: Cluster,
    memory_reserve_bytes: int = 0,
) -> list[str]:
    """List a parallel problem's differences in memory from its profiles and pool.

    Args:
        problem: The problem that was solved.
        profiles: Profiles of its model, with layers.
        cluster: The pool.
        memory_reserve_bytes: Bytes of each device that were to stay free.

    Returns:
        One sentence per fault.
    """
    by_type = {profile.device_type: profile for profile in reversed(profiles)}  # the first counts
    faults: list[str] = []
    most = 0
    for pool in problem.pools:
        profile = by_type[pool.device_type]
        held = (profile.base_memory_bytes or 0) + _exchange_bytes(profile)
        most = max(most, held + _most_beside(profile, cluster, memory_reserve_bytes, 2))
        faults += _memory_faults(pool, cluster, profile)
    if problem.reserved_bytes != most:
        faults.append(f"the problem's reserved_bytes is {problem.reserved_bytes}, not {most}")
    return faults


def pipeline_faults(
    problem: PipelineProblem,
    profiles: Sequence[Profile],
    cluster: Cluster,
    memory_reserve_bytes: int = 0,
) -> list[str]:
    """List the differences between a pipeline's problem and its profiles and pool.

    Args:
        problem: The problem that was solved.
        profiles: Profiles of its model, with layers.
        cluster: The pool.
        memory_reserve_bytes: Bytes of each device that were to stay free.

    Returns:
        One sentence per fault.
    """
    by_type = {profile.device_type: profile for profile in reversed(profiles)}  # the first counts
    faults: list[str] = []
    for pool in problem.pools:
        profile = by_type[pool.device_type]
        graph = next(
            table for table in profile.layer_tables
            if table.microbatch_size == problem.microbatch_size
        )  # fmt: skip
        where = f"the problem's {pool.device_type}"
        shares = _has_company(cluster, profile.device_type)
        found = _pool_faults(problem, pool, profile, graph, shares_host=shares)
        faults += [f"{where}: {fault}" for fault in found]
        between = 2 if traits(problem.schedule).placement == "line" else 4
        beside = _most_beside(profile, cluster, memory_reserve_bytes, between)
        base = profile.base_memory_bytes
        if beside:
            base = (base or 0) + beside
        if pool.base_memory_bytes != base:
            faults.append(f"{where}: base_memory_bytes is {pool.base_memory_bytes}, not {base}")
        faults += _memory_faults(pool, cluster, profile)
    return faults


def _slowed(profile: Profile, batch_size: int) -> float:
    """Ratio of a pass's time on a busy host to its time alone, interpolated between sizes."""
    assert profile.busy is not None
    alone = {point.batch_size: point.pass_seconds for point in profile.batch_curve}
    busy = {point.batch_size: point.pass_seconds for point in profile.busy.batch_curve}
    both = sorted(size for size in alone.keys() & busy.keys() if alone[size] > 0)
    if not both:
        return 1.0
    low = max((size for size in both if size <= batch_size), default=both[0])
    high = min((size for size in both if size >= batch_size), default=both[-1])
    first, second = busy[low] / alone[low], busy[high] / alone[high]
    if low == high or not low <= batch_size <= high:
        return second if batch_size < low else first
    return first + (second - first) * (batch_size - low) / (high - low)


def _pool_faults(
    problem: PipelineProblem,
    pool: DevicePool,
    profile: Profile,
    graph: LayerGraph,
    *,
    shares_host: bool,
) -> Iterator[str]:
    nodes = {node.id: node for node in graph.nodes}
    if set(nodes) != {layer.id for layer in problem.layers}:
        yield "layers are not the profile's"
        return
    busy = profile.busy if shares_host else None
    slowed = 1.0 if busy is None else _slowed(profile, graph.microbatch_size)
    times = zip(problem.layers, pool.forward_seconds, pool.backward_seconds, strict=True)
    for layer, forward, backward in times:
        node = nodes[layer.id]
        slow = (slowed * node.forward_seconds, slowed * node.backward_seconds)
        if not all(map(_is_same, (forward, backward), slow)):
            yield f"{layer.id}: its times are not the profile's"
    # Bytes do not depend on the device type; the problem takes them from the first profile.
    if pool is problem.pools[0]:
        for layer in problem.layers:
            node = nodes[layer.id]
            kept = node.activation_bytes if node.stashed_bytes is None else node.stashed_bytes
            own = (node.activation_bytes, kept, node.weight_bytes, node.shared_weight_bytes or 0)
            told = (layer.activation_bytes, layer.kept_bytes, layer.weight_bytes)
            if own != (*told, layer.shared_weight_bytes) or node.shared_with != layer.shared_with:
                yield f"{layer.id}: its bytes are not the profile's"
        names = [layer.id for layer in problem.layers]
        if {(names[a], names[b]) for a, b in problem.links} != set(graph.edges):
            yield "edges are not the profile's"
    update = profile.update_seconds if busy is None else busy.update_seconds
    if pool.update_seconds != update:
        yield f"update_seconds is {pool.update_seconds}, not {update}"
    costs = profile.pipeline
    fixed = (0.0, 0.0) if costs is None else (costs.pass_seconds, costs.fixed_seconds)
    if (pool.pass_seconds, pool.fixed_seconds) != fixed:
        yield f"a pass and a step cost {pool.pass_seconds} and {pool.fixed_seconds}, not {fixed}"
    if pool.lone_pass_seconds != (costs and costs.lone_pass_seconds):
        yield "a pass of a single stage does not cost what the profile measured"
    latency = (costs and costs.reduce_latency_seconds) or 0.0
    rate = costs and costs.reduce_bytes_per_second
    if (pool.reduce_latency_seconds, pool.reduce_bytes_per_second) != (latency, rate):
        yield "its all-reduces are not as the profile measured them"
    aside = _workspace_bytes(graph) + (profile.update_workspace_bytes or 0)
    aside += _exchange_bytes(profile)
    if pool.workspace_bytes != aside:
        more = " with the update" if profile.update_workspace_bytes else ""
        more += " and the exchange" if _exchange_bytes(profile) else ""
        yield f"workspace_bytes is {pool.workspace_bytes}, the dearest layer{more} needs {aside}"


def _is_same(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=1e-9)


def _exchange_bytes(profile: Profile) -> int:
    """The more of what synchronising took and of a rehearsed pipeline's fragments."""
    found = [
        profile.group_workspace_bytes,
        profile.pipeline and profile.pipeline.fragmentation_bytes,
    ]
    return max(measured or 0 for measured in found)


def _workspace_bytes(graph: LayerGraph) -> int:
    """Most temporary bytes of one layer's passes, gradients of its output and inputs included."""
    nodes = {node.id: node for node in graph.nodes}
    beside = {name: node.activation_bytes for name, node in nodes.items()}
    for source, target in graph.edges:
        beside[target] += nodes[source].activation_bytes
    measured = [node for node in graph.nodes if node.workspace_bytes is not None]
    return max(((node.workspace_bytes or 0) + beside[node.id] for node in measured), default=0)
