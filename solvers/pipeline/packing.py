"""Assign named devices to a counted placement: pack its chains of stages into components.

A placement found in a space of anywhere.py says which neighbouring stages share a
component, not which one. Chains are packed into the components of each level, highest first
(bin packing, searched to the end for two levels); what spans components takes devices left over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ...planning.costs.pipeline import shared_level, slowest_links
from ...schema.pipeline import DevicePool, PipelineProblem
from .placements import PlacedStage, PlacementSpace

Devices = tuple[tuple[int, ...], ...]
"""The devices of each stage, ascending, in the order of the topology."""
_MOST_TRIES = 20_000


class Seats(NamedTuple):
    """The stages' devices, and the stages with the links that these devices really have."""

    placed: list[PlacedStage]
    devices: Devices

    def are_runs(self) -> bool:
        """Whether the placement is ordered: runs of devices, each behind the type's previous."""
        free: dict[int, int] = {}
        for (_, _, move), held in zip(self.placed, self.devices, strict=True):
            if held[0] < free.get(move.pool, 0) or held[-1] - held[0] >= len(held):
                return False
            free[move.pool] = held[-1] + 1
        return True


class NoSeatsError(Exception):
    """The chains fit no components.

    ``is_proved`` says that no packing exists; else the search gave up.
    """

    def __init__(self, *, is_proved: bool) -> None:
        super().__init__("no seats")
        self.is_proved = is_proved


def seat(problem: PipelineProblem, space: PlacementSpace, placed: list[PlacedStage]) -> Seats:
    """Name the devices of a placement.

    Raises:
        NoSeatsError: The chains of a counted placement do not fit the components.
    """
    if space.is_ordered:
        return Seats(placed, _runs(problem, placed))
    if space.kind == "blind":
        raise NoSeatsError(is_proved=False)
    devices: list[tuple[int, ...]] = [()] * len(placed)
    for number, pool in enumerate(problem.pools):
        mine = [index for index, (_, _, move) in enumerate(placed) if move.pool == number]
        seating = _Seating(pool, [_Stage.of(space, placed, index) for index in mine])
        seating.fill(len(pool.levels), 0, list(range(len(mine))))
        for index, held in zip(mine, seating.held, strict=True):
            devices[index] = tuple(sorted(held))
    return Seats(_linked(problem, space, placed, devices), tuple(devices))


def _runs(problem: PipelineProblem, placed: list[PlacedStage]) -> Devices:
    """Ordered spaces count from the model's end; devices are named from its start."""
    found = []
    for _, _, move in placed:
        begin = problem.pools[move.pool].num_devices - move.first - move.num_replicas
        found.append(tuple(range(begin, begin + move.num_replicas)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of one pool: its devices, and its chain in a component of each level.

    ``chains``: by level from the lowest; the index of the chain's last stage, -1 for none.
    """

    num_replicas: int
    chains: tuple[int, ...]

    @classmethod
    def of(cls, space: PlacementSpace, placed: list[PlacedStage], index: int) -> "_Stage":
        depth = len(space.states[placed[index][2].target].inside)
        chains = []
        for level in range(depth):
            last = index
            if not _inside(space, placed, index, level):
                last = -1
            else:
                while _inside(space, placed, last, level) > placed[last][2].num_replicas:
                    last += 1
            chains.append(last)
        return cls(placed[index][2].num_replicas, tuple(chains))


def _inside(space: PlacementSpace, placed: list[PlacedStage], index: int, level: int) -> int:
    """Devices of the chain that begins with a stage, in its component of a level."""
    return space.states[placed[index][2].target].inside[level]


class _Seating:
    """Deals a pool's devices to stages, component by component."""

    def __init__(self, pool: DevicePool, stages: Sequence[_Stage]) -> None:
        self.stages, self.levels = stages, pool.levels
        self.free = set(range(pool.num_devices))
        self.held: list[list[int]] = [[] for _ in stages]

    def fill(self, level: int, begin: int, members: list[int]) -> None:
        """Seat some stages in the component of a level that begins with a device."""
        loose = members
        if level > 1:
            chains: dict[int, list[int]] = {}
            for member in members:
                chain = self.stages[member].chains[level - 2]
                if chain >= 0:
                    chains.setdefault(chain, []).append(member)
            loose = [m for m in members if self.stages[m].chains[level - 2] < 0]
            width = prod(part.num_components for part in self.levels[: level - 1])
            groups = list(chains.values())
            sizes = [sum(self.stages[m].num_replicas for m in group) for group in groups]
            bins = _packed(sizes, self.levels[level - 1].num_components, width)
            if bins is None:
                raise NoSeatsError(is_proved=len(self.levels) <= 2)
            inside = sorted(sorted(m for group in part for m in groups[group]) for part in bins)
            for number, stages in enumerate(part for part in inside if part):
                self.fill(level - 1, begin + number * width, stages)
        end = begin + prod(part.num_components for part in self.levels[:level])
        left = sorted(device for device in self.free if begin <= device < end)
        for member in loose:
            count = self.stages[member].num_replicas
            taken, left = left[:count], left[count:]
            self.held[member] += taken
            self.free -= set(taken)


def _packed(sizes: list[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Items by bin, or None where they do not fit; gives up with an error.

    Raises:
        NoSeatsError: Undecided after many tries.
    """
    order = sorted(range(len(sizes)), key=lambda item: -sizes[item])
    loads, bins = [0] * num_bins, [[] for _ in range(num_bins)]  # type: list[int], list[list[int]]
    tries = 0

    def place(depth: int) -> bool:
        nonlocal tries
        if depth == len(order):
            return True
        tries += 1
        if tries > _MOST_TRIES:
            raise NoSeatsError(is_proved=False)
        item, seen = order[depth], set()
        for number in sorted(range(num_bins), key=lambda number: -loads[number]):
            if loads[number] in seen or loads[number] + sizes[item] > capacity:
                continue
            seen.add(loads[number])
            loads[number] += sizes[item]
            bins[number].append(item)
            if place(depth + 1):
                return True
            loads[number] -= sizes[item]
            bins[number].pop()
        return False

    return bins if place(0) else None


def _linked(
    problem: PipelineProblem,
    space: PlacementSpace,
    placed: list[PlacedStage],
    devices: Sequence[tuple[int, ...]],
) -> list[PlacedStage]:
    """The stages with the links among their devices, which are never slower than counted."""
    found = []
    for index, (first, last, move) in enumerate(placed):
        levels = problem.pools[move.pool].levels
        classes = (0, *(space.bandwidths.index(rate) for rate in slowest_links(levels)))
        held = devices[index]
        span = classes[shared_level(levels, held[0], held[-1])]
        gap = move.gap
        if index + 1 < len(placed) and placed[index + 1][2].pool == move.pool:
            ends = (*held, *devices[index + 1])
            gap = classes[shared_level(levels, min(ends), max(ends))]
        found.append((first, last, move._replace(span=span, gap=gap)))
    return found
