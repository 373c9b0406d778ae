"""Synchronisation, measured in the loop that trains.

A whole step of several workers that synchronise, minus the same step of the same workers at the
same time without it: what is left is the exposed wait for the others and their sums. Both kinds
alternate, so that a drift of the machine meets both; where the wait hides behind the backward pass
it costs nothing, so several sizes are measured.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from ..runtime.step_times import StepTimes
from .crew import Crew
from .rehearsal import config_of
from .timing import Timing

_NUM_NODES = 2
_LONG_SECONDS = 0.5  # a pass: larger sizes are left out
_REHEARSAL_SECONDS = 0.1
_MOST_STEPS = 25
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncInLoop:
    """Seconds of a step that synchronisation takes. ``by_size``: [sizes] the median of each."""

    timing: Timing
    by_size: dict[int, float]

    @property
    def seconds(self) -> float:
        """The median over rounds and sizes, never negative."""
        return max(0.0, self.timing.median_seconds)


def measure_sync_in_loop(
    crew: Crew,
    pass_seconds: dict[int, float],
    *,
    budget_seconds: float,
    clock: Callable[[], float],
    progress: Callable[[str, float], None] = lambda text, left: None,
) -> SyncInLoop:
    """Measure it at up to three sizes, in turns.

    Args:
        crew: The workers; all of them synchronise.
        pass_seconds: About how long a pass of each size takes, alone.
        budget_seconds: Wall time to spend; two rounds are made at least.
        clock: Wall seconds.
        progress: Told what is measured, and how many seconds there are left.

    Raises:
        ChildDied, HetflowError, MemoryError: Workers failed.
    """
    sizes = sizes_to_measure(pass_seconds)
    found: dict[int, list[float]] = {size: [] for size in sizes}
    end = clock() + budget_seconds
    for number in range(_MOST_ROUNDS):
        if number >= _FEWEST_ROUNDS and clock() >= end:
            break
        for size in sizes:
            progress(f"gradient synchronisation at {size}", max(0.0, end - clock()))
            nodes = [size] * _NUM_NODES
            wanted = _REHEARSAL_SECONDS / (_NUM_NODES * max(pass_seconds[size], 1e-6))
            steps = 1 + max(2, min(_MOST_STEPS, round(wanted)))
            apart = crew.beside(nodes, num_steps=steps)
            whole = crew.together(config_of([nodes] * crew.num_workers), num_steps=steps)
            found[size].append(_slowest(whole) - _slowest(apart))
    everything = [seconds for samples in found.values() for seconds in samples]
    return SyncInLoop(
        timing=Timing.of(everything),
        by_size={size: statistics.median(samples) for size, samples in found.items()},
    )


def sizes_to_measure(pass_seconds: dict[int, float]) -> list[int]:
    """The smallest, the largest and one between, without those whose passes are long."""
    sizes = sorted(pass_seconds)
    short = [size for size in sizes if pass_seconds[size] < _LONG_SECONDS] or sizes[:1]
    return [short[index] for index in sorted({0, len(short) // 2, len(short) - 1})]


def _slowest(workers: list[list[StepTimes]]) -> float:
    """The median step of the slowest worker, the first step of a rehearsal left out."""
    return max(statistics.median(step.ended for step in steps[1:]) for steps in workers)
