"""Time the batch split solvers side by side, at equal objective.

    python benchmarks/solver_batch_split.py [--quick] [--json FILE]

CPU seconds of this process and its children (CBC runs as one): the median over instances of the
median over repeats, with the least and the greatest instance. Each instance goes through the
fast search and two MILPs, each by PuLP+CBC and PuLP+HiGHS, in one run; their objectives must agree
to 1e-9. A MILP that meets its time limit counts with the time it used, as a lower bound, marked
">". Sizes at which a MILP is hopeless are run on the fast search alone.

The product's MILP has variables for each device, to be read beside the paper. The tight one counts
the devices of each type that have a share: equal devices are one variable, and its bound is close.
"""

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hetflow.planning.checks.batch_split import check
from hetflow.planning.costs.split import closing_seconds
from hetflow.schema.errors import BackendError
from hetflow.schema.plan import Plan
from hetflow.schema.problem import DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync
from hetflow.solvers.lp import Backend, Program
from hetflow.solvers.split import milp as batch_split_milp
from hetflow.solvers.split import solve as batch_split

COARSE = (32, 48, 64, 96, 128, 192, 256, 384)
FINE = (1, 2, 3, 4, 6, 8, 12, 16)
CONSTANT = Sync(num_devices=2, sync_seconds=0.03)
GROWING = Sync(num_devices=2, sync_seconds=0.03, latency_seconds=2e-5, bytes_per_second=2e9)


METHODS = {
    "fast": "fast",
    "cbc": "PuLP+CBC",
    "highs": "PuLP+HiGHS",
    "tight_cbc": "tight, CBC",
    "tight_highs": "tight, HiGHS",
}


@dataclass(frozen=True)
class Case:
    """One row: a family of random instances."""

    types: int
    devices: int
    batch: int
    sizes: tuple[int, ...]
    sync: Sync = CONSTANT
    milp: bool = False

    @property
    def name(self) -> str:
        """The row in words."""
        sync = "growing sync" if self.sync is GROWING else "constant sync"
        return (
            f"{self.types} types, {self.devices} devices, B={self.batch}, "
            f"sizes {self.sizes[0]}-{self.sizes[-1]}, {sync}"
        )


CASES = (
    Case(2, 8, 1024, COARSE, milp=True),
    Case(3, 6, 1024, COARSE, milp=True),
    Case(3, 9, 2048, COARSE, milp=True),
    Case(4, 8, 2048, COARSE, milp=True),
    Case(3, 12, 16_384, COARSE, milp=True),
    Case(3, 12, 16_384, FINE),
    Case(3, 12, 16_383, FINE),
    Case(3, 64, 16_384, COARSE),
    Case(6, 4096, 65_536, COARSE),
    Case(6, 4096, 65_536, FINE),
    Case(8, 4096, 65_536, COARSE),
    Case(8, 4096, 65_536, FINE),
    Case(8, 4096, 65_535, FINE),
    Case(8, 4096, 65_535, FINE, sync=GROWING),
)


def instance(case: Case, seed: int) -> SplitProblem:
    """Random speeds and fixed costs; everything else as the case says."""
    rng = random.Random(seed)
    devices = []
    for kind in range(case.types):
        rate, fixed = rng.uniform(200, 4000), rng.uniform(0.001, 0.01)
        devices.append(
            DeviceOption(
                device_type=f"type{kind}",
                num_devices=case.devices // case.types,
                batch_curve=tuple(
                    BatchPoint(
                        batch_size=s,
                        step_seconds=fixed + s / rate * rng.uniform(0.97, 1.03),
                        peak_memory_bytes=s,
                    )
                    for s in case.sizes
                ),
                update_seconds=0.002,
                weight_bytes=100_000_000,
                sync=case.sync,
            )
        )
    return SplitProblem(model="random", global_batch_size=case.batch, devices=tuple(devices))


def solve_tightly(problem: SplitProblem, backend: Backend, limit: float) -> tuple[str, float]:
    """Solve the tight MILP, for a pool whose synchronisation is constant.

    Returns:
        How the backend ended, and the step time in seconds that it found (infinite if none).
    """
    batch = problem.global_batch_size
    program = Program("tight_split")
    unit = batch / sum(o.num_devices * _best_rate(o) for o in problem.devices)
    longest = program.variable("compute")
    samples, takes = [], []
    for kind, option in enumerate(problem.devices):
        counts = []
        for share, seconds in _shares(option, batch).items():
            count = program.variable(f"n_{kind}_{share}", high=option.num_devices, integer=True)
            taken = program.variable(f"y_{kind}_{share}", high=1, integer=True)
            program.require(count <= option.num_devices * taken)
            program.require(longest >= seconds / unit * taken)
            counts.append((seconds / unit, count))
            samples.append((share, count))
            takes.append((count.name, seconds))
        program.require(program.total([(1, one) for _, one in counts]) <= option.num_devices)
        # The slowest device of a type is no faster than their mean.
        program.require(option.num_devices * longest >= program.total(counts))
    program.require(program.total(samples) == batch)
    solved = program.solve(program.total([(1, longest)]), backend, limit)
    # By the integers, because the objective is right to the backend's tolerance only.
    found = max((s for name, s in takes if round(solved.values.get(name, 0))), default=float("inf"))
    sync = problem.devices[0].sync
    assert sync is not None
    return solved.termination, found + sync.sync_seconds + closing_seconds(problem.devices[0])


def _best_rate(option: DeviceOption) -> float:
    return max(point.batch_size / point.step_seconds for point in option.batch_curve)


def _shares(option: DeviceOption, batch: int) -> dict[int, float]:
    """The samples that a device can have -> its least seconds for them.

    None takes longer than a device's whole share at an even split over this type alone.
    """
    longest = 2 * batch / option.num_devices / _best_rate(option)
    shares: dict[int, float] = {}
    for point in option.batch_curve:
        for passes in range(1, batch // point.batch_size + 1):
            seconds = passes * point.step_seconds
            share = passes * point.batch_size
            if seconds <= longest and seconds < shares.get(share, float("inf")):
                shares[share] = seconds
    return shares


def cpu_seconds() -> float:
    """CPU time of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def timed(call: Callable[[], Plan], repeats: int) -> tuple[float, Plan | None]:
    """The median CPU seconds over repeats, and the answer; None where a backend found none."""
    times, plan = [], None
    for _ in range(repeats):
        start = cpu_seconds()
        try:
            plan = call()
        except BackendError:
            plan = None
        times.append(cpu_seconds() - start)
    return statistics.median(times), plan


def row(case: Case, seeds: int, repeats: int, limit: float) -> dict[str, object]:
    """Run one case."""
    times: dict[str, list[float]] = {"fast": []}
    stopped: dict[str, int] = {}
    for seed in range(seeds):
        problem = instance(case, seed)
        batch_split.solve(problem)  # imports and caches are not the question
        seconds, best = timed(lambda p=problem: batch_split.solve(p), repeats)
        assert best is not None
        assert check(best, problem) == []
        times["fast"].append(seconds)
        for backend in ("cbc", "highs") if case.milp else ():
            seconds, plan = timed(
                lambda p=problem, b=backend: batch_split_milp.solve(p, b, limit), 1
            )
            times.setdefault(backend, []).append(seconds)
            if plan is None or plan.proof.termination != "optimal":
                stopped[backend] = stopped.get(backend, 0) + 1
            elif abs(plan.proof.objective / best.proof.objective - 1) > 1e-9:
                raise SystemExit(f"{case.name}, seed {seed}: {backend} disagrees")
            start, tight = cpu_seconds(), f"tight_{backend}"
            ended, step = solve_tightly(problem, backend, limit)
            times.setdefault(tight, []).append(cpu_seconds() - start)
            if ended != "optimal":
                stopped[tight] = stopped.get(tight, 0) + 1
            elif abs(step / best.proof.objective - 1) > 1e-9:
                raise SystemExit(f"{case.name}, seed {seed}: {tight} disagrees")
    return summary(case, times, stopped)


def summary(
    case: Case, times: dict[str, list[float]], stopped: dict[str, int]
) -> dict[str, object]:
    """Medians, ranges and ratios (the median over instances of MILP time / fast time)."""
    found: dict[str, object] = {"case": case.name, **asdict(case), "stopped_by_limit": stopped}
    for method, seconds in times.items():
        found[method] = {
            "median_cpu_seconds": statistics.median(seconds),
            "least": min(seconds),
            "greatest": max(seconds),
        }
        if method != "fast":
            ratios = [slow / fast for slow, fast in zip(seconds, times["fast"], strict=True)]
            found[f"{method}_over_fast"] = statistics.median(ratios)
    return found


def line(found: dict[str, object]) -> str:
    """One row as text, in milliseconds."""
    cells = [f"{found['case']:58}"]
    for method in METHODS:
        numbers = found.get(method)
        if not isinstance(numbers, dict):
            cells.append(f"{'-':>24} {'':>8}")
            continue
        mark = ">" if found["stopped_by_limit"].get(method) else ""  # type: ignore[attr-defined]
        middle, least, most = (1e3 * value for value in numbers.values())
        cells.append(f"{f'{mark}{middle:.1f} ({least:.1f}-{most:.1f})':>24}")
        factor = found.get(f"{method}_over_fast")
        cells.append(f"{'' if factor is None else f'{mark}{factor:.0f}x':>8}")
    return " ".join(cells)


def main() -> None:
    """Run the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three instances, short limits")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    asked = parser.parse_args()
    seeds, repeats, limit = (3, 3, 3.0) if asked.quick else (5, 5, 10.0)
    cases = [case for case in CASES if not (asked.quick and case.milp and case.batch > 2048)]
    print("CPU milliseconds: median over instances (least-greatest), and ratio to the fast search")
    print(f"{'':58}", *(f"{name:>24} {'':>8}" for name in METHODS.values()), flush=True)
    rows = []
    for case in cases:
        rows.append(row(case, seeds, repeats, limit))
        print(line(rows[-1]), flush=True)
    if asked.json:
        facts = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "command": " ".join(["python", *sys.argv]),
            "instances": seeds,
            "repeats_of_fast": repeats,
            "milp_time_limit_seconds": limit,
        }
        asked.json.write_text(json.dumps({"setting": facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
