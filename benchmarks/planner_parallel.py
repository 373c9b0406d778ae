"""Sailor's and Piper's planners against hetflow's, on their published inputs.

Plans are judged by the planner's own rule of costs, which hetflow's checkers count: Sailor's
simulator for OPT-350M, Piper's time per sample for BERT-32 and ResNet-50.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from piper_parts import check as steady_check
from piper_parts import problem as piper
from piper_parts import solve as steady

from hetflow.papers.sailor import read_problem
from hetflow.planning.checks.parallel import check
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


def against_piper() -> list[dict[str, Any]]:
    """Solve each of Piper's instances; seconds a sample in the unit of its files."""
    files = {"bert": "bert32a100.json", "resnet": "resnet.json"}
    rows = []
    for line in (planners() / "piper" / "results.jsonl").read_text().splitlines():
        answer = json.loads(line)
        problem = piper.read_problem(
            planners() / "piper" / files[answer["model"]],
            num_devices=answer["devices"],
            memory_bytes=int(answer["memory_gib"] * 2**30),
        )
        start = time.process_time()
        plan = steady.solve(problem)
        seconds = time.process_time() - start
        faults = steady_check.check(plan, problem)
        if faults:
            raise SystemExit(f"the plan fails its check: {'; '.join(faults)}")
        rows.append(
            {
                "model": answer["model"],
                "devices": answer["devices"],
                "memory_gib": answer["memory_gib"],
                "equal_split": answer.get("equi_tps"),
                "piper": answer["piper_tps"],
                "hetflow": plan.sample_seconds,
                "gap": plan.proof.gap,
                "piper_cpu_seconds": answer["piper_cpu_s"],
                "cpu_seconds": seconds,
            }
        )
        print(
            f"{answer['model']} on {answer['devices']} x {answer['memory_gib']} GiB: Piper "
            f"{answer['piper_tps']:.7g} ({answer['piper_cpu_s']:.2f} CPU s), hetflow "
            f"{plan.sample_seconds:.7g} (gap {100 * (plan.proof.gap or 0):.1f} %, "
            f"{seconds:.2f} CPU s)"
        )
    return rows


def main() -> None:
    """Print it; ``--json FILE`` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    results = {"against_sailor": against_sailor(), "against_piper": against_piper()}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
