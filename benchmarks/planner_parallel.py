"""Sailor's planner against hetflow's, on Sailor's published inputs for OPT-350M.

Plans are judged by Sailor's own rule of costs, which the checker counts as its simulator does.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from hetflow.checks.parallel import check
from hetflow.importers.sailor import read_problem
from hetflow.solvers.parallel.solve import solve
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


def main() -> None:
    """Print it; ``--json FILE`` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = {"against_sailor": against_sailor()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
