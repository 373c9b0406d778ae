"""Table 2.2 of Narayanan's thesis, row by row: the plan that each stage cost chooses.

    python examples/pipedream_table_2_2/compare.py FOLDER/pipedream

The folder holds PipeDream's published profiles (msr-fiddle/pipedream, profiler/). Of the seven
models of the table, VGG-16, ResNet-50 and GNMT are among them.
"""

import argparse
from pathlib import Path

from hetflow.formats.importers.pipedream import read_graph, without_placeholders
from hetflow.planning.pipeline_problem import layers_of_graph
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.pipeline import DevicePool, PipelineProblem, TopologyLevel
from hetflow.schema.plan import Plan
from hetflow.solvers.pipeline.solve import solve

# Cluster-A: 4 V100 a server on PCIe (12e9 assumed), 10 Gbps; Cluster-B: 8 on NVLink (150e9
# assumed), 25 Gbps. The thesis gives no bandwidth inside a server.
CLUSTER_A, CLUSTER_B = (12e9, 1.25e9), (150e9, 3.125e9)
ROWS = [
    ("VGG-16", "vgg16", "4x4 (A)", (4, 4), CLUSTER_A, "15-1"),
    ("VGG-16", "vgg16", "2x8 (B)", (8, 2), CLUSTER_B, "15-1"),
    ("ResNet-50", "resnet50", "4x4 (A)", (4, 4), CLUSTER_A, "16"),
    ("ResNet-50", "resnet50", "2x8 (B)", (8, 2), CLUSTER_B, "16"),
    ("GNMT-8", "gnmt", "1x4 (A)", (4,), CLUSTER_A, "straight"),
    ("GNMT-8", "gnmt", "3x4 (A)", (4, 3), CLUSTER_A, "straight"),
    ("GNMT-8", "gnmt", "2x8 (B)", (8, 2), CLUSTER_B, "16"),
]
# Optimizers as in the thesis (2.5.1). The table has no memory limit, so no plan depends on them.
OPTIMIZERS = {"vgg16": "sgd", "resnet50": "sgd", "gnmt": "adam"}
PRICES = [("flat", "ring"), ("flat", "thesis"), ("nested", "thesis"), ("nested", "published")]


def answer(folder: Path, row: tuple, solved: str, cost: str, *, straight: bool) -> Plan:
    """The best plan of one row under one stage cost."""
    _, model, _, shape, bandwidths, _ = row
    graph = without_placeholders(read_graph((folder / f"{model}.graph.txt").read_text()))
    layers, edges, order = layers_of_graph(graph)
    pool = DevicePool(
        device_type="V100",
        levels=tuple(
            TopologyLevel(num_components=m, bytes_per_second=b)
            for m, b in zip(shape, bandwidths, strict=False)
        ),
        forward_seconds=tuple(node.forward_seconds for node in order),
        backward_seconds=tuple(node.backward_seconds for node in order),
    )
    return solve(
        PipelineProblem(
            model=model,
            layers=layers,
            edges=edges,
            pools=(pool,),
            microbatch_size=64,
            num_microbatches=16,
            optimizer=named_optimizer(OPTIMIZERS[model]),
            schedule="pipedream",
            solved=solved,
            stage_cost=cost,
            workers="exactly" if cost == "published" else "at_most",
            replication=not straight,
        )
    )


def matches(table: str, config: str) -> bool:
    """Whether a plan has the table's replicas; "straight" means no replication."""
    return set(config) <= {"1", "-"} if table == "straight" else config == table


def main() -> None:
    """Print the table as markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", type=Path, help="folder of PipeDream's *.graph.txt")
    folder = parser.parse_args().profiles
    if not any(folder.glob("*.graph.txt")):
        parser.error(f"{folder}: no *.graph.txt there; give the folder of PipeDream's profiles")
    names = [f"{cost}, {solved}" for solved, cost in PRICES]
    print("| model | servers | table 2.2 | " + " | ".join(names) + " | straight, ring |")
    print("|---" * (len(names) + 4) + "|")
    agreed = [0] * len(PRICES)
    for row in ROWS:
        cells = []
        for index, (solved, cost) in enumerate(PRICES):
            plan = answer(folder, row, solved, cost, straight=False)
            same = matches(row[5], plan.config)
            agreed[index] += same
            mark = " =" if same else ""
            cells.append(f"{plan.config}{mark} ({plan.proof.objective * 1e3:.2f} ms)")
        line = answer(folder, row, "flat", "ring", straight=True).proof.objective
        print(
            f"| {row[0]} | {row[2]} | {row[5]} | " + " | ".join(cells) + f" | {line * 1e3:.2f} ms |"
        )
    print("| rows that agree | | | " + " | ".join(f"{n} of {len(ROWS)}" for n in agreed) + " | |")


if __name__ == "__main__":
    main()
