"""A queue of four jobs on two unlike emulated devices, as the shell commands a user would type.

    python examples/live_cluster/run.py            about three minutes
    python examples/live_cluster/run.py -o FOLDER  keep what it made

Two jobs are the digits example, two another script; each pair is run alone first. On the cluster
they take turns by their weights, leave in the middle of their training, and go on elsewhere. All
must end with the parameters of the same job alone, to the last bit.
"""

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEVICES = ("cpu:fast=0.4", "cpu:slow=0.2")
POOL = "1xcpu:fast,1xcpu:slow"
ROUND_SECONDS = 4
ROUNDS = 6
"""How many rounds each job lasts alone on the fast device. A round lasts up to twice as long where
a start takes a while; jobs outlast that too, on a machine of any speed, so that they take turns."""
LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Training:
    """A script with its settings, and the weights of its jobs in the queue.

    ``options`` stand before the number of epochs, each of 8 steps: 256 of 1,797 samples of the
    digits, 128 of 1,024 of the other.
    """

    name: str
    script: Path
    options: tuple[str, ...]
    batch_size: int
    virtual_nodes: int
    weights: tuple[int, ...]


EPOCH_STEPS = 8
TRAININGS = (
    Training("digits", HERE.parent / "train_digits.py", ("--epochs",), 256, 8, (1, 4)),
    Training("small", HERE / "train.py", (), 128, 4, (1, 2)),
)


class Demonstration:
    """Runs the commands in a folder; each is printed before it runs."""

    def __init__(
        self, folder: Path, trainings: tuple[Training, ...], round_seconds: int, rounds: int
    ) -> None:
        self._folder, self._trainings, self._round_seconds = folder, trainings, round_seconds
        self._seconds = round_seconds * rounds
        self._epochs: dict[str, int] = {}
        # One thread, as on every emulated device.
        self._environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "HETFLOW_STATE": str(folder / "state")
        }  # fmt: skip

    def hetflow(self, *words: str) -> str:
        """Run a hetflow command and return its output."""
        print(f"$ hetflow {shlex.join(words)}", flush=True)
        return self._quietly(*words)

    def _quietly(self, *words: str) -> str:
        command = [sys.executable, "-m", "hetflow", *words]
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{done.stderr}hetflow {words[0]} exited with {done.returncode}")
        return done.stdout

    def alone(self, one: Training) -> str:
        """Profile a script, run it once alone, and return its parameters' digest."""
        devices = [word for device in DEVICES for word in ("--device", device)]
        size = str(one.batch_size // one.virtual_nodes)
        self.hetflow("profile", f"{one.script}:workload", "--name", one.name, *devices,
                     "--batch-sizes", size, "--sync-devices", "0", "--quick", "-o",
                     f"profiles-{one.name}")  # fmt: skip
        self.hetflow("solve", "split", "--profiles", f"profiles-{one.name}", "--gpus",
                     "1xcpu:fast", "--batch-size", str(one.batch_size), "--virtual-nodes",
                     str(one.virtual_nodes), "-o", f"{one.name}.json")  # fmt: skip
        plan = json.loads((self._folder / f"{one.name}.json").read_text())
        epoch_seconds = EPOCH_STEPS * plan["predicted"]["step_seconds"]
        epochs = self._epochs[one.name] = math.ceil(self._seconds / epoch_seconds)
        self.hetflow("launch", "--determinism", "elastic", "-o", f"alone-{one.name}",
                     f"{one.name}.json", str(one.script), *one.options, str(epochs))  # fmt: skip
        record = json.loads((self._folder / f"alone-{one.name}" / "run.json").read_text())
        digest: str = record["parameters_digest"]
        return digest

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the scheduler as a process in the background."""
        words = ["cluster", "start", "--gpus", POOL, "--round", str(self._round_seconds)]
        print(f"$ hetflow {shlex.join(words)} &", flush=True)
        with (self._folder / "scheduler.log").open("ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "hetflow", *words],
                cwd=self._folder, env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip
        while not (self._folder / "scheduler.log").read_text():  # written when it schedules
            if started.poll() is not None:
                sys.exit("the scheduler did not start")
            time.sleep(0.1)
        return started

    def submit(self, one: Training, weight: int) -> None:
        """Add a job to the queue."""
        epochs = self._epochs[one.name]
        self.hetflow("submit", "--name", f"{one.name}-{weight}", "--weight", str(weight),
                     "--profiles", f"profiles-{one.name}", "--batch-size", str(one.batch_size),
                     "--steps", str(EPOCH_STEPS * epochs), "--virtual-nodes",
                     str(one.virtual_nodes), str(one.script), *one.options,
                     str(epochs))  # fmt: skip

    def watch(self, scheduler: "subprocess.Popen[bytes]") -> list[dict[str, Any]]:
        """Print the queue whenever a job has moved, until all are done; return the jobs."""
        seen, end = None, time.monotonic() + LIMIT_SECONDS
        while True:
            jobs: list[dict[str, Any]] = json.loads(self._quietly("queue", "--json"))["jobs"]
            shown = [(job["number"], job["state"], job["devices"]) for job in jobs]
            if shown != seen:
                seen = shown
                print("$ hetflow queue\n" + self._quietly("queue"), flush=True)
            if all(job["state"] == "done" for job in jobs):
                return sorted(jobs, key=lambda job: job["number"])
            if scheduler.poll() is not None or time.monotonic() > end:
                sys.exit("the queue did not come to its end")
            time.sleep(3.0)

    def run(self) -> list[dict[str, Any]]:
        """Run everything; return the jobs, each with the digest of the run alone (``alone``)."""
        alone = {one.name: self.alone(one) for one in self._trainings}
        scheduler = self.start()
        try:
            for one in self._trainings:
                for weight in one.weights:
                    self.submit(one, weight)
            jobs = self.watch(scheduler)
            self.hetflow("cluster", "stop")
            scheduler.wait(60)
        finally:
            scheduler.kill()
            scheduler.wait()
        return [job | {"alone": alone[job["name"].rpartition("-")[0]]} for job in jobs]


@contextmanager
def preloaded(folder: Path) -> Iterator[None]:
    """Keep a process with torch imported, from which launches fork workers, unless one exists."""
    if "HETFLOW_PRELOAD" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # it only serves processes with the same settings
    path = folder / "preload.sock"
    print("$ python -m hetflow.runtime.preload preload.sock &", flush=True)
    process = subprocess.Popen([sys.executable, "-m", "hetflow.runtime.preload", str(path)])
    try:
        while not path.is_socket() and process.poll() is None:
            time.sleep(0.05)
        os.environ["HETFLOW_PRELOAD"] = str(path)
        yield
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Run it, and print whether all jobs ended with the same bits as alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", "-o", type=Path, help="a new folder to keep")
    parser.add_argument("--quick", action="store_true", help="a quarter as long, and three jobs")
    parser.add_argument("--json", type=Path, help="also write the jobs here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetflow-") as name, preloaded(Path(name)):
        folder = Path(name)
        if arguments.output is not None:
            arguments.output.mkdir(parents=True)
            folder = arguments.output.resolve()
        trainings, shorter = TRAININGS, 1
        if arguments.quick:
            trainings, shorter = (replace(TRAININGS[0], weights=(4,)), TRAININGS[1]), 2
        shown = Demonstration(folder, trainings, ROUND_SECONDS // shorter, ROUNDS // shorter)
        jobs = shown.run()
    for job in jobs:
        same = "the same as alone" if job["digest"] == job["alone"] else f"ALONE {job['alone']}"
        parts = f"ran in {job['leases']} parts, resized {job['resizes']} times"
        print(f"{job['name']:9} {parts}; parameters {job['digest']}: {same}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(jobs, indent=1) + "\n", encoding="utf-8")
    moved = sum(job["leases"] > 1 for job in jobs)
    print(f"{moved} of {len(jobs)} jobs left their devices and went on later")
    if any(job["digest"] != job["alone"] for job in jobs):
        sys.exit(1)


if __name__ == "__main__":
    main()
