"""What the solver of pipeline, tensor and data parallelism sees of a problem."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from math import ceil
from typing import Any

from ..schema.cluster import Cluster
from ..schema.errors import ProblemError
from ..schema.options import command, option
from ..schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    Recompute,
    ShardSizes,
    ShardTimes,
    TypesLink,
    parallel_schedule,
)
from ..schema.problem import Problem
from ..schema.profile import LayerGraph, LayerNode, Profile
from ..schema.schedule import traits
from .costs.memory import (
    COMPARED_BYTES,
    WAITING_BYTES,
    exchange_bytes,
    workspaces,
    writes_at_once,
)
from .links import LinkSource, Pair, PoolLinks, measured_between
from .pipeline_problem import graph_of, layered, reserve_in_pipeline
from .pool_parts import Key, Keys


def parallel_problem(
    problem: Problem,
    *,
    microbatch_size: int | None = None,
    recompute: bool = True,
    sequence_parallel: bool = False,
    tensor_parallel: bool = True,
    **choices: Any,
) -> ParallelProblem:
    """Tables of layers by degree and microbatch size, and the links of each degree.

    Layers are in topological order. A boundary sends every output of the layers before it that a
    layer after it needs. A device's update time is the profile's, in proportion to the weights that
    the device holds. All links between devices of one type have the bandwidth of the slowest one,
    and so have those between two types.

    Args:
        problem: What is asked.
        microbatch_size: Use only layers profiled at this size; None uses all sizes.
        recompute: Whether stages may recompute activations: all, or where every table of layers
            states them those of attention cores.
        sequence_parallel: Whether groups spread tokens between the layers that they share.
        tensor_parallel: Whether devices may share the layers of a stage.
        choices: Other fields of ``ParallelProblem``, which profiles and pool do not give.

    Raises:
        ProblemError: As ``layered``; or the microbatch size is not profiled.
    """
    read = layered(problem, at_one=False)
    chosen, links = read.profiles, read.links
    if not tensor_parallel:
        chosen = [replace(profile, tensor_layers=()) for profile in chosen]
    known = sorted({t.microbatch_size for profile in chosen for _, t in _tables(profile)})
    if microbatch_size is not None and microbatch_size not in known:
        raise ProblemError(
            f"{option('microbatch_size', microbatch_size)}: layers are profiled at "
            f"{', '.join(map(str, known))}",
            hint="take one of these, or profile that one",
        )
    if sequence_parallel:
        chosen = [_over_sequences(profile) for profile in chosen]
    names = [node.id for node in read.order]
    schedule = parallel_schedule(is_chunked=False)
    return ParallelProblem(
        model=chosen[0].model,
        global_batch_size=problem.global_batch_size,
        layers=tuple(names),
        output_bytes=_crossing(read.order, read.edges, read.graphs[0].microbatch_size),
        pools=tuple(
            _pool(profile, problem.pool, links, names, microbatch_size) for profile in chosen
        ),
        sizes=_sizes(chosen, names),
        bytes_per_weight_byte=2.0 + read.optimizer.state_bytes_per_weight_byte,
        reserved_bytes=max(
            (profile.base_memory_bytes or 0)
            + exchange_bytes(profile)
            + (profile.update_workspace_bytes or 0)
            + (COMPARED_BYTES if workspaces(graph_of(profile)) else 0)
            + reserve_in_pipeline(profile, problem, schedule).total_bytes
            for profile in chosen
        ),
        recompute=_recomputations(chosen) if recompute else ("none",),
        optimizer=read.optimizer,
        tied_to=_tied_to(read.order),
        waiting_bytes=0 if all(writes_at_once(profile) for profile in chosen) else WAITING_BYTES,
        **choices,
        between=tuple(
            TypesLink(device_types=types, curve=_curve(rate, chosen, types, links))
            for types, rate in links.between.items()
        ),
    )


def _recomputations(profiles: Sequence[Profile]) -> tuple[Recompute, ...]:
    """Recomputation to choose from: of cores only where all tables of layers have some."""
    tables = [table for profile in profiles for _, table in _tables(profile)]
    knows_cores = all(any(node.core is not None for node in t.nodes) for t in tables)
    return ("none", "selective", "full") if knows_cores else ("none", "full")


def chunks_of(asked: int | None) -> tuple[int, ...]:
    """Numbers of stages per device to try; without a request 1 and those of interleaved 1F1B."""
    return (
        (1, *traits(parallel_schedule(is_chunked=True)).num_model_chunks)
        if asked is None
        else (asked,)
    )


def _over_sequences(profile: Profile) -> Profile:
    """The profile with the layers of sequence parallelism in place of the others."""
    if profile.tensor_layers and not profile.sequence_layers:
        raise ProblemError(
            f"{option('sequence_parallel')}: the profile of {profile.model} on "
            f"{profile.device_type} has no "
            "sequence_layers",
            hint=f"estimate it again with {command('profile', layers=True)}; only "
            "transformers that normalise before each part have them",
        )
    return replace(profile, tensor_layers=profile.sequence_layers)


def _tables(profile: Profile) -> list[tuple[int, LayerGraph]]:
    """List the layer tables of a profile, each with its tensor-parallel degree."""
    ones = [(1, table) for table in profile.layer_tables]
    return ones + [(t.tensor_parallel_size, t.layers) for t in profile.tensor_layers]


def _crossing(
    order: Sequence[LayerNode], edges: Sequence[tuple[int, int]], microbatch_size: int
) -> tuple[int, ...]:
    """[layers] bytes per sample that cross the boundary after each layer; each tensor once."""
    last_use = list(range(len(order)))
    for source, target in edges:
        last_use[source] = max(last_use[source], target)
    sent = []
    for place in range(len(order)):
        made = [
            order[layer].activation_bytes for layer in range(place + 1) if last_use[layer] > place
        ]
        # No layer reads the last layer's output, but a loss outside of the model does.
        whole = sum(made) if made else order[place].activation_bytes
        sent.append(ceil(whole / microbatch_size))
    return tuple(sent)


def _pool(
    profile: Profile,
    cluster: Cluster,
    links: PoolLinks,
    names: Sequence[str],
    microbatch_size: int | None,
) -> ParallelPool:
    name = profile.device_type
    tables = [
        (degree, table)
        for degree, table in _tables(profile)
        if microbatch_size in (None, table.microbatch_size)
    ]
    rate = min(level.bytes_per_second for level in links.levels[name])
    outwards = [each for types, each in links.between.items() if name in types]
    if cluster.num_devices[name] == 1 and outwards:
        rate = max(outwards)  # no link of two of them is used
    curve = _curve(rate, [profile], (name, name), links)
    near = links.inside.get(name, 0.0)
    degrees = sorted({1, *(degree for degree, _ in tables)})
    return ParallelPool(
        device_type=name,
        num_devices=cluster.num_devices[name],
        devices_per_server=cluster.common_width(name),
        memory_bytes=profile.device_memory_bytes,
        times=tuple(_times(profile, degree, table, names) for degree, table in tables),
        links=tuple(DegreeLink(tensor_parallel_size=d, curve=curve) for d in degrees),
        dollars_per_hour=cluster.device_types[name].dollars_per_hour,
        inside=_curve(near, [profile], (name, name), links) if near > rate else None,
    )


def _curve(
    rate: float, profiles: Sequence[Profile], types: tuple[str, str], links: PoolLinks
) -> LinkCurve:
    """A link of a rate; its latency is the longest that was measured of its types, or stated."""
    own = [profile for profile in profiles if profile.device_type in types]
    pairs = [measured_between(one, other) for one, other in combinations(own, 2)]
    known = [found.latency_seconds for found in pairs if found is not None] or [
        profile.links.latency_seconds for profile in own if profile.links is not None
    ]
    latency = max([links.latency_seconds, *known])
    return LinkCurve(coefficients=(rate,), latency_seconds=latency)


def parallel_keys(problem: Problem, pool: Cluster) -> Keys:
    """What parallel plans of a part of the problem's pool count for a pair of devices.

    Raises:
        ProblemError: A type has no profile.
    """
    source = LinkSource(replace(problem, pool=pool).used, pool, problem.link_bytes_per_second)

    def keys(pair: Pair) -> dict[Key, float]:
        link = source.link(pair)
        one, other = sorted(pair.types)
        kind = ("own", one) if one == other else ("between", one, other)
        found: dict[Key, float] = {kind: link.bytes_per_second}
        if one == other and pair.level == "server":
            found["inside", one] = link.bytes_per_second
        if link.latency_seconds:
            found["latency",] = -link.latency_seconds
        return found

    return keys


def degrees_of(profiles: Sequence[Profile]) -> dict[str, set[int]]:
    """Device type -> tensor-parallel degrees at which its layers were timed."""
    return {p.device_type: {degree for degree, _ in _tables(p)} for p in profiles if p.layers}


def _times(profile: Profile, degree: int, table: LayerGraph, names: Sequence[str]) -> ShardTimes:
    nodes, aside = _in_order(table, names), workspaces(table)
    whole = sum(n.weight_bytes for n in graph_of(profile).nodes)
    per_byte = profile.update_seconds / whole if whole else 0.0
    return ShardTimes(
        tensor_parallel_size=degree,
        microbatch_size=table.microbatch_size,
        forward_seconds=tuple(node.forward_seconds for node in nodes),
        backward_seconds=tuple(node.backward_seconds for node in nodes),
        update_seconds=tuple(per_byte * node.weight_bytes for node in nodes),
        core_seconds=tuple(0.0 if n.core is None else n.core.forward_seconds for n in nodes),
        workspace_bytes=tuple(aside.get(node.id, 0) for node in nodes) if aside else (),
    )


def _tied_to(order: Sequence[LayerNode]) -> tuple[tuple[int, ...], ...]:
    """``ParallelProblem.tied_to``; empty where no layer shares weights."""
    place = {node.id: number for number, node in enumerate(order)}
    found = tuple(tuple(place[name] for name in node.shared_with) for node in order)
    return found if any(found) else ()


def _sizes(profiles: Sequence[Profile], names: Sequence[str]) -> tuple[ShardSizes, ...]:
    """Collect each layer's bytes per tensor-parallel degree, the largest over all tables."""
    by_degree: dict[int, list[LayerGraph]] = {}
    for profile in profiles:
        for degree, table in _tables(profile):
            by_degree.setdefault(degree, []).append(table)

    def most(tables: list[LayerGraph], of: Callable[[LayerNode], int]) -> tuple[float, ...]:
        """[layers] bytes for one sample, of the table that states the most."""
        rows = [[of(node) / t.microbatch_size for node in _in_order(t, names)] for t in tables]
        return tuple(map(max, zip(*rows, strict=True)))

    return tuple(
        ShardSizes(
            tensor_parallel_size=degree,
            weight_bytes=tuple(
                max(node.weight_bytes for node in same)
                for same in zip(*(_in_order(table, names) for table in tables), strict=True)
            ),
            stashed_bytes=most(tables, _stashed),
            selective_bytes=most(
                tables, lambda node: node.core.stashed_bytes if node.core else _stashed(node)
            ),
            core_bytes=most(tables, lambda node: node.core.made_bytes if node.core else 0),
            tied_bytes=tuple(
                max(node.shared_weight_bytes or 0 for node in same)
                for same in zip(*(_in_order(table, names) for table in tables), strict=True)
            ),
        )
        for degree, tables in sorted(by_degree.items())
    )


def _in_order(table: LayerGraph, names: Sequence[str]) -> list[LayerNode]:
    node = {entry.id: entry for entry in table.nodes}
    return [node[name] for name in names]


def _stashed(node: LayerNode) -> int:
    """Bytes that a forward pass keeps of a layer; the bytes of its output if not measured."""
    return node.activation_bytes if node.stashed_bytes is None else node.stashed_bytes
