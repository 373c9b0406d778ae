"""Solve VirtualFlow's H1, H2 and H3, and rank table 4's configurations by predicted step time.

Run ``python compare.py``; it needs nothing but the two profiles beside it.
"""

import argparse
from pathlib import Path

from hetflow.planning.checks.batch_split import check
from hetflow.planning.costs.split import predict
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.files import read_profiles
from hetflow.schema.plan import ReplicaGroup, device_group
from hetflow.schema.problem import Problem, SplitProblem
from hetflow.solvers.split.solve import solve

BATCH = 8192
POOLS = {"H1": "2xV100,2xP100", "H2": "2xV100,4xP100", "H3": "2xV100,8xP100"}
PAPER = {
    "H1": "V100 only",
    "H2": "mixed, 3072 and 512",
    "H3": "mixed, 2048 and 512: 42.3 % over V100 only, 52.4 % over P100 only",
}
# name: V100s, samples and virtual nodes of each; P100s, samples and virtual nodes of each (table 4)
TABLE_4 = {
    "V100 only": (2, 4096, 16, 0, 0, 0),
    "P100 only": (0, 0, 0, 8, 1024, 4),
    "H1a": (2, 2048, 8, 2, 2048, 8),
    "H1b": (2, 3072, 16, 2, 1024, 4),
    "H1c": (2, 3072, 32, 2, 1024, 4),
    "H2a": (2, 3072, 16, 4, 512, 2),
    "H2b": (2, 3072, 16, 4, 512, 4),
    "H2c": (2, 3072, 16, 4, 512, 8),
    "H2d": (2, 3072, 16, 4, 512, 16),
    "H3": (2, 2048, 8, 8, 512, 2),
}


def problem(pool: str) -> SplitProblem:
    """The problem of a batch of 8,192 samples on one of the paper's pools."""
    profiles = read_profiles(Path(__file__).parent)
    return split_problem(Problem(profiles, Cluster.parse(pool), BATCH))


def table_4_seconds() -> dict[str, float]:
    """Predicted step seconds of each configuration of table 4, and of each type alone."""
    everything = problem(POOLS["H3"])
    return {name: predict(everything, _groups(*row)).step_seconds for name, row in TABLE_4.items()}


def _groups(
    num_v100: int, v100: int, v100_nodes: int, num_p100: int, p100: int, p100_nodes: int
) -> tuple[ReplicaGroup, ...]:
    rows = (("V100", num_v100, v100, v100_nodes), ("P100", num_p100, p100, p100_nodes))
    return tuple(
        device_group(
            device_type=name,
            num_devices=number,
            virtual_nodes=nodes,
            virtual_node_batch_size=samples // nodes,
        )
        for name, number, samples, nodes in rows
        if number
    )


def main() -> None:
    """Print hetflow's plans and the paper's, then table 4 by predicted step time."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    alone = table_4_seconds()["V100 only"]
    for name, pool in POOLS.items():
        asked = problem(pool)
        plan = solve(asked)
        faults = check(plan, asked)
        work = ", ".join(
            f"{g.num_devices} {g.device_type} x {g.device_batch_size} "
            f"({g.virtual_nodes} x {g.virtual_node_batch_size})"
            for g in plan.groups
        )
        gain = 100 * (alone / plan.predicted.step_seconds - 1)
        print(f"{name} {pool}: {work}; {gain:+.1f} % over V100 only; {faults or 'checked'}")
        print(f"   paper: {PAPER[name]}")
    print()
    print("configuration  step seconds  against V100 only")
    for name, seconds in sorted(table_4_seconds().items(), key=lambda item: item[1]):
        print(f"{name:13}  {seconds:12.4f}  {100 * (alone / seconds - 1):+.1f} %")


if __name__ == "__main__":
    main()
