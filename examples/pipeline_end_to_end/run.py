"""Profile, solve and train two models as pipelines on emulated unlike devices; compare.

    python examples/pipeline_end_to_end/run.py            about 10 minutes on two busy cores
    python examples/pipeline_end_to_end/run.py --quick    one model, two workers

For each model and pool: the solver's pipeline, its predicted step time, the measured one, and the
loss of the last step beside that of one device, which must be the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from hetflow.schema import files
from hetflow.schema.run import RunRecord

SCRIPT = Path(__file__).with_name("train.py")
MODELS = ("vgg", "gpt")
POOLS = ("1xcpu:fast,1xcpu:slow", "1xcpu:fast,2xcpu:slow", "2xcpu:fast,2xcpu:slow")
BATCH_SIZE = 64
MICROBATCH_SIZE = 8
# Four workers compute for a seventh of a core each; otherwise they sleep, as the devices' table
# says. Passes take at least 10 ms, because shorter sleeps are not exact.
DEVICES = ("cpu:fast=0.05", "cpu:slow=0.025")
LINK_BYTES_PER_SECOND = 1e9


@dataclass(frozen=True)
class Result:
    """One pipeline: its prediction and its measurement; the error is relative."""

    model: str
    pool: str
    stages: str
    predicted_step_seconds: float
    measured_step_seconds: float
    error: float
    loss: float
    one_device_loss: float


def command(folder: Path, *arguments: str) -> str:
    """Run a program in a folder and return its stdout; its stderr is shown."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


def hetflow(folder: Path, *arguments: str) -> str:
    """Run one hetflow command."""
    return command(folder, "-m", "hetflow.cli.main", *arguments)


def profile(folder: Path, model: str, quick: bool) -> None:
    """Profile a model's layers on both device types; the bandwidth is given, not measured."""
    devices = [word for device in DEVICES for word in ("--device", device)]
    devices += ["--quick"] if quick else []
    hetflow(
        folder, "profile", f"{SCRIPT}:{model}", "--name", model, "--layers", "--microbatch-size",
        str(MICROBATCH_SIZE), "--batch-sizes", str(MICROBATCH_SIZE), "--sync-devices", "0",
        "--no-links", "--optimizer", "adam", *devices, "-o", "profiles",
    )  # fmt: skip


def one_device_loss(folder: Path, model: str, steps: int) -> float:
    """The last step's loss under plain python."""
    said = command(
        folder, str(SCRIPT), model, "--steps", str(steps), "--batch-size", str(BATCH_SIZE)
    )
    return float(said.split()[-1])


def pipeline(folder: Path, model: str, pool: str, steps: int) -> RunRecord:
    """Solve for a pool, and train under the plan."""
    name = f"{model}-{POOLS.index(pool)}"
    hetflow(
        folder, "solve", "--profiles", "profiles", "--model", model, "--gpus", pool,
        "--batch-size", str(BATCH_SIZE), "--strategy", "pipeline",
        "--link-bytes-per-second", str(LINK_BYTES_PER_SECOND), "-o", f"{name}.json",
    )  # fmt: skip
    hetflow(
        folder, "launch", "-o", name, f"{name}.json", str(SCRIPT), model,
        "--steps", str(steps), "--batch-size", str(BATCH_SIZE),
    )  # fmt: skip
    return files.read(folder / name / "run.json", RunRecord)


def result(model: str, pool: str, run: RunRecord, alone: float) -> Result:
    """Compare a run with its prediction and with one device."""
    plan = run.plan
    assert plan.kind == "pipeline"
    assert run.predicted_step_seconds is not None
    assert run.measured_step_seconds is not None
    assert run.final_loss is not None
    stages = " | ".join(
        f"{len(stage.layers)} on {stage.num_replicas}x{stage.device_type}" for stage in plan.stages
    )
    return Result(
        model=model,
        pool=pool,
        stages=stages,
        predicted_step_seconds=run.predicted_step_seconds,
        measured_step_seconds=run.measured_step_seconds,
        error=run.predicted_step_seconds / run.measured_step_seconds - 1,
        loss=run.final_loss,
        one_device_loss=alone,
    )


def compare(
    models: tuple[str, ...], pools: tuple[str, ...], steps: int, *, quick: bool = False
) -> list[Result]:
    """Run all models on all pools; ``quick`` measures the profiles roughly."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in models:
            profile(folder, model, quick)
            alone = one_device_loss(folder, model, steps)
            for pool in pools:
                run = pipeline(folder, model, pool, steps)
                found.append(result(model, pool, run, alone))
                print(line_of(found[-1]), flush=True)
    return found


def line_of(found: Result) -> str:
    """One result as a row of the table."""
    return (
        f"{found.model:4} {found.pool:23} {found.stages:72} "
        f"{found.predicted_step_seconds * 1e3:7.1f} {found.measured_step_seconds * 1e3:7.1f} ms "
        f"{100 * found.error:+5.1f} %  loss {found.loss:.6f} one device "
        f"{found.one_device_loss:.6f}"
    )


def main() -> None:
    """Run the models and pools asked for, and print the mean error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one model, two workers, few steps")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    if arguments.quick:
        found = compare(MODELS[:1], POOLS[:1], 4, quick=True)
    else:
        found = compare(MODELS, POOLS, arguments.steps)
    mean = sum(abs(entry.error) for entry in found) / len(found)
    apart = max(abs(entry.loss - entry.one_device_loss) for entry in found)
    print(f"mean |error| {100 * mean:.1f} %; losses at most {apart:.1e} from one device's")
    if arguments.json:
        rows = {"rows": [asdict(entry) for entry in found], "mean_error": mean}
        files.write_text(arguments.json, json.dumps(rows, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
