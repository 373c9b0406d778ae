"""What a pool lacks in which no plan fits: bytes on each device, and how many devices would do."""

from dataclasses import replace
from math import inf

import numpy as np

from ...schema.parallel import ParallelPool, ParallelProblem
from ..effort import DEFAULT
from .bound import Relaxation
from .gradients import replica_counts
from .space import Spaces

_MOST_BYTES = 1 << 60


def missing_bytes(problem: ParallelProblem) -> int | None:
    """Bytes that every device would need more, at least, so that a plan fits.

    By the relaxation that bounds devices, so less is not enough; with a single device type and one
    replica it is exact.

    Args:
        problem: In which no plan fits.

    Returns:
        None where no memory would help: there are too few devices for any group.
    """
    low, high = 0, 1
    while not _might_fit(problem, high):
        low, high = high, 2 * high
        if high > _MOST_BYTES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _might_fit(problem, middle) else (middle, high)
    return high


def smallest_pools(problem: ParallelProblem) -> dict[str, int]:
    """For each device type the fewest devices that hold the model on their own, whole servers.

    Exact over the space of plans. Types that cannot hold a layer are left out.

    Args:
        problem: Whose layers and types; its numbers of devices do not count.
    """
    found = {}
    for pool in problem.pools:
        fewest = _fewest_devices(problem, pool)
        if fewest is not None:
            found[pool.device_type] = -(-fewest // pool.devices_per_server) * (
                pool.devices_per_server
            )
    return found


def _might_fit(problem: ParallelProblem, more_bytes: int) -> bool:
    pools = tuple(
        pool
        if pool.memory_bytes is None
        else replace(pool, memory_bytes=pool.memory_bytes + more_bytes)
        for pool in problem.pools
    )
    larger = replace(problem, pools=pools)
    devices, spaces = sum(pool.num_devices for pool in pools), Spaces(larger)
    for size in spaces.microbatch_sizes:
        if not spaces.of(size).options:
            continue
        for replicas in replica_counts(problem, size, devices, is_timed=False):
            rounds = -(-problem.global_batch_size // (size * replicas))
            most = min(len(problem.layers), devices // replicas, problem.most_stages or devices)
            if replicas > 1 and rounds >= most and not problem.shard_optimizer:
                continue  # as many in flight as with one replica, which takes fewer devices
            space = spaces.of(size, replicas)
            if Relaxation(larger, space, replicas, rounds, most, DEFAULT).covers():
                return True
    return False


def _fewest_devices(problem: ParallelProblem, pool: ParallelPool) -> int | None:
    size, best = len(problem.layers), None
    most_stages = min(size, problem.most_stages or size)
    most = max((t.tensor_parallel_size for t in pool.times), default=1)
    many = replace(pool, num_devices=most)
    alone = replace(problem, pools=(many,))
    spaces = Spaces(alone)
    for microbatch in spaces.microbatch_sizes:
        for replicas in replica_counts(
            problem, microbatch, problem.global_batch_size, is_timed=False
        ):
            space = spaces.of(microbatch, replicas)
            if not space.options or (best is not None and replicas >= best):
                break
            rounds = -(-problem.global_batch_size // (microbatch * replicas))
            relaxation = Relaxation(alone, space, replicas, rounds, most_stages, DEFAULT)
            firsts = relaxation.firsts(inf, inf)
            devices = relaxation.tables(np.ones((1, 1)), firsts, is_timed=False)[0, 0, -1]
            if devices < inf and (best is None or devices * replicas < best):
                best = int(devices) * replicas
    return best
