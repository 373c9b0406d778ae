"""Heterogeneity-agnostic LAS: a flat throughput matrix leaves few classes of jobs."""

from collections import Counter

import numpy as np

from ..schema.errors import ProblemError
from ..solvers.allocation.engine import solve_alone
from ..solvers.allocation.program import Program
from .active import Active
from .priorities import Floats
from .shares import Shares

Key = tuple[float, int, bytes]


class FlatLas:
    """LAS that is blind to device types, over classes of jobs that it cannot tell apart.

    With one rate on every type a job's row is ``sum_j X_mj >= z w_m / s_m``, so jobs of one weight,
    scale factor and set of types are alike whatever their models. Of several optima: the analytic
    centre of the optimal face, which depends on how many jobs each class has and on nothing else.
    Where the jobs that run anywhere fill the pool it is known: every job gets the same part
    of each type, X_mj = C_j / (N s_m). Elsewhere the interior point method finds it, once for
    each tuple of counts.
    """

    agnostic = True
    shares_space = False

    def __init__(self, *, weighted: bool = False, blind: bool = False) -> None:
        """Start with nothing solved.

        Args:
            weighted: Whether priority weights count.
            blind: Whether types that cannot run a job count as if they did, where it fits.
        """
        self.name = "las_weighted" if weighted else "las"
        self.weighted, self.blind = weighted, blind
        self._solved: dict[tuple[tuple[Key, int], ...], dict[Key, Floats]] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Count the classes present and give each job its class's share; O(jobs).

        Raises:
            ProblemError: The pool has mixes of device types.
        """
        if active.pool.uses_mixes:
            raise ProblemError("agnostic LAS knows device types only; mixes need `las`")
        capacity, number = active.pool.capacity, len(active)
        runs = active.scale <= capacity[:, None] if self.blind else active.rate > 0
        filled = number * active.scale.min() >= capacity.sum()
        if filled and not self.weighted and runs.all():
            return Shares(capacity[:, None] / (number * active.scale))
        weight = active.weight if self.weighted else np.ones(number)
        keys: list[Key] = [
            (w, s, mask.tobytes())
            for w, s, mask in zip(weight.tolist(), active.scale.tolist(), runs.T, strict=True)
        ]
        counts = Counter(keys)
        state = tuple(sorted(counts.items()))
        if state not in self._solved:
            self._solved[state] = self._centre(counts, capacity.astype(float))
        found = self._solved[state]
        return Shares(np.array([found[key] for key in keys]).T)

    def _centre(self, counts: Counter[Key], capacity: Floats) -> dict[Key, Floats]:
        """Time fractions [types] of a job of each class; O(classes x types) an iteration."""
        scale = np.array([float(s) for _, s, _ in counts])
        rate = np.array([np.frombuffer(mask, dtype=bool) for _, _, mask in counts]).astype(float)
        level = np.array([w for w, _, _ in counts]) / scale
        if self.blind:  # throughput(m, X^equal) at rate 1 is the part of the pool that fits
            level = level * (rate @ capacity) / capacity.sum()
        found = solve_alone(
            Program(
                count=np.array([float(number) for number in counts.values()]),
                rate=rate,
                usage=np.repeat(scale[:, None], len(capacity), axis=1),
                gain=np.zeros_like(rate),
                resources=np.eye(len(capacity)),
                capacity=capacity,
                level=level,
                floor=np.zeros_like(scale),
                demands=np.ones(len(scale), dtype=bool),
                level_weight=1.0,
                level_capacity=np.zeros_like(capacity),
            )
        )
        return dict(zip(counts, found.x, strict=True))
