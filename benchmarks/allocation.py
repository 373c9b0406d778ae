"""Time to an allocation: hetflow against the same models in PuLP with CBC and in cvxpy.

Jobs are drawn from a seed: 26 model types with scale factors 1, 2, 4, 8 (70, 10, 15, 5 %), a
fifth with weight 5, every job its own steps; N / 4 devices of each of three types. ``merged``
keeps the 26 types' throughputs (as in a real cluster), ``distinct`` gives every job its own.
CPU seconds of one call, model building included, on one core; the median of the repeats.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from peers.allocation_models import Cbc, Cvxpy, objective

from hetflow.schema.jobs import Entity
from hetflow.solvers.allocation import Instance, make_instance, policy_named, solve

SIZES = [32, 128, 512, 2048, 8192]
POLICIES = ["las_weighted", "makespan", "finish_time_fairness", "min_cost_slo", "fifo",
            "las_water_filling", "hierarchical"]  # fmt: skip
PACKED = ["las_weighted", "makespan", "finish_time_fairness", "min_cost_slo",
          "las_water_filling", "hierarchical"]  # fmt: skip
SLOW_PEERS = {"las_water_filling", "hierarchical", "finish_time_fairness"}
GROWTH = 6  # of CPU seconds where jobs are 4 times as many
LIMIT_SECONDS = (
    60.0  # for one answer; a series stops where its next size, 4 times larger, may take longer
)


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
    seconds = 10 ** rng.uniform(3, 5, number)
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


def cpu_seconds(call: Callable[[], float], repeats: int) -> tuple[float, float]:
    """Median CPU seconds (children included) and the answer."""
    taken = []
    for _ in range(repeats):
        start = _cpu()
        value = call()
        taken.append(_cpu() - start)
        if taken[-1] > 5:
            break
    return statistics.median(taken), value


def _within_limit(call: Callable[[], float], repeats: int) -> tuple[float, float] | None:
    """``cpu_seconds`` in a process of its own; None if it fails or is not done in time."""
    here, there = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        os.setsid()  # so that a solver's own processes end with it
        there.send(cpu_seconds(call, repeats))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(LIMIT_SECONDS * (repeats + 1)) else None
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
    if policy in ("las_water_filling", "hierarchical"):
        return float((found.throughput * jobs.scale / jobs.equal).sum())
    return 1.0 / found.objective if policy == "makespan" else found.objective


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every policy, kind of jobs and size, with its peers."""
    peers: list[Any] = [Cbc(), *([Cvxpy()] if _has_cvxpy() else [])]
    rows = []
    series = [(p, kind, False) for p in POLICIES for kind in ("merged", "distinct")]
    series += [(p, "merged", True) for p in PACKED]
    if arguments.policies:
        series = [each for each in series if each[0] in arguments.policies]
    for policy, kind, packed in series:
        slow: set[str] = set()
        for number in arguments.sizes:
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
        seconds, value = cpu_seconds(lambda: ours(jobs, policy), arguments.repeats)
        row = {"hetflow": seconds, "objective": value}
        slow |= {"hetflow"} if seconds * 8 > LIMIT_SECONDS else set()
    for peer in peers:
        if peer.name not in slow and row:
            repeats = 1 if policy in SLOW_PEERS else arguments.repeats
            measured = _within_limit(lambda call=peer: objective(call, jobs, policy), repeats)  # type: ignore[misc]
            if measured is None:
                slow |= {peer.name}
                row |= {f"{peer.name} gave up after": LIMIT_SECONDS}
                continue
            seconds, value = measured
            row |= {peer.name: seconds, f"{peer.name} apart": abs(value / row["objective"] - 1)}
            growth = GROWTH if jobs.pair_rate is None else GROWTH**2
            slow |= {peer.name} if seconds * growth > LIMIT_SECONDS else set()
    return row


def _has_cvxpy() -> bool:
    try:
        import cvxpy  # noqa: F401
    except ImportError:
        return False
    return True


def _line(row: dict[str, Any]) -> str:
    shared = " packed" if row["space_sharing"] else ""
    text = f"{row['policy']}{shared} ({row['throughputs']}), {row['jobs']} jobs: "
    text += f"{row['hetflow'] * 1e3:.1f} ms"
    for name in ("pulp+cbc", "cvxpy"):
        if name in row:
            text += f"; {name} {row[name] * 1e3:.0f} ms ({row[name] / row['hetflow']:.0f}x"
            text += f", objectives {row[name + ' apart']:.0e} apart)"
        elif f"{name} gave up after" in row:
            text += f"; {name} gave no answer"
    return text


def exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Slope of log CPU seconds against log jobs, from 128 jobs up."""
    answer = {}
    for key in sorted({(r["policy"], r["throughputs"], r["space_sharing"]) for r in rows}):
        points = [
            (r["jobs"], r["hetflow"])
            for r in rows
            if (r["policy"], r["throughputs"], r["space_sharing"]) == key and r["jobs"] >= 128
        ]
        if len(points) > 1:
            sizes, seconds = np.log(np.array(points)).T
            name = f"{key[0]} ({key[1]}{', packed' if key[2] else ''})"
            answer[name] = round(float(np.polyfit(sizes, seconds, 1)[0]), 2)
    return answer


def main() -> None:
    """Run, print, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 512 jobs, one repeat")
    parser.add_argument("--policies", nargs="*", help="only these")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    arguments.sizes = SIZES[:3] if arguments.quick else SIZES
    arguments.repeats = 1 if arguments.quick else 3
    solve(drawn(32, distinct=False, packed=True), policy_named("las"))  # imports, caches
    start = time.perf_counter()
    rows = measure(arguments)
    slopes = exponents(rows)
    print("scaling exponents (CPU seconds ~ jobs^k):", slopes)
    if arguments.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "wall_seconds": time.perf_counter() - start,
            "cpu_seconds": rows,
            "exponents": slopes,
        }  # fmt: skip
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
