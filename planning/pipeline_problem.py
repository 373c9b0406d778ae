"""Build the problem of a pipeline partition from layer profiles and a cluster."""

from collections.abc import Sequence
from itertools import combinations
from math import inf, isclose
from typing import Any

from ..schema.cluster import Cluster
from ..schema.device_memory import MemoryReserve
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.optimizer import NAMES, OptimizerState
from ..schema.options import command, option
from ..schema.pipeline import (
    DevicePool,
    PipelineLayer,
    PipelineProblem,
    TopologyLevel,
)
from ..schema.profile import BusyHost, LayerGraph, LayerNode, Profile
from ..schema.schedule_traits import DEFAULT_SCHEDULE, traits
from .costs.compute import busy_ratio
from .costs.memory import exchange_bytes, reserve_of, with_reserve
from .links import Pair, Source, links_of, measured_between
from .pool_parts import Key, Keys

Edges = tuple[tuple[int, int], ...]


def pipeline_problem(
    profiles: Sequence[Profile],
    cluster: Cluster,
    global_batch_size: int,
    *,
    microbatch_size: int | None = None,
    link_bytes_per_second: float | None = None,
    optimizer: OptimizerState | None = None,
    memory_reserve_bytes: int = 0,
    schedule: str = DEFAULT_SCHEDULE,
    **choices: Any,
) -> PipelineProblem:
    """Build the problem from the profiles of a cluster's device types.

    All profiles must hold the same layers at the same microbatch size, which the pipeline uses.
    The devices of a type form one ``DevicePool``. If all servers with the type hold equally many
    devices of it, the pool has two levels; else one level with the slower link's bandwidth.

    Args:
        profiles: Profiles of one model with layers; types that the cluster lacks are ignored.
        cluster: The pool.
        global_batch_size: Samples per step; a multiple of the profiled microbatch size.
        microbatch_size: Use the layers profiled nearest to this size; None uses the profiles'
            ``layers``.
        link_bytes_per_second: Bandwidth of links that the cluster does not state; None takes the
            profiles' measurements (``pipeline_links``).
        optimizer: The optimizer whose state every replica keeps; None takes the profiles'.
        memory_reserve_bytes: Bytes of each device to leave free, besides what a worker takes
            beside tensors (``costs.memory.reserve_of``).
        schedule: Name of the schedule.
        choices: Other fields of ``PipelineProblem``, which profiles and pool do not give.

    Raises:
        ProblemError: A device type has no profile or no layers, the layers differ between types,
            a bandwidth or the optimizer is unknown, or the microbatch size does not divide the
            batch.
    """
    chosen = [profile_of(name, profiles) for name in cluster.num_devices]
    graphs = [graph_of(profile, microbatch_size) for profile in chosen]
    _check_alike(chosen, graphs)
    size = graphs[0].microbatch_size
    if global_batch_size % size:
        raise ProblemError(
            f"microbatches of {size} samples do not divide a global batch of {global_batch_size}",
            hint=f"take {max(1, round(global_batch_size / size)) * size}, or profile the layers "
            "at another microbatch size",
        )
    layers, edges, order = layers_of_graph(graphs[0])
    links = links_of(chosen, cluster, link_bytes_per_second)
    return PipelineProblem(
        model=chosen[0].model,
        layers=layers,
        edges=edges,
        pools=tuple(
            _pool(
                with_reserve(
                    profile, reserve_in_pipeline(profile, cluster, schedule, memory_reserve_bytes)
                ),
                graph,
                order,
                cluster,
                links.levels[profile.device_type],
            )
            for profile, graph in zip(chosen, graphs, strict=True)
        ),
        inter_bytes_per_second=links.between_types,
        microbatch_size=size,
        num_microbatches=global_batch_size // size,
        schedule=schedule,
        optimizer=optimizer or optimizer_of(chosen),
        link_bytes_per_second=link_bytes_per_second,
        message_seconds=max(links.latency_seconds, _message_seconds(chosen)),
        step_error=_step_error(chosen),
        **choices,
    )


def pipeline_keys(
    profiles: Sequence[Profile], link_bytes_per_second: float | None, pool: Cluster
) -> Keys:
    """What pipelines of a pool count for a pair of devices.

    Args:
        profiles: Profiles of the pool's types, and perhaps of others.
        link_bytes_per_second: Bandwidth of links that the pool does not state.
        pool: The devices.

    Raises:
        ProblemError: A type has no profile, or one without layers.
    """
    chosen = {name: profile_of(name, profiles) for name in pool.num_devices}
    graphs = [graph_of(profile) for profile in chosen.values()]
    source = Source(list(chosen.values()), pool, link_bytes_per_second)
    ties = any(node.shared_with for graph in graphs for node in graph.nodes)

    def keys(pair: Pair) -> dict[Key, float]:
        link, (one, other) = source.link(pair), pair.types
        shares = pair.level == "server"
        kind = ("between",) if one != other else ("inside" if shares else "across", one)
        found: dict[Key, float] = {kind: link.bytes_per_second}
        if ties:
            found["rate",] = link.bytes_per_second
        if link.latency_seconds:
            found["latency",] = -link.latency_seconds
        busy = [name for name in pair.types if shares and chosen[name].busy is not None]
        return found | {("alone", name): 0.0 for name in busy}

    return keys


def capacity_seconds(problem: PipelineProblem) -> float:
    """Seconds per input that no plan is faster than, by what the devices can compute.

    Devices of type i are priced at one over the seconds W_i that all layers take on them.
    """
    offered, least = 0.0, [inf] * len(problem.layers)
    for pool in problem.pools:
        work = [a + b for a, b in zip(pool.forward_seconds, pool.backward_seconds, strict=True)]
        if (whole := sum(work)) <= 0:
            return 0.0
        offered += pool.num_devices / whole
        least = [min(old, new / whole) for old, new in zip(least, work, strict=True)]
    return sum(least) / offered


def reserve_in_pipeline(
    profile: Profile, cluster: Cluster, schedule: str, asked_bytes: int
) -> MemoryReserve:
    """What a worker of a pipeline takes beside tensors, at most, and what the user reserves."""
    return reserve_of(
        profile,
        asked_bytes,
        num_devices=sum(cluster.num_devices.values()),
        channels_per_peer=traits(schedule).channels_between,
    )


def optimizer_of(profiles: Sequence[Profile]) -> OptimizerState:
    """Return the optimizer that the profiles were made with, if the user chose it.

    Raises:
        ProblemError: A profile does not state a chosen optimizer, or two profiles state different
            ones; the hint names the flags.
    """
    flags = (
        f"say which one trains: {option('optimizer', '|'.join(NAMES))}, or "
        f"{option('state_bytes_per_weight_byte')}"
    )
    for profile in profiles:
        where = f"the profile of {profile.model} on {profile.device_type}"
        if profile.optimizer is None:
            raise ProblemError(f"{where} does not say what the optimizer keeps", hint=flags)
        if profile.optimizer.is_default:
            raise ProblemError(
                f"{where} was measured with {profile.optimizer.name} because none was chosen",
                hint=flags,
            )
    first, *others = profiles
    assert first.optimizer is not None
    for other in others:
        assert other.optimizer is not None
        if not _keep_alike(first.optimizer, other.optimizer):
            raise ProblemError(
                f"the profiles are of two optimizers: {first.optimizer} on {first.device_type}, "
                f"{other.optimizer} on {other.device_type}",
                hint=flags,
            )
    return first.optimizer


def _keep_alike(one: OptimizerState, other: OptimizerState) -> bool:
    return one.name == other.name and isclose(
        one.state_bytes_per_weight_byte, other.state_bytes_per_weight_byte, rel_tol=1e-6
    )


def layers_of_graph(
    graph: LayerGraph,
) -> tuple[tuple[PipelineLayer, ...], Edges, tuple[LayerNode, ...]]:
    """Sort a graph's layers topologically, keeping the given order as far as possible.

    Returns:
        The layers, the edges as pairs of positions in them, and the profile's nodes in the same
        order.

    Raises:
        ProblemError: The graph has a cycle; the message names a layer on it.
    """
    parents: dict[str, set[str]] = {node.id: set() for node in graph.nodes}
    for source, target in graph.edges:
        parents[target].add(source)
    left, order = list(graph.nodes), []
    done: set[str] = set()
    while left:
        ready = next((node for node in left if parents[node.id] <= done), None)
        if ready is None:
            raise ProblemError(
                f"the layer graph has a cycle: {left[0].id} waits for "
                f"{sorted(parents[left[0].id] - done)[0]}",
                hint="profile the model again; a layer cannot feed itself",
            )
        order.append(ready)
        done.add(ready.id)
        left.remove(ready)
    position = {node.id: index for index, node in enumerate(order)}
    layers = tuple(
        PipelineLayer(
            id=node.id,
            activation_bytes=node.activation_bytes,
            weight_bytes=node.weight_bytes,
            stashed_bytes=node.stashed_bytes,
            shared_with=node.shared_with,
            shared_weight_bytes=node.shared_weight_bytes or 0,
        )
        for node in order
    )
    edges = tuple((position[source], position[target]) for source, target in graph.edges)
    return layers, edges, tuple(order)


def profile_of(name: str, profiles: Sequence[Profile]) -> Profile:
    """The profile of a device type.

    Raises:
        ProblemError: There is none.
    """
    found = [profile for profile in profiles if profile.device_type == name]
    if not found:
        raise ProblemError(
            f"no profile of {name}", hint=f"run {command('profile', layers=True, devices=name)}"
        )
    return found[0]


def graph_of(profile: Profile, microbatch_size: int | None = None) -> LayerGraph:
    """The layers of a profile, those timed nearest to a microbatch size if one is given.

    Raises:
        ProblemError: The profile has none.
    """
    if profile.layers is None:
        raise ProblemError(
            f"the profile of {profile.model} on {profile.device_type} has no layers",
            hint=f"profile it with {option('layers', True)}",
        )
    if microbatch_size is None:
        return profile.layers
    wanted = microbatch_size
    return min(
        profile.layer_tables,
        key=lambda table: (abs(table.microbatch_size - wanted), table.microbatch_size),
    )


def _check_alike(profiles: Sequence[Profile], graphs: Sequence[LayerGraph]) -> None:
    first = graphs[0]
    for profile, graph in zip(profiles, graphs, strict=True):
        if profile.model != profiles[0].model:
            raise ProblemError(f"profiles of two models: {profiles[0].model}, {profile.model}")
        if graph.microbatch_size != first.microbatch_size:
            raise ProblemError(
                f"layers are profiled at microbatches of {first.microbatch_size} on "
                f"{profiles[0].device_type} and {graph.microbatch_size} on {profile.device_type}",
                hint="profile both at one size",
            )
        same = {node.id for node in graph.nodes} == {node.id for node in first.nodes}
        if not same or set(graph.edges) != set(first.edges):
            raise ProblemError(
                f"the layers on {profile.device_type} are not those on {profiles[0].device_type}",
                hint="profile the same model on both",
            )


def _pool(
    profile: Profile,
    graph: LayerGraph,
    order: Sequence[LayerNode],
    cluster: Cluster,
    levels: tuple[TopologyLevel, ...],
) -> DevicePool:
    node = {entry.id: entry for entry in graph.nodes}
    name = profile.device_type
    total = cluster.device_types[name].memory_bytes or profile.device_memory_bytes
    busy, ratio = _busy(profile, cluster), 1.0
    if busy is not None:
        ratio = busy_ratio(profile.batch_curve, busy.batch_curve, graph.microbatch_size)
    costs = profile.pipeline
    return DevicePool(
        device_type=name,
        levels=levels,
        forward_seconds=tuple(ratio * node[entry.id].forward_seconds for entry in order),
        backward_seconds=tuple(ratio * node[entry.id].backward_seconds for entry in order),
        update_seconds=profile.update_seconds if busy is None else busy.update_seconds,
        memory_bytes=total,
        workspace_bytes=_workspace(profile, graph, total),
        base_memory_bytes=profile.base_memory_bytes,
        pass_seconds=costs.pass_seconds if costs is not None else 0.0,
        fixed_seconds=costs.fixed_seconds if costs is not None else 0.0,
        lone_pass_seconds=costs.lone_pass_seconds if costs is not None else None,
        reduce_latency_seconds=(costs.reduce_latency_seconds or 0.0) if costs is not None else 0.0,
        reduce_bytes_per_second=costs.reduce_bytes_per_second if costs is not None else None,
    )


def _busy(profile: Profile, cluster: Cluster) -> BusyHost | None:
    """Return a type's busy-host measurements; None if each of its servers has one device only."""
    return profile.busy if cluster.shares_servers(profile.device_type) else None


def _message_seconds(profiles: Sequence[Profile]) -> float:
    """Fixed seconds of a message, on the slowest type: as measured, else its link's latency.

    A link between types counts with its latency.
    """
    found = [0.0]
    for profile in profiles:
        if profile.pipeline is not None:
            found.append(profile.pipeline.message_seconds)
        elif profile.links is not None:
            found.append(profile.links.latency_seconds)
    for one, other in combinations(profiles, 2):
        link = measured_between(one, other)
        if link is not None:
            found.append(link.latency_seconds)
    return max(found)


def _step_error(profiles: Sequence[Profile]) -> float | None:
    """The largest relative step error of the profiles, estimated ones included; None if unknown."""
    found = [profile.pipeline.step_error for profile in profiles if profile.pipeline is not None]
    found += [profile.estimate.step_error for profile in profiles if profile.estimate is not None]
    return max((error for error in found if error is not None), default=None)


def _workspace(profile: Profile, graph: LayerGraph, total: int) -> int:
    """Bytes of a device's ``total`` bytes of memory to reserve for temporary use, for any stage.

    The sum of the largest layer's workspace, if measured, with the gradients of its output and
    inputs, which exist at the same time in its backward pass; the optimizer update's workspace, if
    the allocator keeps it apart; and what communication with other workers and fragments take.

    Raises:
        InfeasibleError: These bytes alone fill the device.
    """
    made = {node.id: node.activation_bytes for node in graph.nodes}
    inputs = dict.fromkeys(made, 0)
    for source, target in graph.edges:
        inputs[target] += made[source]
    aside = max(
        (
            node.workspace_bytes + made[node.id] + inputs[node.id]
            for node in graph.nodes
            if node.workspace_bytes is not None
        ),
        default=0,
    )
    aside += (profile.update_workspace_bytes or 0) + exchange_bytes(profile)
    base = profile.base_memory_bytes or 0
    if aside + base >= total:
        before = f", beside {base} before there is a model" if base else ""
        raise InfeasibleError(
            f"one layer alone needs {aside} bytes of workspace and gradients on a "
            f"{profile.device_type} of {total}{before}",
            hint=f"profile a smaller microbatch than {graph.microbatch_size}",
        )
    return aside
