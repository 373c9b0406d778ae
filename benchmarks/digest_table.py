"""One digest a model: the same virtual nodes on unlike mappings, at a level of determinism.

Each mapping is a launch of its own; each digest is taken of the final parameters, buffers,
optimizer state and losses. Printed as the table of docs/determinism.md.

    python benchmarks/digest_table.py --level elastic
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetflow.schema import files
from hetflow.schema.plan import (
    DeviceGroup,
    EmulatedDevice,
    PassTime,
    Prediction,
    Proof,
    SplitPlan,
)

VIRTUAL_NODES = 8
NODE_SAMPLES = 4
BATCH = VIRTUAL_NODES * NODE_SAMPLES
NUM_SAMPLES = 2 * BATCH + 5  # the last batch leaves some virtual nodes without samples
EPOCHS = 2
SPEEDS = {"cpu:fast": 0.5, "cpu:slow": 0.125}
# Virtual nodes of each worker, with its emulated type.
MAPPINGS: dict[str, list[tuple[str, int]]] = {
    "1 worker": [("cpu:fast", 8)],
    "2 workers": [("cpu:fast", 4)] * 2,
    "3 uneven": [("cpu:fast", 5), ("cpu:fast", 2), ("cpu:fast", 1)],
    "4 workers": [("cpu:fast", 2)] * 4,
    "2 types": [("cpu:fast", 6), ("cpu:slow", 2)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mappings")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--level", default="elastic", help="static, elastic or heterogeneous")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train_all(arguments.train, arguments.stop_after)
        return
    names = ["1 worker", "3 uneven"] if arguments.quick else list(MAPPINGS)
    with tempfile.TemporaryDirectory() as folder:
        digests = {
            name: launch(MAPPINGS[name], arguments.level, Path(folder) / str(number))
            for number, name in enumerate(names)
        }
    document = {"benchmark": "digest_table", "level": arguments.level, "digests": digests}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(digests))


def plan_of(workers: Sequence[tuple[str, int]]) -> SplitPlan:
    """A plan by hand: the given virtual nodes on each worker."""
    types = sorted({kind for kind, _ in workers})
    return SplitPlan(
        model="digests",
        global_batch_size=BATCH,
        groups=tuple(
            DeviceGroup(
                device_type=kind,
                num_devices=1,
                device_batch_size=nodes * NODE_SAMPLES,
                virtual_nodes=nodes,
                virtual_node_batch_size=NODE_SAMPLES,
            )
            for kind, nodes in workers
        ),
        predicted=Prediction(step_seconds=0.01, samples_per_second=3200.0),
        proof=Proof(
            termination="feasible", objective=0.01, lower_bound=None, gap=None, method="by hand"
        ),
        emulated=tuple(
            EmulatedDevice(
                device_type=kind,
                base_device_type="cpu",
                speed=SPEEDS[kind],
                passes=(PassTime(batch_size=NODE_SAMPLES, step_seconds=0.001 / SPEEDS[kind]),),
            )
            for kind in types
            if len(types) > 1
        ),
    )


def launch(workers: Sequence[tuple[str, int]], level: str, folder: Path) -> dict[str, str]:
    """Train the models under one mapping; return their digests."""
    done = run(workers, level, folder)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, str] = json.loads((folder / "digests.json").read_text())
    return found


def run(
    workers: Sequence[tuple[str, int]],
    level: str,
    folder: Path,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> "subprocess.CompletedProcess[str]":
    """One launch of this file's training, as it ended."""
    folder.mkdir(parents=True)
    files.write(folder / "plan.json", plan_of(workers))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", level]
    command += [*options, "-o", str(folder / "run"), str(folder / "plan.json")]
    command += [__file__, "--train", str(folder / "digests.json"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def train_all(result: Path, stop_after: int | None) -> None:
    """What each worker runs: the models one after another, each a job of its own."""
    digests = {name: train(*make(), stop_after) for name, make in models().items()}
    if os.environ.get("HETFLOW_SLOT", "0") == "0":
        result.write_text(json.dumps(digests))


def models() -> dict[str, Callable[[], tuple]]:
    """The three models with their data; torch is imported in workers only."""
    import torch
    from torch import nn

    class Cnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Dropout(0.2), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.ReLU()),
                *(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4, 10)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 32)
            layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.embed(x)).mean(1))

    class Factors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(200, 16), nn.Embedding(300, 16)
            self.bag = nn.EmbeddingBag(100, 16, mode="mean")
            self.head = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [self.user(x[:, 0]), self.item(x[:, 1]), self.bag(x[:, 2:] % 100)]
            return self.head(torch.cat(parts, 1))

    def make(model: Callable[[], nn.Module], x: Callable[..., torch.Tensor]) -> tuple:
        generator = torch.Generator().manual_seed(5)
        inputs, targets = x(generator), torch.randint(10, (NUM_SAMPLES,), generator=generator)
        torch.manual_seed(7)
        return model(), torch.utils.data.TensorDataset(inputs, targets)

    return {
        "CNN": lambda: make(Cnn, lambda g: torch.randn(NUM_SAMPLES, 3, 8, 8, generator=g)),
        "transformer": lambda: make(
            Transformer, lambda g: torch.randint(50, (NUM_SAMPLES, 12), generator=g)
        ),
        "embeddings": lambda: make(
            Factors, lambda g: torch.randint(200, (NUM_SAMPLES, 8), generator=g)
        ),
    }


class Losses:
    """Every step's loss; saved with checkpoints, so a run that goes on has them all."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        """What a checkpoint keeps."""
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Take it back."""
        self.values = list(state["values"])


def train(model, dataset, stop_after) -> str:  # type: ignore[no-untyped-def]
    """Train one model; digest of all that training leaves."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from hetflow import runtime as hf
    from hetflow.runtime.digest import digest_of

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    job = hf.prepare(model, optimizer)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    losses = Losses()
    job.register(scheduler, losses)
    for _ in range(EPOCHS):
        for batch in job.batches(loader):
            loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.values.append(loss.item())
            if job.num_steps == stop_after:
                if job.is_main:
                    os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(1)  # until the launcher has passed it on
    job.finish()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    told = json.dumps([digest_of(tensors), losses.values, scheduler.state_dict()["_last_lr"]])
    return hashlib.sha256(told.encode()).hexdigest()


def table(digests: dict[str, dict[str, str]]) -> str:
    """A Markdown table: a row a model, a column a mapping."""
    names = list(digests)
    rows = [f"| model | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for model in digests[names[0]]:
        found = [digests[name][model] for name in names]
        rows.append(f"| {model} | {' | '.join(f'`{digest[:12]}`' for digest in found)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
