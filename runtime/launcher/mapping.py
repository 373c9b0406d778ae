"""Map virtual nodes to workers after a change, and workers to hosts: pure functions."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby

from ...devices.cpu import DEVICE_TYPE as CPU
from ...devices.cpu import base_type, is_emulated
from ...schema.cluster import Cluster
from ...schema.deployment import HostGroup
from ...schema.errors import InfeasibleError, LaunchError, ProblemError
from ...schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from ...schema.options import option
from ...schema.plan import Plan


def nodes_of(config: LaunchConfig) -> list[VirtualNode]:
    """All virtual nodes of a launch, by index."""
    nodes = [node for slot in config.workers for node in slot.virtual_nodes]
    return sorted(nodes, key=lambda node: node.index)


def devices_of(config: LaunchConfig) -> str:
    """The devices of a launch as ``--gpus`` names them."""
    numbers = Counter(slot.device_type for slot in config.workers)
    return ",".join(f"{number}x{name}" for name, number in numbers.items())


def spread(
    config: LaunchConfig, types: Sequence[str], node_seconds: Mapping[str, float] | None = None
) -> LaunchConfig:
    """Spread the virtual nodes over devices, in runs in proportion to the devices' speeds.

    Least is the slowest device's time (samples held times seconds per sample); each device gets
    a contiguous run of at least one. Exact for that objective, in O(N D) for N nodes and D
    devices for each of 60 halvings.

    Args:
        config: The launch as it is.
        types: Device type of each device, in order of ranks.
        node_seconds: Seconds per sample on each type; alike where it is None or lacks one.

    Raises:
        InfeasibleError: More devices than virtual nodes.
    """
    nodes = nodes_of(config)
    if len(types) > len(nodes):
        raise InfeasibleError(
            f"{len(types)} devices cannot share {len(nodes)} virtual nodes",
            hint=f"ask for at most {len(nodes)}",
        )
    known = dict(node_seconds or {})
    alike = set(types) <= known.keys()
    costs = [known[name] if alike else 1.0 for name in types]
    cuts = _runs([node.batch_size for node in nodes], costs)
    filled = _filled_bytes(config)
    workers, at = [], 0
    for rank, (name, number) in enumerate(zip(types, cuts, strict=True)):
        run = tuple(nodes[at : at + number])
        memory = max(filled[node.index] for node in run) or None
        workers.append(
            WorkerSlot(rank=rank, device_type=name, virtual_nodes=run, memory_bytes=memory)
        )
        at += number
    return replace(config, predicted_step_seconds=None, workers=tuple(workers))


def _filled_bytes(config: LaunchConfig) -> dict[int, int]:
    """Virtual node -> what the worker that runs it fills of its device; 0 if that is not known."""
    # A worker's passes follow each other in the same memory, of much the same bytes on every type.
    return {
        node.index: slot.memory_bytes or 0 for slot in config.workers for node in slot.virtual_nodes
    }


def _runs(sizes: Sequence[int], costs: Sequence[float]) -> list[int]:
    """How many nodes each device takes: bisect on the slowest device's time."""
    ends = [0, *accumulate(sizes)]
    low, high = 0.0, ends[-1] * max(costs)
    best = _cut(ends, costs, high)
    assert best is not None
    # Sixty halvings end below what a double can tell apart.
    for _ in range(60):
        middle = (low + high) / 2
        found = _cut(ends, costs, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _cut(ends: Sequence[int], costs: Sequence[float], limit: float) -> list[int] | None:
    """Runs of at least one node with no device above the limit; None where there are none."""
    last = len(ends) - 1
    # before[d][q]: where device d's run may begin if it ends at node q. Starts come in ascending
    # order, and each end is noted once, so all is O(N D) for N nodes and D devices.
    before: list[dict[int, int]] = []
    reached = [0]
    for cost in costs:
        starts: dict[int, int] = {}
        for start in reached:
            most = ends[start] + limit * (1 + 1e-12) / cost  # the limit too, in spite of rounding
            first = max(start, max(starts, default=start)) + 1
            for end in range(first, bisect_right(ends, most)):
                starts[end] = start
        before.append(starts)
        reached = sorted(starts)
    taken, at = [], last
    for starts in reversed(before):
        if at not in starts:
            return None
        taken.append(at - starts[at])
        at = starts[at]
    return taken[::-1]


def without(config: LaunchConfig, ranks: Iterable[int]) -> LaunchConfig:
    """Move the virtual nodes of lost workers to the others; these keep their own.

    Each goes to the worker that will be least loaded in proportion to what it holds now, of the
    same device type where one is left. Shares of states stay in proportion.

    Raises:
        ProblemError: The others would run unequal numbers, and those that share states may not.
    """
    lost = set(ranks)
    left = [slot for slot in config.workers if slot.rank not in lost]
    held, filled = {slot.rank: list(slot.virtual_nodes) for slot in left}, _filled_bytes(config)
    # What a worker holds now tells how fast it is: the plan gave faster ones more samples.
    weight = {slot.rank: sum(node.batch_size for node in slot.virtual_nodes) for slot in left}
    load = dict(weight)
    for slot in config.workers:
        if slot.rank not in lost:
            continue
        alike = [other for other in left if other.device_type == slot.device_type] or left
        for node in slot.virtual_nodes:
            least = min(
                alike, key=lambda o: ((load[o.rank] + node.batch_size) / weight[o.rank], o.rank)
            )
            held[least.rank].append(node)
            load[least.rank] += node.batch_size
    workers = tuple(
        replace(
            slot,
            rank=rank,
            device=None,
            virtual_nodes=tuple(sorted(held[slot.rank], key=lambda node: node.index)),
            memory_bytes=max(filled[node.index] for node in held[slot.rank]) or None,
        )
        for rank, slot in enumerate(left)
    )
    return replace(config, predicted_step_seconds=None, workers=workers)


def same_nodes(config: LaunchConfig, other: LaunchConfig) -> None:
    """Refuse a mapping of other virtual nodes.

    Raises:
        ProblemError: They differ; says how.
    """
    if other.pipeline is not None:
        raise ProblemError("a running job cannot change into a pipeline", hint="give a split plan")
    if config.shard != other.shard:
        raise ProblemError(
            f"the new plan shares {other.shard or 'nothing'}, the job shares "
            f"{config.shard or 'nothing'}",
            hint=f"solve with {option('shard', config.shard or 'none')}",
        )
    own, theirs = ([n.batch_size for n in nodes_of(c)] for c in (config, other))
    if sorted(own) != sorted(theirs):
        raise ProblemError(
            f"the new plan has virtual nodes of {_short(theirs)} samples, the job has "
            f"{_short(own)}",
            hint=f"a resize keeps the virtual nodes: solve with {option('virtual_nodes')}, "
            f"or give {option('pool')}",
        )


def renumbered(config: LaunchConfig, other: LaunchConfig) -> LaunchConfig:
    """The mapping of ``other`` with the virtual nodes of ``config``: equal sizes are exchanged.

    Raises:
        ProblemError: They are not the same virtual nodes.
    """
    same_nodes(config, other)
    free: dict[int, list[VirtualNode]] = {}
    for node in nodes_of(config):
        free.setdefault(node.batch_size, []).append(node)
    workers = []
    for slot in other.workers:
        nodes = [free[node.batch_size].pop(0) for node in slot.virtual_nodes]
        run = tuple(sorted(nodes, key=lambda node: node.index))
        workers.append(replace(slot, virtual_nodes=run))
    emulated = {device.device_type: device for device in (*config.emulated, *other.emulated)}
    return replace(
        config,
        predicted_step_seconds=None,
        workers=tuple(workers),
        emulated=tuple(emulated.values()),
    )


def seated(
    config: LaunchConfig, present: Mapping[str, str], fresh: Iterable[str]
) -> tuple[LaunchConfig, dict[str, int]]:
    """Give the slots of a mapping to workers: first to those who are there, in their order.

    Args:
        config: The mapping; its ranks are dealt anew so that the first worker stays the first.
        present: Device type of each worker that is there, in order of ranks.
        fresh: Names for joining workers, as many as may be needed.

    Returns:
        The config, and the rank of each worker that has a slot in it.
    """
    waiting = list(config.workers)
    dealt: list[tuple[str, WorkerSlot]] = []
    for name, kind in present.items():
        slot = next((slot for slot in waiting if slot.device_type == kind), None)
        if slot is not None:
            waiting.remove(slot)
            dealt.append((name, slot))
    names = iter(fresh)
    dealt += [(next(names), slot) for slot in waiting]
    workers = tuple(replace(slot, rank=rank) for rank, (_, slot) in enumerate(dealt))
    return replace(config, predicted_step_seconds=None, workers=workers), {
        name: n for n, (name, _) in enumerate(dealt)
    }


def _short(sizes: Sequence[int]) -> str:
    alike = len(set(sizes)) == 1
    return f"{len(sizes)} x {sizes[0]}" if alike else "+".join(str(size) for size in sizes)


# Which host gets which workers, and with which devices.


def deal_slots(config: LaunchConfig, devices: Sequence[dict[str, int]]) -> list[list[int]]:
    """Deal slots to hosts by device type, in order of the planned devices and of hosts.

    A slot whose device the plan names goes to the host that has it, counting the devices of the
    type host after host: stages that the plan puts on one server are on one host, whatever their
    ranks. Where the hosts have fewer devices than the plan counted (it left some idle), slots
    keep the order of their devices; slots without one follow in order of ranks.

    Returns:
        The ranks of each host.

    Raises:
        LaunchError: The hosts together lack a device, or one is left without work.
    """
    ranks, lacking = assigned_slots(config, devices)
    if lacking is not None:
        raise LaunchError(lacking)
    for host, mine in enumerate(ranks):
        if not mine:
            raise LaunchError(f"the plan has no work for node {host}; leave that host out")
    return ranks


def assigned_slots(
    config: LaunchConfig, devices: Sequence[Mapping[str, int]]
) -> tuple[list[list[int]], str | None]:
    """Assign slots to hosts as ``deal_slots`` does, where hosts may be left without work.

    Returns:
        The ranks of each host, and which device the hosts lack; None if none.
    """
    free = [dict(offered) for offered in devices]
    ranks: list[list[int]] = [[] for _ in devices]
    planned = _hosts_of_devices(config, devices)
    for slot in config.workers_by_device:
        names = (slot.device_type, base_type(slot.device_type, config))
        hosts = [planned[slot.rank]] if slot.rank in planned else range(len(free))
        found = next(((host, n) for host in hosts for n in names if free[host].get(n)), None)
        if found is None:
            kind = slot.device_type
            needed = sum(other.device_type == kind for other in config.workers)
            present = sum(offered.get(kind, 0) for offered in devices)
            said = f"the plan needs {needed} x {kind}, the {len(devices)} hosts have {present}"
            return ranks, said
        host, name = found
        free[host][name] -= 1
        ranks[host].append(slot.rank)
    return [sorted(mine) for mine in ranks], None


def _hosts_of_devices(config: LaunchConfig, devices: Sequence[Mapping[str, int]]) -> dict[int, int]:
    """The host of each rank whose device the hosts have, by the plan's count of devices."""
    found: dict[int, int] = {}
    for kind in {slot.device_type for slot in config.workers}:
        slots = [slot for slot in config.workers if slot.device_type == kind]
        ends = list(accumulate(offered.get(kind, 0) for offered in devices))
        if any(slot.device is None or slot.device >= ends[-1] for slot in slots):
            continue
        found |= {slot.rank: bisect_right(ends, slot.device or 0) for slot in slots}
    return found


def host_groups(config: LaunchConfig, plan: Plan, pool: Cluster | None) -> tuple[HostGroup, ...]:
    """The hosts that a launch of a plan needs, each with the devices that it uses there.

    Args:
        config: The lowered plan.
        plan: The plan. Without ``pool``, its own description of the servers counts; a plan for a
            flat pool takes one host for each device type.
        pool: The hosts that there are, in order of their ranks.

    Raises:
        ProblemError: The hosts lack devices.
    """
    described = pool if pool is not None else plan.cluster
    if described is None or (pool is None and described.num_servers == 1):
        needed = Counter(slot.device_type for slot in config.workers)
        hosts: list[dict[str, int]] = [{name: number} for name, number in needed.items()]
    else:
        hosts = [dict(group.devices) for group in described.servers for _ in range(group.count)]
    ranks, lacking = assigned_slots(config, hosts)
    if lacking is not None:
        raise ProblemError(
            lacking,
            hint=f"name hosts that have them, such as {option('hosts', '1x(2xV100),2x(4xP100)')}",
        )
    used = [Counter(config.workers[rank].device_type for rank in mine) for mine in ranks if mine]
    return tuple(
        HostGroup(num_hosts=len(list(alike)), devices=dict(devices))
        for devices, alike in groupby(tuple(sorted(host.items())) for host in used)
    )


def virtual_types(config: LaunchConfig) -> frozenset[str]:
    """Device types of a launch that are emulated."""
    stated = {device.device_type for device in config.emulated}
    held = {slot.device_type for slot in config.workers}
    return frozenset(name for name in held if name in stated or is_emulated(name))


def host_types(config: LaunchConfig) -> frozenset[str]:
    """Device types of a launch that every host has: its processors."""
    return frozenset(slot.device_type for slot in config.workers if slot.device_type == CPU)
