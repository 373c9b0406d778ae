"""Workers that change, die or sit on several hosts; pipelines."""

import json
import re
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.run import RunRecord
from hetflow.tests.handmade import two_stages
from hetflow.tests.launcher.elastic_runs import plan_of, wait_until
from hetflow.tests.plan_parts import with_replicas
from hetflow.tests.testing.hosts import GpuHost, Host, software_host

from .test_launch import SCRIPT, launch, told

PIPELINE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
data = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))
for epoch in range(2):
    for batch in job.batches(DataLoader(data, batch_size=8, shuffle=True)):
        loss = job.backward(lambda x, y: nn.functional.cross_entropy(model(x), y), batch)
        optimizer.step()
        optimizer.zero_grad()
job.finish()
if job.is_main:
    print("loss", loss.item(), next(model.parameters()).device.type, flush=True)
"""


def steps(folder: Path) -> list[tuple[int, int, int]]:
    """(step, rank, workers) of every step that any worker has completed."""
    lines = [line for path in folder.glob("steps-*") for line in path.read_text().splitlines()]
    return sorted(tuple(map(int, line.split())) for line in lines)


def test_a_resize_to_another_type_keeps_the_training(gpus: GpuHost) -> None:
    """One to a type without the memory is refused, and the job goes on."""
    host = gpus(2, 1)
    first, second = host.types
    folder = host.folder / "a"
    folder.mkdir()
    files.write(folder / "plan.json", plan_of([4, 4], [first, first]))
    other = plan_of([8], [second])
    files.write(folder / "next.json", other)
    large = replace(other, stages=(with_replicas(other.stages[0], memory_bytes=1 << 45),))
    files.write(folder / "large.json", large)
    words = ["launch", "-o", folder / "run", folder / "plan.json", SCRIPT, folder, "6", "0.2", ""]
    process = host.start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None or any(s == 2 for s, _, _ in steps(folder)))
    refused = host.run("resize", folder / "run", "--plan", folder / "large.json")
    resized = host.run("resize", folder / "run", "--plan", folder / "next.json")
    _, said = process.communicate(timeout=150)
    assert refused.returncode == 2
    assert f"the plan fills {1 << 45:,} bytes on each {second}, and this" in refused.stderr
    assert resized.returncode == 0, resized.stderr + said
    assert process.returncode == 0, said
    assert {workers for _, _, workers in steps(folder)} == {1, 2}
    found = json.loads((folder / "told.json").read_text())
    straight = told(host, "b", [(first, 8)], epochs=6)
    number = len(found["losses"])  # of those steps that the last worker made itself
    assert found["losses"] == pytest.approx(straight["losses"][-number:], rel=5e-3)
    assert max(step for step, _, _ in steps(folder)) == 18


@pytest.mark.parametrize(
    ("how", "said", "code"),
    [
        ("die=2", "was killed by SIGKILL", 137),
        ("raise=2", "failed with exit code 1: ValueError: no such picture", 1),
    ],
)
def test_who_failed_is_told_from_whom_nccls_watchdog_kills(
    gpus: GpuHost, how: str, said: str, code: int
) -> None:
    host = gpus(2).also(FAKECUDA_WATCHDOG_SECONDS="0.02")
    kind = host.types[0]
    found = launch(host, "a", [(kind, 5), (kind, 3)], how=how)
    assert found.returncode == code
    first = next(line for line in found.stderr.splitlines() if line.startswith("hetflow: worker"))
    assert first.startswith(f"hetflow: worker 1 ({kind}) {said}")


def test_a_worker_that_hangs_is_named(gpus: GpuHost) -> None:
    host = gpus(2).also(FAKECUDA_WATCHDOG_SECONDS="0.1")
    kind = host.types[0]
    found = launch(host, "a", [(kind, 5), (kind, 3)], "--timeout", "3", how="stall=2")
    assert found.returncode != 0
    who = f"worker 1 ({kind}) hangs: worker 0 ({kind}) waited for it in vain"
    assert f"hetflow: {who}: Watchdog caught collective operation timeout" in found.stderr


def test_a_joining_worker_gets_the_state_over_nccl(gpus: GpuHost) -> None:
    host = gpus(2)
    kind = host.types[0]
    folder, level = host.folder / "a", ["--determinism", "elastic"]
    folder.mkdir()
    files.write(folder / "plan.json", plan_of([8], [kind]))
    files.write(folder / "next.json", plan_of([5, 3], [kind, kind]))
    words = [*level, "-o", folder / "run", folder / "plan.json", SCRIPT, folder, "6", "0.2", ""]
    process = host.start("launch", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None or any(s == 2 for s, _, _ in steps(folder)))
    resized = host.run("resize", folder / "run", "--plan", folder / "next.json")
    _, said = process.communicate(timeout=150)
    assert (resized.returncode, process.returncode) == (0, 0), resized.stderr + said
    assert {workers for _, _, workers in steps(folder)} == {1, 2}
    found = json.loads((folder / "told.json").read_text())
    assert found["backend"] == "nccl"
    straight = told(host, "b", [(kind, 8)], *level, epochs=6)
    assert found["digest"] == straight["digest"]


def test_a_death_costs_no_bit_from_the_checkpoint_or_without_one(gpus: GpuHost) -> None:
    host = gpus(3)
    kind = host.types[0]
    saving = ["--checkpoint", host.folder / "saved", "--checkpoint-every", "1"]
    options = ["--determinism", "elastic"]
    straight = told(host, "b", [(kind, 8)], *options)
    found = told(host, "a", [(kind, 5), (kind, 3)], *options, *saving, how="die=2")
    assert (host.folder / "a/died").exists()
    assert found["digest"] == straight["digest"]
    assert kinds_of(host.folder / "a") == ["start", "restart"]
    # If asked to, the survivors abort their communicators and go on over new ones.
    three = [(kind, 3), (kind, 3), (kind, 2)]
    for name, level in (("c", "elastic"), ("d", "none")):
        levels = ["--determinism", level, "--on-failure", "shrink"]
        found = told(host, name, three, *levels, how="late=4")
        assert (host.folder / name / "died").exists()
        assert found["backend"] == "nccl"
        assert {number for _, _, number in steps(host.folder / name)} == {3, 2}
        assert kinds_of(host.folder / name) == ["start", "failure"]
        # No optimizer ran on what an aborted collective leaves.
        assert found["losses"] == pytest.approx(straight["losses"], rel=2e-3)
        if level == "elastic":
            assert found["digest"] == straight["digest"]


def test_all_start_again_where_communicators_cannot_be_made_anew(software: GpuHost) -> None:
    host = software("V100,V100,V100", FAKECUDA_COMMUNICATORS="1")
    kind = host.types[0]
    three, options = [(kind, 3), (kind, 3), (kind, 2)], ["--determinism", "elastic"]
    saving = ["--checkpoint", host.folder / "saved", "--checkpoint-every", "1"]
    shrinking = [*options, *saving, "--on-failure", "shrink"]
    found = launch(host, "a", three, *shrinking, how="late=4")
    assert found.returncode == 0, found.stderr
    lost = "worker 1 (V100) was killed by SIGKILL; the others could not meet again in 3 tries"
    assert f"{lost}: lost another worker in init_process_group: NCCL error" in found.stderr
    assert "starting again from the last checkpoint" in found.stderr
    assert kinds_of(host.folder / "a") == ["start", "restart"]
    assert {number for _, _, number in steps(host.folder / "a")} == {3}
    told_at_end = json.loads((host.folder / "a/told.json").read_text())
    assert told_at_end["digest"] == told(host, "b", [(kind, 8)], *options)["digest"]


def kinds_of(folder: Path) -> list[str]:
    """What began each generation of a launch's workers."""
    record = files.read(folder / "run0/run.json", RunRecord)
    return [generation.kind for generation in record.generations]


@pytest.mark.parametrize("how", ["", "weighted"])
def test_a_notice_saves_and_another_launch_goes_on(gpus: GpuHost, how: str) -> None:
    host = gpus(2)
    kind = host.types[0]
    options = ["--determinism", "elastic", "--checkpoint", host.folder / "saved"]
    folder = host.folder / "a"
    folder.mkdir()
    files.write(folder / "plan.json", plan_of([5, 3], [kind, kind]))
    words = ["launch", *options, "-o", folder / "run0", folder / "plan.json", SCRIPT, folder]
    process = host.start(*words, "4", "0.2", how, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    wait_until(lambda: process.poll() is not None or any(s == 3 for s, _, _ in steps(folder)))
    process.terminate()
    _, said = process.communicate(timeout=150)
    assert process.returncode == 143, said
    last = max(step for step, _, _ in steps(folder))
    saved = [int(path.name[5:]) for path in (host.folder / "saved").glob("step-*")]
    assert saved == [last], said
    assert last < 12
    found = told(host, "a", [(kind, 3), (kind, 5)], *options, epochs=4, how=how)
    straight = told(host, "b", [(kind, 8)], *options[:2], epochs=4, how=how)
    assert found["digest"] == straight["digest"]


def test_two_hosts_train_over_nccl(tmp_path: Path, gpus: GpuHost) -> None:
    if gpus(1).is_real:
        pytest.skip("needs two hosts")
    one = [
        software_host(tmp_path, f"V100:{memory}GiB", FAKECUDA_HOST=name)
        for name, memory in (("left", 1), ("right", 2))
    ]
    folder = tmp_path / "two"
    folder.mkdir()
    files.write(folder / "plan.json", plan_of([5, 3], ["V100", "V100-2GB"]))
    with socket.create_server(("127.0.0.1", 0)) as found:
        endpoint = f"127.0.0.1:{found.getsockname()[1]}"
    processes = [
        host.start(
            *("launch", "--nnodes", "2", "--node-rank", str(node), "--rdzv-endpoint", endpoint),
            *("-o", folder / f"run{node}", folder / "plan.json", SCRIPT, folder, "2", "0", ""),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node, host in enumerate(one)
    ]
    said = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    result = json.loads((folder / "told.json").read_text())
    assert result["backend"] == "nccl"
    alone = told(one[0], "alone", [("V100", 8)])
    assert result["losses"] == pytest.approx(alone["losses"], rel=2e-3)


def pipeline_loss(host: Host, *options: str) -> float:
    (host.folder / "pipeline.py").write_text(PIPELINE)
    files.write(host.folder / "plan.json", two_stages(host.types[:2]), force=True)
    found = host.run("launch", *options, "-o", "run", "plan.json", "pipeline.py")
    assert found.returncode == 0, found.stderr
    ((loss, device),) = re.findall(r"loss (\S+) (\S+)", found.stdout)
    assert device == "cuda"
    return float(loss)


def test_a_pipeline_of_two_types(gpus: GpuHost) -> None:
    host = gpus(1, 1)
    (host.folder / "alone.py").write_text(PIPELINE)
    alone = host.also(CUDA_VISIBLE_DEVICES="0").python(PIPELINE)
    assert pipeline_loss(host) == pytest.approx(float(alone.split()[1]), rel=1e-4)
