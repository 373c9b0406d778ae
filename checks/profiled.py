"""Hold plans and problems to the profiles and the pool that they come from.

Solvers see a problem that was built from profiles; a judge who took it as built would miss what
was lost on the way. Here memory, layers and times are read from the profiles once more.
"""

from collections.abc import Iterator, Sequence
from math import ceil, isclose

from ..schema.cluster import Cluster
from ..schema.optimizer import OptimizerState
from ..schema.pipeline import DevicePool, PipelineProblem
from ..schema.plan import DeviceGroup, SplitPlan
from ..schema.profile import LayerGraph, Profile


def split_faults(
    plan: SplitPlan,
    profiles: Sequence[Profile],
    cluster: Cluster,
    optimizer: OptimizerState | None,
) -> list[str]:
    """Every group whose passes do not fit its devices.

    Args:
        plan: The plan to judge.
        profiles: Of its model.
        cluster: The pool; its memory counts where it states one, else the profiled device's.
        optimizer: The one that will train; None takes the profiles'.
    """
    by_type = {profile.device_type: profile for profile in profiles}
    faults = []
    for index, group in enumerate(plan.groups):
        profile = by_type.get(group.device_type)
        if profile is None or group.device_type not in cluster.device_types:
            continue  # the judge of the split says so
        has = _device_bytes(cluster, profile)
        needs = _peak_bytes(group, profile)
        if needs is None:
            continue
        if optimizer is not None and profile.optimizer is not None:
            more = optimizer.state_bytes_per_weight_byte
            more -= profile.optimizer.state_bytes_per_weight_byte
            needs += ceil(more * profile.weight_bytes)
        if needs > has:
            faults.append(
                f"groups[{index}]: a pass of {group.virtual_node_batch_size} samples needs {needs} "
                f"bytes on a {group.device_type} of {has}: {needs - has} too many"
            )
    return faults


def _device_bytes(cluster: Cluster, profile: Profile) -> int:
    stated = cluster.device_types[profile.device_type].memory_bytes
    return profile.device_memory_bytes if stated is None else stated


def _peak_bytes(group: DeviceGroup, profile: Profile) -> int | None:
    """The profiled peak, or the line between two; None outside of what was profiled."""
    size = group.virtual_node_batch_size
    below = [point for point in profile.batch_curve if point.batch_size <= size]
    above = [point for point in profile.batch_curve if point.batch_size >= size]
    if not below or not above:
        return None
    low, high = below[-1], above[0]
    if low is high:
        return low.peak_memory_bytes
    rise = (high.peak_memory_bytes - low.peak_memory_bytes) / (high.batch_size - low.batch_size)
    return ceil(low.peak_memory_bytes + rise * (size - low.batch_size))


def pipeline_faults(
    problem: PipelineProblem, profiles: Sequence[Profile], cluster: Cluster
) -> list[str]:
    """Everything in which a pipeline's problem is not what profiles and pool say.

    Args:
        problem: What was solved.
        profiles: Of its model, with layers.
        cluster: The pool.
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
        shares = _shares_host(cluster, profile.device_type)
        found = _pool_faults(problem, pool, profile, graph, shares_host=shares)
        faults += [f"{where}: {fault}" for fault in found]
        if pool.memory_bytes != _device_bytes(cluster, profile):
            has = _device_bytes(cluster, profile)
            faults.append(f"{where}: memory_bytes is {pool.memory_bytes}, it has {has}")
    return faults


def _shares_host(cluster: Cluster, device_type: str) -> bool:
    return any(
        device_type in group.devices and sum(group.devices.values()) > 1
        for group in cluster.servers
    )


def _slowed(profile: Profile, batch_size: int) -> float:
    """A pass with the host's other devices at work, to one alone, on the line between sizes."""
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
    # Bytes are the model's; they were taken from the first type's profile.
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
    aside = _workspace_bytes(graph)
    if pool.workspace_bytes != aside:
        yield f"workspace_bytes is {pool.workspace_bytes}, the dearest layer needs {aside}"


def _is_same(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=1e-9)


def _workspace_bytes(graph: LayerGraph) -> int:
    """Most that one layer's passes need for a while, gradients of its output and inputs too."""
    nodes = {node.id: node for node in graph.nodes}
    beside = {name: node.activation_bytes for name, node in nodes.items()}
    for source, target in graph.edges:
        beside[target] += nodes[source].activation_bytes
    measured = [node for node in graph.nodes if node.workspace_bytes is not None]
    return max(((node.workspace_bytes or 0) + beside[node.id] for node in measured), default=0)
