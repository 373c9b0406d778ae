"""The quantities of an allocation problem by definition, for the judges of policies.

Each function follows the thesis's formula for a single job. Nothing is shared with the solvers.
Tables hold what many jobs or many calls have in common, so a thousand jobs are checked in a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import fsum, inf

import numpy as np
from numpy.typing import NDArray

from ...schema.jobs import Allocation, AllocationProblem, Job

Floats = NDArray[np.float64]
Kind = tuple[str, int]
"""Model and scale factor: jobs of one kind have the same throughputs."""

_APART, _TOGETHER = "/unconsolidated", "/consolidated"


@dataclass(frozen=True)
class Pool:
    """An allocation problem, accessed one job and one column at a time.

    ``is_flat`` gives each job one throughput for all columns, as heterogeneity-agnostic policies
    see it. ``is_cheapest`` leaves a job only the columns with its most steps per dollar.
    """

    problem: AllocationProblem
    is_flat: bool = False
    is_cheapest: bool = False

    def flat(self) -> "Pool":
        """Return the pool as a heterogeneity-agnostic policy sees it."""
        return replace(self, is_flat=True)

    def cheapest(self) -> "Pool":
        """Return the pool with each job limited to its cheapest columns (thesis 6.4.2)."""
        return replace(self, is_cheapest=True)

    @cached_property
    def _all_jobs(self) -> dict[str, Job]:
        return {job.id: job for job in self.problem.jobs.jobs}

    @cached_property
    def jobs(self) -> dict[str, Job]:
        """Jobs that fit the pool, by id, in order of arrival."""
        return {name: job for name, job in self._all_jobs.items() if self._fits(name)}

    @cached_property
    def misfits(self) -> set[str]:
        """Ids of the jobs that do not fit the pool even if it is empty."""
        return self._all_jobs.keys() - self.jobs.keys()

    def _fits(self, name: str) -> bool:
        return any(rate > 0 for rate in self._true_rates[self._kinds[name]].values())

    @cached_property
    def _kinds(self) -> dict[str, Kind]:
        return {name: (job.model, job.scale_factor) for name, job in self._all_jobs.items()}

    @cached_property
    def _mixes(self) -> dict[str, dict[str, int]]:
        mixes = (mix.devices for mix in self.problem.throughputs.mixes)
        return {
            "+".join(f"{number}x{name}" for name, number in devices.items()): devices
            for devices in mixes
            if devices.keys() <= self.problem.num_devices.keys()
        }

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: device types, unconsolidated types and mixes."""
        types = tuple(self.problem.num_devices)
        apart = tuple(name + _APART for name in types) if self._offers_both else ()
        return (*types, *apart, *self._mixes)

    @property
    def _offers_both(self) -> bool:
        return self.problem.placement == "mixed"

    @cached_property
    def capacity(self) -> dict[str, int]:
        """Number of devices of each resource."""
        limits = self.problem.consolidated_devices if self._offers_both else {}
        together = {name + _TOGETHER: number for name, number in limits.items()}
        return {**self.problem.num_devices, **together}

    @cached_property
    def _entries(self) -> dict[tuple[str, int], tuple[dict[str, float], dict[str, float]]]:
        return {
            (e.model, e.scale_factor): (
                e.steps_per_second, e.unconsolidated_steps_per_second or {},
            )
            for e in self.problem.throughputs.models
        }  # fmt: skip

    @cached_property
    def _mix_rates(self) -> dict[tuple[str, int, str], float]:
        return {
            (m.model, m.scale_factor, "+".join(f"{n}x{d}" for d, n in m.devices.items())): (
                m.steps_per_second
            )
            for m in self.problem.throughputs.mixes
        }

    def holds(self, name: str, column: str) -> dict[str, float]:
        """Return the devices of each resource that a job holds while it runs on a column."""
        return self._held[self._all_jobs[name].scale_factor][column]

    @cached_property
    def _held(self) -> dict[int, dict[str, dict[str, float]]]:
        scales = {job.scale_factor for job in self.problem.jobs.jobs}
        return {
            scale: {column: self._held_on(scale, column) for column in self.columns}
            for scale in scales
        }

    def _held_on(self, scale_factor: int, column: str) -> dict[str, float]:
        if column in self._mixes:
            return {device: float(number) for device, number in self._mixes[column].items()}
        scale = float(scale_factor)
        if column.endswith(_APART):
            return {column.removesuffix(_APART): scale}
        together = {column + _TOGETHER} & self.capacity.keys()
        return dict.fromkeys([column, *together], scale)

    def true_rate(self, name: str, column: str) -> float:
        """Return T_mj in steps per second; 0 where the job does not run or does not fit."""
        return self._true_rates[self._kinds[name]][column]

    @cached_property
    def _true_rates(self) -> dict[Kind, dict[str, float]]:
        return {
            kind: {column: self._true_rate(kind, column) for column in self.columns}
            for kind in set(self._kinds.values())
        }

    def _true_rate(self, kind: Kind, column: str) -> float:
        _, scale_factor = kind
        held = self._held[scale_factor][column]
        if any(number > self.capacity[r] for r, number in held.items()):
            return 0.0
        if column in self._mixes:
            return self._mix_rates.get((*kind, column), 0.0)
        alone, apart = self._entries.get(kind, ({}, {}))
        if column.endswith(_APART):
            device = column.removesuffix(_APART)
            if scale_factor == 1:  # always consolidated, so no limit applies
                return alone.get(device, 0.0) if device + _TOGETHER in self.capacity else 0.0
            return apart.get(device, 0.0)
        only_apart = self.problem.placement == "unconsolidated" and scale_factor > 1
        return (apart if only_apart else alone).get(column, 0.0)

    def rate(self, name: str, column: str) -> float:
        """Return T_mj in steps per second as the policy sees it (flat, cheapest or true)."""
        true = self.true_rate(name, column)
        seen = self.equal(name) if self.is_flat and true > 0 else true
        return 0.0 if self.is_cheapest and column not in self._cheapest[name] else seen

    @cached_property
    def rates(self) -> Floats:
        """``rate`` of every job and column [jobs, columns]."""
        return np.array([[self.rate(name, c) for c in self.columns] for name in self.jobs])

    def held(self, resource: str) -> Floats:
        """Devices of a resource that each job holds on each column [jobs, columns]."""
        rows = {
            scale: [held[column].get(resource, 0.0) for column in self.columns]
            for scale, held in self._held.items()
        }
        return np.array([rows[job.scale_factor] for job in self.jobs.values()])

    def rents(self, prices: Mapping[str, float]) -> Floats:
        """What a job's whole time on a column costs at prices of resources [jobs, columns]."""
        rows = {
            scale: [
                fsum(number * prices.get(r, 0.0) for r, number in held[column].items())
                for column in self.columns
            ]
            for scale, held in self._held.items()
        }
        return np.array([rows[job.scale_factor] for job in self.jobs.values()])

    @cached_property
    def _cheapest(self) -> dict[str, set[str]]:
        open_ = replace(self, is_cheapest=False)
        answer = {}
        for name in self.jobs:
            each = {c: open_.rate(name, c) / self.dollars(name, c) for c in self.columns}
            most = max(each.values())
            answer[name] = {c for c, steps in each.items() if steps >= most * (1 - 1e-12)}
        return answer

    def pair_rates(self, jobs: tuple[str, str], column: str) -> tuple[float, float]:
        """Return two jobs' steps per second on the same devices; (0, 0) if they cannot share."""
        first, second = (self.jobs[name] for name in jobs)
        key = (first.model, second.model, first.scale_factor)
        if first.scale_factor != second.scale_factor or key not in self._pairs:
            return 0.0, 0.0
        if not self.is_flat:
            return self._pairs[key].get(column, (0.0, 0.0))
        return self._flat_half(jobs, column), self._flat_half(jobs[::-1], column)

    def _flat_half(self, jobs: tuple[str, str], column: str) -> float:
        first, second = (self.jobs[name] for name in jobs)
        rates = self._pairs[first.model, second.model, first.scale_factor]
        kept = {
            c: pair[0] / self.true_rate(jobs[0], c)
            for c, pair in rates.items()
            if c in self.columns and pair[0] > 0 and self.true_rate(jobs[0], c) > 0
        }
        return fsum(kept.values()) / len(kept) * self.equal(jobs[0]) if column in kept else 0.0

    @cached_property
    def _pairs(self) -> dict[tuple[str, str, int], dict[str, tuple[float, float]]]:
        """(model, model, scale factor) -> column -> rates, if both models also run alone there."""
        table = self.problem.throughputs
        alone = {(row.model, row.scale_factor): row.steps_per_second for row in table.models}
        found: dict[tuple[str, str, int], dict[str, tuple[float, float]]] = {}
        for pair in table.pairs:
            a, b = pair.models
            runs = [alone.get((model, pair.scale_factor), {}) for model in (a, b)]
            kept = {
                c: rates
                for c, rates in pair.steps_per_second.items()
                if all(rate.get(c, 0.0) > 0 for rate in runs)
            }
            found[a, b, pair.scale_factor] = kept
            turned = {c: (second, first) for c, (first, second) in kept.items()}
            found[b, a, pair.scale_factor] = turned
        return found

    def equal(self, name: str) -> float:
        """Return throughput(m, X^equal): the same share of time on every device (thesis 5.4.1)."""
        return self._equals[self._kinds[name]]

    @cached_property
    def _equals(self) -> dict[Kind, float]:
        types = self.problem.num_devices
        total = sum(types.values())
        shared = {
            kind: fsum(rates[c] * number / total for c, number in types.items())
            for kind, rates in self._true_rates.items()
        }
        return {
            kind: value if value > 0 else max(self._true_rates[kind].values())
            for kind, value in shared.items()
        }

    def isolated(self, name: str) -> float:
        """Return throughput(m, X^isolated) (thesis 5.4.2), in steps per second."""
        # The job holds 1/n of the devices of every type, for a total time fraction of at most 1.
        types, job = self.problem.num_devices, self.jobs[name]
        shares = {c: n / len(self.jobs) / job.scale_factor for c, n in types.items()}
        room = max(fsum(shares.values()), 1.0)
        if self.is_flat:
            return self.equal(name) * min(1.0, fsum(shares.values()))
        value = fsum(self.true_rate(name, c) * share / room for c, share in shares.items())
        return value if value > 0 else self.best(name) / len(self.jobs)

    def best(self, name: str) -> float:
        """Return the job's throughput on its fastest column, alone, in steps per second."""
        return max(self.rate(name, column) for column in self.columns)

    def best_in_company(self, name: str) -> float:
        """Return the job's highest throughput on any column, alone or in a pair."""
        if not self.problem.space_sharing:
            return self.best(name)
        job = self.jobs[name]
        beside = [
            rates[0]
            for (model, _, scale), columns in self._pairs.items()
            for column, rates in columns.items()
            if (model, scale) == (job.model, job.scale_factor) and column in self.columns
        ]
        return max(self.best(name), *beside) if beside and not self.is_flat else self.best(name)

    def dollars(self, name: str, column: str) -> float:
        """Return the dollars per hour of the devices that a job holds on a column."""
        types = self.problem.num_devices
        held = {c: n for c, n in self.holds(name, column).items() if c in types}
        return fsum(number * self.problem.dollars_per_hour[c] for c, number in held.items())

    def unit_dollars(self, name: str, column: str) -> float:
        """Return c_j, the dollars per hour of one device of a column (of a mix: of all devices)."""
        scale = 1 if column in self._mixes else self.jobs[name].scale_factor
        return self.dollars(name, column) / scale


def inverse(value: float) -> float:
    """Return 1 / value, infinite if the value is not positive."""
    return 1.0 / value if value > 0 else inf


def finish_time_ratio(pool: Pool, name: str, throughput: float) -> float:
    """Return the finish-time ratio rho of thesis 5.4.2 at a throughput in steps per second."""
    job = pool.jobs[name]
    alone = job.isolated_seconds + job.steps / pool.isolated(name)
    return (job.elapsed_seconds + job.steps / max(throughput, 1e-300)) / alone


def needed_throughput(pool: Pool, name: str, rho: float) -> float:
    """Return the throughput, in steps per second, at which a job's finish-time ratio is rho."""
    job = pool.jobs[name]
    alone = job.isolated_seconds + job.steps / pool.isolated(name)
    return job.steps / max(rho * alone - job.elapsed_seconds, 1e-300)


def spent_dollars(allocation: Allocation, pool: Pool) -> float:
    """Return the dollars per hour of all devices that jobs hold, on average over time."""
    alone = [
        pool.dollars(name, column) * time
        for name, shares in allocation.x.items()
        for column, time in shares.items()
    ]
    shared = [
        pool.dollars(pair.jobs[0], column) * time
        for pair in allocation.pairs
        for column, time in pair.shares.items()
    ]
    return fsum(alone + shared)
