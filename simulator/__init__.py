"""A cluster in virtual time: traces, scheduling mechanisms, metrics.

Pure and deterministic: the same jobs, seed and options give the same result to the last digit.
Mechanisms (``rounds``, ``fair_share``, ``proposals``) are separate from policies.
"""

from typing import TYPE_CHECKING

from ..schema.lazy import lazy_names

if TYPE_CHECKING:
    from ..mechanisms.allocators.named import allocator_named
    from ..mechanisms.allocators.shares import Allocator, Shares
    from ..mechanisms.cluster.layout import Layout
    from ..mechanisms.cluster.pool import Pool
    from .cases import SCHEDULERS, Case, report, run_case, sweep
    from .cluster.failures import FailureOptions
    from .events.fair_share import FairShareOptions, simulate_fair_share
    from .events.proposals import ProposalOptions, simulate_proposals
    from .metrics import summarise
    from .mixes import split_throughput
    from .outcomes import Simulation
    from .rounds.options import RoundOptions
    from .rounds.simulate import simulate_rounds
    from .traces.draws import TraceOptions, draw_jobs

_WHERE = {
    "allocator_named": "..mechanisms.allocators.named",
    "Allocator": "..mechanisms.allocators.shares",
    "Shares": "..mechanisms.allocators.shares",
    "Layout": "..mechanisms.cluster.layout",
    "Pool": "..mechanisms.cluster.pool",
    "SCHEDULERS": ".cases",
    "Case": ".cases",
    "report": ".cases",
    "run_case": ".cases",
    "sweep": ".cases",
    "FailureOptions": ".cluster.failures",
    "FairShareOptions": ".events.fair_share",
    "simulate_fair_share": ".events.fair_share",
    "ProposalOptions": ".events.proposals",
    "simulate_proposals": ".events.proposals",
    "summarise": ".metrics",
    "split_throughput": ".mixes",
    "Simulation": ".outcomes",
    "RoundOptions": ".rounds.options",
    "simulate_rounds": ".rounds.simulate",
    "TraceOptions": ".traces.draws",
    "draw_jobs": ".traces.draws",
}

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

__getattr__, __dir__ = lazy_names(globals(), _WHERE)
