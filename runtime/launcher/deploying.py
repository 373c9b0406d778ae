"""Lay a plan out over hosts, for exporters of scripts and manifests."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from ...devices.cpu import DEVICE_TYPE as CPU
from ...devices.emulated import is_emulated
from ...schema.cluster import Cluster
from ...schema.deployment import HostGroup
from ...schema.errors import ProblemError
from ...schema.launch import LaunchConfig
from ...schema.options import option
from ...schema.plan import Plan
from .hosts import assigned_slots


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
    used = _used(config, hosts)
    return tuple(
        HostGroup(num_hosts=len(list(alike)), devices=dict(devices))
        for devices, alike in groupby(tuple(host.items()) for host in used)
    )


def _used(config: LaunchConfig, hosts: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """What each host with work has to offer: the devices that the launch would give work there."""
    offered = [dict(host) for host in hosts]
    ranks, lacking = assigned_slots(config, offered)
    if lacking is not None:
        raise ProblemError(
            lacking,
            hint=f"name hosts that have them, such as {option('hosts', '1x(2xV100),2x(4xP100)')}",
        )
    found = [Counter(config.workers[rank].device_type for rank in mine) for mine in ranks]
    return [dict(sorted(used.items())) for used in found if used]


def virtual_types(config: LaunchConfig) -> frozenset[str]:
    """Device types of a launch that are emulated."""
    stated = {device.device_type for device in config.emulated}
    held = {slot.device_type for slot in config.workers}
    return frozenset(name for name in held if name in stated or is_emulated(name))


def host_types(config: LaunchConfig) -> frozenset[str]:
    """Device types of a launch that every host has: its processors."""
    return frozenset(slot.device_type for slot in config.workers if slot.device_type == CPU)
