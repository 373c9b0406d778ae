"""The end of a job: what ended has ended, whatever signal comes, and the next launch waits."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hetflow.runtime.launcher.request import Fence
from hetflow.schema import files
from hetflow.schema.errors import LaunchError
from hetflow.schema.run import RunRecord
from hetflow.tests import programs

from .elastic_runs import wait_until
from .test_launch import LAUNCH, make_plan, write_script
from .two_hosts import Hosts

pytestmark = pytest.mark.processes

# Workers of these tests need no torch. The end takes as long as a last save or an upload may.
ENDS_SLOWLY = """
import atexit, os, pathlib, time
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
def end():
    while not (here / "go").exists():
        time.sleep(0.02)
    (here / ("uploaded" + rank)).touch()
atexit.register(end)
"""
ENDS = """
import os, pathlib
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
(here / ("ended" + rank)).touch()
"""
LEAVES_EARLY = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=8)
for epoch in range(9):
    for batch in job.batches(data):
        job.backward(lambda x: model(x).pow(2).mean(), batch)
    if os.environ["WHERE"] == "evaluation":
        with job.evaluation():
            pass
    if job.rank == 1 and job.num_steps == 3:
        break
"""
HANDLES = """
import os, pathlib, time, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
here, rank = pathlib.Path(os.environ["HERE"]), os.environ["RANK"]
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=8)
try:
    while True:
        for batch in job.batches(data):
            job.backward(lambda x: model(x).pow(2).mean(), batch)
        (here / ("trains" + rank)).touch()
except KeyboardInterrupt:
    (here / ("caught" + rank)).touch()
    time.sleep(float(os.environ["TAKES"]))
    torch.save(model.state_dict(), here / ("saved" + rank))
"""
# A launcher that is signalled as it writes the record, and once more when its work is done.
SIGNALLED = """
import atexit, signal, sys
from hetflow.cli.main import main
from hetflow.schema import files
write = files.write
def written(path, *arguments, **options):
    if path.name == "run.json":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
    return write(path, *arguments, **options)
files.write = written
atexit.register(lambda: signal.raise_signal(signal.SIGTERM))
main()
"""


# Nothing is left to do for its workers, whose interpreters take long to end.
LINGERS = """
import os, pathlib, time
class Lingers:
    def __del__(self, sleep=time.sleep):
        sleep(60)
lingers = Lingers()
(pathlib.Path(os.environ["HERE"]) / ("pid" + os.environ["RANK"])).write_text(str(os.getpid()))
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    files.write(tmp_path / "plan.json", make_plan("cpu:fast", "cpu:slow"))
    return tmp_path


def status(here: Path) -> tuple[str, int]:
    record = files.read(here / "run" / "run.json", RunRecord)
    return record.status, record.exit_code


@pytest.mark.parametrize("saving", [(), ("--checkpoint", "saved")])
def test_no_signal_undoes_that_the_scripts_have_ended(here: Path, saving: tuple[str, ...]) -> None:
    write_script(here, ENDS_SLOWLY)
    with programs.start(
        [*LAUNCH, *saving, "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        ended = [here / "run" / "logs" / f"rank{rank}.ended" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in ended))
        for number in (signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
            time.sleep(0.1)
        (here / "go").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert status(here) == ("done", 0)
    assert (here / "uploaded0").exists()
    assert (here / "uploaded1").exists()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_no_signal_to_one_of_two_hosts_undoes_that_all_scripts_have_ended(
    here: Path, node: int
) -> None:
    write_script(here, ENDS_SLOWLY)
    saving = ("--checkpoint", str(here / "saved"))
    hosts = Hosts(here / "a", 0, [5, 3], *saving, script=here / "script.py")
    wait_until(lambda: all(list(run.glob("logs/*.ended")) for run in hosts.runs))
    for number in (signal.SIGTERM, signal.SIGINT):
        hosts.processes[node].send_signal(number)
        time.sleep(1.5)  # the other host asks for signals once a second
    (here / "go").touch()
    assert hosts.end() == [0, 0], hosts.said()
    record = files.read(hosts.runs[0] / "run.json", RunRecord)
    assert (record.status, record.exit_code) == ("done", 0)
    assert [(here / f"uploaded{rank}").exists() for rank in range(2)] == [True, True]


def test_an_end_that_hangs_is_cut_off_after_the_grace_time(here: Path) -> None:
    write_script(here, ENDS_SLOWLY)
    with programs.start(
        [*LAUNCH, "--grace", "1", "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until((here / "run" / "logs" / "rank0.ended").exists)
        wait_until((here / "run" / "logs" / "rank1.ended").exists)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 143, said
    assert status(here) == ("interrupted", 143)


@pytest.mark.parametrize("where", ["a step", pytest.param("evaluation", marks=pytest.mark.slow)])
def test_a_worker_that_leaves_the_loop_early_is_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("WHERE", where)
    write_script(here, LEAVES_EARLY)
    command = [*LAUNCH, "-o", "run", "plan.json", "script.py"]
    done = programs.run(command, timeout=60, cwd=here)  # a wait's own limit is 600 s
    assert done.returncode == 2, done.stderr
    said = done.stderr.splitlines()
    assert said[-2] == (
        "hetflow: worker 1 (cpu:slow) left the loop at step 3, and worker 0 (cpu:fast) waits for "
        "it there"
    )
    assert "job.evaluation()" in said[-1]


@pytest.mark.parametrize(("takes", "is_saved"), [("0.1", True), ("60", False)])
def test_the_script_handles_ctrl_c_within_the_grace_time(
    here: Path, monkeypatch: pytest.MonkeyPatch, takes: str, is_saved: bool
) -> None:
    monkeypatch.setenv("TAKES", takes)
    write_script(here, HANDLES)
    grace = "30" if is_saved else "2"
    with programs.start(
        [*LAUNCH, "--grace", grace, "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: all((here / f"trains{rank}").exists() for rank in range(2)))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert status(here) == ("interrupted", 130)
    assert "Traceback" not in said
    for rank in range(2):
        assert (here / f"caught{rank}").exists()
        assert (here / f"saved{rank}").exists() == is_saved
        assert not (here / "run" / "logs" / f"rank{rank}.ended").exists()


@pytest.mark.slow
def test_signals_while_the_record_is_written_and_after_it_change_nothing(here: Path) -> None:
    write_script(here, ENDS)
    arguments = ["launch", "-o", "run", "plan.json", "script.py"]
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED, *arguments],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert status(here) == ("done", 0)


def test_sigkill_to_workers_that_have_nothing_left_to_do_changes_nothing(here: Path) -> None:
    write_script(here, LINGERS)
    with programs.start(
        [*LAUNCH, "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        left = [here / "run" / "logs" / f"rank{rank}.left" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in left))
        for rank in range(2):
            os.kill(int((here / f"pid{rank}").read_text()), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert status(here) == ("done", 0)


# A worker whose own process outlives the launch, as one in a long exit of a driver does.
OUTLIVES = """
import fcntl, os, pathlib, time
here = pathlib.Path(os.environ["HERE"])
if os.environ["RANK"] == "0":
    lock = (here / "own lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit("the worker before is still there")
    if not (here / "first").exists():
        if os.fork() == 0:
            (here / "first").touch()
            time.sleep(3)
            os._exit(0)
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_new_launch_waits_until_every_process_of_a_killed_one_is_gone(here: Path) -> None:
    write_script(here, OUTLIVES)
    command = [*LAUNCH, "--checkpoint", "saved", "plan.json", "script.py"]
    with programs.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        wait_until((here / "first").exists)
        first.kill()
        first.communicate(timeout=60)
    again = programs.run(command, timeout=60)
    assert again.returncode == 0, again.stderr
    assert "waiting until the workers of another launch (launcher: process " in again.stderr


def test_a_launch_does_not_wait_for_ever(tmp_path: Path) -> None:
    told: list[str] = []
    quiet = lambda: None  # noqa: E731
    with Fence(tmp_path / "saved") as first, Fence(tmp_path / "saved") as second:
        first.close_behind(1.0, quiet, told.append)
        with pytest.raises(LaunchError, match="still used these checkpoints after 0 s"):
            second.close_behind(0.0, quiet, told.append)
        with Fence(tmp_path / "saved", 1) as another_host:
            another_host.close_behind(0.0, quiet, told.append)
    with Fence(tmp_path / "saved") as later:
        later.close_behind(0.0, quiet, told.append)
        assert later.descriptor is not None
        assert not os.get_inheritable(later.descriptor)
        fcntl.flock(later.descriptor, fcntl.LOCK_UN)
    assert not told
