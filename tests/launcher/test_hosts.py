"""Several hosts: two controllers on one machine, in network namespaces, and torchrun's agents."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetflow.api.formats import export
from hetflow.schema import files
from hetflow.schema.plan import Plan, Prediction, Proof
from hetflow.schema.run import RunRecord
from hetflow.tests import programs
from hetflow.tests.plan_parts import split_plan, whole_group
from hetflow.tests.testing.hosts import real_types

pytestmark = pytest.mark.processes

TELLS = """
import json, os, pathlib
pathlib.Path(os.environ["HERE"], "told" + os.environ["RANK"]).write_text(json.dumps(
    [os.environ["NODE"], os.environ["HETFLOW_DEVICE_TYPE"], os.environ["WORLD_SIZE"]]))
"""
FAILS_ON_1 = """
import os, sys, time
if os.environ["NODE"] == "1":
    raise ValueError("only here")
time.sleep(120)
"""
TRAINS = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(44, 4), torch.arange(44) % 2)
for batch in job.batches(DataLoader(data, batch_size=12, shuffle=True)):
    job.backward(lambda x, y: torch.nn.functional.cross_entropy(model(x), y), batch)
    optimizer.step()
    optimizer.zero_grad()
job.finish()
"""
ROLES = """
import json, os, pathlib, torch
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
model = torch.nn.Linear(2, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
seen = 0
for batch in job.batches(DataLoader(TensorDataset(torch.randn(24, 2)), batch_size=12)):
    def loss_of(x):
        global seen
        seen += len(x)
        return model(x).pow(2).mean()
    job.backward(loss_of, batch)
pathlib.Path(os.environ["HERE"], "seen%d" % job.rank).write_text(
    json.dumps([os.environ["ROLE_NAME"], int(os.environ["RANK"]), seen]))
"""


def plan_of(*groups: tuple[str, int, int]) -> Plan:
    """(device type, number, samples of its one virtual node)."""
    made = tuple(
        whole_group(
            device_type=name,
            num_devices=number,
            device_batch_size=size,
            virtual_nodes=1,
            virtual_node_batch_size=size,
        )
        for name, number, size in groups
    )
    return split_plan(
        model="m",
        global_batch_size=sum(g.num_devices * g.device_batch_size for g in made),
        groups=made,
        predicted=Prediction(step_seconds=0.5, samples_per_second=16.0),
        proof=Proof(
            termination="feasible", objective=0.5, lower_bound=None, gap=None, method="hand"
        ),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _controller(
    prefix: list[str], arguments: list[str], **options: Any
) -> "programs.Program | subprocess.Popen[str]":
    """One host's ``hetflow launch``; a forked one would not be where a prefix puts it."""
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if prefix:
        return subprocess.Popen([*prefix, *command], text=True, **pipes, **options)
    return programs.start(command, **pipes, **options)


def agents(
    folder: Path,
    endpoint: str,
    devices: tuple[str, str],
    script: str,
    *arguments: str,
    prefixes: tuple[list[str], list[str]] = ([], []),
) -> list[tuple[int, str]]:
    """Run both nodes; (exit code, stderr) of each."""
    processes = [
        _controller(
            prefixes[node],
            ["--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", endpoint]
            + ["--devices", devices[node], "-o", f"run{node}", "--force", "plan.json", script]
            + list(arguments),
            cwd=folder,
            env={**os.environ, "HERE": str(folder), "NODE": str(node)},
        )
        for node in range(2)
    ]
    return [(p.wait(), err) for p in processes for _, err in [p.communicate(timeout=120)]]


@pytest.mark.slow
def test_slots_go_to_the_host_of_the_type(tmp_path: Path) -> None:
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 2, 4)))
    (tmp_path / "script.py").write_text(TELLS)
    endpoint = f"127.0.0.1:{free_port()}"
    ended = agents(tmp_path, endpoint, ("2xcpu:slow", "1xcpu:fast"), "script.py")
    assert [code for code, _ in ended] == [0, 0], ended
    told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(3)]
    assert told == [["1", "cpu:fast", "3"], ["0", "cpu:slow", "3"], ["0", "cpu:slow", "3"]]
    assert files.read(tmp_path / "run0" / "run.json", RunRecord).status == "done"


@pytest.mark.slow
def test_hosts_meet_with_one_token_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 2, 4)))
    (tmp_path / "script.py").write_text(TELLS)
    devices = ("2xcpu:slow", "1xcpu:fast")
    monkeypatch.setenv("HETFLOW_TOKEN", "0123456789abcdef")
    ended = agents(tmp_path, f"127.0.0.1:{free_port()}", devices, "script.py")
    assert [code for code, _ in ended] == [0, 0], ended
    others = (["env", "HETFLOW_TOKEN=fedcba9876543210"], [])
    endpoint = f"127.0.0.1:{free_port()}"
    ended = agents(tmp_path, endpoint, devices, "script.py", "again", prefixes=others)
    for code, stderr in ended:
        assert code == 2
        assert "hetflow: host 1 was given another HETFLOW_TOKEN than host 0\n" in stderr
    monkeypatch.setenv("HETFLOW_TOKEN", "short")
    (code, stderr), _ = agents(tmp_path, f"127.0.0.1:{free_port()}", devices, "script.py")
    assert code == 2
    assert "HETFLOW_TOKEN must be at least 16 printable characters" in stderr


@pytest.mark.slow
def test_a_failure_on_one_host_ends_all(tmp_path: Path) -> None:
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 1, 4)))
    (tmp_path / "script.py").write_text(FAILS_ON_1)
    endpoint = f"127.0.0.1:{free_port()}"
    ended = agents(tmp_path, endpoint, ("1xcpu:fast", "1xcpu:slow"), "script.py")
    for code, stderr in ended:
        assert code == 1
        assert "worker 1 (cpu:slow) failed with exit code 1: ValueError: only here" in stderr
    assert files.read(tmp_path / "run0" / "run.json", RunRecord).status == "failed"


@pytest.mark.slow
def test_a_shortage_is_told_to_all_and_leaves_no_file(tmp_path: Path) -> None:
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 1, 4)))
    (tmp_path / "script.py").write_text(TELLS)
    endpoint = f"127.0.0.1:{free_port()}"
    for code, stderr in agents(tmp_path, endpoint, ("1xcpu:fast", "1xV100"), "script.py"):
        assert code == 2
        assert stderr == "hetflow: the plan needs 1 x cpu:slow, the 2 hosts have 0\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "script.py"]


@pytest.mark.slow
def test_a_host_that_cannot_start_ends_all(tmp_path: Path) -> None:
    if "V100" in real_types():
        pytest.skip("this machine has what its plan lacks")
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("V100", 1, 4)))
    (tmp_path / "script.py").write_text(FAILS_ON_1)
    endpoint = f"127.0.0.1:{free_port()}"
    said = agents(tmp_path, endpoint, ("1xcpu:fast", "1xV100"), "script.py")
    lacks = "the plan needs 1 x V100, this machine has 0\n"
    assert [code for code, _ in said] == [2, 2], said
    assert f"hetflow: host 1 ({socket.gethostname()}) did not start: {lacks}" in said[0][1]
    assert f"hetflow: {lacks}" in said[1][1]


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the ip command (package iproute2)")
    first, second = (f"hf{os.getpid()}{side}" for side in "ab")
    commands = [
        f"ip netns add {first}",
        f"ip netns add {second}",
        f"ip link add {first} netns {first} type veth peer name {second} netns {second}",
        f"ip -n {first} addr add 10.213.0.1/24 dev {first}",
        f"ip -n {second} addr add 10.213.0.2/24 dev {second}",
        *(f"ip -n {name} link set {device} up" for name in (first, second)
          for device in ("lo", name)),
    ]  # fmt: skip
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
        yield first, second
    finally:
        for name in (first, second):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.slow
def test_two_hosts_train_over_a_link(tmp_path: Path, namespaces: tuple[str, str]) -> None:
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 2, 2)))
    (tmp_path / "script.py").write_text(TRAINS)
    ended = agents(
        tmp_path,
        "10.213.0.1:29400",
        ("2xcpu:slow", "1xcpu:fast"),
        "script.py",
        prefixes=tuple(["ip", "netns", "exec", name] for name in namespaces),
    )
    assert [code for code, _ in ended] == [0, 0], ended
    record = files.read(tmp_path / "run0" / "run.json", RunRecord)
    assert [device.rank for device in record.devices] == [0, 1, 2]
    assert record.events == ()
    assert sum(device.num_samples for device in record.devices) == 44


@pytest.mark.slow
def test_torchrun_roles_are_mapped_by_type(tmp_path: Path) -> None:
    """Two torchrun agents with a role each, by the exported script; ranks in whatever order."""
    files.write(tmp_path / "plan.json", plan_of(("cpu:fast", 1, 8), ("cpu:slow", 2, 2)))
    (tmp_path / "script.py").write_text(ROLES)
    environment = {
        **os.environ,
        "HERE": str(tmp_path),
        "HETFLOW_RUN": str(tmp_path / "run"),
        "OMP_NUM_THREADS": "1",
    }
    script = tmp_path / "start"
    plan = tmp_path / "plan.json"
    script.write_text(export(plan, "torchrun", str(tmp_path / "script.py"), determinism="elastic"))
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    port = str(free_port())
    processes = [
        subprocess.Popen(
            ["bash", str(script), rank, "127.0.0.1", port],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("1", "0")
    ]
    errors = [process.communicate(timeout=180)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    seen = [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(3)]
    assert [(role, samples) for role, _, samples in seen] == [
        ("cpu:fast", 16), ("cpu:slow", 4), ("cpu:slow", 4),
    ]  # fmt: skip
    record = files.read(tmp_path / "run" / "run.json", RunRecord)
    assert [device.device_type for device in record.devices] == ["cpu:fast", "cpu:slow", "cpu:slow"]
    assert record.num_steps == 2
