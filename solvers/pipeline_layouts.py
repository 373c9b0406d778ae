"""Where the pipelines of a schedule with equal replicas stand: d devices at each place.

A layout gives each place of the pipeline a run of d devices of one type, right behind the type's
previous run; the types follow each other in any order, each with as many places as asked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product

from ..costs.pipeline import shared_level, slowest_links
from ..schema.pipeline import PipelineProblem


@dataclass(frozen=True, slots=True)
class Place:
    """A run of devices: its pool, and the first of them in the order of the topology."""

    pool: int
    first_device: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Places of the pipeline in order, each with as many replicas."""

    num_replicas: int
    places: tuple[Place, ...]

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.num_replicas * len(self.places)


def layouts(problem: PipelineProblem) -> Iterator[Layout]:
    """Every layout of the problem's pools; with ``exactly``, those that use all devices."""
    widest = max(pool.num_devices for pool in problem.pools) if problem.replication else 1
    seen = set()
    for replicas in filter(problem.may_replicate, range(1, widest + 1)):
        most = [pool.num_devices // replicas for pool in problem.pools]
        for order in permutations(range(len(problem.pools))):
            for counts in product(*(range(most[pool] + 1) for pool in order)):
                places = tuple(
                    Place(pool, number * replicas)
                    for pool, count in zip(order, counts, strict=True)
                    for number in range(count)
                )
                layout = Layout(replicas, places)
                full = layout.num_devices == problem.num_devices
                if places and layout not in seen and (problem.workers == "at_most" or full):
                    seen.add(layout)
                    yield layout


def span(problem: PipelineProblem, layout: Layout, place: int) -> float:
    """Bytes per second of the slowest link among the replicas of a place."""
    here = layout.places[place]
    return _slowest(problem, here.pool, here.first_device, layout.num_replicas)


def link(problem: PipelineProblem, layout: Layout, one: int, other: int) -> float:
    """Bytes per second of the slowest link that any replicas of two places have."""
    here, there = layout.places[one], layout.places[other]
    if here.pool != there.pool:
        spans = (span(problem, layout, one), span(problem, layout, other))
        return min(*spans, problem.inter_bytes_per_second or 0.0)
    first = min(here.first_device, there.first_device)
    last = max(here.first_device, there.first_device) + layout.num_replicas
    return _slowest(problem, here.pool, first, last - first)


def _slowest(problem: PipelineProblem, pool: int, first: int, count: int) -> float:
    levels = problem.pools[pool].levels
    level = shared_level(levels, first, first + count - 1)
    return slowest_links(levels)[level - 1] if level else float("inf")
