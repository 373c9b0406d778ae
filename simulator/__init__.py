"""A cluster in virtual time: traces, scheduling mechanisms, metrics.

Pure and deterministic: the same jobs, seed and options give the same result to the last digit.
Mechanisms (``rounds``, ``fair_share``, ``proposals``) are separate from policies.
"""

from .metrics import Metrics, summarise
from .outcomes import JobOutcome, Simulation
from .rounds import RoundOptions, simulate_rounds

__all__ = [
    "JobOutcome",
    "Metrics",
    "RoundOptions",
    "Simulation",
    "simulate_rounds",
    "summarise",
]
