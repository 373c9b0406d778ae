"""One run of Gavel's own simulator, in a Python that has what it imports (cvxpy, ECOS).

    python published_simulator.py GAVEL/scheduler POLICY TRACE V100S:P100S:K80S THROUGHPUTS [--log]

Prints a line of JSON: CPU seconds of ``simulate`` (solver included, imports and files read before),
those of its allocations alone, and the results. Its log, a line or two a job and round, goes where
standard error goes with ``--log`` and is switched off otherwise.
"""

import contextlib
import json
import logging
import os
import sys
import time


def main() -> None:
    folder, policy_name, trace, cluster, throughputs = sys.argv[1:6]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, folder)
    import scheduler
    import utils

    if "--log" not in sys.argv[6:]:
        logging.disable(logging.CRITICAL)
    jobs, arrivals = utils.parse_trace(trace)
    policy = utils.get_policy(policy_name, solver="ECOS", seed=0)
    simulator = scheduler.Scheduler(
        policy, throughputs_file=throughputs, simulate=True, seed=0, time_per_iteration=360
    )
    solving = 0.0
    allocate = simulator._compute_allocation

    def timed(*given: object) -> object:
        nonlocal solving
        start = time.process_time()
        try:
            return allocate(*given)
        finally:
            solving += time.process_time() - start

    simulator._compute_allocation = timed
    numbers = dict(zip(("v100", "p100", "k80"), map(int, cluster.split(":")), strict=True))
    start = time.process_time()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        simulator.simulate(numbers, arrivals, jobs)
        seconds = time.process_time() - start
        average = simulator.get_average_jct()
    found = {
        "cpu_seconds": seconds,
        "allocation_cpu_seconds": solving,
        "average_jct_seconds": float(average),
        "makespan_seconds": float(simulator.get_current_timestamp()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
