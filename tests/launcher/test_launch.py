"""``hetflow launch`` from outside: processes, signals, exit codes, files, hostile strings."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.runtime.protocol.environment import pins, prefix_of
from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.run import RunRecord
from hetflow.tests import programs
from hetflow.tests.plan_parts import split_plan, whole_group

pytestmark = pytest.mark.processes

LAUNCH = [sys.executable, "-m", "hetflow.cli.main", "launch"]

# Workers of these tests need no torch, so they start at once.
SLEEPS = """
import os, pathlib, time
pathlib.Path(os.environ["HERE"], "pid" + os.environ["RANK"]).write_text(str(os.getpid()))
print("started", flush=True)
time.sleep(120)
"""
FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    MANNER
time.sleep(60)
"""
# A run that waits, after all its steps, until the test lets it end.
HOLDS_AT_THE_END = """
import os, pathlib, sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in job.batches(DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=8)):
    job.backward(lambda x: model(x).pow(2).mean(), batch)
here = pathlib.Path(os.environ["HERE"])
if job.rank == 1:
    told = [str(os.getpid()), os.environ["MASTER_PORT"], str("HETFLOW_TOKEN" in os.environ)]
    (here / "telling").write_text(" ".join(told))
    (here / "telling").rename(here / "told")
    while not (here / "go").exists():
        time.sleep(0.02)
"""
TRAINS = """
import os, pathlib, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=8)
for epoch in range(10**6):
    for batch in job.batches(loader):
        job.backward(lambda x: model(x).pow(2).mean(), batch)
    if epoch == 5:
        pathlib.Path(os.environ["HERE"], f"trained{job.rank}").touch()
"""
TELLS = """
import json, os, pathlib, sys
pathlib.Path(os.environ["HERE"], "told" + os.environ["RANK"]).write_text(
    json.dumps([sys.argv[1:], os.environ["HETFLOW_DEVICE_TYPE"], __name__]))
print("out of", os.environ["RANK"])
print("err of", os.environ["RANK"], file=sys.stderr)
"""


def make_plan(*types: str, model: str = "m") -> Plan:
    groups = tuple(
        whole_group(
            device_type=name,
            num_devices=1,
            device_batch_size=4,
            virtual_nodes=2,
            virtual_node_batch_size=2,
        )
        for name in types
    )
    return split_plan(
        model=model,
        global_batch_size=4 * len(types),
        groups=groups,
        predicted=Prediction(step_seconds=0.5, samples_per_second=16.0),
        proof=Proof(
            termination="feasible", objective=0.5, lower_bound=None, gap=None, method="hand"
        ),
    )


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    files.write(tmp_path / "plan.json", make_plan("cpu:fast", "cpu:slow"))
    return tmp_path


def write_script(folder: Path, text: str) -> None:
    (folder / "script.py").write_text(text)


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return programs.run([*LAUNCH, *arguments], timeout=90)


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_arguments_pass_untouched_and_execute_nothing(here: Path) -> None:
    write_script(here, TELLS)
    strange = ["a b", "quo'te\"", "new\nline", "$(touch marker)", "--json", "-o", ""]
    strange += ["--api-key", "of-my-account", "s3://me:pass-word@host/data"]
    model = "m; touch marker `touch marker` $(touch marker)"
    files.write(here / "plan.json", make_plan("cpu:fast", "cpu:slow", model=model), force=True)
    done = run("plan.json", "script.py", *strange)
    assert done.returncode == 0, done.stderr
    for rank, kind in enumerate(["cpu:fast", "cpu:slow"]):
        assert json.loads((here / f"told{rank}").read_text()) == [strange, kind, "__main__"]
    assert not list(here.rglob("marker"))
    assert done.stdout == "out of 0\n"
    assert "err of 0\n" in done.stderr
    assert "never called hf.prepare" in done.stderr
    (run_folder,) = (here / "hetflow-runs").iterdir()
    assert (run_folder / "logs" / "rank1.out").read_text() == "out of 1\n"
    assert (run_folder / "logs" / "rank1.err").read_text() == "err of 1\n"
    record = files.read(run_folder / "run.json", RunRecord)
    assert record.status == "done"
    masked = [*strange[:-3], "--api-key", "***", "s3://me:***@host/data"]
    assert (record.provenance or {})["script"] == ["script.py", *masked]
    written = [path for path in run_folder.rglob("*") if path.is_file()]
    for secret in (b"of-my-account", b"pass-word"):
        assert [path for path in written if secret in path.read_bytes()] == []


def test_a_module_runs_and_json_stands_alone_on_stdout(here: Path) -> None:
    (here / "script.py").write_text(TELLS)
    done = run("--json", "-o", "run", "plan.json", "-m", "script", "one")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["schema"] == "hetflow.run/1"
    assert "out of 0\n" in done.stderr
    assert json.loads((here / "told1").read_text())[0] == ["one"]
    again = run("-o", "run", "plan.json", "-m", "script")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr.startswith("hetflow: run: exists already\nhint: give --force")


@pytest.mark.parametrize(
    ("manner", "code", "said"),
    [
        ("raise ValueError('its own error')", 1, "exit code 1: ValueError: its own error"),
        ("sys.exit(7)", 7, "failed with exit code 7: sys.exit(7)"),
        ("sys.exit('a reason')", 1, "failed with exit code 1: a reason"),
        ("os._exit(9)", 9, "failed with exit code 9"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by SIGKILL"),
    ],
)
def test_the_failing_workers_own_error_and_code(
    here: Path, manner: str, code: int, said: str
) -> None:
    write_script(here, FAILS.replace("MANNER", manner))
    done = run("-o", "run", "plan.json", "script.py")
    assert done.returncode == code
    last = [line for line in done.stderr.splitlines() if line.startswith("hetflow: ")][-1]
    assert last.startswith("hetflow: worker 1 (cpu:slow) ")
    assert said in last
    # A script's traceback holds the script's frames only, as under plain python.
    assert "runtime/worker.py" not in done.stderr
    record = files.read(here / "run" / "run.json", RunRecord)
    assert (record.status, record.exit_code) == ("failed", code)
    assert said in record.events[0].detail


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_worker_outlives_the_launch(here: Path, number: int, code: int) -> None:
    write_script(here, SLEEPS)
    with programs.start(
        [*LAUNCH, "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: all((here / f"pid{rank}").exists() for rank in range(2)))
        wait_until(lambda: all((here / f"pid{rank}").read_text() for rank in range(2)))
        pids = [int((here / f"pid{rank}").read_text()) for rank in range(2)]
        assert all(alive(pid) for pid in pids)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    wait_until(lambda: not any(alive(pid) for pid in pids))
    if number != signal.SIGKILL:
        name = signal.Signals(number).name
        assert f"hetflow: interrupted by {name}; all workers are stopped\n" in stderr
        record = files.read(here / "run" / "run.json", RunRecord)
        assert (record.status, record.exit_code) == ("interrupted", code)
        assert record.events[0].kind == "stop"


@pytest.mark.slow
def test_a_run_that_is_interrupted_records_what_it_measured(here: Path) -> None:
    write_script(here, TRAINS)
    with programs.start(
        [*LAUNCH, "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: all((here / f"trained{rank}").exists() for rank in range(2)))
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr == "hetflow: interrupted by SIGINT; all workers are stopped\n"
    record = files.read(here / "run" / "run.json", RunRecord)
    assert (record.status, record.parameters_digest) == ("interrupted", None)
    assert record.num_steps >= 18
    assert [device.rank for device in record.devices] == [0, 1]
    for device in record.devices:
        assert device.terms is not None
        assert device.terms.num_steps >= 10
    assert record.terms


def test_dry_run_prints_what_would_run(here: Path) -> None:
    write_script(here, TELLS)
    shown = run("--dry-run", "plan.json", "script.py", "a b", "$(touch marker)")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert len(lines) == 2
    assert "RANK=1 WORLD_SIZE=2" in lines[1]
    assert lines[1].endswith("hetflow.runtime.worker script.py 'a b' '$(touch marker)'")
    assert "HETFLOW_DEVICE_TYPE=cpu:slow" in lines[1]
    assert "OMP_NUM_THREADS=1" in lines[1]
    assert "PYTHONHASHSEED" not in lines[1]
    elastic = ("--dry-run", "--json", "--determinism", "elastic", "plan.json", "script.py")
    workers = json.loads(run(*elastic).stdout)["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert all(pins("elastic").items() <= worker["environment"].items() for worker in workers)
    assert sorted(path.name for path in here.iterdir()) == ["plan.json", "script.py"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json", "script.py"], "none.json: no such file"),
        (["plan.json", "none.py"], "none.py: no such script"),
        (["many.json", "script.py"], "the plan needs 4096 x cpu, this machine has "),
        (["gpu.json", "script.py"], "the plan needs 1 x NoSuchGPU, this machine has 0"),
        (["--checkpoint-every", "2", "plan.json", "script.py"], "--checkpoint-every 2 needs a"),
        (["--checkpoint", "plan.json", "plan.json", "script.py"], "plan.json: is no folder"),
        (["--nnodes", "2", "plan.json", "script.py"], "need --node-rank and --rdzv-endpoint"),
        (["--devices", "1xcpu", "plan.json", "script.py"], "--devices '1xcpu' is what this host"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", "plan.json", "x.py"],
            "--node-rank must be 0 to 1 with --nnodes 2, got 2",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "h", "plan.json", "x.py"],
            "--rdzv-endpoint must be HOST:PORT, got 'h'",
        ),
    ],
)
def test_bad_requests_end_in_one_line_and_no_file(
    here: Path, arguments: list[str], said: str
) -> None:
    write_script(here, TELLS)
    many = make_plan("cpu")
    group = files.to_plain(many)
    replicas = group["stages"][0]["replicas"][0]
    nodes = 4096 * replicas["virtual_nodes"]
    replicas["num_replicas"], replicas["samples"] = 4096, 4 * 4096
    group["global_batch_size"], group["num_microbatches"] = 4 * 4096, nodes
    (here / "many.json").write_text(json.dumps(group))
    files.write(here / "gpu.json", make_plan("NoSuchGPU"))
    before = sorted(here.iterdir())
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    first, *rest = done.stderr.splitlines()
    assert first.startswith("hetflow: ")
    assert said in first
    assert all(line.startswith("hint: ") for line in rest)
    assert len(rest) <= 1
    assert sorted(here.iterdir()) == before


@pytest.mark.slow
def test_who_does_not_know_the_token_cannot_touch_the_keys_of_a_launch(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = pytest.importorskip("torch.distributed")
    # The system lists the environment that a process was started with, not what a fork was given.
    monkeypatch.setenv("HETFLOW_PRELOAD", "off")
    write_script(here, HOLDS_AT_THE_END)
    with programs.start(
        [*LAUNCH, "--timeout", "30", "-o", "run", "plan.json", "script.py"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        wait_until((here / "told").exists)
        assert listening_addresses(process.pid) == {"0100007F"}  # loopback alone
        pid, port, is_left = (here / "told").read_text().split()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        (token,) = re.findall(rb"HETFLOW_TOKEN=([0-9a-f]{32})", environment)
        assert is_left == "False"  # what the script starts or logs does not hold it
        assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        prefix = prefix_of(token.decode())
        assert {key.split("/")[0] for key in store.list_keys() if key} == {prefix}
        assert re.fullmatch("[0-9a-f]{32}", prefix)
        assert prefix not in (token.decode(), prefix_of(token.decode()[::-1]))
        # Keys of the launch as they would be without a token.
        store.add("hetflow/0/finished", 1)
        for key in ("hetflow/0/all finished", "hetflow/0/finished/0", "hetflow/0/finished/1"):
            store.set(key, "1")
        store.set("launcher/failure/0", "{}")
        (here / "go").touch()
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    for path in (here / "run").rglob("*"):
        assert not path.is_file() or token not in path.read_bytes()


def listening_addresses(pid: int) -> set[str]:
    """Local addresses (as /proc writes them) that a process listens on."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(entry)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows += Path("/proc/net/tcp6").read_text().splitlines()[1:]
    fields = [row.split() for row in rows]
    return {f[1].split(":")[0] for f in fields if f[3] == "0A" and f[9] in inodes}


def test_a_script_that_leaves_the_group_too_early_is_told(here: Path) -> None:
    write_script(
        here,
        "import torch.distributed as dist\n"
        "from torch import nn\n"
        "from hetflow import runtime as hf\n"
        "job = hf.prepare(nn.Linear(2, 1))\n"
        "dist.destroy_process_group()\n",
    )
    done = run("-o", "run", "plan.json", "script.py")
    assert done.returncode == 2  # nobody can know any more whether the workers agree
    assert "call job.finish() before it" in done.stderr
    assert "Traceback" not in done.stderr
