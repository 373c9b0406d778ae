"""What it costs to start workers: fresh processes against forks of a preloaded one.

In turns, on two workers (gloo, CPU) of a small model. ``start`` is from the command to the first
step of both workers; ``replace`` from a SIGKILL to the first step of the worker that replaces the
dead one; ``grow`` from the request of a third worker to its first step. ``worker CPU`` is what a
worker has used when its first step is complete, ``launch CPU`` what a whole launch of ten steps
uses, controller and preloaded process included. ``fresh`` is ``HETFLOW_PRELOAD=off``, ``preloaded``
a launch with its own, ``shared`` a launch that uses one that runs already.

    python benchmarks/start_up.py [--quick] [--json FILE]
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from elasticity import begin, plan_of, stop

from hetflow.runtime import preload
from hetflow.runtime.launcher.mapping import renumbered
from hetflow.runtime.protocol import control
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from torch import nn
from hetflow import runtime as hf
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(320, 8), torch.randint(2, (320,)))
job = hf.prepare(model, optimizer)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
is_first = True
while job.num_steps < steps:
    for batch in job.batches(loader):
        job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            is_first = False
            new = folder / f"new-{os.getpid()}"
            new.write_text(f"{time.time()} {time.process_time()}")
            new.rename(folder / f"first-{os.getpid()}")
        if steps > 10:
            time.sleep(0.02)
        if job.num_steps >= steps:
            break
"""
LIMIT_SECONDS = 120.0
ENDLESS = 1_000_000
Numbers = dict[str, float]


def main() -> None:
    """Measure the ways in turns, print medians and extremes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all ways")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    results: dict[str, list[Numbers]] = {}
    for _ in range(1 if arguments.quick else arguments.rounds):
        for way in ("fresh", "preloaded", "shared"):
            with tempfile.TemporaryDirectory() as name:
                results.setdefault(way, []).append(measured(way, Path(name)))
    summary = {
        way: {
            key: {
                "median": statistics.median(r[key] for r in rounds),
                "least": min(r[key] for r in rounds),
                "most": max(r[key] for r in rounds),
            }
            for key in rounds[0]
        }
        for way, rounds in results.items()
    }
    print(table(summary))
    if arguments.json:
        document = {
            "benchmark": "start_up",
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "seconds": summary,
        }
        files.write_text(arguments.json, json.dumps(document, indent=1) + "\n", force=True)


def table(summary: dict[str, dict[str, Numbers]]) -> str:
    """Markdown: a row a way."""
    keys = list(dict.fromkeys(key for numbers in summary.values() for key in numbers))
    rows = [f"| seconds | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for way, numbers in summary.items():
        cells = [
            f"{n['median']:.2f} ({n['least']:.2f} to {n['most']:.2f})" if (n := numbers.get(key))
            else "" for key in keys
        ]  # fmt: skip
        rows.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(rows)


def measured(way: str, folder: Path) -> Numbers:
    """All numbers of one way, once."""
    shared = preload.serving(folder / "own") if way == "shared" else nullcontext()
    with shared as path:
        place = {"fresh": preload.OFF, "preloaded": "", "shared": str(path)}[way]
        short = folder / "short"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if launched(short, 10, place).wait(timeout=LIMIT_SECONDS):
            raise SystemExit((short / "log").read_text())
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        # A shared one's workers are no descendants of ours.
        numbers = {} if way == "shared" else {"launch CPU": cpu}
        return numbers | changing(folder / "long", place)


def launched(folder: Path, steps: int, place: str) -> "subprocess.Popen[bytes]":
    """A launch of the script by ``HETFLOW_PRELOAD=place``."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT)
    files.write(folder / "plan.json", plan_of([2, 2], 8), force=True)
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--on-failure", "replace"]
    command += ["-o", str(folder / "run"), str(folder / "plan.json"), str(folder / "script.py")]
    return begin([*command, str(folder), str(steps)], folder / "log", HETFLOW_PRELOAD=place)


def firsts(folder: Path, number: int) -> dict[int, tuple[float, float]]:
    """Time and own CPU seconds at the first step of so many processes, once they are there."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(found := list(folder.glob("first-*"))) < number:
        if time.monotonic() > deadline:
            raise SystemExit((folder / "log").read_text())
        time.sleep(0.005)
    texts = {int(path.name[6:]): path.read_text().split() for path in found}
    return {pid: (float(at), float(cpu)) for pid, (at, cpu) in texts.items()}


def changing(folder: Path, place: str) -> Numbers:
    """Start, replace, grow, in one run."""
    began = time.time()
    process = launched(folder, ENDLESS, place)
    try:
        started = firsts(folder, 2)
        numbers = {
            "start": max(at for at, _ in started.values()) - began,
            "worker CPU": statistics.median(cpu for _, cpu in started.values()),
        }
        killed = time.time()
        os.kill(max(started), signal.SIGKILL)
        after = firsts(folder, 3)
        ((at, cpu),) = [after[pid] for pid in set(after) - set(started)]
        numbers |= {"replace": at - killed, "replace CPU": cpu}
        asked = time.time()
        resized(folder / "run")
        grown = firsts(folder, 4)
        ((at, cpu),) = [grown[pid] for pid in set(grown) - set(after)]
        return numbers | {"grow": at - asked, "grow CPU": cpu}
    finally:
        stop(process)


def resized(run: Path) -> None:
    """Ask for a third worker, and wait until it is there."""
    while True:
        now = control.current(run)
        config = renumbered(now, lower(plan_of([2, 1, 1], 8), now.seed, now.determinism))
        answer = control.wait_for(run, control.ask(run, config), LIMIT_SECONDS)
        if answer.status == "done":
            return
        time.sleep(0.1)  # the replacement is not settled yet


if __name__ == "__main__":
    main()
