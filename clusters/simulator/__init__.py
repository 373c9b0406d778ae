"""A cluster in virtual time: traces, scheduling mechanisms, metrics.

Pure and deterministic: the same jobs, seed and options give the same result to the last digit.
Mechanisms (``rounds``, ``fair_share``, ``proposals``) are separate from policies.
"""

from typing import TYPE_CHECKING

from ...schema.lazy import lazy_names

if TYPE_CHECKING:
    from ..mechanisms.allocators.named import allocator_named
    from ..mechanisms.allocators.shares import Allocator, Shares
    from ..mechanisms.cluster.pool import ClusterPool
    from ..mechanisms.cluster.seats import DeviceLayout
    from .arrivals import DrawOptions, draw_jobs
    from .cases import SCHEDULERS, Case, report, run_case, sweep
    from .events.fair_share import FairShareOptions, simulate_fair_share
    from .events.proposals import ProposalOptions, simulate_proposals
    from .failures import FailureOptions
    from .metrics import Simulation, summarise
    from .mixes import split_throughput
    from .rounds.base import RoundOptions
    from .rounds.simulate import simulate_rounds

_NAMES = {
    "..mechanisms.allocators.named": "allocator_named",
    "..mechanisms.allocators.shares": "Allocator Shares",
    "..mechanisms.cluster.seats": "DeviceLayout",
    "..mechanisms.cluster.pool": "ClusterPool",
    ".cases": "SCHEDULERS Case report run_case sweep",
    ".failures": "FailureOptions",
    ".events.fair_share": "FairShareOptions simulate_fair_share",
    ".events.proposals": "ProposalOptions simulate_proposals",
    ".metrics": "Simulation summarise",
    ".mixes": "split_throughput",
    ".rounds.base": "RoundOptions",
    ".rounds.simulate": "simulate_rounds",
    ".arrivals": "DrawOptions draw_jobs",
}

__all__ = [
    "SCHEDULERS",
    "Allocator",
    "Case",
    "FailureOptions",
    "FairShareOptions",
    "DeviceLayout",
    "ClusterPool",
    "ProposalOptions",
    "RoundOptions",
    "Shares",
    "Simulation",
    "DrawOptions",
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

__getattr__, __dir__ = lazy_names(globals(), _NAMES)
