"""Plans that take milliseconds to find, for searches that a limit of time ends before their first.

Every stage has equally many replicas, on runs of devices in the order of the topology. Cuts share
out the compute, or the weights, evenly by the devices' speed. The plans prove nothing.

    layers of 2, 1, 1, 2 s on two equal devices: half of 6 s is reached after the second layer
    so the stages are (2, 1) and (1, 2)
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...schema.pipeline import PipelineProblem
from .bottleneck import objective
from .cuts import Floats, own_order
from .placements import Ints, Moves, PlacementSpace, Seats, chain, seat
from .stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement on named devices, with the costs it was found under."""

    costs: StageCosts
    seats: Seats

    @property
    def seconds(self) -> float:
        """The slowest stage or boundary, in seconds per input."""
        return objective(self.costs, self.seats.placed)


def at_once(problem: PipelineProblem, tables: list[StageCosts]) -> list[Candidate]:
    """List the plans that fit the memory and are what is asked; there may be none."""
    nothing = PlacementSpace((), Moves(*np.zeros((8, 0), np.int64)), tables[0].bandwidths)
    positions = in_one_line(problem, tables[0])
    found = []
    for stages in _stages(problem, len(positions) - 1):
        moves = chain(problem, stages)
        for costs in tables:
            for curve in (costs.compute_seconds.mean(axis=0), costs.cuts.weight_bytes):
                cuts = even_cuts(problem, curve[positions], stages)
                at = [int(positions[cut]) for cut in cuts]
                placed = list(zip(at, at[1:], moves, strict=False))
                if all(costs.lack_bytes(*stage) <= 0 for stage in placed):
                    found.append(Candidate(costs, seat(problem, nothing, placed)))
    return found


def in_one_line(problem: PipelineProblem, costs: StageCosts) -> Ints:
    """Cuts in one line, the first and the last among them, between any two of which a stage may be.

    Those two alone where the layers' own order is not known to give any other.
    """
    cuts = costs.cuts
    if cuts.before is None and (cuts.split_bytes is None or problem.traits.flushes):
        return np.arange(cuts.size)
    line = own_order(problem, cuts)
    if line is None:
        return np.array([0, cuts.size - 1])
    number = {inside: cut for cut, inside in enumerate(cuts.layer_sets)}
    return np.array([number[inside] for inside in line.layer_sets])


def _stages(problem: PipelineProblem, most_stages: int) -> Iterator[list[tuple[int, int]]]:
    """(pool, replicas) of each stage: of one pool alone, or one device each over all pools."""
    sizes = [pool.num_devices for pool in problem.pools]
    limit = min(most_stages, problem.stage_limit or most_stages)
    shapes = [
        [(pool, replicas)] * count
        for pool, size in enumerate(sizes)
        for replicas in _powers(size if problem.replication else 1)
        for count in _powers(size // replicas, problem.num_stages)
        if problem.may_replicate(replicas)
    ]
    everywhere = [(pool, 1) for pool, size in enumerate(sizes) for _ in range(size)]
    shapes += [everywhere[:count] for count in _powers(len(everywhere), problem.num_stages)]
    for stages in shapes:
        used = sum(replicas for _, replicas in stages)
        is_asked = problem.num_stages in (None, len(stages))
        is_whole = problem.workers == "at_most" or used == problem.num_devices
        if len(stages) <= limit and used <= problem.most_workers and is_asked and is_whole:
            yield stages


def _powers(most: int, also: int | None = None) -> list[int]:
    """1, 2, 4, ... and ``most`` itself, and ``also`` if it is no more."""
    found = {most} if most else set()
    found |= {1 << bit for bit in range(most.bit_length()) if 1 << bit <= most}
    return sorted(found | ({also} if also is not None and also <= most else set()))


def even_cuts(problem: PipelineProblem, curve: Floats, stages: list[tuple[int, int]]) -> list[int]:
    """Places on an ascending curve that share it out by the stages' speed, all different."""
    seconds = [sum(pool.forward_seconds) + sum(pool.backward_seconds) for pool in problem.pools]
    speed = np.array([replicas / max(seconds[pool], 1e-300) for pool, replicas in stages])
    shares = np.cumsum(speed / speed.sum())[:-1]
    found = np.searchsorted(curve, curve[0] + shares * (curve[-1] - curve[0]))
    last = len(curve) - 1
    cuts = [0]
    for index, cut in enumerate(found.tolist(), start=1):
        cuts.append(min(max(cut, cuts[-1] + 1), last - (len(stages) - index)))
    return [*cuts, last]
