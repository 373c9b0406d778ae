"""What preemption costs a live job, with and without lease renewals, as Gavel's table 5.4.

    python benchmarks/lease_renewals.py [--quick] [--json FILE]

The digits example on one emulated device, under the live scheduler and the engine ``local``: with
renewals a job that keeps its device trains on into the next round; without, it is asked to save and
end at the end of every round, and starts again on the same device. Both are compared with
the same launch alone. All must end with the same parameters. Rounds are short here, and what
a round costs is then put beside Gavel's rounds of six minutes. ``shared`` launches fork their
workers from a preloaded process that runs already, ``own`` ones from their own.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_parts.real import run_to_end, write_profile

import hetflow.examples
from hetflow.clusters.engines.local import LocalEngine
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler import leases
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.plans import plan_on
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import STARTS, ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit
from hetflow.runtime import preload
from hetflow.schema import files
from hetflow.schema.cluster import Cluster

SCRIPT = Path(hetflow.examples.__file__).parent / "train_digits.py"
DEVICE = "cpu:fast"
PASS_SECONDS = 0.03
"""Of 32 digits on the emulated device, longer than on a core."""
BATCH_SIZE, VIRTUAL_NODES, EPOCH_STEPS = 256, 8, 8
GAVEL_ROUND_SECONDS = 360.0
SHARED, OWN = "shared", "own"
OWN_ROUND_SECONDS = 13.0
LIMIT_SECONDS = 200.0


@dataclass(frozen=True)
class Row:
    """One way to run the job, beside the launch alone."""

    preloaded: str
    renews: bool
    round_seconds: float
    num_rounds: float
    num_starts: int
    seconds: float
    alone_seconds: float

    @property
    def per_round_seconds(self) -> float:
        """What the job lost in each round that began while it ran."""
        return (self.seconds - self.alone_seconds) / self.num_rounds

    @property
    def gavel_overhead(self) -> float:
        """The same over a round of six minutes."""
        return self.per_round_seconds / GAVEL_ROUND_SECONDS


def prepare(folder: Path, epochs: int) -> Submission:
    """Write a profile of the digits on an emulated device; the job."""
    write_profile(
        folder / "profiles", DEVICE, batch_size=BATCH_SIZE // VIRTUAL_NODES,
        pass_seconds=PASS_SECONDS,
    )  # fmt: skip
    return Submission(
        name="digits", script=str(SCRIPT), arguments=("--epochs", str(epochs)),
        directory=str(folder), profiles=str(folder / "profiles"), batch_size=BATCH_SIZE,
        virtual_nodes=VIRTUAL_NODES, steps=float(EPOCH_STEPS * epochs),
    )  # fmt: skip


def alone(folder: Path, asked: Submission) -> tuple[float, str]:
    """Seconds of the launch by itself, and the digest of its parameters."""
    folder.mkdir()
    files.write(folder / "plan.json", plan_on(asked, {DEVICE: 1}))
    start = time.monotonic()
    command = [
        sys.executable, "-m", "hetflow", "launch", "--output", str(folder / "run"),
        "--determinism", asked.level, "--checkpoint", str(folder / "checkpoint"),
        str(folder / "plan.json"), asked.script, *asked.arguments,
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.monotonic() - start
    digest: str = json.loads((folder / "run" / "run.json").read_text())["parameters_digest"]
    return seconds, digest


def scheduled(
    folder: Path, asked: Submission, round_seconds: float, *, renews: bool
) -> tuple[float, int, str]:
    """Seconds of the job from its first start to its end, how often it started, its digest."""
    store = ClusterStore.create(folder)
    rules = RoundRules(round_seconds=round_seconds, reset_seconds=0.0)
    scheduler = Scheduler(
        store, LocalEngine(Cluster.parse(f"1x{DEVICE}")), ClusterSettings(rules=rules)
    )
    submit(store, asked)

    def end_round(now: float) -> None:
        ends = store.get("round_ends")
        if not renews and ends is not None and now >= ends:
            with store.transaction():
                for lease in leases.open_leases(store):
                    leases.ask_to_stop(store, lease, now)

    run_to_end(scheduler, store, end_round, num_jobs=1, limit_seconds=LIMIT_SECONDS)
    [job] = store.rows(f"SELECT *, {STARTS} FROM jobs")  # noqa: S608
    store.close()
    return job["ended"] - job["started"], job["starts"], job["digest"]


def measured(
    folder: Path, asked: Submission, round_seconds: float, preloaded: str, ways: tuple[bool, ...]
) -> list[Row]:
    """The launch alone, then under the scheduler in some ways."""
    one_epoch = replace(asked, arguments=("--epochs", "1"), steps=float(EPOCH_STEPS))
    alone(folder / f"first-{preloaded}", one_epoch)  # else the first one waits for imports
    alone_seconds, digest = alone(folder / f"alone-{preloaded}", asked)
    rows = []
    for renews in ways:
        seconds, starts, ended_as = scheduled(
            folder / f"{preloaded}-{renews}", asked, round_seconds, renews=renews
        )
        if ended_as != digest:
            raise RuntimeError(f"the job ended as {ended_as}, alone as {digest}")
        rounds = seconds / round_seconds if renews else starts - 1.0
        rows.append(Row(preloaded, renews, round_seconds, rounds, starts, seconds, alone_seconds))
    return rows


def line_of(row: Row) -> str:
    """One row in words."""
    way = "with renewals" if row.renews else "without renewals"
    return (
        f"{row.preloaded:7} {way:17} {row.num_starts} starts, {row.seconds:.1f} s, alone "
        f"{row.alone_seconds:.1f} s: {row.per_round_seconds:+.2f} s a round, "
        f"{100 * row.gavel_overhead:.2f} % of six minutes"
    )


def main() -> None:
    """Measure, and print a line a way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a shorter job")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    epochs, round_seconds = (4, 6.0) if arguments.quick else (10, 8.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked = prepare(folder, epochs)
        with preload.serving(folder / "preload") as path:
            os.environ[preload.VARIABLE] = str(path)
            rows = measured(folder, asked, round_seconds, SHARED, (True, False))
        del os.environ[preload.VARIABLE]
        if not arguments.quick:  # a start takes most of a round as short as that
            rows += measured(folder, asked, OWN_ROUND_SECONDS, OWN, (False,))
    for row in rows:
        print(line_of(row), flush=True)
    if arguments.json is not None:
        document = {
            "epochs": epochs,
            "rows": [
                asdict(row)
                | {"per_round_seconds": row.per_round_seconds, "gavel_overhead": row.gavel_overhead}
                for row in rows
            ],
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
