"""Check plans, and what their solvers saw, against the profiles and the pool that they come from.

Solvers get a view that was made from profiles. A checker that trusted this view would miss errors
made in making it. So memory, layers and times are read from the profiles again.
"""

import re
from collections.abc import Iterator, Sequence
from math import ceil, isclose
from typing import Any

from ...schema.cluster import Cluster
from ...schema.optimizer import OptimizerState
from ...schema.parallel import ParallelProblem
from ...schema.pipeline import PipelineProblem
from ...schema.plan import Plan, ReplicaGroup
from ...schema.problem import Problem, ShardedDevices, ShardedProblem, SplitProblem
from ...schema.profile import BatchPoint, BusyHost, LayerGraph, LayerNode, Profile, asked_bytes
from ...schema.schedule import traits
from .links import JudgedLinks


def split_faults(plan: Plan, problem: Problem) -> list[str]:
    """List the groups whose passes do not fit their devices, or differ from the measured time.

    A plan on one device uses the measurements made on one device alone. A plan on several devices
    uses those made on a busy host, if the type has such measurements and a measured size fits the
    memory. Some server of the pool must also hold the type together with other devices.

    Args:
        plan: The plan to check.
        problem: What it answers. Device memory is the pool's if stated, else the profiled device's.
    """
    by_type = {profile.device_type: profile for profile in problem.profiles}
    faults = [*_sync_bound_faults(plan, by_type)]
    others = enumerate(plan.alternatives)
    named = [("", plan.stages[0]), *((f"alternatives[{n}].", one.stages[0]) for n, one in others)]
    groups = [
        (f"{where}groups[{index}]", group, sum(one.num_devices for one in stage.replicas))
        for where, stage in named
        for index, group in enumerate(stage.replicas)
    ]
    for where, group, number in groups:
        profile = by_type.get(group.device_type)
        if profile is None or group.device_type not in problem.pool.device_types:
            continue  # checks.batch_split reports it
        has, more = _device_bytes(problem.pool, profile), _more_bytes(profile, problem)
        busy = _busy_of(problem, profile) if number > 1 else None
        beside = _beside_bytes(problem, profile, is_among=busy is not None)
        curve = (busy or profile).batch_curve
        around = _around(curve, group.virtual_node_batch_size)
        if around is None:
            continue
        seconds = _between(around, [point.step_seconds for point in around], group)
        if group.pass_seconds is not None and not isclose(group.pass_seconds, seconds):
            faults.append(
                f"{where}: pass_seconds is {group.pass_seconds}, measured for a plan on "
                f"{number} device(s) were {seconds}"
            )
        needs = ceil(_between(around, [_held(point) for point in around], group)) + more + beside
        taken = needs - problem.memory_reserve_bytes
        stated = group.memory_bytes
        if problem.optimizer not in (None, plan.optimizer):
            stated = None  # the plan counts another one's state
        reserves = (problem.memory_reserve_bytes, asked_bytes(plan.reserves))
        if stated is not None and all(abs(stated - taken - free) > 1 for free in reserves):
            faults.append(f"{where}: memory_bytes is {stated}, it takes {taken}")
        if needs > has:
            faults.append(
                f"{where}: a pass of {group.virtual_node_batch_size} samples needs {needs} "
                f"bytes on a {group.device_type} of {has}: {needs - has} too many"
            )
    return faults


def split_view_faults(view: SplitProblem, problem: Problem) -> list[str]:
    """List what a split's solver saw of devices, and of shared states, unlike the profiles."""
    by_type = {profile.device_type: profile for profile in problem.profiles}
    shares = isinstance(view, ShardedProblem)
    rate, latency = JudgedLinks(problem).slowest()
    faults = [*_unlike(view, {"optimizer": _optimizer(problem, by_type)})]
    for option in view.devices:
        profile, where = by_type[option.device_type], f"{option.device_type}: "
        busy = _busy_of(problem, profile, at_any_size=shares)
        own = {
            "num_devices": problem.pool.num_devices[profile.device_type],
            "weight_bytes": profile.weight_bytes,
            "sync": profile.sync,
            "step_error": profile.step_error,
            "is_estimated": profile.estimate is not None,
            "link_bytes_per_second": rate,
            "link_latency_seconds": latency,
        }
        faults += _unlike(option, own | _ends(busy or profile), where)
        if (option.alone is None) != (busy is None):
            faults.append(f"the problem's {where}alone is not as the profiles were measured")
        elif option.alone is not None:
            faults += _unlike(option.alone, _ends(profile), f"{where}alone: ")
        if not isinstance(option, ShardedDevices) or not isinstance(view, ShardedProblem):
            continue
        more = _more_bytes(profile, problem)
        more += 2**14 * view.num_units  # cuts of units' tensors
        beside = more + _beside_bytes(problem, profile, is_among=busy is not None)
        again = more + _beside_bytes(problem, profile, is_among=True)
        if busy is not None:  # such passes were measured alone
            again += profile.group_workspace_bytes or 0
        if (profile.frozen_weight_bytes or 0) > view.frozen_bytes:
            faults.append(f"{where}more frozen weights than {view.frozen_bytes} bytes")
        for told, curve, taken in (
            ((busy or profile).batch_curve, option.batch_curve, beside),
            (profile.recomputed_curve, option.recomputed_curve, again),
            (profile.offloaded_curve, option.offloaded_curve, again),
        ):
            found = {point.batch_size: point for point in curve}
            for measured in told:
                if _pins_too_much(measured, profile, problem):
                    if measured.batch_size in found:
                        faults.append(f"{where}hosts lack memory for {measured.batch_size} samples")
                    continue
                size, point = measured.batch_size, found.get(measured.batch_size)
                peak = None if point is None else point.peak_memory_bytes
                compared = 2**17 if measured.buffered_pass_bytes is None else 0
                if peak != max(0, _held(measured) + taken + compared):
                    faults.append(f"{where}a pass of {size} does not hold {peak} bytes")
                parts = _parts(measured, profile, problem)
                faults += _unlike(point or measured, parts, f"{where}{size}: ")
        faults += _unlike(option, {"memory_bytes": _device_bytes(problem.pool, profile)}, where)
    if isinstance(view, ShardedProblem):
        known = (by_type[name].sync for name in problem.pool.num_devices)
        rings = [ring for ring in known if ring is not None]
        rates = [rate, *(ring.bytes_per_second for ring in rings)]
        link = {
            "bytes_per_second": min((each for each in rates if each is not None), default=None),
            "latency_seconds": max([latency, *(ring.latency_seconds or 0.0 for ring in rings)]),
        }
        faults += [*_unlike(view, link), *_unit_faults(view, by_type)]
    return faults


def _ends(costs: Profile | BusyHost) -> dict[str, Any]:
    """What ends a step, as it was measured."""
    return {
        "update_seconds": costs.update_seconds,
        "fixed_seconds": costs.fixed_seconds or 0.0,
    }


def _unit_faults(view: ShardedProblem, by_type: dict[str, Profile]) -> list[str]:
    """List the bytes of units that are gathered, where the layers give others."""
    known = (by_type[option.device_type].layers for option in view.devices)
    layers = next((graph for graph in known if graph is not None), None)
    listed = {name for profile in by_type.values() for name in profile.blocks or ()}
    blocks = {name.replace(".", "_") for name in listed}

    def whole(model: int, *, frozen: bool) -> list[int]:
        """Of what is in no block, and of the two largest of these, the smaller one first."""
        units: dict[str, int] = {}
        for node in () if layers is None else layers.nodes:
            path = re.split(r"[._]", node.id)
            depths = range(len(path), 0, -1) if blocks else range(1, len(path) + 1)
            ends = ("_".join(path[:depth]) for depth in depths)
            known = (e for e in ends if (e in blocks if blocks else e.split("_")[-1].isdecimal()))
            name = next(known, "")
            own_bytes = node.weight_bytes + (node.frozen_weight_bytes or 0) * frozen
            units[name] = units.get(name, 0) + own_bytes
        rest = model if layers is None else units.pop("", 0)
        return [rest, *sorted([0, 0, *units.values()])[-2:]]

    trained = view.weight_bytes - view.frozen_bytes
    both, own = whole(view.weight_bytes, frozen=True), whole(trained, frozen=False)
    counted = {
        "gathered_bytes": min(view.weight_bytes, sum(both)),
        "edge_bytes": max(both),
        "gathered_trained_bytes": min(trained, sum(own)),
        "second_trained_bytes": own[1],
    }
    return [*_unlike(view, counted)]


def _unlike(stated: Any, counted: dict[str, Any], where: str = "") -> Iterator[str]:
    """List the fields of a view that are not as counted from the profiles."""
    for name, want in counted.items():
        got = getattr(stated, name)
        several = isinstance(want, tuple) and len(want) == len(got)
        pairs = zip(got, want, strict=True) if several else [(got, want)]
        for one, other in pairs:
            floats = isinstance(one, float) and isinstance(other, float)
            if not (isclose(one, other, rel_tol=1e-9) if floats else one == other):
                yield f"the problem's {where}{name} is {one}, the profiles give {other}"


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
    """List what a plan repeats of its profiles, and what they do not say."""
    used = [profile for profile in profiles if profile.device_type in plan.devices_by_type]
    faults = []
    estimated = [profile.estimate for profile in used if profile.estimate is not None]
    if sorted(map(repr, plan.estimates)) != sorted(map(repr, estimated)):
        names = [estimate.device_type for estimate in estimated]
        faults.append(
            f"estimates do not repeat the profiles, of which {', '.join(names) or 'none'} are "
            "estimated"
        )
    speeds = {p.device_type: p.reference_seconds for p in used if p.reference_seconds}
    if plan.reference_seconds is not None and plan.reference_seconds != speeds:
        faults.append(f"reference_seconds are {plan.reference_seconds}, the profiles have {speeds}")
    sharing = plan.shard is not None and not plan.layers
    curves = [point for profile in profiles for point in profile.batch_curve]
    known = any(profile.layers for profile in profiles) or any(point.moments for point in curves)
    listed = {profile.blocks for profile in profiles if known}
    if sharing and plan.blocks is not None and plan.blocks not in listed:
        faults.append("blocks are not those that the profiles list")
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


def _parts(point: BatchPoint, profile: Profile, problem: Problem) -> dict[str, Any]:
    """What the parts of a step take; of an update only by the optimizer that was measured."""
    names = ("pass_bytes", "first_pass_bytes", "buffered_pass_bytes", "moments", "pinned_bytes")
    parts = {name: getattr(point, name) for name in names}
    named = profile.optimizer and profile.optimizer.name
    is_other = problem.optimizer is not None and problem.optimizer.name != named
    return parts | {"update_bytes": None if is_other else point.update_bytes}


def _pins_too_much(point: BatchPoint, profile: Profile, problem: Problem) -> bool:
    """Whether a server has no such host memory for each of its devices."""
    for server in problem.pool.servers:
        has = server.host_memory_bytes or profile.host_memory_bytes
        number = sum(server.devices.values())
        if profile.device_type in server.devices and has is not None:
            if (point.pinned_bytes or 0) * number > has:
                return True
    return False


def _context_bytes(profile: Profile) -> int:
    return 0 if profile.beside_tensors is None else profile.beside_tensors.context_bytes


def _group_bytes(profile: Profile) -> int:
    return 0 if profile.beside_tensors is None else profile.beside_tensors.group_bytes or 0


def _beside_bytes(problem: Problem, profile: Profile, *, is_among: bool) -> int:
    """Bytes of a device that a split's worker takes beside tensors, or that must stay free."""
    # One that trains alone has no communicator, if the peaks of one among others were measured
    # apart.
    among = is_among or profile.busy is None
    several = among and sum(problem.pool.num_devices.values()) > 1
    beside = problem.memory_reserve_bytes + _context_bytes(profile)
    return beside + (_group_bytes(profile) if several else 0)


def _busy_of(problem: Problem, profile: Profile, *, at_any_size: bool = False) -> BusyHost | None:
    """The measurements on a busy host, if devices have company and a measured size fits."""
    if profile.busy is None or not _has_company(problem.pool, profile.device_type):
        return None
    room = _device_bytes(problem.pool, profile) - _beside_bytes(problem, profile, is_among=True)
    more = _more_bytes(profile, problem)
    fits = any(max(0, _held(point) + more) <= room for point in profile.busy.batch_curve)
    return profile.busy if fits or at_any_size else None


def _most_beside(profile: Profile, problem: Problem, channels_between: int) -> int:
    """Bytes that a pipeline's worker may take beside tensors, with channels to all others."""
    others = sum(problem.pool.num_devices.values()) - 1
    found = problem.memory_reserve_bytes + _context_bytes(profile)
    found += max((point.fragmentation_bytes or 0 for point in profile.batch_curve), default=0)
    if others and profile.beside_tensors is not None:
        found += _group_bytes(profile)
        ends = [profile.links] if profile.links is not None else []
        ends += [link.links for link in profile.links_to]
        found += others * channels_between * max((e.channel_bytes or 0 for e in ends), default=0)
    return found


def _device_bytes(cluster: Cluster, profile: Profile) -> int:
    stated = cluster.device_types[profile.device_type].memory_bytes
    return profile.device_memory_bytes if stated is None else stated


def _optimizer(problem: Problem, by_type: dict[str, Profile]) -> OptimizerState | None:
    """The optimizer that will train: the stated one, else the profiles' if all name theirs."""
    named = [by_type[name].optimizer for name in problem.pool.num_devices]
    return problem.optimizer or (None if None in named else named[0])


def _more_bytes(profile: Profile, problem: Problem) -> int:
    """Bytes that the optimizer keeps beyond the one that peak memory was measured with."""
    optimizer = problem.optimizer
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


def parallel_faults(view: ParallelProblem, problem: Problem) -> list[str]:
    """List what a parallel plan's solver saw of memory, unlike the profiles and the pool."""
    by_type = {profile.device_type: profile for profile in problem.profiles}
    faults: list[str] = []
    most = 0
    for pool in view.pools:
        profile = by_type[pool.device_type]
        held = (profile.base_memory_bytes or 0) + _exchange_bytes(profile)
        held += profile.update_workspace_bytes or 0
        held += 2**17 if profile.layers and _workspaces(profile.layers) else 0  # to compare workers
        most = max(most, held + _most_beside(profile, problem, 2))
        own = {"memory_bytes": _device_bytes(problem.pool, profile)}
        where = f"{pool.device_type}: "
        faults += _unlike(pool, own, where)
        graphs = [(1, graph) for graph in profile.layer_tables]
        for table in (*profile.tensor_layers, *profile.sequence_layers):
            graphs.append((table.tensor_parallel_size, table.layers))
        for times in pool.times:
            degree, size = times.tensor_parallel_size, times.microbatch_size
            told = [g for of, g in graphs if (of, g.microbatch_size) == (degree, size)]
            taken = [_workspaces(graph) for graph in told]
            if times.workspace_bytes not in [
                tuple(each.get(layer, 0) for layer in view.layers) if each else () for each in taken
            ]:
                faults.append(f"{where}workspaces at degree {degree}, microbatch {size} are others")
            faults += _tie_faults(view, told[0], degree, where)
    # Only where updates are measured apart, on hosts, no gradients wait.
    updates = [by_type[pool.device_type].update_workspace_bytes for pool in view.pools]
    own = {"reserved_bytes": most, "waiting_bytes": 25 << 20 if None in updates else 0}
    return faults + [*_unlike(view, own)]


def _tie_faults(view: ParallelProblem, graph: LayerGraph, degree: int, where: str) -> Iterator[str]:
    """Whether weights that several layers use are those of the profile, and no smaller."""
    (sizes,) = (each for each in view.sizes if each.tensor_parallel_size == degree)
    for node in graph.nodes:
        layer = view.layers.index(node.id)
        told = {view.layers[other] for other in view.tied_to[layer]} if view.tied_to else set()
        less = node.shared_with and sizes.tied_bytes[layer] < (node.shared_weight_bytes or 0)
        if told != set(node.shared_with) or less:
            yield f"{where}{node.id} shares {node.shared_weight_bytes} bytes of other layers"


def pipeline_faults(view: PipelineProblem, problem: Problem) -> list[str]:
    """List what a pipeline's solver saw, unlike the profiles and the pool."""
    by_type = {profile.device_type: profile for profile in problem.profiles}
    links = JudgedLinks(problem)
    errors = [
        costs.step_error
        for name in problem.pool.num_devices
        for costs in (by_type[name].pipeline, by_type[name].estimate)
        if costs is not None and costs.step_error is not None
    ]
    whole = {
        "inter_bytes_per_second": links.between_types(),
        "message_seconds": links.message_seconds(),
        "step_error": max(errors, default=None),
        "optimizer": _optimizer(problem, by_type),
        "sample_bytes": max(
            table.sample_bytes or 0
            for pool in view.pools
            for table in by_type[pool.device_type].layer_tables
            if table.microbatch_size == view.microbatch_size
        ),
    }
    faults = [*_unlike(view, whole)]
    for pool in view.pools:
        profile = by_type[pool.device_type]
        graph = next(
            table for table in profile.layer_tables if table.microbatch_size == view.microbatch_size
        )
        where = f"{pool.device_type}: "
        nodes = {node.id: node for node in graph.nodes}
        if set(nodes) != {layer.id for layer in view.layers}:
            faults.append(f"the problem's {where}layers are not the profile's")
            continue
        ordered = [nodes[layer.id] for layer in view.layers]
        own = _pool_terms(view, problem, profile, graph) | {
            "levels": links.levels(pool.device_type)
        }
        faults += _unlike(pool, own, where)
        # Bytes do not depend on the device type; the view takes them from the first profile.
        for layer, node in zip(view.layers, ordered, strict=True) if pool is view.pools[0] else ():
            kept = node.activation_bytes if node.stashed_bytes is None else node.stashed_bytes
            own = {
                "activation_bytes": node.activation_bytes,
                "kept_bytes": kept,
                "weight_bytes": node.weight_bytes,
                "shared_with": node.shared_with,
                "shared_weight_bytes": node.shared_weight_bytes or 0,
                "halved_bytes": _halved(node),
                "saved_later": _saved_later(node, view, graph),
                "padding_bytes": node.padding_bytes or 0,
                "buffer_bytes": node.buffer_bytes or 0,
                "statistics_bytes": node.statistics_bytes or 0,
            }
            faults += _unlike(layer, own, f"{where}{layer.id}: ")
        names = [layer.id for layer in view.layers]
        if {(names[a], names[b]) for a, b in view.links} != set(graph.edges):
            faults.append(f"the problem's {where}edges are not the profile's")
    return faults


def _pool_terms(
    view: PipelineProblem, problem: Problem, profile: Profile, graph: LayerGraph
) -> dict[str, Any]:
    """The fields of a pipeline's pool of devices, counted from its profile."""
    busy = profile.busy if _has_company(problem.pool, profile.device_type) else None
    slowed = 1.0 if busy is None else _slowed(profile, graph.microbatch_size)
    place = {layer.id: number for number, layer in enumerate(view.layers)}
    ordered = sorted(graph.nodes, key=lambda node: place[node.id])
    channels = 2 if traits(view.schedule).placement == "line" else 4
    base, beside = profile.base_memory_bytes, _most_beside(profile, problem, channels)
    costs, halved = profile.pipeline, list[LayerNode]()
    if traits(view.schedule).splits_backward:
        halved = [node for node in ordered if node.input_gradient_share is not None]
    halved = halved if len(halved) == len(ordered) else []
    taken = _workspaces(graph)
    # An update that takes memory of its own beside passes is set aside.
    counts_update = taken and profile.update_workspace_bytes is None
    update = view.optimizer.workspace_bytes_per_weight_byte or 0.0
    return {
        "update_bytes_per_weight_byte": update if counts_update else 0.0,
        "waiting_bytes": 25 << 20 if counts_update else 0,
        "copies_messages": bool(taken),
        "compared_bytes": 2**17 if taken else 0,
        "layer_workspace_bytes": tuple(taken.get(node.id, 0) for node in ordered) if taken else (),
        "memory_bytes": _device_bytes(problem.pool, profile),
        "base_memory_bytes": (base or 0) + beside if beside else base,
        "workspace_bytes": (2**17 + 2**13 + 512 * view.num_microbatches if taken else 0)
        + (profile.update_workspace_bytes or 0)
        + _exchange_bytes(profile),
        "forward_seconds": tuple(slowed * node.forward_seconds for node in ordered),
        "backward_seconds": tuple(slowed * node.backward_seconds for node in ordered),
        "input_gradient_seconds": tuple(
            slowed * node.backward_seconds * (node.input_gradient_share or 0.0) for node in halved
        ),
        "repeated_seconds": tuple(
            slowed * node.backward_seconds * (node.repeated_share or 0.0) for node in halved
        ),
        "update_seconds": profile.update_seconds if busy is None else busy.update_seconds,
        "pass_seconds": 0.0 if costs is None else costs.pass_seconds,
        "fixed_seconds": 0.0 if costs is None else costs.fixed_seconds,
        "lone_pass_seconds": costs and costs.lone_pass_seconds,
        "reduce_latency_seconds": (costs and costs.reduce_latency_seconds) or 0.0,
        "reduce_bytes_per_second": costs and costs.reduce_bytes_per_second,
    }


def _halved(node: LayerNode) -> int:
    """Gradients that wait between the halves of a layer's backward pass, or as much as may."""
    known = [node.activation_bytes * bool(node.weight_bytes)]
    known += [node.stashed_bytes or 0] if node.weight_bytes else []
    return max(known) if node.halved_bytes is None else node.halved_bytes


def _saved_later(
    node: LayerNode, view: PipelineProblem, graph: LayerGraph
) -> tuple[tuple[int, int], ...]:
    """Where an output is saved first, of layers that are in the profile's own order."""
    names = [layer.id for layer in view.layers]
    later = node.saved_later if names == [each.id for each in graph.nodes] else None
    return tuple((names.index(saver), size) for saver, size in (later or {}).items())


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


def _exchange_bytes(profile: Profile) -> int:
    """The more of what synchronising took and of a rehearsed pipeline's fragments."""
    found = [
        profile.group_workspace_bytes,
        profile.pipeline and profile.pipeline.fragmentation_bytes,
    ]
    return max(measured or 0 for measured in found)


def _workspaces(graph: LayerGraph) -> dict[str, int]:
    """Layer -> temporary bytes of its passes, gradients of its output and inputs included."""
    nodes = {node.id: node for node in graph.nodes}
    beside = {name: node.activation_bytes for name, node in nodes.items()}
    for source, target in graph.edges:
        beside[target] += nodes[source].activation_bytes
    names, order = list(nodes), {name: number for number, name in enumerate(nodes)}
    past: dict[str, set[str]] = {name: set() for name in nodes}
    for source, target in graph.edges:
        for name in names[order[source] + 1 : order[target]]:
            past[name].add(source)
    for name, sources in past.items():
        # Gradients that layers behind it gave to outputs of layers before it.
        beside[name] += sum(nodes[source].activation_bytes for source in sources)
    for holder in {name for node in graph.nodes for name in node.shared_with}:
        # The gradients of two users, and their sum.
        users = [node for node in graph.nodes if holder in node.shared_with]
        beside[holder] += max(node.shared_weight_bytes or 0 for node in users)
    measured = {n.id: n.workspace_bytes for n in graph.nodes if n.workspace_bytes is not None}
    found = {name: bytes_ + beside[name] for name, bytes_ in measured.items()}
    for name in {*found} - {source for source, _ in graph.edges}:
        # When the loss is tested: two copies of the samples; the output, a copy, and twice as much
        # of the loss's own; of more than 16 samples 16 again and again, and these by themselves.
        output, size = nodes[name].activation_bytes, graph.microbatch_size
        again = size + size + size if size < 17 else 48 * -(-size // 16) + 16
        samples = graph.sample_bytes or 0
        tested = samples + samples + output - (-output * again // size)
        found[name] = max(found[name], tested)
    return found
