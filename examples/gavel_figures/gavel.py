"""Gavel's simulated figures (thesis 5.7.3): the paper's ratio beside ours.

    python examples/gavel_figures/gavel.py simulation_throughputs.json [--seeds 3] [--jobs 8000]
        [--quick] [--only las-single|las-multiple|fifo|fairness|makespan]
    python examples/gavel_figures/gavel.py GAVEL --only stored-fifo --seeds 6

The table is Gavel's (github.com/stanford-futuredata/gavel). Cluster 36:36:36, rounds of 360 s,
averages over jobs 4,000 to 5,000 of a drawn trace. Arrivals must go on while these run, or the
queue that an overloaded policy has built up drains unseen: so --jobs 8000, or more. README.md says
what was assumed; nothing was fitted. "Published" figures are those that the notebooks in Gavel's
repository print, means over its seeds 0, 1 and 2.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hetflow.clusters.mechanisms.allocators import Allocator, Shares
from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.clusters.simulator.arrivals import DrawOptions, draw_jobs
from hetflow.clusters.simulator.cases import Case, report, run_case, simulate_rounds
from hetflow.clusters.simulator.metrics import Simulation
from hetflow.clusters.simulator.rounds import RoundOptions
from hetflow.formats.importers.gavel import read_gavel_throughputs, read_gavel_trace
from hetflow.papers.gavel.baselines import Gandiva
from hetflow.schema.errors import HetflowError

HOUR = 3600.0
TYPES = ("v100", "p100", "k80")
Baseline = Callable[[ClusterPool, int], Allocator]


class Isolated:
    """X^isolated (thesis 5.4.2): each of n jobs gets 1/n of each type, whatever the other jobs."""

    name, agnostic, shares_space, leaves_idle = "isolated", False, False, False

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Split the cluster evenly."""
        capacity = active.pool.capacity.astype(float)
        share = capacity[:, None] / len(active) / active.scale
        share = share / np.maximum(share.sum(axis=0), 1.0)
        return Shares(np.where(active.rate > 0, share, 0.0))


class GavelFifo:
    """FIFO without heterogeneity as in Gavel's code, with its faults.

    The code draws a free type at random and then uses another: the last one in its list of open
    types, with v100 first of all. A type should leave the list when all its devices are taken, but
    the drawn type leaves instead. So more jobs are on V100s than there are V100s. The rows
    ``fixfifo`` of stored results have this fixed. Two faults remain in both. Where a job has ended,
    the head of the queue leaves the queue for this time, whether it fits or not. And it must fit
    into devices that later jobs, not yet counted, may hold.

    One rule is ours: no job gets a type on which it cannot run.
    """

    agnostic, shares_space, leaves_idle = True, False, True

    def __init__(self, pool: ClusterPool, seed: int = 0, *, mended: bool = False) -> None:
        """Start without jobs.

        Args:
            pool: Its device types in the order of their names are the list of open types.
            seed: Seed of the random draws.
            mended: Use the type that was drawn.
        """
        self.name = "fifo (Gavel's code, mended)" if mended else "fifo (Gavel's code)"
        self._random, self._mended = np.random.default_rng(seed), mended
        self._order = sorted(range(len(pool.types)), key=lambda kind: pool.types[kind])
        self._type: dict[str, int] = {}

    def allocate(self, active: Active, now_seconds: float) -> Shares:
        """Keep running jobs; waiting jobs first replace ended ones, then the rest start."""
        place = {job.id: number for number, job in enumerate(active.jobs)}
        scale, runs = active.scale.tolist(), (active.rate > 0).tolist()
        free = active.pool.capacity.tolist()
        queue = sorted((id_ for id_ in place if id_ not in self._type), key=int)

        def fits(id_: str, kind: int) -> bool:
            return bool(scale[place[id_]] <= free[kind] and runs[kind][place[id_]])

        def take(id_: str, kind: int) -> None:
            self._type[id_] = kind
            free[kind] -= scale[place[id_]]

        for id_, kind in sorted(self._type.items(), key=lambda item: int(item[0])):
            if id_ in place:
                free[kind] -= scale[place[id_]]
                continue
            del self._type[id_]
            if queue and fits(head := queue.pop(0), kind):
                take(head, kind)
        open_ = [kind for kind in self._order if free[kind] > 0]
        while queue and open_:
            head = queue.pop(0)
            fitting = [number for number, kind in enumerate(open_) if fits(head, kind)]
            if not fitting:
                break
            drawn = fitting[int(self._random.integers(len(fitting)))]
            used = open_[drawn if self._mended else -1]
            if not runs[used][place[head]]:
                continue
            take(head, used)
            if free[used] == 0:
                open_.pop(drawn)
        share = np.zeros_like(active.rate)
        for id_, kind in self._type.items():
            share[kind, place[id_]] = 1.0
        return Shares(share)


def drawn(case: Case, seed: int) -> Case:
    """The case with this seed for its trace and its policy."""
    assert case.trace is not None
    return replace(case, seed=seed, trace=replace(case.trace, seed=seed))


def run(case: Case, baseline: Baseline | None = None) -> Simulation:
    """Run a case; if a baseline of this example is given, it replaces the case's policy."""
    if baseline is None:
        return run_case(case)
    assert case.trace is not None
    pool = ClusterPool(throughputs=case.throughputs, num_devices=case.num_devices)
    allocator = baseline(pool, case.seed)
    options = RoundOptions(seed=case.seed, fills_idle=not allocator.leaves_idle)
    return simulate_rounds(draw_jobs(case.trace, case.throughputs), pool, allocator, options)


def figures_of(case: Case, baseline: Baseline | None = None) -> dict[str, float]:
    """Mean JCT of the window and makespan, both in hours, and mean finish-time fairness."""
    found = report(case, run(case, baseline), "drawn").metrics
    return {
        "JCT": found.average_jct_seconds / HOUR,
        "makespan": found.makespan_seconds / HOUR,
        "FTF": found.average_finish_time_fairness,
    }


def compare(
    name: str,
    paper: str,
    slow: Case,
    fast: Case,
    seeds: int,
    figure: str = "JCT",
    baseline: Baseline | None = None,
) -> None:
    """Print baseline, ours and their ratio for each seed."""
    for seed in range(seeds):
        before = figures_of(drawn(slow, seed), baseline)[figure]
        after = figures_of(drawn(fast, seed))[figure]
        show(name, seed, figure, before, after, paper)


def show(name: str, seed: int, figure: str, before: float, after: float, paper: str) -> None:
    """Print one line of the comparison."""
    sys.stdout.write(
        f"{name:<48} seed {seed}  {figure:<8} {before:8.2f}  {after:8.2f}  "
        f"ours {before / after:.2f}x  paper {paper}\n"
    )
    sys.stdout.flush()


def las(title: str, paper: str, packed: str, base: Case, seeds: int) -> None:
    """Compare LAS with figures 5.9 and 5.10: aware, with space sharing, Gandiva's packing."""
    flat, shared = replace(base, agnostic=True), replace(base, space_sharing=True)
    for optimum in ("vertex", "centre"):
        compare(f"{title}, {optimum}", paper, flat, replace(base, optimum=optimum), seeds)
    compare(f"{title}, packed", f"last {packed}", base, shared, seeds)
    gandiva = replace(base, policy="gandiva")
    compare(f"{title}, packed, Gandiva", "2.2x", gandiva, shared, seeds)
    compare(
        f"{title}, packed, Gandiva's code", "2.2x", gandiva, shared, seeds,
        baseline=lambda _pool, seed: Gandiva(seed, sums_types=True),
    )  # fmt: skip


def fifo(single: Case, seeds: int) -> None:
    """Compare FIFO on the fastest free type, FIFO on any type, and FIFO as Gavel's code draws."""
    assert single.trace is not None
    for load, published in ((4.0, "1.45x"), (4.4, "2.65x"), (4.8, "3.82x"), (5.2, "2.70x")):
        at = replace(single, trace=replace(single.trace, jobs_per_hour=load), policy="fifo_greedy")
        title, paper = f"FIFO, continuous-single at {load:g}/h", f"2.7x (published {published})"
        compare(title, paper, replace(at, policy="fifo_any_type"), at, seeds)
        compare(f"{title}, Gavel's code", paper, at, at, seeds, baseline=GavelFifo)


def fairness(multiple: Case, seeds: int) -> None:
    """Compare with figure 5.11: JCT, and finish-time fairness in two definitions.

    The thesis divides each run by what 1/n of the cluster gives that run's own n jobs. The
    published figure divides every run by the same run, in which each job gets 1/n.
    """
    base = replace(multiple, policy="finish_time_fairness")
    title = "FTF, continuous-multiple at 2.6/h"
    for seed in range(seeds):
        cases = [drawn(replace(base, agnostic=agnostic), seed) for agnostic in (True, False)]
        runs = [run(case) for case in cases]
        found = [
            report(case, made, "drawn").metrics for case, made in zip(cases, runs, strict=True)
        ]
        alone = completions(cases[0], run(cases[0], lambda _pool, _seed: Isolated()))
        jct = [each.average_jct_seconds / HOUR for each in found]
        show(title, seed, "JCT", *jct, "3x (published 2.17x: 62.09/28.65 h; seed 0 1.90x)")
        own = [each.average_finish_time_fairness for each in found]
        show(f"{title}, own n", seed, "FTF", *own, "2.8x")
        common = [
            statistics.mean(
                seconds / alone[id_] for id_, seconds in completions(case, made).items()
            )
            for case, made in zip(cases, runs, strict=True)
        ]
        show(f"{title}, same 1/n run", seed, "FTF", *common, "2.8x")


def completions(case: Case, run: Simulation) -> dict[str, float]:
    """Seconds from arrival to completion of the window's jobs, by id."""
    arrived = sorted(run.jobs, key=lambda job: job.arrival_seconds)
    kept = arrived if case.window is None else arrived[case.window[0] : case.window[1]]
    return {job.id: job.completion_seconds for job in kept}


MAKESPANS = {  # Gavel's notebook: FIFO, Gandiva and space sharing over makespan, by jobs
    100: ("1.13x", "1.03x", "0.99x"),
    300: ("1.83x", "1.24x", "1.00x"),
    500: ("2.52x", "1.56x", "1.01x"),
    700: ("2.54x", "1.42x", "1.08x"),
}


def makespan(single: Case, seeds: int, quick: bool) -> None:
    """Compare makespans of static traces: FIFO, Gandiva's packing, and space sharing."""
    for jobs in (100,) if quick else MAKESPANS:
        static = replace(
            single,
            window=None,
            policy="makespan",
            trace=DrawOptions(kind="static-multiple", num_jobs=jobs),
        )
        over_fifo, over_gandiva, packed = MAKESPANS[jobs]
        name, paper = f"makespan, {jobs} jobs, over", f"2.5x (published {over_fifo})"
        compare(
            f"{name} FIFO on any type", paper, replace(static, policy="fifo_any_type"), static,
            seeds, "makespan",
        )  # fmt: skip
        compare(f"{name} FIFO of Gavel's code", paper, static, static, seeds, "makespan", GavelFifo)
        compare(
            f"{name} Gandiva", f"1.4x (published {over_gandiva})",
            replace(static, policy="gandiva"), static, seeds, "makespan",
        )  # fmt: skip
        compare(
            f"{name} packed", f"1.08x (published {packed})", static,
            replace(static, space_sharing=True), seeds, "makespan",
        )  # fmt: skip


def stored_fifo(folder: Path, seeds: int) -> None:
    """Print a line for each stored row of FIFO: its JCT in thousand seconds, and ours by seed.

    The rule draws types at random, and which generator the stored runs had is not known: what is
    to be seen is whether they lie among ours.

    Args:
        folder: Holds ``simulated.json``, ``traces/`` and ``throughputs/`` (tests/data/README.md).
        seeds: Number of our runs.
    """
    table = read_gavel_throughputs(folder / "throughputs" / "simulation_throughputs.json")
    for stored in json.loads((folder / "simulated.json").read_text()):
        if stored["policy"] != "fifo":
            continue
        numbers = map(int, stored["cluster"].split(":"))
        pool = ClusterPool(throughputs=table, num_devices=dict(zip(TYPES, numbers, strict=True)))
        mended = "fixfifo" in stored["options"]
        found = []
        for seed in range(seeds):
            options = RoundOptions(seed=seed, convention="published", fills_idle=False)
            jobs = read_gavel_trace(folder / "traces" / stored["trace"])
            allocator = GavelFifo(pool, seed, mended=mended)
            done = simulate_rounds(jobs, pool, allocator, options).jobs
            found.append(statistics.mean(job.completion_seconds for job in done) / 1e3)
        shown = " ".join(f"{jct:.1f}" for jct in sorted(found))
        sys.stdout.write(
            f"{stored['trace'][:12]:<12} {'mended' if mended else 'as it is':<9} "
            f"JCT {stored['avg_jct_s'] / 1e3:.1f} thousand s, ours {shown}\n"
        )
        sys.stdout.flush()


FIGURES = ("las-single", "las-multiple", "fifo", "fairness", "makespan", "stored-fifo")


def main() -> None:
    """Run the figures that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("throughputs", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=8000, help="drawn jobs of continuous traces")
    parser.add_argument("--quick", action="store_true", help="1,000 jobs, window 500 to 700")
    parser.add_argument("--only", choices=FIGURES)
    arguments = parser.parse_args()
    if arguments.only == "stored-fifo":
        stored_fifo(arguments.throughputs, arguments.seeds)
        return
    number, window = (1000, (500, 700)) if arguments.quick else (arguments.jobs, (4000, 5000))
    single = Case(
        throughputs=read_gavel_throughputs(arguments.throughputs),
        num_devices={"v100": 36, "p100": 36, "k80": 36},
        trace=DrawOptions(kind="continuous-single", num_jobs=number, jobs_per_hour=5.6),
        window=window,
    )
    assert single.trace is not None
    multiple = replace(
        single, trace=replace(single.trace, kind="continuous-multiple", jobs_per_hour=2.6)
    )
    seeds, only = arguments.seeds, arguments.only
    if only in (None, "las-single"):
        paper = "3.5x (3.31x: 95.99/28.96 h)"
        las("LAS, continuous-single at 5.6/h", paper, "19.64 h", single, seeds)
    if only in (None, "las-multiple"):
        paper = "2.2x (1.94x: 70.54/36.44 h)"
        las("LAS, continuous-multiple at 2.6/h", paper, "30.51 h", multiple, seeds)
    if only in (None, "fifo"):
        fifo(single, seeds)
    if only in (None, "fairness"):
        fairness(multiple, seeds)
    if only in (None, "makespan"):
        makespan(single, seeds, arguments.quick)


if __name__ == "__main__":
    try:
        main()
    except HetflowError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
