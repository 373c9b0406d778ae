"""The steps of ``hetflow demo``. Each is a command of hetflow's own, shown before it runs."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hetflow
from hetflow.devices.cpu import DEMONSTRATED, DEMONSTRATED_POOL
from hetflow.devices.local import accelerators
from hetflow.schema import files
from hetflow.schema.errors import HetflowError, LaunchError
from hetflow.schema.run import RunRecord

SCRIPT = Path(__file__).resolve().parent / "train_digits.py"
GLOBAL_BATCH_SIZE = 256
# The script trains in float64: what is left is the rounding of sums taken in another order.
LOSS_TOLERANCE = 1e-9


def check_installed() -> None:
    """Refuse to start where a library that the demo needs is missing. Imports torch.

    Raises:
        ModuleNotFoundError: It is torch, which the command line says in its own words.
        HetflowError: It is scikit-learn.
    """
    importlib.import_module("torch")
    if importlib.util.find_spec("sklearn") is None:
        raise HetflowError(
            "the demo's dataset ships with scikit-learn, which is not installed",
            hint="pip install 'hetflow[examples]'",
        )


def demonstrate(
    folder: Path, epochs: int, say: Callable[[str], object] | None
) -> tuple[str, dict[str, Any]]:
    """Profile, solve, check, launch, and train once more on one device.

    Args:
        folder: Where profiles, plan and run go.
        epochs: How long to train.
        say: Shows a line, and what the commands print; None shows nothing.

    Returns:
        What was found, as a text and as a JSON document.

    Raises:
        HetflowError: A step failed, or the results differ.
    """

    def run(shown: str, command: list[str], *, capture: bool = False) -> str:
        if say is not None:
            say(shown)
        # One thread, as every emulated device has: no crowding.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        target = subprocess.PIPE if capture or say is None else None
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=target, text=True, check=False
        )
        if done.returncode:
            raise LaunchError(
                f"the demo stopped: `{shlex.join(command[1:4])} ...` exited with "
                f"{done.returncode}; its own error is above",
                exit_code=done.returncode if done.returncode > 0 else 128 - done.returncode,
            )
        return done.stdout or ""

    def command(*arguments: str) -> None:
        run(f"$ hetflow {shlex.join(arguments)}",
            [sys.executable, "-m", "hetflow.cli.main", *arguments])  # fmt: skip

    devices, pool, is_emulated = _devices_and_pool()
    if say is not None:
        say(f"# devices: {pool}{'  (emulated)' if is_emulated else ''}")
    chosen = [flag for device in devices for flag in ("--device", device)]
    command(
        "profile", f"{SCRIPT}:workload", "--name", "digits-cnn", *chosen,
        "--batch-sizes", "16,32,64,128", "--quick", "-o", "profiles",
    )  # fmt: skip
    pool_flags = ["--profiles", "profiles", "--gpus", pool]
    command("solve", *pool_flags, "--batch-size", str(GLOBAL_BATCH_SIZE), "-o", "plan.json")
    command("show", "plan.json")
    command("check", "plan.json", *pool_flags)
    script = [str(SCRIPT), "--epochs", str(epochs), "--batch-size", str(GLOBAL_BATCH_SIZE)]
    command("launch", "-o", "run", "plan.json", *script)
    printed = run(
        f"$ python {shlex.join(script)}   # the same script on one device",
        [sys.executable, *script, "--json"], capture=True,
    )  # fmt: skip
    alone = float(json.loads(printed.strip().splitlines()[-1])["loss"])
    return _compared(files.read(folder / "run" / "run.json", RunRecord), alone)


def _devices_and_pool() -> tuple[list[str], str, bool]:
    """The machine's GPUs; two emulated CPU types where there are none; and which it was."""
    found = sorted(accelerators(), key=lambda device: device.device_type)
    if not found:
        return list(DEMONSTRATED), DEMONSTRATED_POOL, True
    pool = ",".join(f"{device.num_devices}x{device.device_type}" for device in found)
    return [device.device_type for device in found], pool, False


def _compared(record: RunRecord, alone: float) -> tuple[str, dict[str, Any]]:
    if record.final_loss is None:
        raise HetflowError("the launch recorded no final loss")
    difference = abs(record.final_loss - alone) / max(abs(alone), 1e-12)
    if difference > LOSS_TOLERANCE:
        raise HetflowError(f"the results differ by {difference:.1e}, more than {LOSS_TOLERANCE}")
    text = (
        f"\n{hetflow.show(record)}\nfinal loss under the plan {record.final_loss:.8g}, on one "
        f"device {alone:.8g} (relative difference {difference:.1e})"
    )
    return text, {
        "run": files.to_plain(record),
        "one_device_final_loss": alone,
        "relative_difference": difference,
        "same": True,
    }
