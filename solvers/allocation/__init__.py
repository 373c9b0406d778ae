"""Cluster policies: each job's part of the time on each device type (thesis chapter 5, 6.4).

``allocate`` answers a problem file; ``solve`` with an ``Instance`` is the same without records,
for callers that allocate thousands of times.
"""

from .answer import allocate, effective_throughput
from .instance import Instance, instance_of, make_instance
from .policy import Policy, all_policies, policy_named, solve
from .space_sharing.pair_estimates import fill_pairs

__all__ = [
    "Instance",
    "Policy",
    "all_policies",
    "allocate",
    "effective_throughput",
    "fill_pairs",
    "instance_of",
    "make_instance",
    "policy_named",
    "solve",
]
