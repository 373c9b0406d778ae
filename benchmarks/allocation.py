"""Time to an allocation: hetflow against the same models in PuLP with CBC and in cvxpy.

Jobs are drawn from a seed: 26 model types with scale factors 1, 2, 4, 8 (70, 10, 15, 5 %), a
fifth with weight 5, every job its own steps; N / 4 devices of each of three types. ``merged``
keeps the 26 types' throughputs (as in a real cluster), ``distinct`` gives every job its own.
Lengths are such that the pool, not one long job, decides the makespan. CPU seconds of one call,
model building included, on one core: the median of the repeats, least and most beside it.
``targets`` are those that the project set itself; the last lines name each one missed.

    python benchmarks/allocation.py --quick
    python benchmarks/allocation.py --json benchmarks/results/allocation.json
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from peers.allocation_models import Cbc, Cvxpy, objective

from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import Instance, make_instance, policy_named, solve

SIZES = [32, 128, 512, 2048, 8192]
POLICIES = ["las", "las_water_filling", "hierarchical", "makespan", "finish_time_fairness",
            "min_cost_slo", "fifo"]  # fmt: skip
PACKED = [policy for policy in POLICIES if policy != "fifo"]
TARGETS = {  # CPU seconds at 2,048 jobs by (policy, space sharing), and of one program at 8,192
    ("las", False): 0.02, ("las", True): 0.1, ("las_water_filling", False): 0.5,
    ("hierarchical", False): 3.0, ("makespan", False): 0.15, ("finish_time_fairness", False): 1.5,
    ("min_cost_slo", False): 0.2,
}  # fmt: skip
LARGE_TARGET = 2.0
WATER_FILLING = {"las_water_filling", "hierarchical"}
SLOW_PEERS = {*WATER_FILLING, "finish_time_fairness"}
GROWTH = 6  # of CPU seconds where jobs are 4 times as many
MOST_DISTINCT_PAIRED = 512  # its table of pairs alone has 3 x 512^2 rates
LIMIT_SECONDS = 30.0  # of CPU an answer; a series stops where its next size may take longer
WALL = 5  # wall time allowed for each second of CPU: cores may be shared


def drawn(number: int, *, distinct: bool, packed: bool, seed: int = 0) -> Instance:
    """A cluster of ``number`` jobs drawn from a seed."""
    rng = np.random.default_rng(seed)
    scales = np.array([1.0, 2.0, 4.0, 8.0])
    base = 10 ** rng.uniform(-1, 2, 26)[:, None] * np.sort(rng.uniform(1, 8, (26, 3)), axis=1)
    model = rng.integers(26, size=number)
    scale = scales[rng.choice(4, number, p=[0.7, 0.1, 0.15, 0.05])]
    kind = np.unique(model * 8 + scale.astype(int), return_inverse=True)[1].reshape(-1)
    rate = base[model] * scale[:, None] ** 0.9
    if distinct:
        rate = rate * rng.uniform(0.8, 1.25, rate.shape)
        kind = np.arange(number)
    weight = np.where(rng.random(number) < 0.2, 5.0, 1.0)
    best = rate.max(axis=1)
    seconds = 10 ** rng.uniform(4, 5, number)
    pairs = _pair_rates(rng, rate, kind, scale) if packed else None
    return make_instance(
        rate=rate,
        scale=scale,
        capacity=np.full(3, float(max(number // 4, 8))),
        columns=("k80", "p100", "v100"),
        weight=weight,
        steps=seconds * best,
        elapsed_seconds=seconds * rng.uniform(0, 0.5, number),
        isolated_seconds=seconds * rng.uniform(0, 0.5, number),
        slo_seconds=seconds * np.where(rng.random(number) < 0.5, 25.0, np.inf),
        dollars=np.array([0.135, 0.43, 0.74]),
        kind=kind,
        pair_rate=pairs,
        entity=rng.integers(6, size=number),
        entities=tuple(Entity(name=f"team{i}", weight=1.0 + i % 3) for i in range(6)),
    )  # fmt: skip


def _pair_rates(rng: Any, rate: Any, kind: Any, scale: Any) -> Any:
    kinds = int(kind.max()) + 1
    first = np.unique(kind, return_index=True)[1]
    alone, devices = rate[first], scale[first]
    kept = rng.uniform(0.3, 0.9, (kinds, kinds, 1))
    kept[np.arange(kinds), np.arange(kinds)] = 0.5
    kept = np.where((devices[:, None] == devices[None, :])[:, :, None], kept, 0.0)
    return kept * alone[:, None, :]


def cpu_seconds(call: Callable[[], float], repeats: int) -> tuple[list[float], float]:
    """CPU seconds (children included) of each repeat, and the answer."""
    taken = []
    for _ in range(repeats):
        start = _cpu()
        value = call()
        taken.append(_cpu() - start)
        if taken[-1] > 5:
            break
    return taken, value


def _within_limit(call: Callable[[], float], repeats: int) -> tuple[list[float], float] | None:
    """``cpu_seconds`` in a process of its own; None if it fails or is not done in time."""
    here, there = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        os.setsid()  # so that a solver's own processes end with it
        most = int(LIMIT_SECONDS * (repeats + 1))
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))
        warnings.simplefilter("ignore")  # "may be inaccurate": how far apart is printed
        there.send(cpu_seconds(call, repeats))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(WALL * LIMIT_SECONDS * (repeats + 1)) else None
    except EOFError:
        return None
    finally:
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _cpu() -> float:
    each = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in each)


def ours(jobs: Instance, policy: str) -> float:
    """Our objective, as the peers state it; of water filling the sum of all levels."""
    found = solve(jobs, policy_named(policy))
    if policy in WATER_FILLING:
        return float((found.throughput * jobs.scale / jobs.equal).sum())
    return 1.0 / found.objective if policy == "makespan" else found.objective


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every policy, kind of jobs and size, with its peers."""
    peers: list[Any] = [Cbc(), *([Cvxpy()] if _has_cvxpy() else [])]
    rows = []
    series = [(p, kind, False) for p in POLICIES for kind in ("merged", "distinct")]
    series += [(p, kind, True) for p in PACKED for kind in ("merged", "distinct")]
    if arguments.policies:
        series = [each for each in series if each[0] in arguments.policies]
    for policy, kind, packed in series:
        slow: set[str] = set()
        for number in arguments.sizes:
            if packed and kind == "distinct" and number > MOST_DISTINCT_PAIRED:
                break
            jobs = drawn(number, distinct=kind == "distinct", packed=packed)
            row = _row(jobs, policy, peers, slow, arguments)
            if row:
                rows.append({"policy": policy, "jobs": number, "throughputs": kind,
                             "space_sharing": packed, **row})  # fmt: skip
                print(_line(rows[-1]), flush=True)
    return rows


def _row(
    jobs: Instance,
    policy: str,
    peers: list[Any],
    slow: set[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if "hetflow" not in slow:
        taken, value = cpu_seconds(lambda: ours(jobs, policy), arguments.repeats)
        row = {**_spread("hetflow", taken), "objective": value}
        slow |= {"hetflow"} if row["hetflow"] * 8 > LIMIT_SECONDS else set()
    for peer in peers:
        if peer.name not in slow and row:
            repeats = 1 if policy in SLOW_PEERS else arguments.repeats
            measured = _within_limit(lambda call=peer: objective(call, jobs, policy), repeats)  # type: ignore[misc]
            if measured is None:
                slow |= {peer.name}
                row |= {f"{peer.name} gave up after": LIMIT_SECONDS}
                continue
            taken, value = measured
            row |= _spread(peer.name, taken)
            row[f"{peer.name} apart"] = abs(value / row["objective"] - 1)
            growth = GROWTH if jobs.pair_rate is None else GROWTH**2
            slow |= {peer.name} if row[peer.name] * growth > LIMIT_SECONDS else set()
    return row


def _spread(name: str, taken: list[float]) -> dict[str, Any]:
    return {name: statistics.median(taken), f"{name} spread": [min(taken), max(taken)]}


def _has_cvxpy() -> bool:
    try:
        import cvxpy  # noqa: F401
    except ImportError:
        return False
    return True


def _title(row: dict[str, Any]) -> str:
    shared = " packed" if row["space_sharing"] else ""
    return f"{row['policy']}{shared} ({row['throughputs']}), {row['jobs']} jobs"


def _line(row: dict[str, Any]) -> str:
    least, most = row["hetflow spread"]
    text = f"{_title(row)}: {row['hetflow'] * 1e3:.1f} ms ({least * 1e3:.1f} to {most * 1e3:.1f})"
    for name in ("pulp+cbc", "cvxpy"):
        if name in row:
            text += f"; {name} {row[name] * 1e3:.0f} ms ({row[name] / row['hetflow']:.0f}x"
            text += f", objectives {row[name + ' apart']:.0e} apart)"
        elif f"{name} gave up after" in row:
            text += f"; {name} gave no answer"
    return text


def exponents(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Slope of log CPU seconds against log jobs, from 128 jobs up, for each that answered twice."""
    answer: dict[str, dict[str, float]] = {}
    for key in sorted({(r["policy"], r["throughputs"], r["space_sharing"]) for r in rows}):
        name = f"{key[0]} ({key[1]}{', packed' if key[2] else ''})"
        for who in ("hetflow", "pulp+cbc", "cvxpy"):
            points = [
                (r["jobs"], r[who])
                for r in rows
                if (r["policy"], r["throughputs"], r["space_sharing"]) == key
                and r["jobs"] >= 128
                and who in r
            ]
            if len(points) > 1:
                sizes, seconds = np.log(np.array(points)).T
                slope = round(float(np.polyfit(sizes, seconds, 1)[0]), 2)
                answer.setdefault(name, {})[who] = slope
    return answer


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The targets that were not met, a line each."""
    lines = []
    for row in rows:
        key = (row["policy"], row["space_sharing"])
        target = TARGETS.get(key) if row["jobs"] == 2048 else None
        if row["jobs"] == 8192 and not key[1] and key[0] not in WATER_FILLING:
            target = LARGE_TARGET
        if target is not None and row["hetflow"] > target:
            lines.append(f"{_title(row)}: {row['hetflow']:.3f} s of CPU, target {target:g} s")
    return lines


def main() -> None:
    """Run, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 512 jobs, one repeat")
    parser.add_argument("--policies", nargs="*", help="only these")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    arguments.sizes = SIZES[:3] if arguments.quick else SIZES
    arguments.repeats = 1 if arguments.quick else 5
    solve(drawn(32, distinct=False, packed=True), policy_named("las"))  # imports, caches
    import pulp  # noqa: F401  (so that its import is not counted)

    start = time.perf_counter()
    rows = measure(arguments)
    slopes = exponents(rows)
    print("scaling exponents (CPU seconds ~ jobs^k):")
    for name, each in slopes.items():
        print(f"  {name}: " + ", ".join(f"{who} {slope:.2f}" for who, slope in each.items()))
    for line in missed(rows) or ["every target met (at the sizes that were run)"]:
        print("target:", line)
    if arguments.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "wall_seconds": time.perf_counter() - start,
            "cpu_seconds": rows,
            "exponents": slopes,
            "targets missed": missed(rows),
        }  # fmt: skip
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
