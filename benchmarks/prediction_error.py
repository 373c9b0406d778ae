"""Predicted against measured step time on emulated unlike devices, over several splits.

VirtualFlow reports 5.6 % on average (figure 14). Profiles are measured, splits are the solver's
own and uneven ones besides, every one is launched for real, and the run records are compared.

    python benchmarks/prediction_error.py            about 4 minutes
    python benchmarks/prediction_error.py --quick    three splits
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import hetflow.examples
from hetflow.planning.costs.split import predict
from hetflow.planning.split_problem import split_problem
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord
from hetflow.tests.plan_parts import whole_group, with_groups

SCRIPT = Path(hetflow.examples.__file__).with_name("train_digits.py")
PAPER_MEAN_ERROR = 0.056
# (pool, global batch, shares to force or None for the solver's own): a share is
# (device type, devices, virtual nodes, samples per virtual node).
SPLITS = [
    ("1xcpu:fast,1xcpu:slow", 256, None),
    ("1xcpu:fast,2xcpu:slow", 256, None),
    ("1xcpu:fast,1xcpu:slow", 256, [("cpu:fast", 1, 2, 64), ("cpu:slow", 1, 2, 64)]),
    ("2xcpu:fast,1xcpu:slow", 512, None),
    ("1xcpu:fast,3xcpu:slow", 384, None),
    ("1xcpu:fast,1xcpu:slow", 256, [("cpu:fast", 1, 6, 32), ("cpu:slow", 1, 2, 32)]),
    ("1xcpu:fast,2xcpu:slow", 320, [("cpu:fast", 1, 1, 128), ("cpu:slow", 2, 3, 32)]),
    ("2xcpu:slow", 128, None),
]


def hetflow_command(folder: Path, *arguments: str) -> None:
    """Run one hetflow command in a folder; its own error is shown if it fails."""
    subprocess.run(
        [sys.executable, "-m", "hetflow.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def plan_of(folder: Path, index: int) -> Path:
    """Solve one split, or force its shares, and write the plan."""
    pool, batch, shares = SPLITS[index]
    path = folder / f"plan{index}.json"
    hetflow_command(
        folder, "solve", "--profiles", "profiles", "--gpus", pool, "--batch-size", str(batch),
        "-o", str(path),
    )  # fmt: skip
    if shares is not None:
        profiles = tuple(p for p in files.read_profiles(folder / "profiles"))
        files.write(path, forced(files.read(path, Plan), profiles, pool, shares), force=True)
    return path


def forced(
    plan: Plan,
    profiles: tuple[Profile, ...],
    pool: str,
    shares: list[tuple[str, int, int, int]],
) -> Plan:
    """The same plan with other shares, predicted by the same cost model."""
    problem = split_problem(Problem(profiles, Cluster.parse(pool), plan.global_batch_size))
    groups = tuple(
        whole_group(
            device_type=name,
            num_devices=devices,
            device_batch_size=nodes * size,
            virtual_nodes=nodes,
            virtual_node_batch_size=size,
        )
        for name, devices, nodes, size in shares
    )
    proof = dataclasses.replace(
        plan.proof, termination="feasible", lower_bound=None, gap=None, method="forced"
    )
    return with_groups(plan, groups=groups, predicted=predict(problem, groups), proof=proof)


def launched(folder: Path, index: int, epochs: int) -> RunRecord:
    """Train under one plan and read what was measured."""
    batch = SPLITS[index][1]
    hetflow_command(
        folder, "launch", "-o", f"run{index}", str(plan_of(folder, index)), str(SCRIPT),
        "--epochs", str(epochs), "--batch-size", str(batch),
    )  # fmt: skip
    return files.read(folder / f"run{index}" / "run.json", RunRecord)


def main() -> None:
    """Measure every split and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hetflow_command(
            folder, "profile", f"{SCRIPT}:workload", "--name", "digits-cnn",
            "--device", "cpu:fast=0.25", "--device", "cpu:slow=0.0625",
            "--batch-sizes", "16,32,64,128", "-o", "profiles",
        )  # fmt: skip
        for index in range(3 if arguments.quick else len(SPLITS)):
            run = launched(folder, index, arguments.epochs)
            assert run.measured_step_seconds is not None
            assert run.predicted_step_seconds is not None
            error = run.predicted_step_seconds / run.measured_step_seconds - 1
            pool, batch, shares = SPLITS[index]
            rows.append(
                {
                    "pool": pool,
                    "global_batch_size": batch,
                    "split": "forced" if shares else "solved",
                    "predicted_step_seconds": run.predicted_step_seconds,
                    "measured_step_seconds": run.measured_step_seconds,
                    "error": error,
                }
            )
            print(
                f"{pool:28} B={batch:<4} {rows[-1]['split']:7} predicted "
                f"{run.predicted_step_seconds * 1e3:7.1f} ms  measured "
                f"{run.measured_step_seconds * 1e3:7.1f} ms  {100 * error:+5.1f} %",
                flush=True,
            )
    errors = [abs(row["error"]) for row in rows]
    mean = statistics.fmean(errors)
    print(
        f"mean |error| {100 * mean:.1f} %, worst {100 * max(errors):.1f} % "
        f"(VirtualFlow: {100 * PAPER_MEAN_ERROR:.1f} % mean)"
    )
    if arguments.json:
        document = {"rows": rows, "mean_error": mean, "worst_error": max(errors)}
        files.write_text(arguments.json, json.dumps(document, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
