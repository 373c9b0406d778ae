"""The devices that a stage may get: states of the pools, moves between them, and named devices.

Stages are placed from the model's end to its start, as a stage's memory depends on the workers
behind it. Each takes a run of devices of one type in the order of the topology. It starts right
behind the type's previous run or at the start of the next component (devices between stay idle). No
run gains from starting elsewhere: shifted left to such a place it spans no more levels.

    two servers of two devices, (0 1) (2 3); the last stage has one device: 0
    the next stage, of two, starts behind it: (1 2), over the network; or at the next
    component: (2 3), inside a server, and device 1 stays idle

A placement found in a space of anywhere.py says which neighbouring stages share a component, not
which one. ``seat`` packs its chains of stages into the components of each level, highest first (bin
packing, searched to the end for two levels); what spans components takes devices left over.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...planning.costs.pipeline import shared_level, slowest_links
from ...schema.pipeline import DevicePool, PipelineProblem
from ..effort import DEFAULT, Effort


class State(NamedTuple):
    """The devices used so far, by pool, and all else that later moves depend on.

    ``workers`` counts devices in use, ``last_pool`` names the pool of the stage placed last,
    ``stages`` counts stages; each stays -1 where nothing depends on it. ``inside`` is what the
    chain of stages that ends here holds of its component of each level (anywhere.py).
    """

    used: tuple[int, ...]
    workers: int = -1
    last_pool: int = -1
    stages: int = -1
    inside: tuple[int, ...] = ()


class Move(NamedTuple):
    """One stage placed: ``num_replicas`` devices of ``pool`` from ``first`` (from the end) on.

    ``span`` and ``gap`` index ``PlacementSpace.bandwidths``: the slowest link among replicas, and
    the one between the run and the stage that follows in the model. ``workers`` counts devices
    from this stage to the model's end.
    """

    source: int
    target: int
    pool: int
    num_replicas: int
    first: int
    span: int
    gap: int
    workers: int


PlacedStage = tuple[int, int, Move]
"""The cut where a stage begins, the one where it ends, and its move."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves by column, as large pools have hundreds of thousands; ``Move`` one at a time."""

    source: Ints
    target: Ints
    pool: Ints
    num_replicas: Ints
    first: Ints
    span: Ints
    gap: Ints
    workers: Ints
    _numbered: dict[tuple[str, ...], tuple[list[tuple[int, ...]], Ints]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> Move:
        return Move(*(int(getattr(self, name)[number]) for name in Move._fields))

    def __iter__(self) -> Iterator[Move]:
        columns = (getattr(self, name).tolist() for name in Move._fields)
        return map(Move._make, zip(*columns, strict=True))

    @property
    def need(self) -> Ints:
        """The slowest link that a stage itself puts on the boundary behind it."""
        return np.maximum(self.span, self.gap)

    @property
    def is_last(self) -> Ints:
        """Whether nothing is behind the stage."""
        found: Ints = (self.source == 0).astype(np.int64)
        return found

    def numbered(self, *columns: str) -> tuple[list[tuple[int, ...]], Ints]:
        """The distinct rows of some columns, ascending, and each move's place among them."""
        if columns not in self._numbered:
            self._numbered[columns] = self._distinct(columns)
        return self._numbered[columns]

    def _distinct(self, columns: tuple[str, ...]) -> tuple[list[tuple[int, ...]], Ints]:
        sizes = [int(getattr(self, name).max(initial=0)) + 1 for name in columns]
        # Rows as numbers in a mixed radix: one sort of integers instead of one of rows.
        code = np.zeros(len(self), np.int64)
        for name, size in zip(columns, sizes, strict=True):
            code = code * size + getattr(self, name)
        distinct, number = np.unique(code, return_inverse=True)
        rows = []
        for size in reversed(sizes):
            rows.append((distinct % size).tolist())
            distinct = distinct // size
        return list(zip(*reversed(rows), strict=True)), number.reshape(-1)


@dataclass(frozen=True, slots=True)
class PlacementSpace:
    """States in the order they can be filled; every move's source comes before its target.

    ``bandwidths`` starts with infinity (one device and itself), then falls. ``kind`` tells moves
    that name a run of devices from those that count devices anywhere, in chains or blindly.
    """

    states: tuple[State, ...]
    moves: Moves
    bandwidths: tuple[float, ...]
    kind: Literal["ordered", "counted", "blind"] = "ordered"

    @property
    def is_ordered(self) -> bool:
        """Whether a move names its devices."""
        return self.kind == "ordered"


class _Pool:
    """One pool's geometry."""

    def __init__(self, pool: DevicePool, bandwidths: tuple[float, ...]) -> None:
        self.levels = pool.levels
        self.size = pool.num_devices
        self.classes = link_classes(pool, bandwidths)

    def link(self, one: int, other: int) -> int:
        return self.classes[shared_level(self.levels, one, other)]

    def runs(self, position: int, may_skip: bool, replication: bool) -> Ints:
        """[4, runs] that may follow the devices before ``position``, by start, then length."""
        # First device, replicas, the slowest link among them, and that to the device before.
        starts = self._starts(position) if may_skip else [position]
        found = []
        for first in starts:
            longest = self.size - first if replication else min(1, self.size - first)
            # To the device before: a chain of stages sends over what both share.
            gap = self.link(position - 1, first) if position else 0
            for replicas in range(1, longest + 1):
                found.append((first, replicas, self.link(first, first + replicas - 1), gap))
        return np.array(found, np.int64).reshape(-1, 4).T

    def _starts(self, position: int) -> list[int]:
        """Where a run may begin: right here, or at the next component of each level."""
        found, width = {position}, 1
        for level in self.levels[:-1]:
            width *= level.num_components
            # The next multiple of a component's width, at or behind the position.
            found.add(-(-position // width) * width)
        return sorted(start for start in found if start < self.size)


def build(problem: PipelineProblem, effort: Effort = DEFAULT) -> PlacementSpace:
    """List the states and moves of a problem's pools.

    Raises:
        OutOfTimeError: The effort's limit came first.
    """
    return _Builder(problem).space(effort)


def bandwidths_of(problem: PipelineProblem) -> tuple[float, ...]:
    """Infinity (a device and itself), then every link's bytes per second, falling."""
    links = {b for pool in problem.pools for b in slowest_links(pool.levels)}
    if len(problem.pools) > 1 and problem.inter_bytes_per_second is not None:
        links.add(problem.inter_bytes_per_second)
    return (float("inf"), *sorted(links, reverse=True))


def link_classes(pool: DevicePool, bandwidths: tuple[float, ...]) -> tuple[int, ...]:
    """[levels + 1] the place among the bandwidths: of one device, then of each level's links."""
    return (0, *(bandwidths.index(rate) for rate in slowest_links(pool.levels)))


def class_between(problem: PipelineProblem, bandwidths: tuple[float, ...]) -> int:
    """The place among the bandwidths of the links between pools; 0 for one pool."""
    if len(problem.pools) == 1 or problem.inter_bytes_per_second is None:
        return 0
    return bandwidths.index(problem.inter_bytes_per_second)


def chain(problem: PipelineProblem, stages: Sequence[tuple[int, int]]) -> list[Move]:
    """Moves that put (pool, replicas) after (pool, replicas) on runs of devices, first stage first.

    The moves are of no list of states: their sources and targets say nothing, except that the
    source of the last stage is 0.
    """
    bandwidths = bandwidths_of(problem)
    pools = [_Pool(pool, bandwidths) for pool in problem.pools]
    inter = class_between(problem, bandwidths)
    used, workers, behind = [0] * len(pools), 0, -1
    found: list[Move] = []
    # From the model's end: used devices count from there.
    for number, replicas in reversed(stages):
        pool, first = pools[number], used[number]
        gap = 0 if behind < 0 else inter
        if behind == number:
            gap = pool.link(first - 1, first)
        span = pool.link(first, first + replicas - 1)
        used[number], workers, behind = first + replicas, workers + replicas, number
        found.append(Move(len(found), -1, number, replicas, first, span, gap, workers))
    return found[::-1]


class _Builder:
    def __init__(self, problem: PipelineProblem) -> None:
        self.problem = problem
        self.bandwidths = bandwidths_of(problem)
        self.pools = [_Pool(pool, self.bandwidths) for pool in problem.pools]
        limited = any(pool.limit_bytes is not None for pool in problem.pools)
        exactly = problem.workers == "exactly"
        self.may_skip = not exactly
        self.by_stage = problem.stage_limit is not None
        has_gaps = any(len(pool.levels) > 1 for pool in problem.pools) and self.may_skip
        # Memory depends on the workers behind a stage, and so may how many more there can be.
        counts_workers = limited and problem.traits.order != "forward-first"
        counts_workers |= problem.most_workers < problem.num_devices
        self.by_worker = counts_workers and has_gaps
        # With one pool the boundary's link depends on positions alone, so the last pool need not
        # be known.
        self.by_pool = len(self.pools) > 1
        self.known_runs: dict[tuple[int, int], Ints] = {}
        # A state as one number in a mixed radix. Each digit has room for -1, which is stored as 0.
        digits = [pool.size + 1 for pool in self.pools]
        digits += [problem.num_devices + 2, len(self.pools) + 1, (problem.stage_limit or 0) + 2]
        self.digits = np.array(digits, np.int64)
        self.worth = np.concatenate([[1], np.cumprod(self.digits[:-1])]).astype(np.int64)
        self.inter = class_between(problem, self.bandwidths)

    def space(self, effort: Effort) -> PlacementSpace:
        """States are numbers whose digits are what ``State`` holds, each moved up by one."""
        start = self._code(State((0,) * len(self.pools), *self._counted()))
        waiting: dict[int, list[Ints]] = {0: [np.array([start])]}
        codes, moves = [], []
        # By devices in use: all that reach a number are known when its turn comes, so each state
        # is made once.
        for total in range(self.problem.num_devices + 1):
            if total in waiting:
                codes.append(np.unique(np.concatenate(waiting.pop(total))))
                moves += self._moves(total, codes[-1], waiting, effort)
        known = np.concatenate(codes)
        order = np.argsort(known)
        found = np.concatenate(moves, axis=1) if moves else np.zeros((8, 0), np.int64)
        effort.check()
        # Codes become places among the states.
        found[:2] = order[np.searchsorted(known, found[:2], sorter=order)]
        effort.check()
        # By target, then source, pool and replicas: tables take the moves into a state as one run.
        found = found[:, np.lexsort((found[3], found[2], found[0], found[1]))]
        effort.check()
        states = tuple(self._state(row) for row in self._read(known).tolist())
        return PlacementSpace(states, Moves(*found), self.bandwidths)

    def _counted(self) -> tuple[int, int, int]:
        return 0 if self.by_worker else -1, -1, 0 if self.by_stage else -1

    def _code(self, state: State) -> int:
        rest = (state.workers + 1, state.last_pool + 1, state.stages + 1)
        return int(np.dot(self.worth, (*state.used, *rest)))

    def _read(self, codes: Ints) -> Ints:
        """[states, digits] of states by number."""
        found: Ints = codes[:, None] // self.worth % self.digits
        return found

    def _state(self, row: list[int]) -> State:
        *used, workers, last_pool, stages = row
        return State(tuple(used), workers - 1, last_pool - 1, stages - 1)

    def _moves(
        self, total: int, codes: Ints, waiting: dict[int, list[Ints]], effort: Effort
    ) -> list[Ints]:
        """[8, moves] out of all states of so many devices; their targets wait for their turn."""
        rows, found = self._read(codes), []
        num_pools = len(self.pools)
        # Without idle devices between runs, devices used and workers are the same.
        workers = rows[:, num_pools] - 1 if self.by_worker else np.full(len(codes), total)
        for number, pool in enumerate(self.pools):
            for used in np.unique(rows[:, number]).tolist():
                effort.check()
                here = rows[:, number] == used
                if self.by_stage:
                    here &= rows[:, -1] - 1 < (self.problem.stage_limit or 0)
                first, replicas, span, gap = self._runs(pool, number, used)
                if not len(first) or not here.any():
                    continue
                shape = (int(here.sum()), len(first))
                # Behind the last stage there is no boundary.
                own_gap = np.broadcast_to(gap * (total > 0), shape)
                if self.by_pool and total > 0:
                    other = rows[here, num_pools + 1] - 1 != number
                    own_gap = np.where(other[:, None], self.inter, own_gap)
                taken = first + replicas - used
                targets = codes[here, None] + taken * self.worth[number]
                if self.by_worker:
                    targets = targets + replicas * self.worth[num_pools]
                if self.by_pool:
                    # The digit of the last pool changes from that of the source to this pool's.
                    step = number + 1 - rows[here, num_pools + 1]
                    targets = targets + step[:, None] * self.worth[num_pools + 1]
                if self.by_stage:
                    targets = targets + self.worth[num_pools + 2]
                # Idle devices count as used, not as workers.
                used_by_all = workers[here, None] + replicas
                allowed = used_by_all <= self.problem.most_workers
                for count in np.unique(taken).tolist():
                    reached = np.unique(targets[allowed & (taken == count)])
                    waiting.setdefault(total + count, []).append(reached)
                columns = (
                    codes[here, None], targets, number, replicas, first, span, own_gap, used_by_all,
                )  # fmt: skip
                wide = [np.broadcast_to(column, shape)[allowed] for column in columns]
                found.append(np.stack(wide))
        return found

    def _runs(self, pool: _Pool, number: int, used: int) -> Ints:
        key = (number, used)
        if key not in self.known_runs:
            runs = pool.runs(used, self.may_skip, self.problem.replication)
            may = [self.problem.may_replicate(count) for count in runs[1].tolist()]
            self.known_runs[key] = runs[:, may]
        return self.known_runs[key]


def final_states(problem: PipelineProblem, space: PlacementSpace) -> NDArray[np.int64]:
    """The states in which a plan may end, by workers and stages asked for."""
    wanted = [
        index
        for index, state in enumerate(space.states)
        if (problem.workers == "at_most" or sum(state.used) == problem.num_devices)
        and (problem.num_stages is None or state.stages == problem.num_stages)
    ]
    # No state is final: the empty one stands for that, as nothing is placed in it.
    return np.array(wanted or [0], np.int64)


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
                # Behind the type's previous run, without a gap inside.
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
                # A chain ends with the stage that holds nothing but itself of the component.
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
            # Stages of no chain on this level span components: they get what is left.
            loose = [m for m in members if self.stages[m].chains[level - 2] < 0]
            width = prod(part.num_components for part in self.levels[: level - 1])
            groups = list(chains.values())
            sizes = [sum(self.stages[m].num_replicas for m in group) for group in groups]
            bins = _packed(sizes, self.levels[level - 1].num_components, width)
            if bins is None:
                # Greedy over more than two levels: another packing of the upper level might have
                # fitted the lower one.
                raise NoSeatsError(is_proved=len(self.levels) <= 2)
            inside = sorted(sorted(m for group in part for m in groups[group]) for part in bins)
            for number, stages in enumerate(part for part in inside if part):
                self.fill(level - 1, begin + number * width, stages)
        end = begin + prod(part.num_components for part in self.levels[:level])
        left = sorted(device for device in self.free if begin <= device < end)
        for member in loose:
            count = self.stages[member].num_replicas
            # Ascending devices, so a loose stage spans as little as what is left allows.
            taken, left = left[:count], left[count:]
            self.held[member] += taken
            self.free -= set(taken)


def _packed(sizes: list[int], num_bins: int, capacity: int) -> list[list[int]] | None:
    """Items by bin, or None where they do not fit; gives up with an error."""
    # Largest first, the fullest bin first: few tries where it fits.
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
            # Bins of one load are alike, so one of them is enough to try.
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
        classes = link_classes(problem.pools[move.pool], space.bandwidths)
        held = devices[index]
        span = classes[shared_level(levels, held[0], held[-1])]
        gap = move.gap
        if index + 1 < len(placed) and placed[index + 1][2].pool == move.pool:
            ends = (*held, *devices[index + 1])
            gap = classes[shared_level(levels, min(ends), max(ends))]
        found.append((first, last, move._replace(span=span, gap=gap)))
    return found
