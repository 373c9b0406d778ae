"""The demo's steps. Each is a command of hetflow's own, shown before it runs."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..reports.tables import run_table
from ..schema import files
from ..schema.errors import HetflowError, LaunchError
from ..schema.run import RunRecord
from .common import emit

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "train_digits.py"
GLOBAL_BATCH_SIZE = 256
# The script trains in float64: what is left is the rounding of sums taken in another order.
LOSS_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Summary:
    """What the demo found, for people and for programs."""

    text: str
    document: dict[str, Any]


class Demonstration:
    """Run the chain in a folder and compare its result with a one-device run."""

    def __init__(self, folder: Path, *, epochs: int, talk: bool) -> None:
        self._folder = folder
        self._epochs = epochs
        self._talk = talk

    def run(self) -> Summary:
        """Profile, solve, check, launch, and train once more on one device.

        Raises:
            HetflowError: A step failed, or the results differ.
        """
        devices, pool, is_emulated = _devices_and_pool()
        self._say(f"# devices: {pool}{'  (emulated)' if is_emulated else ''}")
        self._profile_and_solve(devices, pool)
        script = [str(SCRIPT), "--epochs", str(self._epochs)]
        script += ["--batch-size", str(GLOBAL_BATCH_SIZE)]
        self._hetflow("launch", "-o", "run", "plan.json", *script)
        alone = self._script_alone(script)
        record = files.read(self._folder / "run" / "run.json", RunRecord)
        return _summary(record, alone)

    def _profile_and_solve(self, devices: list[str], pool: str) -> None:
        chosen = [flag for device in devices for flag in ("--device", device)]
        self._hetflow(
            "profile", f"{SCRIPT}:workload", "--name", "digits-cnn", *chosen,
            "--batch-sizes", "16,32,64,128", "--quick", "-o", "profiles",
        )  # fmt: skip
        pool_flags = ["--profiles", "profiles", "--gpus", pool]
        self._hetflow(
            "solve", *pool_flags, "--batch-size", str(GLOBAL_BATCH_SIZE), "-o", "plan.json"
        )
        self._hetflow("show", "plan.json")
        self._hetflow("check", "plan.json", *pool_flags)

    def _script_alone(self, script: list[str]) -> float:
        self._say(f"$ python {shlex.join(script)}   # the same script on one device")
        done = self._call([sys.executable, *script, "--json"], capture=True)
        return float(json.loads(done.strip().splitlines()[-1])["loss"])

    def _hetflow(self, *arguments: str) -> None:
        self._say(f"$ hetflow {shlex.join(arguments)}")
        self._call([sys.executable, "-m", "hetflow.cli.main", *arguments], capture=False)

    def _call(self, command: list[str], *, capture: bool) -> str:
        # One thread, as every emulated device has: no crowding.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        target = subprocess.PIPE if capture or not self._talk else None
        done = subprocess.run(
            command, cwd=self._folder, env=environment, stdout=target, text=True, check=False
        )
        if done.returncode:
            raise LaunchError(
                f"the demo stopped: `{shlex.join(command[1:4])} ...` exited with "
                f"{done.returncode}; its own error is above",
                exit_code=done.returncode if done.returncode > 0 else 128 - done.returncode,
            )
        return done.stdout or ""

    def _say(self, line: str) -> None:
        if self._talk:
            emit(line)
            sys.stdout.flush()


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


def _devices_and_pool() -> tuple[list[str], str, bool]:
    """The machine's GPUs; two emulated CPU types where there are none; and which it was."""
    from ..devices.emulated import DEMONSTRATED, DEMONSTRATED_POOL
    from ..devices.local import accelerators

    found = sorted(accelerators(), key=lambda device: device.device_type)
    if not found:
        return list(DEMONSTRATED), DEMONSTRATED_POOL, True
    pool = ",".join(f"{device.num_devices}x{device.device_type}" for device in found)
    return [device.device_type for device in found], pool, False


def _summary(record: RunRecord, alone: float) -> Summary:
    if record.final_loss is None:
        raise HetflowError("the launch recorded no final loss")
    difference = abs(record.final_loss - alone) / max(abs(alone), 1e-12)
    same = difference <= LOSS_TOLERANCE
    text = "\n".join(
        [
            "",
            run_table(record),
            f"final loss under the plan {record.final_loss:.8g}, on one device {alone:.8g} "
            f"(relative difference {difference:.1e})",
        ]
    )
    if not same:
        raise HetflowError(f"the results differ by {difference:.1e}, more than {LOSS_TOLERANCE}")
    document = {
        "run": files.to_plain(record),
        "one_device_final_loss": alone,
        "relative_difference": difference,
        "same": same,
    }
    return Summary(text=text, document=document)
