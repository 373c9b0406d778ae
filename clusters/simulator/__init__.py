"""A cluster in virtual time: traces, scheduling mechanisms, metrics.

Pure and deterministic: the same jobs, seed and options give the same result to the last digit.
Mechanisms (``rounds``, ``elastic``, ``easyscale``) are separate from policies.
"""
