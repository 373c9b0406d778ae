"""A training over an hour of market in three minutes: dollars beside the prediction, and the bits.

Two zones whose spot machines go without notice. What a launch takes until its first step is
measured before, and given as the restart.

    python benchmarks/renting_live.py        five minutes; on a quiet machine
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hetflow.runtime.preload import VARIABLE, serving
from hetflow.runtime.protocol.environment import FIRST_STEP
from hetflow.tests.scheduler.test_renting_live import SCRIPT, hetflow, left_over

SCALE, STEPS, STEP_SECONDS, TICK_SECONDS = 20.0, 1200, 0.1, 150.0
ZONES = {"a": [1] * 5 + [0] * 19, "b": [0] * 5 + [1] * 5 + [0] * 2 + [1] * 12}
PACED = SCRIPT.replace("range(40)", f"range({STEPS // 4})").replace(
    "        time.sleep(0.05)",
    f"        due = max(due + {STEP_SECONDS}, time.monotonic() - 1)\n"
    "        time.sleep(max(0.0, due - time.monotonic()))",
).replace("for epoch", "due = time.monotonic()\nfor epoch", 1)  # fmt: skip


def prepare(folder: Path) -> None:
    """A script that makes a step each 0.1 s, its plan, and a market."""
    point = {"batch_size": 16, "step_seconds": STEP_SECONDS, "peak_memory_bytes": 1 << 20}
    profile = {
        "schema": "hetflow.profile/1", "model": "tiny", "device_type": "cpu",
        "device_memory_bytes": 1 << 30, "weight_bytes": 1000, "update_seconds": 0.0,
        "batch_curve": [point],
    }  # fmt: skip
    windows = [
        {"zone": zone, "start": "2024-01-01T00:00:00Z", "tick_seconds": TICK_SECONDS,
         "available": there}
        for zone, there in ZONES.items()
    ]  # fmt: skip
    market = {"schema": "hetflow.market/1", "availability": windows}
    (folder / "train.py").write_text(PACED)
    (folder / "cpu.json").write_text(json.dumps(profile))
    (folder / "zones.json").write_text(json.dumps(market))
    hetflow("solve", "split", "--profiles", "cpu.json", "--gpus", "1xcpu", "--batch-size", "16",
            "--virtual-nodes", "1", "-o", "plan.json", folder=folder)  # fmt: skip


def launch_seconds(folder: Path) -> float:
    """From a launch to its first step."""
    first = folder / "first"
    first.unlink(missing_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "hetflow", "launch", "-o", "once", "--force", "--determinism",
               "elastic", "plan.json", "train.py"]  # fmt: skip
    launch = subprocess.Popen(
        command, cwd=folder, env={**os.environ, FIRST_STEP: str(first)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while not first.exists() and launch.poll() is None:
        time.sleep(0.01)
    took = time.monotonic() - began
    launch.kill()
    launch.wait()
    return took


def main() -> None:
    """Run it, and print dollars, launches and whether the bits are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as socket:
        os.environ[VARIABLE] = str(socket)
        folder = Path(name)
        prepare(folder)
        took = sorted(launch_seconds(folder) for _ in range(3))[1]
        hetflow(
            "rent", "run", "--offers", "zones.json", "--between-zones", "--work-hours",
            str(STEPS * STEP_SECONDS * SCALE / 3600), "--deadline-hours", "1", "--on-demand", "3",
            "--spot", "1", "--restart-seconds", str(round(took * SCALE)), "--notice-seconds", "0",
            "--checkpoint-every", "5", "--steps", str(STEPS), "--time-scale", str(SCALE),
            "--policy", "greedy", "-o", "rented", "plan.json", "train.py", folder=folder,
        )  # fmt: skip
        run = json.loads((folder / "rented" / "rent_run.json").read_text())
        hetflow("launch", "-o", "alone", "--determinism", "elastic", "plan.json", "train.py",
                folder=folder)  # fmt: skip
        alone = json.loads((folder / "alone" / "run.json").read_text())["parameters_digest"]
        result = {
            "launch_seconds": took,
            **{key: value for key, value in run.items() if key != "held"},
            "same_bits": run["parameters_digest"] == alone,
            "left_over": left_over(folder / "rented"),
        }
    off = run["dollars"] / run["predicted_dollars"] - 1
    print(
        f"{run['dollars']:.4f} $, predicted {run['predicted_dollars']:.4f} $ ({100 * off:+.1f} %); "
        f"{run['num_launches']} launches of {took:.1f} s, {run['num_preemptions']} machines taken "
        f"away, {run['num_steps_repeated']} steps repeated; the bits are "
        + ("the same" if result["same_bits"] else "OTHERS")
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
