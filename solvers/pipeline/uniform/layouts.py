"""The devices of pipelines whose stages all have d replicas: d devices at each place.

Every layout on any devices is listed where they are few: a path through the states of
anywhere.py with d replicas at each step. Layouts on the same types whose links are all
no faster than another's are left out. Where there are many, only ordered ones: each place has a
run of d devices of one type right behind the type's previous run, the types one after another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from typing import NamedTuple

from ....planning.costs.pipeline import shared_level, slowest_links
from ....schema.pipeline import PipelineProblem
from ..anywhere import has_one_order, relaxed
from ..packing import NoSeatsError, seat
from ..placements import Move, PlacedStage, PlacementSpace

_MOST_PATHS = 2000
"""Paths that are looked at for one number of replicas."""


@dataclass(frozen=True, slots=True)
class PipelinePlace:
    """Devices of a pool, ascending in the order of the topology."""

    pool: int
    devices: tuple[int, ...]

    @classmethod
    def run(cls, pool: int, first_device: int, num_devices: int) -> "PipelinePlace":
        """Devices one after another."""
        return cls(pool, tuple(range(first_device, first_device + num_devices)))


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Places of the pipeline in order, each with as many replicas."""

    num_replicas: int
    places: tuple[PipelinePlace, ...]

    @property
    def num_devices(self) -> int:
        """Devices in use."""
        return self.num_replicas * len(self.places)


class Layouts(NamedTuple):
    """Layouts to look at, and whether none on other devices can be better."""

    found: list[PipelineLayout]
    are_all: bool


def layouts(problem: PipelineProblem) -> Layouts:
    """The layouts of the problem's pools; with ``exactly``, those that use all devices.

    Pipelines placed round-robin also send from the last place to the first, a link that paths do
    not count: where that can differ, only ordered layouts are listed.
    """
    if problem.traits.placement == "round-robin" and not has_one_order(problem):
        return Layouts(list(_ordered(problem)), are_all=False)
    widest = max(pool.num_devices for pool in problem.pools) if problem.replication else 1
    found: list[PipelineLayout] = []
    for replicas in filter(problem.may_replicate, range(1, widest + 1)):
        anywhere = _anywhere(problem, replicas)
        if anywhere is None:
            return Layouts(list(_ordered(problem)), are_all=False)
        found += anywhere
    return Layouts(found, are_all=True)


def _ordered(problem: PipelineProblem) -> Iterator[PipelineLayout]:
    widest = max(pool.num_devices for pool in problem.pools) if problem.replication else 1
    seen = set()
    for replicas in filter(problem.may_replicate, range(1, widest + 1)):
        most = [pool.num_devices // replicas for pool in problem.pools]
        for order in permutations(range(len(problem.pools))):
            for counts in product(*(range(most[pool] + 1) for pool in order)):
                places = tuple(
                    PipelinePlace.run(pool, number * replicas, replicas)
                    for pool, count in zip(order, counts, strict=True)
                    for number in range(count)
                )
                layout = PipelineLayout(replicas, places)
                full = layout.num_devices == problem.num_devices
                if layout.num_devices > problem.most_workers:
                    continue
                if places and layout not in seen and (problem.workers == "at_most" or full):
                    seen.add(layout)
                    yield layout


def _anywhere(problem: PipelineProblem, replicas: int) -> list[PipelineLayout] | None:
    """The best layouts of so many replicas on any devices; None where there are too many."""
    space = relaxed(problem, 10 * _MOST_PATHS, replicas)
    paths = None if space is None else _paths(problem, space)
    if space is None or paths is None:
        return None
    kept: dict[tuple[int, ...], list[tuple[tuple[int, ...], PipelineLayout]]] = {}
    for links, placed in sorted(paths.items(), key=lambda entry: (sum(entry[0][1]), entry[0])):
        pools, own = links
        others = kept.setdefault(pools, [])
        if any(all(a <= b for a, b in zip(other, own, strict=True)) for other, _ in others):
            continue
        try:
            seats = seat(problem, space, placed)
        except NoSeatsError as error:
            if not error.is_proved:
                return None
            continue
        places = tuple(
            PipelinePlace(move.pool, devices)
            for (_, _, move), devices in zip(seats.placed, seats.devices, strict=True)
        )
        others.append((_links(seats.placed), PipelineLayout(replicas, places)))
    return [layout for others in kept.values() for _, layout in others]


Signature = tuple[tuple[int, ...], tuple[int, ...]]


def _paths(
    problem: PipelineProblem, space: PlacementSpace
) -> dict[Signature, list[PlacedStage]] | None:
    """Placements without cuts by pools and links; None where there are too many paths."""
    out: dict[int, list[Move]] = {}
    for move in space.moves:
        out.setdefault(move.source, []).append(move)
    found: dict[Signature, list[PlacedStage]] = {}
    waiting: list[tuple[int, list[PlacedStage]]] = [(0, [])]
    num_paths = 0
    while waiting:
        state, placed = waiting.pop()
        for move in out.get(state, ()):
            num_paths += 1
            if num_paths > _MOST_PATHS:
                return None
            longer: list[PlacedStage] = [(0, 0, move), *placed]
            waiting.append((move.target, longer))
            full = sum(space.states[move.target].used) == problem.num_devices
            if problem.workers == "at_most" or full:
                pools = tuple(entry[2].pool for entry in longer)
                found.setdefault((pools, _links(longer)), longer)
    return found


def _links(placed: list[PlacedStage]) -> tuple[int, ...]:
    """Slowness of the links inside each place, then of those between neighbours."""
    moves = [move for _, _, move in placed]
    between = (max(a.span, a.gap, b.span) for a, b in zip(moves, moves[1:], strict=False))
    return (*(move.span for move in moves), *between)


def span(problem: PipelineProblem, layout: PipelineLayout, place: int) -> float:
    """Bytes per second of the slowest link among the replicas of a place."""
    here = layout.places[place]
    return _slowest(problem, here.pool, here.devices)


def link(problem: PipelineProblem, layout: PipelineLayout, one: int, other: int) -> float:
    """Bytes per second of the slowest link that any replicas of two places have."""
    here, there = layout.places[one], layout.places[other]
    if here.pool != there.pool:
        spans = (span(problem, layout, one), span(problem, layout, other))
        return min(*spans, problem.inter_bytes_per_second or 0.0)
    return _slowest(problem, here.pool, (*here.devices, *there.devices))


def _slowest(problem: PipelineProblem, pool: int, devices: tuple[int, ...]) -> float:
    levels = problem.pools[pool].levels
    level = shared_level(levels, min(devices), max(devices))
    return slowest_links(levels)[level - 1] if level else float("inf")
