"""Pause of a resize, and time from a kill to the next step: hetflow, torchrun, torchft.

The same small model on two workers (gloo, CPU), in turns. ``kill`` is the time from a SIGKILL of
one worker until a step that began after it is complete; ``grow`` and ``shrink`` are the longest
stretch without a completed step while a worker joins or leaves; ``start`` is from the command to
the first step. torchrun restarts its workers (from a snapshot that the script writes); torchft
averages over whoever is alive, so its results depend on the failure. torchft is measured where it
is installed.

    python benchmarks/elasticity.py --quick
"""

import argparse
import importlib.util
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.tests.plan_parts import split_plan, whole_group

SCRIPT = Path(__file__).parent / "peers" / "elasticity_scripts.py"
STEPS = 1_000_000  # until it is stopped
LIMIT_SECONDS = 90.0
Numbers = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all contenders")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    contenders: dict[str, Callable[[Path], Numbers]] = {"hetflow": hetflow, "torchrun": torchrun}
    if importlib.util.find_spec("torchft") is not None:
        contenders["torchft"] = torchft
    results: dict[str, list[Numbers]] = {name: [] for name in contenders}
    for _ in range(1 if arguments.quick else arguments.rounds):
        for name, measure in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                results[name].append(measure(Path(folder)))
    costs = cost_of_surviving(1 if arguments.quick else arguments.rounds)
    summary = {name: summarised(rounds) for name, rounds in results.items()}
    document = {
        "benchmark": "elasticity",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "torchft": "measured" if "torchft" in contenders else "not installed",
        "seconds": summary,
        "step_with_survival_over_without": costs,
    }
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(summary))
    print(f"a step that can survive a death, over one that cannot: {costs['median']:.3f}")


def summarised(rounds: list[Numbers]) -> dict[str, dict[str, float]]:
    """Median and extremes of each number."""
    return {
        key: {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
        }
        for key in {key: None for numbers in rounds for key in numbers}
        if (values := [numbers[key] for numbers in rounds if key in numbers])
    }


def table(summary: dict[str, dict[str, dict[str, float]]]) -> str:
    """Markdown: a row a contender."""
    keys = ["start", "kill", "grow", "shrink"]
    rows = [f"| seconds | {' | '.join(keys)} |", "|---" * (len(keys) + 1) + "|"]
    for name, numbers in summary.items():
        cells = [
            f"{found['median']:.2f} ({found['least']:.2f} to {found['most']:.2f})"
            if (found := numbers.get(key))
            else "none"
            for key in keys
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


class Watched:
    """A run whose workers note their steps in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.began = folder, time.time()

    def steps(self) -> list[tuple[float, int, int]]:
        """(time, step, process) of all steps so far, in order of time."""
        found = []
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                if re.fullmatch(r"[\d.]+ \d+", line):
                    at, step = line.split()
                    found.append((float(at), int(step), int(path.name[6:])))
        return sorted(found)

    def wait(self, happened: Callable[[list[tuple[float, int, int]]], Any]) -> Any:
        """Wait until something is true of the steps."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (found := happened(self.steps())):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {LIMIT_SECONDS:g} s; see {self.folder}")
            time.sleep(0.02)
        return found

    def start(self, workers: int) -> float:
        """Wait until so many have taken ten steps; seconds to the first step."""
        self.wait(lambda steps: len({s[2] for s in steps if s[1] >= 10}) >= workers)
        return self.steps()[0][0] - self.began

    def kill_one(self, *, restarts: bool = False) -> float:
        """Kill a worker; seconds until a step that began afterwards is complete."""
        before = self.steps()
        alive = sorted({pid for at, _, pid in before if at > before[-1][0] - 2})
        victim = random.choice(alive)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        top, known = before[-1][1], {pid for _, _, pid in before}

        def gone_on(steps: list[tuple[float, int, int]]) -> list[float]:
            if restarts:
                return [at for at, _, pid in steps if pid not in known]
            return [at for at, step, pid in steps if at > killed and step > top + 1]

        return float(min(self.wait(gone_on))) - killed

    def longest_gap(self, since: float, until: float) -> float:
        """The longest time without a completed step by anyone."""
        times = [at for at, _, _ in self.steps() if since <= at <= until]
        return max(b - a for a, b in zip(times, times[1:], strict=False))


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def begin(command: list[str], log: Path, **more: str) -> "subprocess.Popen[bytes]":
    """Start a command in a session of its own."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command,
            stdout=stream,
            stderr=stream,
            env=environment(**more),
            start_new_session=True,
        )


def stop(*processes: "subprocess.Popen[bytes]") -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
    for process in processes:
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def plan_of(nodes: list[int], size: int) -> Plan:
    """Workers with so many virtual nodes each."""
    return split_plan(
        model="elasticity",
        global_batch_size=sum(nodes) * size,
        groups=tuple(
            whole_group(
                device_type="cpu:core",
                num_devices=1,
                device_batch_size=number * size,
                virtual_nodes=number,
                virtual_node_batch_size=size,
            )
            for number in nodes
        ),
        predicted=Prediction(step_seconds=0.01, samples_per_second=1.0),
        proof=Proof(
            termination="feasible", objective=0.01, lower_bound=None, gap=None, method="by hand"
        ),
    )


def launched(folder: Path, steps: int, *options: str) -> "subprocess.Popen[bytes]":
    """Hetflow's launch of the script."""
    files.write(folder / "plan.json", plan_of([2, 2], 8), force=True)
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", *options]
    command += ["-o", str(folder / "run"), str(folder / "plan.json")]
    command += [str(SCRIPT), "hetflow", str(folder), str(steps)]
    return begin(command, folder / "log")


def hetflow(folder: Path) -> Numbers:
    """Start, shrink, grow, kill, in one run."""
    run = Watched(folder)
    process = launched(folder, STEPS)
    numbers = {"start": run.start(2)}
    for name, gpus in (("shrink", "1xcpu:core"), ("grow", "2xcpu:core")):
        asked = time.time()
        command = [sys.executable, "-m", "hetflow.cli.main", "resize", str(folder / "run")]
        answer = subprocess.run(
            [*command, "--gpus", gpus, "--json"], capture_output=True, check=True
        )
        numbers[f"{name}_pause"] = json.loads(answer.stdout)["pause_seconds"]
        time.sleep(0.5)
        numbers[name] = run.longest_gap(asked, time.time())
    numbers["kill"] = run.kill_one()
    stop(process)
    return numbers


def torchrun(folder: Path) -> Numbers:
    """Torchrun with its waits made short: it restarts every worker."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "20"]
    command += ["--monitor-interval", "0.05", "--local-addr", "127.0.0.1"]
    alone = [*command, "--standalone", "--nproc-per-node", "2"]
    run = Watched(folder)
    agent = begin([*alone, str(SCRIPT), "torchrun", str(folder), str(STEPS)], folder / "log")
    numbers = {"start": run.start(2), "kill": run.kill_one(restarts=True)}
    stop(agent)
    return numbers | _torchrun_grows(folder / "grow", command)


def _torchrun_grows(folder: Path, command: list[str]) -> Numbers:
    """A second agent joins the first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    command = [*command, "--nnodes", "1:2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-conf", "last_call_timeout=1,join_timeout=60"]
    command += [str(SCRIPT), "torchrun", str(folder), str(STEPS)]
    run = Watched(folder)
    first = begin(command, folder / "log-a")
    run.start(1)
    asked = time.time()
    second = begin(command, folder / "log-b")
    known = {pid for _, _, pid in run.steps()}
    numbers = {}
    try:
        run.wait(lambda steps: len({pid for _, _, pid in steps} - known) >= 2)
        time.sleep(0.5)
        numbers["grow"] = run.longest_gap(asked, time.time())
    except TimeoutError as error:
        sys.stderr.write(f"torchrun did not grow: {error}\n")
    stop(first, second)
    return numbers


@contextmanager
def stderr_to(log: Path) -> Iterator[None]:
    """Keep what a library's own threads write off the terminal."""
    before = os.dup(2)
    with log.open("wb") as stream:
        os.dup2(stream.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def torchft(folder: Path) -> Numbers:
    """torchft: a lighthouse, and each worker a replica of its own."""
    with stderr_to(folder / "lighthouse"):
        return _torchft(folder)


def _torchft(folder: Path) -> Numbers:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=100,
        quorum_tick_ms=50,
        heartbeat_timeout_ms=1000,
    )
    command = [sys.executable, str(SCRIPT), "torchft", str(folder), str(STEPS)]

    def replica(number: int) -> "subprocess.Popen[bytes]":
        address = lighthouse.address()
        return begin(
            command, folder / f"log-{number}", REPLICA=str(number), TORCHFT_LIGHTHOUSE=address
        )

    run = Watched(folder)
    processes = [replica(0)]
    numbers = {"start": run.start(1)}
    asked = time.time()
    processes.append(replica(1))
    run.wait(lambda steps: len({pid for _, _, pid in steps}) >= 2)
    time.sleep(1)
    numbers["grow"] = run.longest_gap(asked, time.time())
    numbers["kill"] = run.kill_one()
    stop(*processes)
    lighthouse.shutdown()
    return numbers


def cost_of_surviving(rounds: int) -> dict[str, Any]:
    """What a step costs more where a worker's death can be survived: ratios of whole runs."""
    ratios = []
    for _ in range(max(rounds, 2)):
        seconds = {}
        for policy in ("stop", "shrink"):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                done = launched(folder, 600, "--on-failure", policy).wait(timeout=300)
                if done:
                    raise SystemExit((folder / "log").read_text())
                record = json.loads((folder / "run" / "run.json").read_text())
                seconds[policy] = record["measured_step_seconds"]
        ratios.append(seconds["shrink"] / seconds["stop"])
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    main()
