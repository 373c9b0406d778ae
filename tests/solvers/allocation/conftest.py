"""Shared cases, drawn problems, and an oracle: the same programs through scipy's HiGHS."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume

from hetflow.schema.jobs import (
    AllocationProblem,
    Entity,
    Job,
    Jobs,
    ModelThroughput,
    PairThroughput,
    Throughputs,
)
from hetflow.tests.data import reference


@pytest.fixture(scope="session")
def gavel_case() -> Callable[[str], dict[str, Any]]:
    """A reference case as its document."""
    cache: dict[str, dict[str, Any]] = {}

    def load(name: str) -> dict[str, Any]:
        path = reference.folder() / "gavel" / "cases" / f"{name}.json"
        if name not in cache:
            cache[name] = json.loads(path.read_text(encoding="utf-8"))
        return cache[name]

    return load


@pytest.fixture(scope="session")
def problem_of() -> Callable[..., AllocationProblem]:
    """A reference case as a problem."""

    def build(case: dict[str, Any], **options: Any) -> AllocationProblem:
        types = case["worker_types"]
        alone = {
            (job["job_type"], job["scale_factor"]): dict(zip(types, rates, strict=True))
            for job, rates in zip(case["jobs"], case["throughputs"], strict=True)
        }
        return AllocationProblem(
            jobs=Jobs(
                jobs=tuple(_job(entry) for entry in case["jobs"]),
                entities=tuple(
                    Entity(name=name, weight=float(weight))
                    for name, weight in case["entity_weights"].items()
                ),
            ),
            throughputs=Throughputs(
                models=tuple(
                    ModelThroughput(model=model, scale_factor=scale, steps_per_second=rates)
                    for (model, scale), rates in alone.items()
                ),
                pairs=tuple(_pair(key, value, types)
                            for key, value in case["pair_throughputs_by_type"].items()),
            ),
            num_devices=case["cluster_spec"],
            dollars_per_hour=case["instance_costs_per_hour"],
            **options,
        )  # fmt: skip

    return build


def _job(entry: dict[str, Any]) -> Job:
    return Job(
        id=str(entry["id"]),
        model=entry["job_type"],
        steps=float(entry["num_steps_remaining"]),
        scale_factor=entry["scale_factor"],
        priority_weight=float(entry["priority_weight"]),
        slo_seconds=entry["slo_seconds"],
        entity=entry["entity"],
        elapsed_seconds=entry["time_since_start"],
        isolated_seconds=entry["isolated_time_so_far"],
    )


def _pair(key: str, rates: list[list[float]], types: list[str]) -> PairThroughput:
    first, second, scale = key.split("|")
    both = {name: (a, b) for name, (a, b) in zip(types, rates, strict=True) if a > 0 and b > 0}
    return PairThroughput(models=(first, second), scale_factor=int(scale), steps_per_second=both)


@pytest.fixture(scope="session")
def draw() -> Callable[..., AllocationProblem]:
    """A random problem from a seed: some jobs alike, some that do not run everywhere."""

    def build(
        seed: int,
        *,
        num_jobs: int = 8,
        num_types: int = 3,
        num_models: int = 4,
        entities: tuple[Entity, ...] = (),
        slos: bool = False,
        **options: Any,
    ) -> AllocationProblem:
        rng = np.random.default_rng(seed)
        types = [f"type{j}" for j in range(num_types)]
        keys = [(f"model{k}", int(rng.choice([1, 1, 2, 4]))) for k in range(num_models)]
        rates = {key: 10 ** rng.uniform(-1, 2) * rng.uniform(1, 8, num_types) for key in keys}
        for key in keys[1:]:
            rates[key][rng.random(num_types) < 0.2] = 0.0
            rates[key][rng.integers(num_types)] += 1.0
        jobs = tuple(_drawn_job(rng, i, keys, rates, entities, slos) for i in range(num_jobs))
        return AllocationProblem(
            jobs=Jobs(jobs=jobs, entities=entities),
            throughputs=Throughputs(
                models=tuple(
                    ModelThroughput(
                        model=model,
                        scale_factor=scale,
                        steps_per_second=dict(
                            zip(types, rates[model, scale].tolist(), strict=True)
                        ),
                    )
                    for model, scale in keys
                ),
                pairs=tuple(_drawn_pairs(rng, keys, rates, types)),
            ),
            num_devices={name: int(rng.integers(4, 9)) for name in types},
            dollars_per_hour={name: float(rng.uniform(0.1, 2.0)) for name in types},
            **options,
        )

    return build


def _drawn_job(
    rng: np.random.Generator, i: int, keys: Any, rates: Any, entities: Any, slos: bool
) -> Job:
    model, scale = keys[int(rng.integers(len(keys)))]
    best = float(rates[model, scale].max())
    steps = best * float(10 ** rng.uniform(2, 4))
    return Job(
        id=f"job{i}",
        model=model,
        steps=steps,
        scale_factor=scale,
        priority_weight=float(rng.choice([1.0, 1.0, 5.0])),
        slo_seconds=steps / best * float(rng.uniform(3, 12)) if slos and i % 2 else None,
        entity=entities[int(rng.integers(len(entities)))].name if entities else None,
        elapsed_seconds=float(rng.uniform(0, 1e4)),
        isolated_seconds=float(rng.uniform(0, 1e4)),
    )  # fmt: skip


def _drawn_pairs(rng: np.random.Generator, keys: Any, rates: Any, types: list[str]) -> Any:
    for i, (first, scale) in enumerate(keys):
        for second, other in keys[i:]:
            if scale != other:
                continue
            kept = rng.uniform(0.3, 0.95, (2, len(types)))
            both = {
                name: (float(kept[0, j] * rates[first, scale][j]),
                       float(kept[1, j] * rates[second, scale][j]))
                for j, name in enumerate(types)
                if rates[first, scale][j] > 0 and rates[second, scale][j] > 0
            }  # fmt: skip
            if first == second:
                both = {name: (a, a) for name, (a, _) in both.items()}
            yield PairThroughput(models=(first, second), scale_factor=scale, steps_per_second=both)


@pytest.fixture(scope="session")
def oracle() -> type["Oracle"]:
    """The allocation polytope as explicit rows, solved by scipy: slow and plain."""
    return Oracle


class Oracle:
    """Variables: time of every job, and with space sharing of every pair, on every type; z."""

    def __init__(self, problem: AllocationProblem) -> None:
        self.problem, self.jobs = problem, problem.jobs.jobs
        self.spare = 1.0  # as if there were so many times the devices
        self.types = list(problem.num_devices)
        table = {(e.model, e.scale_factor): e.steps_per_second for e in problem.throughputs.models}
        self.columns: list[dict[int, float]] = []  # job -> rate
        self.where: list[str] = []
        for m, job in enumerate(self.jobs):
            for name in self.types:
                rate = table[job.model, job.scale_factor].get(name, 0.0)
                if rate > 0 and job.scale_factor <= problem.num_devices[name]:
                    self._add({m: rate}, name)
        if problem.space_sharing:
            self._add_pairs()

    def _add(self, rates: dict[int, float], name: str) -> None:
        self.columns.append(rates)
        self.where.append(name)

    def _add_pairs(self) -> None:
        for pair in self.problem.throughputs.pairs:
            for m, a in enumerate(self.jobs):
                for k, b in enumerate(self.jobs):
                    same = pair.models[0] == pair.models[1]
                    if (a.model, b.model) != pair.models or m == k or (same and m > k):
                        continue
                    if a.scale_factor == b.scale_factor == pair.scale_factor:
                        for name, (first, second) in pair.steps_per_second.items():
                            if a.scale_factor <= self.problem.num_devices[name]:
                                self._add({m: first, k: second}, name)

    def throughput_rows(self) -> Any:
        """throughput_m as a linear function of the columns [jobs, columns]."""
        rows = np.zeros((len(self.jobs), len(self.columns)))
        for i, rates in enumerate(self.columns):
            for m, rate in rates.items():
                rows[m, i] = rate
        return rows

    def _limits(self) -> tuple[Any, Any]:
        time = (self.throughput_rows() > 0).astype(float)
        used = np.zeros((len(self.types), len(self.columns)))
        for i, (rates, name) in enumerate(zip(self.columns, self.where, strict=True)):
            used[self.types.index(name), i] = self.jobs[next(iter(rates))].scale_factor
        devices = [self.spare * self.problem.num_devices[name] for name in self.types]
        return np.vstack((time, used)), np.concatenate((np.ones(len(self.jobs)), devices))

    def maximise(
        self, cost: Any, *, level: Any = None, floor: Any = None, z_weight: float = 0.0
    ) -> tuple[float, Any] | None:
        """max cost . x + z_weight z with throughput >= floor + level z; None if infeasible."""
        from scipy.optimize import linprog

        limits, room = self._limits()
        rows = self.throughput_rows()
        level = np.zeros(len(rows)) if level is None else level
        floor = np.zeros(len(rows)) if floor is None else floor
        unit = np.maximum(rows.max(axis=1), 1e-300)
        above = np.hstack((limits, np.zeros((len(limits), 1))))
        below = np.hstack((-rows, level[:, None])) / unit[:, None]
        found = linprog(
            -np.append(cost, z_weight),
            A_ub=np.vstack((above, below)),
            b_ub=np.concatenate((room, -floor / unit)),
            bounds=[(0, None)] * len(cost) + [(None, None) if level.any() else (0, 0)],
            method="highs",
        )
        return (-found.fun, found.x) if found.status == 0 else None

    def max_min(self, level: Any, floor: Any = None) -> tuple[float, Any] | None:
        """The largest z with throughput >= floor + level z."""
        zero = np.zeros(len(self.columns))
        return self.maximise(zero, level=level, floor=floor, z_weight=1.0)

    def levels(self, unit: Any, share_of: Callable[[Any], Any]) -> Any:
        """Max-min levels by their definition: raise all, then ask of each job alone for room.

        Args:
            unit: [jobs] what one of a level is of each job's throughput.
            share_of: From which jobs can still rise [jobs] to how fast each does [jobs].
        """
        level, active = np.zeros(len(unit)), np.ones(len(unit), dtype=bool)
        for _ in range(4 * len(unit)):
            if not active.any():
                return level
            share = share_of(active)
            rise, _ = self.max_min(unit * share, unit * level)
            level = level + max(rise, 0.0) * share
            for m in np.flatnonzero(share > 0):
                alone = np.zeros(len(unit))
                alone[m] = unit[m]
                room, _ = self.max_min(alone, unit * level * (1 - 1e-9))
                if room <= 1e-6 * (level[m] + 1e-2 * level.max()):
                    active[m] = False
        assume(False)  # the oracle's own tolerances lost the thread
        return level
