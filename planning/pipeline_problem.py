"""What the solvers of pipelines see of a problem, and what all plans that cut layers read."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from math import inf, isclose
from typing import Any, NamedTuple

from ..schema.cluster import Cluster
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.optimizer import NAMES, OptimizerState
from ..schema.options import option
from ..schema.pipeline import DevicePool, PipelineLayer, PipelineProblem
from ..schema.problem import Problem
from ..schema.profile import LayerGraph, LayerNode, MemoryReserve, Profile
from ..schema.schedule import DEFAULT_SCHEDULE, traits
from .costs.compute import busy_ratio
from .costs.memory import (
    COMPARED_BYTES,
    LOSS_BYTES,
    NUMBERS_BYTES,
    WAITING_BYTES,
    exchange_bytes,
    reserve_of,
    with_reserve,
    workspaces,
    writes_at_once,
)
from .links import LinkSource, Pair, PoolLinks, links_of, measured_between
from .pool_parts import Key, Keys

Edges = tuple[tuple[int, int], ...]


class Layered(NamedTuple):
    """What plans that cut a model's layers are made from: read from profiles and pool once."""

    profiles: list[Profile]
    graphs: list[LayerGraph]
    layers: tuple[PipelineLayer, ...]
    edges: Edges
    order: tuple[LayerNode, ...]
    links: PoolLinks
    optimizer: OptimizerState


def layered(problem: Problem, microbatch_size: int | None = None, *, at_one: bool) -> Layered:
    """Read the layers of a pool's types, which must be the same, and the pool's links.

    Without a microbatch size it takes ``layers``, else the tables nearest to it. ``at_one`` asks
    for tables of one size.

    Raises:
        ProblemError: A device type has no profile or no layers, the layers differ between types,
            or a bandwidth or the optimizer is unknown.
    """
    used = problem.used
    graphs = [graph_of(profile, microbatch_size) for profile in used]
    _check_alike(used, graphs, at_one=at_one)
    layers, edges, order = layers_of_graph(graphs[0])
    links = links_of(used, problem.pool, problem.link_bytes_per_second)
    optimizer = problem.optimizer or optimizer_of(used)
    return Layered(used, graphs, layers, edges, order, links, optimizer)


def pipeline_problem(
    problem: Problem,
    *,
    microbatch_size: int | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    **choices: Any,
) -> PipelineProblem:
    """A graph of layers at one microbatch size, and pools of devices in levels of links.

    The devices of a type form one ``DevicePool``. If all servers with the type hold equally many
    devices of it, the pool has two levels; else one level with the slower link's bandwidth.

    Args:
        problem: What is asked; its batch is a multiple of the profiled microbatch size.
        microbatch_size: Use the layers profiled nearest to this size; None uses the profiles'
            ``layers``.
        schedule: Name of the schedule.
        choices: Other fields of ``PipelineProblem``, which profiles and pool do not give.

    Raises:
        ProblemError: As ``layered``; or the microbatch size does not divide the batch.
        InfeasibleError: A device is too small for a layer's temporary memory.
    """
    read, batch = layered(problem, microbatch_size, at_one=True), problem.global_batch_size
    size = read.graphs[0].microbatch_size
    if batch % size:
        raise ProblemError(
            f"microbatches of {size} samples do not divide a global batch of {batch}",
            hint=f"take {max(1, round(batch / size)) * size}, or profile the layers "
            "at another microbatch size",
        )
    return PipelineProblem(
        model=read.profiles[0].model,
        layers=read.layers,
        edges=read.edges,
        pools=tuple(
            _pool(
                with_reserve(profile, reserve_in_pipeline(profile, problem, schedule)),
                graph,
                read,
                problem.pool,
                batch // size,
                splits_backward=traits(schedule).splits_backward,
            )
            for profile, graph in zip(read.profiles, read.graphs, strict=True)
        ),
        inter_bytes_per_second=read.links.between_types,
        microbatch_size=size,
        num_microbatches=batch // size,
        schedule=schedule,
        optimizer=read.optimizer,
        link_bytes_per_second=problem.link_bytes_per_second,
        message_seconds=max(read.links.latency_seconds, _message_seconds(read.profiles)),
        step_error=_step_error(read.profiles),
        sample_bytes=max(graph.sample_bytes or 0 for graph in read.graphs),
        **choices,
    )


def pipeline_keys(problem: Problem, pool: Cluster) -> Keys:
    """What pipelines of a part of the problem's pool count for a pair of devices.

    Raises:
        ProblemError: A type has no profile, or one without layers.
    """
    chosen = {profile.device_type: profile for profile in replace(problem, pool=pool).used}
    graphs = [graph_of(profile) for profile in chosen.values()]
    source = LinkSource(list(chosen.values()), pool, problem.link_bytes_per_second)
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
    """Seconds per input that no plan is faster than, by what the devices can compute."""
    # Devices of type i are priced at one over the seconds W_i that all layers take on them.
    offered, least = 0.0, [inf] * len(problem.layers)
    for pool in problem.pools:
        work = [a + b for a, b in zip(pool.forward_seconds, pool.backward_seconds, strict=True)]
        if (whole := sum(work)) <= 0:
            return 0.0
        offered += pool.num_devices / whole
        least = [min(old, new / whole) for old, new in zip(least, work, strict=True)]
    return sum(least) / offered


def reserve_in_pipeline(profile: Profile, problem: Problem, schedule: str) -> MemoryReserve:
    """What a worker of a pipeline takes beside tensors, at most, and what the user reserves."""
    return reserve_of(
        profile,
        problem.memory_reserve_bytes,
        num_devices=sum(problem.pool.num_devices.values()),
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
        one, two = first.optimizer, other.optimizer
        near = isclose(
            one.state_bytes_per_weight_byte, two.state_bytes_per_weight_byte, rel_tol=1e-6
        )
        if one.name != two.name or not near:
            raise ProblemError(
                f"the profiles are of two optimizers: {one} on {first.device_type}, "
                f"{two} on {other.device_type}",
                hint=flags,
            )
    return first.optimizer


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
    # In another order the first layer that saves an output may be another one.
    is_sorted = order == [*graph.nodes]
    layers = tuple(
        PipelineLayer(
            id=node.id,
            activation_bytes=node.activation_bytes,
            weight_bytes=node.weight_bytes,
            stashed_bytes=node.stashed_bytes,
            shared_with=node.shared_with,
            shared_weight_bytes=node.shared_weight_bytes or 0,
            halved_bytes=_halved(node),
            saved_later=tuple(
                (position[name], size) for name, size in (node.saved_later or {}).items()
            )
            if is_sorted
            else (),
            padding_bytes=node.padding_bytes or 0,
            buffer_bytes=node.buffer_bytes or 0,
            statistics_bytes=node.statistics_bytes or 0,
        )
        for node in order
    )
    edges = tuple((position[source], position[target]) for source, target in graph.edges)
    return layers, edges, tuple(order)


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


def _check_alike(
    profiles: Sequence[Profile], graphs: Sequence[LayerGraph], *, at_one: bool
) -> None:
    first = graphs[0]
    for profile, graph in zip(profiles, graphs, strict=True):
        if at_one and graph.microbatch_size != first.microbatch_size:
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
    read: Layered,
    cluster: Cluster,
    num_microbatches: int,
    *,
    splits_backward: bool,
) -> DevicePool:
    node = {entry.id: entry for entry in graph.nodes}
    nodes = [node[entry.id] for entry in read.order]
    knows_halves = all(each.input_gradient_share is not None for each in nodes)
    halved = nodes if splits_backward and knows_halves else []
    busy = profile.busy if cluster.shares_servers(profile.device_type) else None
    costs, ratio = profile.pipeline, 1.0
    if busy is not None:
        ratio = busy_ratio(profile.batch_curve, busy.batch_curve, graph.microbatch_size)
    measured: dict[str, Any] = (
        {}
        if costs is None
        else {
            "pass_seconds": costs.pass_seconds,
            "fixed_seconds": costs.fixed_seconds,
            "lone_pass_seconds": costs.lone_pass_seconds,
            "reduce_latency_seconds": costs.reduce_latency_seconds or 0.0,
            "reduce_bytes_per_second": costs.reduce_bytes_per_second,
        }
    )
    return DevicePool(
        device_type=profile.device_type,
        levels=read.links.levels[profile.device_type],
        forward_seconds=tuple(ratio * each.forward_seconds for each in nodes),
        backward_seconds=tuple(ratio * each.backward_seconds for each in nodes),
        input_gradient_seconds=tuple(
            ratio * each.backward_seconds * (each.input_gradient_share or 0.0) for each in halved
        ),
        repeated_seconds=tuple(
            ratio * each.backward_seconds * (each.repeated_share or 0.0) for each in halved
        ),
        update_seconds=(busy or profile).update_seconds,
        memory_bytes=profile.device_memory_bytes,
        workspace_bytes=_workspace(profile, graph, num_microbatches),
        base_memory_bytes=profile.base_memory_bytes,
        **_for_a_while(profile, graph, nodes, read.optimizer),
        **measured,
    )


def _message_seconds(profiles: Sequence[Profile]) -> float:
    """Fixed seconds of a message, on the slowest type: as measured, else its link's latency."""
    # A link between types counts with its latency.
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


def _for_a_while(
    profile: Profile, graph: LayerGraph, nodes: Sequence[LayerNode], optimizer: OptimizerState
) -> dict[str, Any]:
    """What updates, first gradients and messages take for a while, as far as it was measured."""
    aside = workspaces(graph)
    if not aside:
        return {}
    # Where the allocator keeps an update's workspace apart, ``_workspace`` has it.
    is_apart = writes_at_once(profile)
    ratio = optimizer.workspace_bytes_per_weight_byte
    return {
        "update_bytes_per_weight_byte": 0.0 if is_apart else ratio or 0.0,
        "waiting_bytes": 0 if is_apart else WAITING_BYTES,
        "copies_messages": True,
        "compared_bytes": COMPARED_BYTES,
        "layer_workspace_bytes": tuple(aside.get(each.id, 0) for each in nodes),
    }


def _halved(node: LayerNode) -> int:
    """What waits between the halves of a layer's backward pass; its output's gradient at least."""
    if node.halved_bytes is not None:
        return node.halved_bytes
    return max(node.activation_bytes, node.stashed_bytes or 0) if node.weight_bytes else 0


def _workspace(profile: Profile, graph: LayerGraph, num_microbatches: int) -> int:
    """Bytes of a device's memory to reserve for temporary use, for any stage."""
    # The optimizer update's workspace, if the allocator keeps it apart; what communication with
    # other workers and fragments take; what compares workers; and a step's numbers and losses.
    of_layers = workspaces(graph).values()
    found = (profile.update_workspace_bytes or 0) + exchange_bytes(profile)
    if of_layers:
        found += COMPARED_BYTES + NUMBERS_BYTES + LOSS_BYTES * num_microbatches
    aside = found + max(of_layers, default=0)
    base, total = profile.base_memory_bytes or 0, profile.device_memory_bytes
    if aside + base >= total:
        before = f", beside {base} before there is a model" if base else ""
        raise InfeasibleError(
            f"one layer alone needs {aside} bytes of workspace and gradients on a "
            f"{profile.device_type} of {total}{before}",
            hint=f"profile a smaller microbatch than {graph.microbatch_size}",
        )
    return found
