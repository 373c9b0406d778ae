"""Rounds as Gavel's published simulator runs them, which its figures were made with."""

from collections.abc import Iterable
from dataclasses import replace

from ...clusters.mechanisms.pool import ClusterPool
from ...clusters.simulator.cases import (
    SCHEDULERS,
    Case,
    Progress,
    SimulatedScheduler,
    allocator_of,
    round_options,
    simulate_rounds,
)
from ...clusters.simulator.metrics import Simulation
from ...schema.jobs import Job
from .baselines import Gandiva


def _run(case: Case, jobs: Iterable[Job], pool: ClusterPool, told: Progress) -> Simulation:
    blind = case.agnostic and not case.space_sharing
    allocator = allocator_of(case, pool, blind=blind, warm=False)
    if isinstance(allocator, Gandiva):
        allocator = Gandiva(case.seed, sums_types=True)
    options = replace(round_options(case, allocator), convention="published", servers=None)
    return simulate_rounds(jobs, pool, allocator, options, told)


SCHEDULERS.add(
    "published-rounds",
    SimulatedScheduler(run=_run, is_in_rounds=True, knows_servers=False),
    __name__,
)
