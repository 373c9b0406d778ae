"""Run every planning command that has --json, parse what it prints, and check the plans.

    PYTHON_OF_AN_INSTALLATION .ci/commands.py

Each command is a process of its own, so what a library writes on the process's stdout is seen. It
is forked from one that has hetflow's modules, but not yet the solvers' libraries: starting anew
would take three times as long.
"""

import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hetflow.cli.main import run

for module in ("common", "solve", "simulate", "files"):
    importlib.import_module(f"hetflow.cli.{module}")
assert "highspy" not in sys.modules, "what highspy prints when it is loaded would not be seen"

ROOT = Path(__file__).resolve().parents[1]
SPLIT = "--profiles flat --gpus 2xV100,3xP100 --batch-size 64"
PIPELINE = "--profiles layered --gpus 4xV100 --batch-size 64 --link-bytes-per-second 1e9"
JOBS = "--throughputs throughputs.json --cluster cluster.json"
POOL = "--throughputs throughputs.json --gpus 4xV100,4xP100,4xK80"
RENT = "--work-hours 1 --deadline-hours 2 --on-demand 3 --spot 1 --restart-seconds 0"
PLANS = {
    "exact": (f"solve split {SPLIT}", SPLIT),
    "highs": (f"solve split {SPLIT} --method highs", SPLIT),
    "cbc": (f"solve split {SPLIT} --method cbc", SPLIT),
    "1f1b": (f"solve pipeline {PIPELINE}", PIPELINE),
    "2bw": (f"solve pipeline {PIPELINE} --schedule 2bw", PIPELINE),
    "parallel": (f"solve parallel {PIPELINE}", PIPELINE),
}
ALLOCATIONS = {
    policy: f"allocate jobs.json {JOBS} --policy {policy}{more}"
    for policy, more in {
        "las": "", "las_water_filling": "", "makespan": "", "finish_time_fairness": "",
        "max_throughput": " --space-sharing", "min_cost_ratio": "",
    }.items()
}  # fmt: skip
OTHERS = (
    "show flat/v100.json",
    f"simulate arriving.json {POOL} --policy las_weighted --csv table.csv",
    f"simulate arriving.json {POOL} --space-sharing",
    "throughputs flat --batch-size 64",
    "export layered/v100.json -o graph.txt",
    f"rent window.json --history window.json {RENT}",
    f"rent zones.json --between-zones --learn-until 2024-01-01T04:00:00Z {RENT}",
    "rent counts.json --history counts.json --machines 2 --work-hours 4 --deadline-hours 4 "
    "--on-demand 3 --spot 1",
    "rent odds zones.json",
    "rent machines prices.json --profiles flat --batch-size 64 --steps 1000 --most-devices 2",
    "rent prices prices.json --rate V100=2 --rate P100=1 --work-hours 2",
    "show layered",
    "show jobs.json",
    "show throughputs.json",
    "show cluster.json",
    "show zones.json",
    "show prices.json",
    "show counts.json",
    "import small.graph.txt --device-type V100 --device-memory 16GB -o imported.json",
    "import log.txt --format sacct --rate v100=2 -o imported-jobs.json",
    "cluster replay --sacct log.txt --policy las --gpus 2xv100",
    "queue --state state",
    "cluster usage --state state",
)


def main() -> None:
    """Run them all, two at a time."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(2, context) as pool:
        folder = Path(name)
        write_inputs(folder)
        work = [pool.submit(planned, folder, name, *each) for name, each in PLANS.items()]
        work += [pool.submit(allocated, folder, *item) for item in ALLOCATIONS.items()]
        work += [pool.submit(document, folder, line) for line in OTHERS]
        for each in work:
            each.result()
    print(f"{len(work)} commands print JSON, and what they plan is valid")  # noqa: T201


def write_inputs(folder: Path) -> None:
    """Write the golden cases' files, markets, a log of Slurm's, and the state of a live cluster."""
    from hetflow.clusters.scheduler.store import ClusterStore

    ClusterStore.create(folder / "state").close()
    (folder / "log.txt").write_text(
        "JobID|JobName|State|Submit|Start|End|AllocTRES\n"
        "1|a|COMPLETED|2026-11-23T03:11:15|2026-11-23T03:11:16|2026-11-23T03:11:18|gres/gpu:v100=2\n",
        encoding="utf-8",
    )
    spec = importlib.util.spec_from_file_location("inputs", ROOT / "tests" / "golden" / "inputs.py")
    inputs: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(inputs)  # type: ignore[union-attr]
    inputs.write_inputs(folder)
    start = "2024-01-01T00:00:00Z"
    zones = [
        {"zone": zone, "start": start, "tick_seconds": 600.0, "available": ticks * 4}
        for zone, ticks in (("a", [1] * 6 + [0] * 6), ("b", [0] * 6 + [1] * 6))
    ]
    machines = [
        {"name": name, "device_type": kind, "on_demand_dollars_per_hour": dollars}
        for name, kind, dollars in (("v", "V100", 3.0), ("p", "P100", 1.5))
    ]
    prices = [
        {"cloud": "aws", "zone": "a", "instance_type": name, "times": [start],
         "dollars_per_hour": [dollars], "known_until": "2024-01-03T00:00:00Z"}
        for name, dollars in (("v", 1.0), ("p", 0.5))
    ]  # fmt: skip
    counts = {"zone": "a", "tick_seconds": 1800.0, "num_machines": [2, 2, 0, 2, 2, 2, 2, 2]}
    for name, market in {
        "zones": {"availability": zones},
        "window": {"availability": zones[:1]},
        "counts": {"capacity": [counts]},
        "prices": {"instance_types": machines, "prices": prices},
    }.items():
        text = json.dumps({"schema": "hetflow.market/1", **market})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")


def document(folder: Path, line: str) -> str:
    """What a command prints with --json, which must be one JSON document and nothing else."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if not child:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            os.chdir(folder)
            code = run([*line.split(), "--json"])
            sys.stdout.flush()
            loaded = "pandas" in sys.modules and "--csv" not in line  # tables alone need it
            os._exit(99 if loaded else code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        printed, said = ((each.seek(0), each.read())[1] for each in (out, errors))
    if code:
        raise RuntimeError(f"hetflow {line} --json: exit code {code}\n{said}")
    try:
        json.loads(printed)
    except ValueError as error:
        raise RuntimeError(f"hetflow {line} --json: {error} in\n{printed[:400]}") from None
    return printed


def planned(folder: Path, name: str, line: str, asked: str) -> None:
    """Solve, and check what was printed against the same profiles and pool."""
    path = folder / f"plan-{name}.json"
    path.write_text(document(folder, line), encoding="utf-8")
    words = asked.split()
    given = {words[i]: words[i + 1] for i in range(0, len(words), 2)}
    again = " ".join(f"{key} {value}" for key, value in given.items() if key != "--batch-size")
    document(folder, f"check {path.name} {again}")
    document(folder, f"show {path.name}")


def allocated(folder: Path, name: str, line: str) -> None:
    """Allocate, and check what was printed against the same jobs and pool."""
    path = folder / f"allocation-{name}.json"
    path.write_text(document(folder, line), encoding="utf-8")
    shared = " --space-sharing" if "--space-sharing" in line else ""
    document(folder, f"check {path.name} --jobs jobs.json {JOBS}{shared}")


if __name__ == "__main__":
    main()
