"""How long a job is without devices when it moves to another node and type of a Slurm cluster.

    python benchmarks/slurm_moves.py [--quick] [--json FILE]

A real Slurm with two fake nodes on this host, of one emulated type each; a job that the live
scheduler moves to the other node at the end of every round. Four moments of each move: the
decision, the end of the old launch (which has finished its step and saved), the begin of the new
one, and the end of its first step. Where Slurm cannot be started this says so, and measures
nothing.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from live_parts.real import run_to_end, write_profile

from hetflow.clusters.engines.protocol import ENDED, OUTPUT, STARTED
from hetflow.clusters.engines.slurm import SlurmEngine
from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, submit
from hetflow.runtime import preload
from hetflow.schema.cluster import Cluster
from hetflow.tests.engines.slurm_daemons import slurm_cluster, why_not

SCRIPT = """
import sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

torch.manual_seed(0)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = hf.prepare(model, optimizer)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
is_first = True
for epoch in range(int(sys.argv[1])):
    for batch in job.batches(loader):
        job.backward(lambda x, y: nn.functional.mse_loss(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
        if is_first:
            is_first = False
            job.print(f"first step at {time.time():.3f}")
"""
PASS_SECONDS = {"cpu:fast": 0.02, "cpu:slow": 0.03}
BATCH_SIZE, VIRTUAL_NODES, EPOCH_STEPS = 16, 4, 4
ROUND_SECONDS, LIMIT_SECONDS = 10.0, 240.0


@dataclass(frozen=True)
class Move:
    """Seconds from one moment of a move to the next."""

    decision_to_end: float
    """With the rest of a step, and the save."""
    end_to_begin: float
    begin_to_first_step: float

    @property
    def decision_to_begin(self) -> float:
        """All but the new worker's start."""
        return self.decision_to_end + self.end_to_begin


def job(folder: Path, epochs: int) -> Submission:
    """Write the script and its profiles; the job."""
    (folder / "train.py").write_text(SCRIPT)
    for kind, seconds in PASS_SECONDS.items():
        write_profile(
            folder / "profiles", kind, batch_size=BATCH_SIZE // VIRTUAL_NODES, pass_seconds=seconds
        )
    return Submission(
        name="job", script=str(folder / "train.py"), arguments=(str(epochs),),
        directory=str(folder), profiles=str(folder / "profiles"), batch_size=BATCH_SIZE,
        virtual_nodes=VIRTUAL_NODES, steps=float(EPOCH_STEPS * epochs),
    )  # fmt: skip


def run(folder: Path, epochs: int) -> ClusterStore:
    """Train, on the other node in every round; the state at the end."""
    store = ClusterStore.create(folder / "state")
    pool = Cluster.parse(",".join(f"1x{kind}" for kind in PASS_SECONDS))
    rules = RoundRules(round_seconds=ROUND_SECONDS, reset_seconds=0.0)
    scheduler = Scheduler(store, SlurmEngine(pool), ClusterSettings(rules=rules))
    submit(store, job(folder, epochs))

    def drain_its_type(now: float) -> None:
        if now < (store.get("round_ends") or float("inf")):
            return
        [row] = store.rows("SELECT devices FROM leases ORDER BY number DESC LIMIT 1")
        with store.transaction():
            store.set("drained", [kind for kind in PASS_SECONDS if kind in row["devices"]])

    run_to_end(scheduler, store, drain_its_type, num_jobs=1, limit_seconds=LIMIT_SECONDS)
    return store


def moves_of(store: ClusterStore) -> list[Move]:
    """All moves of the job; the files' times are those of the moments."""
    rows = store.rows("SELECT * FROM leases WHERE started NOT NULL ORDER BY number")
    found = []
    for old, new in zip(rows, rows[1:], strict=False):
        before = store.lease_folder(old["job"], old["number"])
        after = store.lease_folder(new["job"], new["number"])
        ended = (before / ENDED).stat().st_mtime
        began = (after / STARTED).stat().st_mtime
        said = re.search(r"first step at ([\d.]+)", (after / OUTPUT).read_text())
        if said is not None:
            found.append(
                Move(ended - old["stop_asked"], began - ended, float(said.group(1)) - began)
            )
    return found


def line_of(moves: list[Move]) -> str:
    """Medians, and the longest."""
    parts = (
        ("decision to the old launch's end, save included", "decision_to_end"),
        ("to the new launch's begin", "end_to_begin"),
        ("these two together", "decision_to_begin"),
        ("to its first step", "begin_to_first_step"),
    )
    lines = [f"{len(moves)} moves, seconds: median (least to most)"]
    for what, name in parts:
        values = [getattr(move, name) for move in moves]
        middle = statistics.median(values)
        lines.append(f"{what}: {middle:.2f} ({min(values):.2f} to {max(values):.2f})")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer moves")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    reason = why_not()
    if reason is not None:
        print(f"not measured: {reason}")
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "slurm").mkdir()
        os.environ |= stack.enter_context(slurm_cluster(folder / "slurm"))
        os.environ[preload.VARIABLE] = str(stack.enter_context(preload.serving(folder / "preload")))
        store = run(folder, 20 if arguments.quick else 60)
        moves = moves_of(store)
        store.close()
    print(line_of(moves))
    if arguments.json is not None:
        document = {
            "rows": [asdict(move) | {"decision_to_begin": move.decision_to_begin} for move in moves]
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
