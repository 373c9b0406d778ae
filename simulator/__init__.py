"""A cluster in virtual time: traces, scheduling mechanisms, metrics.

Pure and deterministic: the same jobs, seed and options give the same result to the last digit.
Mechanisms (``rounds``, ``fair_share``, ``proposals``) are separate from policies.
"""

from .allocators import allocator_named
from .cases import SCHEDULERS, Case, report, run_case, sweep
from .draws import TraceOptions, draw_jobs
from .failures import FailureOptions, Layout
from .fair_share import FairShareOptions, simulate_fair_share
from .in_rounds import simulate_rounds
from .metrics import summarise
from .mixes import split_throughput
from .outcomes import Simulation
from .pool import Pool
from .proposals import ProposalOptions, simulate_proposals
from .rounds import RoundOptions
from .shares import Allocator, Shares

__all__ = [
    "SCHEDULERS",
    "Allocator",
    "Case",
    "FailureOptions",
    "FairShareOptions",
    "Layout",
    "Pool",
    "ProposalOptions",
    "RoundOptions",
    "Shares",
    "Simulation",
    "TraceOptions",
    "allocator_named",
    "draw_jobs",
    "report",
    "run_case",
    "simulate_fair_share",
    "simulate_proposals",
    "simulate_rounds",
    "split_throughput",
    "summarise",
    "sweep",
]
