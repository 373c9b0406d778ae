"""Plans of three dimensions: against Sailor's planner, and predictions against its measured runs.

Both use Sailor's published inputs for OPT-350M (tests/data). Plans are judged by Sailor's own rule
of costs, which the checker counts as its simulator does. Of the 15 measured runs (GH200 nodes of 4)
the first two predictions use the profiles alone; the third scales its terms (passes with the
update, messages, all-reduce) by three factors fitted on the other 14 runs.
"""

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hetflow.checks.parallel import check, counted_memory, counted_step
from hetflow.importers.sailor import read_problem
from hetflow.schema.parallel import ParallelPlan, ParallelProblem
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.data import sailor_plans
from hetflow.tests.data.reference import planners

MODEL, BATCH = "OPT-350", 1024
POOLS = (  # devices, Sailor's plan and the best that an enumeration found, in steps per second
    ({"A100-40": 32}, 0.12511, 0.12971),
    ({"A100-40": 8, "V100-16": 8}, 0.043496, 0.043496),
    ({"A100-40": 32, "V100-16": 96}, 0.16996, 0.17237),
)


def against_sailor() -> list[dict[str, Any]]:
    """Solve each pool under Sailor's rule."""
    rows = []
    for pool, sailor, known in POOLS:
        problem = read_problem(planners() / "sailor", MODEL, pool, global_batch_size=BATCH)
        start = time.process_time()
        plan = solve(problem)
        seconds = time.process_time() - start
        faults = check(plan, problem)
        if faults:
            raise SystemExit(f"the plan fails its check: {'; '.join(faults)}")
        rows.append(
            {
                "pool": ",".join(f"{n}x{name}" for name, n in pool.items()),
                "sailor_steps_per_second": sailor,
                "best_known_steps_per_second": known,
                "hetflow_steps_per_second": 1 / plan.predicted.step_seconds,
                "gap": plan.proof.gap,
                "cpu_seconds": seconds,
            }
        )
        print(
            f"{rows[-1]['pool']}: Sailor {sailor}, best known {known}, hetflow "
            f"{1 / plan.predicted.step_seconds:.5f} steps/s (gap {100 * (plan.proof.gap or 0):.0f} "
            f"%, {seconds:.2f} CPU s)"
        )
    return rows


@dataclass(frozen=True)
class MeasuredRun:
    """One of Sailor's runs: the plan, what was measured, and the terms of the prediction."""

    name: str
    plan: ParallelPlan
    problem: ParallelProblem
    measured_seconds: float
    measured_memory_bytes: float

    @property
    def terms(self) -> tuple[float, float, float]:
        """Passes with the update, messages and the all-reduce by hetflow's rule, seconds."""
        whole = counted_step(self.plan, self.problem)
        no_links = _without_links(self.problem)
        passes = counted_step(self.plan, no_links)
        one = replace(self.problem, output_bytes=(0,) * len(self.problem.layers))
        reduced = counted_step(self.plan, one) - passes
        return passes, whole - passes - reduced, reduced


def _without_links(problem: ParallelProblem) -> ParallelProblem:
    """The same with nothing to send or to reduce."""
    sizes = tuple(replace(size, weight_bytes=(0,) * len(problem.layers)) for size in problem.sizes)
    return replace(problem, output_bytes=(0,) * len(problem.layers), sizes=sizes)


def measured_runs() -> list[MeasuredRun]:
    """All 15."""
    runs = []
    for path in sorted((planners() / "sailor" / "validation_gh200_opt350").glob("*/*.json")):
        run = json.loads(path.read_text())
        problem = read_problem(
            planners() / "sailor",
            MODEL,
            {"GH-96": 4 * run["N"]},
            global_batch_size=run["gbs"],
            cost_rule="hetflow",
        )
        runs.append(
            MeasuredRun(path.stem, _plan_of(run), problem, run["real"], float(run["max_mem"]))
        )
    return runs


def _plan_of(run: dict[str, Any]) -> ParallelPlan:
    pipeline = run["pipeline_list"][0]
    return sailor_plans.plan_of(
        MODEL,
        pipeline["layers_per_stage"],
        pipeline["tmp_per_stage"],
        global_batch_size=run["gbs"],
        microbatch_size=run["mbs"],
        data_parallel_size=pipeline["dp"][0],
    )


def against_measurements() -> dict[str, Any]:
    """Errors of time and memory, each run's and the mean of their absolute values."""
    runs = measured_runs()
    measured = np.array([run.measured_seconds for run in runs])
    sailor = [
        counted_step(run.plan, replace(run.problem, cost_rule="sailor")) / run.measured_seconds - 1
        for run in runs
    ]
    terms = np.array([run.terms for run in runs])
    relative = terms / measured[:, None]
    fitted = []
    for left_out in range(len(runs)):
        others = [i for i in range(len(runs)) if i != left_out]
        factors = np.linalg.lstsq(relative[others], np.ones(len(others)), rcond=None)[0]
        fitted.append(float(relative[left_out] @ factors) - 1)
    memory = [
        max(max(counted_memory(r.plan, r.problem, i)) for i in range(len(r.plan.stages)))
        / r.measured_memory_bytes
        - 1
        for r in runs
    ]
    errors = {
        "sailor_rule": sailor,
        "hetflow_rule": [float(each) for each in terms.sum(axis=1) / measured - 1],
        "hetflow_fitted_leave_one_out": fitted,
        "memory": memory,
    }
    for name, found in errors.items():
        size = np.abs(found)
        print(f"{name}: mean {100 * size.mean():.1f} %, largest {100 * size.max():.1f} %")
    return {"runs": [run.name for run in runs], **errors}


def main() -> None:
    """Print both; ``--json FILE`` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = {"against_sailor": against_sailor(), "against_measurements": against_measurements()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
