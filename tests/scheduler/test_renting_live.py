"""Trainings on rented machines for real: bits after kills without notice, and killed agents."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.market import RentRun
from hetflow.tests import programs

from .conftest import profile
from .test_live import SCRIPT as TRAINING
from .test_live import hetflow

pytestmark = [pytest.mark.processes, pytest.mark.slow]
NUM_KILLS = int(os.environ.get("HETFLOW_RENT_KILLS", "2"))
LIMIT_SECONDS = 300.0
STEP_LINE = "        optimizer.zero_grad()\n"
# The training of test_live, with steps that take a while: the market has time to change.
SCRIPT = TRAINING.replace("range(50)", "range(40)").replace(
    STEP_LINE, STEP_LINE + "        time.sleep(0.05)\n"
).replace("import torch\n", "import time\nimport torch\n", 1)  # fmt: skip
ZONES = {
    "a": [1] * 6 + [0] * 6 + [1] * 60,
    "b": [0] * 6 + [1] * 6 + [0] * 60,
}
RENT = [
    "rent", "run", "--offers", "zones.json", "--between-zones", "--work-hours", "0.1333",
    "--deadline-hours", "1", "--on-demand", "3", "--spot", "1", "--restart-seconds", "60",
    "--notice-seconds", "0", "--checkpoint-every", "10", "--steps", "160", "--time-scale", "60",
    "--policy", "greedy", "-o", "rented", "plan.json", "train.py",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, a script and a market of two zones, in ticks of a minute."""
    monkeypatch.setenv(programs.VARIABLE, programs.preloaded())
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "profiles").mkdir()
    one = profile("cpu", 0.012, 1.0)
    del one["emulation"]
    (tmp_path / "profiles" / "cpu.json").write_text(json.dumps(one))
    windows = [
        {"zone": name, "start": "2024-01-01T00:00:00Z", "tick_seconds": 60, "available": there}
        for name, there in ZONES.items()
    ]
    market = {"schema": "hetflow.market/1", "availability": windows}
    (tmp_path / "zones.json").write_text(json.dumps(market))
    hetflow("solve", "split", "--profiles", "profiles", "--gpus", "1xcpu", "--batch-size", "16",
            "--virtual-nodes", "1", "-o", "plan.json", folder=tmp_path)  # fmt: skip
    return tmp_path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digest of an undisturbed training, once it is known."""
    return []


def undisturbed(folder: Path, alone: list[str]) -> str:
    if not alone:
        hetflow("launch", "-o", "alone", "--determinism", "elastic", "plan.json", "train.py",
                folder=folder)  # fmt: skip
        told = json.loads((folder / "alone" / "run.json").read_text())
        alone.append(told["parameters_digest"])
    return alone[0]


def record_of(folder: Path) -> RentRun:
    return files.read(folder / "rented" / "rent_run.json", RentRun)


def check_paid(run: RentRun) -> None:
    """What was paid is what was held, at its prices; an agent that was killed pays for a tick."""
    paid = sum(
        row.dollars_per_hour * (after.at_seconds - row.at_seconds) / 3600
        for row, after in zip(run.held, run.held[1:], strict=False)
    )
    assert run.dollars == pytest.approx(paid, rel=0.05, abs=0.02)


def test_machines_that_go_without_notice_leave_the_bits_as_they_are(
    folder: Path, alone: list[str]
) -> None:
    table = hetflow(*RENT, folder=folder)
    run = record_of(folder)
    assert (run.status, run.is_late) == ("done", False)
    assert run.num_preemptions >= 1
    assert run.num_steps_repeated <= run.checkpoint_every * run.num_preemptions
    assert run.parameters_digest == undisturbed(folder, alone)
    check_paid(run)
    assert f"parameters {run.parameters_digest}" in table
    assert hetflow("show", str(folder / "rented" / "rent_run.json"), folder=folder) == table
    assert not left_over(folder)
    # It is done: started again, it says so and trains no more.
    assert hetflow(*RENT, folder=folder) == table
    assert record_of(folder) == run


def test_nothing_outlives_an_agent_that_is_killed(folder: Path, alone: list[str]) -> None:
    draw = random.Random(NUM_KILLS + 1)  # of two kills one comes early, one in the middle
    kills = 0
    while kills < NUM_KILLS:
        with (folder / "agent.log").open("ab") as log:
            agent = programs.start(
                [sys.executable, "-m", "hetflow", *RENT], cwd=folder, stdout=log, stderr=log
            )
        try:
            agent.wait(draw.uniform(1.0, 9.0))
        except subprocess.TimeoutExpired:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
            kills += 1
            until_nothing_is_left(folder)
        else:
            assert agent.returncode == 0, (folder / "agent.log").read_text()
            assert record_of(folder).parameters_digest == undisturbed(folder, alone)
            (folder / "rented").rename(folder / f"rented-{kills}-{time.monotonic_ns()}")
    hetflow(*RENT, folder=folder)
    run = record_of(folder)
    assert run.status == "done"
    assert run.parameters_digest == undisturbed(folder, alone)
    check_paid(run)


def until_nothing_is_left(folder: Path) -> None:
    end = time.monotonic() + LIMIT_SECONDS
    while found := left_over(folder):
        assert time.monotonic() < end, found
        time.sleep(0.1)


def left_over(folder: Path) -> list[str]:
    """The commands that run on behalf of a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            home = os.readlink(process / "cwd")
        except OSError:
            continue
        if process.name != str(os.getpid()) and (str(folder) in words or home == str(folder)):
            found.append(words)
    return found
