"""One digest a model: the same virtual nodes on unlike mappings, at a level of determinism.

Each mapping is a launch of its own; each digest is taken of the final parameters, buffers,
optimizer state and losses. Two more launches a model change while they train: resizes from four
workers to two to three of two emulated types, and SIGKILLs of three workers of four, both after
steps drawn from a seed. Printed as the table of docs/determinism.md; exit code 1 where a row has
two digests.

    python benchmarks/digest_table.py --levels elastic heterogeneous
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetflow.schema import files
from hetflow.schema.plan import EmulatedDevice, PassTime, Plan, Prediction, Proof
from hetflow.tests.plan_parts import split_plan, whole_group

VIRTUAL_NODES = 8
NODE_SAMPLES = 4
BATCH = VIRTUAL_NODES * NODE_SAMPLES
NUM_SAMPLES = 2 * BATCH + 5  # the last batch leaves some virtual nodes without samples
EPOCHS = 5
HETFLOW = [sys.executable, "-m", "hetflow.cli.main"]
SPEEDS = {"cpu:fast": 0.5, "cpu:slow": 0.125}
# Virtual nodes of each worker, with its emulated type.
MAPPINGS: dict[str, list[tuple[str, int]]] = {
    "1 worker": [("cpu:fast", 8)],
    "2 workers": [("cpu:fast", 4)] * 2,
    "3 uneven": [("cpu:fast", 5), ("cpu:fast", 2), ("cpu:fast", 1)],
    "4 workers": [("cpu:fast", 2)] * 4,
    "2 types": [("cpu:fast", 6), ("cpu:slow", 2)],
}
MODELS = ("CNN", "transformer", "embeddings")
RESIZES = [[("cpu:fast", 4)] * 2, [("cpu:fast", 4), ("cpu:slow", 2), ("cpu:slow", 2)]]
NUM_KILLS = 3
LIMIT_SECONDS = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two mappings, no changes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--levels", nargs="+", default=["elastic", "heterogeneous"])
    parser.add_argument("--seed", type=int, default=0, help="of the steps of resizes and kills")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--stop-after", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train_all(arguments.train, arguments.only, arguments.stop_after, arguments.epochs)
        return
    levels = ["elastic"] if arguments.quick else arguments.levels
    digests = {level: measure(level, arguments.seed, quick=arguments.quick) for level in levels}
    document = {"benchmark": "digest_table", "seed": arguments.seed, "digests": digests}
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(digests))
    if any(len(set(row)) > 1 for rows in digests.values() for row in by_model(rows).values()):
        raise SystemExit(1)


def measure(level: str, seed: int, *, quick: bool) -> dict[str, dict[str, str]]:
    """Digests by column, then model."""
    names = ["1 worker", "3 uneven"] if quick else list(MAPPINGS)
    with tempfile.TemporaryDirectory() as folder:
        digests = {
            name: launch(MAPPINGS[name], level, Path(folder) / str(number))
            for number, name in enumerate(names)
        }
        for name, disturb in () if quick else (("resizes", resize), ("SIGKILLs", kill)):
            digests[name] = {
                model: Moving(Path(folder) / name / model, level, model).digest(disturb, seed)
                for model in MODELS
            }
    return digests


def plan_of(workers: Sequence[tuple[str, int]]) -> Plan:
    """A plan by hand: the given virtual nodes on each worker."""
    types = sorted({kind for kind, _ in workers})
    return split_plan(
        model="digests",
        global_batch_size=BATCH,
        groups=tuple(
            whole_group(
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
    command = command_of(workers, level, folder, options, arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


def command_of(
    workers: Sequence[tuple[str, int]],
    level: str,
    folder: Path,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> list[str]:
    """The command of a launch in a folder of its own."""
    folder.mkdir(parents=True)
    files.write(folder / "plan.json", plan_of(workers))
    command = [*HETFLOW, "launch", "--determinism", level]
    command += [*options, "-o", str(folder / "run"), str(folder / "plan.json")]
    return [*command, __file__, "--train", str(folder / "digests.json"), *arguments]


class Moving:
    """A launch of one model on four workers that change while it trains.

    Its workers append "STEP PID" to ``progress``, and go on only below the step in ``limit``.
    """

    def __init__(self, folder: Path, level: str, model: str) -> None:
        command = command_of(MAPPINGS["4 workers"], level, folder, arguments=["--only", model])
        self.folder, self.model = folder, model
        (folder / "progress").touch()
        self.allow(0)
        self.output = folder / "output"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(command, stdout=stream, stderr=stream)

    def digest(self, disturb: "Callable[[Moving, random.Random], list[str]]", seed: int) -> str:
        """Let things happen to it; its digest."""
        try:
            expected = disturb(self, random.Random(f"{seed} {self.model}"))
            self.allow(1 << 30)
            if self.process.wait(LIMIT_SECONDS):
                raise SystemExit(self.output.read_text())
        finally:
            self.process.kill()
        record = json.loads((self.folder / "run" / "run.json").read_text())
        kinds = [generation["kind"] for generation in record["generations"][1:]]
        if kinds != expected:
            raise SystemExit(f"{self.model}: {expected} should have happened, and {kinds} did")
        found: str = json.loads((self.folder / "digests.json").read_text())[self.model]
        return found

    def allow(self, limit: int) -> None:
        """Let the workers go on up to a step."""
        self.limit = limit
        (self.folder / "limit.new").write_text(str(limit))
        (self.folder / "limit.new").replace(self.folder / "limit")

    def workers_at(self, step: int) -> set[int]:
        """The processes that have completed a step; at 0, those that are about to begin."""
        lines = (self.folder / "progress").read_text().splitlines()
        return {int(line.split()[1]) for line in lines if line.split()[0] == str(step)}

    def wait(self, is_there: Callable[[], object], *, goes_on: bool = False) -> None:
        """Wait for something, stopped at the limit or with a step ever more seldom."""
        began = at = time.monotonic()
        pause_seconds = 0.5
        while not is_there():
            if self.process.poll() is not None or time.monotonic() > began + LIMIT_SECONDS:
                raise SystemExit(self.output.read_text() or "nothing happens")
            if goes_on and time.monotonic() > at + pause_seconds:
                at, pause_seconds = time.monotonic(), 2 * pause_seconds
                self.allow(self.limit + 1)
            time.sleep(0.01)


def resize(launch: Moving, draw: random.Random) -> list[str]:
    """From four workers to two, and to three of two types, after random steps."""
    present = len(MAPPINGS["4 workers"])
    joined = 0
    for number, workers in enumerate(RESIZES):
        launch.allow(launch.limit + draw.randint(1, 3))
        step = launch.limit
        launch.wait(lambda: len(launch.workers_at(step)) >= present)  # noqa: B023
        plan = launch.folder / f"plan-{number}.json"
        files.write(plan, plan_of(workers))
        asked = subprocess.Popen(
            [*HETFLOW, "resize", str(launch.folder / "run"), "--plan", str(plan)],
            stdout=subprocess.DEVNULL,
        )
        joined += sum(kind == "cpu:slow" for kind, _ in workers)
        launch.wait(lambda: len(launch.workers_at(0)) >= 4 + joined)  # noqa: B023
        launch.wait(lambda: asked.poll() is not None, goes_on=True)  # noqa: B023
        if asked.returncode:
            raise SystemExit("the resize did not come about")
        present = len(workers)
    return ["resize"] * len(RESIZES)


def kill(launch: Moving, draw: random.Random) -> list[str]:
    """SIGKILL three of four workers, one after another, soon after random steps."""
    alive: set[int] = set()
    for _ in range(NUM_KILLS):
        launch.allow(launch.limit + draw.randint(1, 3))
        step = launch.limit
        launch.wait(lambda: len(launch.workers_at(step)) >= max(len(alive), 1))  # noqa: B023
        alive = alive or launch.workers_at(step)
        launch.allow(launch.limit + draw.randint(0, 1))
        time.sleep(draw.uniform(0.0, 0.03))
        victim = draw.choice(sorted(alive))
        alive.remove(victim)
        os.kill(victim, signal.SIGKILL)
    return ["failure"] * NUM_KILLS


def train_all(result: Path, only: str | None, stop_after: int | None, epochs: int) -> None:
    """What each worker runs: the models one after another, each a job of its own."""
    moving = result.parent if only else None
    wanted = {name: make for name, make in models().items() if only in (None, name)}
    found = {
        name: train(*make(), epochs, stop_after, moving, result.parent)
        for name, make in wanted.items()
    }
    if all(is_main for _, is_main in found.values()):
        result.write_text(json.dumps({name: digest for name, (digest, _) in found.items()}))


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


def train(  # type: ignore[no-untyped-def]
    model, dataset, epochs, stop_after, moving, here
) -> tuple[str, bool]:
    """Train one model; digest of all that training leaves, and whether this is the first worker."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from hetflow import runtime as hf
    from hetflow.runtime.nested_tensors import digest_of

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    job = hf.prepare(model, optimizer)
    loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)
    losses = Losses()
    job.register(scheduler, losses)
    hold(moving, 0)
    for _ in range(epochs):
        for batch in job.batches(loader):
            loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.values.append(loss.item())
            hold(moving, job.num_steps)
            if job.num_steps == stop_after:
                wait_for_a_stop(here)
    job.finish()
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    told = json.dumps([digest_of(tensors), losses.values, scheduler.state_dict()["_last_lr"]])
    return hashlib.sha256(told.encode()).hexdigest(), job.is_main


def wait_for_a_stop(here: Path) -> None:
    """Say that the launcher may get a signal, and wait until it had one and has passed it on."""
    (here / "stopping").touch()
    while not (here / "stopped").exists():
        time.sleep(0.01)
    time.sleep(1)


def hold(moving: Path | None, step: int) -> None:
    """Say that a step is complete, and wait until there may be another."""
    if moving is None:
        return
    with (moving / "progress").open("a") as stream:
        stream.write(f"{step} {os.getpid()}\n")
    while step and step >= int((moving / "limit").read_text()):
        time.sleep(0.01)


def by_model(digests: dict[str, dict[str, str]]) -> dict[str, list[str]]:
    """Rows: the digests of a model in order of columns."""
    return {model: [found[model] for found in digests.values()] for model in MODELS}


def table(levels: dict[str, dict[str, dict[str, str]]]) -> str:
    """A Markdown table: a row a level and model, a column a mapping."""
    names = list(next(iter(levels.values())))
    rows = [f"| level, model | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for level, digests in levels.items():
        for model, found in by_model(digests).items():
            cells = " | ".join(f"`{digest[:8]}`" for digest in found)
            rows.append(f"| {level}, {model} | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
