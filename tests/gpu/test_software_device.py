"""The software device by itself: it refuses, limits, counts and finds what CUDA would."""

from pathlib import Path

import pytest

from hetflow.tests.testing.hosts import GpuHost, Host, software_host

TRAINS = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(4, 3))
x, y = torch.randn(8, 3, 6, 6), torch.arange(8) % 3
def losses(device):
    import copy
    own = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(own(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        yield loss.item()
print(torch.allclose(torch.tensor(list(losses("cpu"))), torch.tensor(list(losses("cuda")))))
"""
LIMITS = """
import torch
torch.cuda.set_device(1)
kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(4 << 20, device="cuda")
except torch.OutOfMemoryError as error:
    print(torch.cuda.max_memory_allocated(), "out of memory" in str(error))
print(torch.empty(4 << 20, device="cuda:0").device)
"""
# WAITS is what orders the two streams.
TWO_STREAMS = """
import torch
first, second = torch.cuda.current_stream(), torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
second.wait_stream(first)
with torch.cuda.stream(second):
    y = x * 2
WAITS
z = y + 1 if "y" in globals() else None
torch.cuda.synchronize()
"""
LATE = """
import torch
x, there = torch.arange(4.0, device="cuda"), torch.zeros(4).pin_memory()
there.copy_(x, non_blocking=True)
print(there.tolist() == x.tolist())
torch.cuda.synchronize()
print(there.tolist() == [0, 1, 2, 3])
"""
BACK = """
import torch
x, there = torch.arange(4.0, device="cuda"), torch.zeros(4).pin_memory()
back = torch.zeros(4, device="cuda")
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    there.copy_(x, non_blocking=True)
WAITS
back.copy_(there, non_blocking=True)
print(back.tolist() == [0, 1, 2, 3])
torch.cuda.synchronize()
"""
COUNTS = """
import _fakecuda, torch
x, away = torch.ones(4, device="cuda"), torch.zeros(4).pin_memory()
torch.cuda.synchronize()
_fakecuda.reset_counts()
STATEMENT
print(_fakecuda.counts().get("host_sync", 0), _fakecuda.counts().get("kernel", 0))
"""
COLLECTIVE = """
import os, sys, torch, torch.distributed as dist, time
from datetime import timedelta
rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + os.path.abspath("store"), rank=rank,
                        world_size=2, timeout=timedelta(seconds=3))
x = torch.full((4,), rank + 1.0, device="cuda")
STATEMENT
"""


def pair(host: Host, statement: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of two workers that run a statement."""
    import subprocess
    import sys

    from hetflow.tests import programs

    path = host.folder / "program.py"
    path.write_text(COLLECTIVE.replace("STATEMENT", statement))
    workers = [
        programs.start(
            [sys.executable, path, str(rank)],
            env=host.environment,
            cwd=host.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    said = [worker.communicate(timeout=60) for worker in workers]
    return [(worker.returncode, *text) for worker, text in zip(workers, said, strict=True)]


def test_training_gives_what_the_cpu_gives(gpus: GpuHost) -> None:
    assert gpus(1).python(TRAINS) == "True\n"


CELLS = """
import copy, torch
from torch import nn
torch.manual_seed(0)
model, x = nn.CELL(3, 4, num_layers=2, bidirectional=True), torch.randn(5, 2, 3)
def gradients(device):
    own = copy.deepcopy(model).to(device)
    out, state = own(x.to(device))
    sum(part.pow(2).sum() for part in (out, *state)).backward()
    return [parameter.grad.cpu() for parameter in own.parameters()]
pairs = zip(gradients("cuda"), gradients("cpu"))
print(all(torch.allclose(own, other, atol=1e-6) for own, other in pairs))
"""
# Under CUDA graphs each pass leaves its gradients in the same memory.
REPLAYED = """
import torch
from torch import nn
from hetflow.runtime.gradients import GradientReducer

parameter = nn.Parameter(torch.zeros(4, device="cuda"))
memory = torch.zeros(4, device="cuda")

class Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, value):
        ctx.value = value
        return parameter.sum()

    @staticmethod
    def backward(ctx, gradient):
        memory.fill_(ctx.value)
        return torch.empty(0, device="cuda").set_(memory.untyped_storage(), 0, (4,)), None

reducer = GradientReducer([parameter], distributed=False)
reducer.begin(num_passes=2)
for node, value in enumerate((1.0, 2.0)):
    reducer.enter(node)
    Replayed.apply(parameter, value).backward()
    reducer.leave()
reducer.finish()
print(parameter.grad.tolist())
"""


@pytest.mark.parametrize("cell", ["LSTM", "GRU"])
def test_a_recurrent_cell_is_one_kernel_with_a_duration(software: GpuHost, cell: str) -> None:
    host = software("V100", FAKECUDA_TIMELINE="timeline")
    text = CELLS.replace("CELL", cell)
    assert host.python(text) == "True\n"
    name = f"_thnn_fused_{cell.lower()}_cell"
    spans = [span for span in host.timeline().spans if span.name.startswith(name)]
    assert len(spans) == 2 * 2 * 2 * 5  # ways, layers, directions, steps
    assert all(span.end_seconds > span.start_seconds for span in spans)


def test_gradients_are_kept_from_the_next_passs_replay(gpus: GpuHost) -> None:
    assert gpus(1).python(REPLAYED) == "[3.0, 3.0, 3.0, 3.0]\n"


def test_more_than_a_device_holds_is_out_of_memory(software: GpuHost) -> None:
    assert software("V100,A100:8MiB").python(LIMITS) == "1048576 True\ncuda:0\n"


@pytest.mark.parametrize(
    ("waits", "faults"),
    [
        ("first.wait_stream(second)\ny.record_stream(first)", []),
        ("torch.cuda.synchronize()", []),
        (
            "",
            ["read on stream 0 by aten::add does not wait for the write on stream 1 by aten::mul"],
        ),
        ("first.wait_stream(second)\nz = y + 1\ndel y", ["without record_stream"]),
    ],
)
def test_a_missing_wait_is_a_race(tmp_path: Path, waits: str, faults: list[str]) -> None:
    host = software_host(tmp_path, "V100")
    host.python(TWO_STREAMS.replace("WAITS", waits))
    assert len(host.faults) == len(faults)
    assert all(any(fault in found for found in host.faults) for fault in faults)


def test_pinned_memory_is_filled_when_the_host_has_waited(software: GpuHost) -> None:
    assert software("V100").python(LATE) == "False\nTrue\n"


@pytest.mark.parametrize(
    ("waits", "is_there"), [("torch.cuda.current_stream().wait_stream(stream)", True), ("", False)]
)
def test_pinned_memory_is_filled_for_a_stream_that_has_waited(
    software: GpuHost, waits: str, is_there: bool
) -> None:
    assert software("V100").python(BACK.replace("WAITS", waits)) == f"{is_there}\n"


@pytest.mark.parametrize(
    ("statement", "counted"),
    [
        ("x.add_(1)", "0 1"),
        ("x.sum().item()", "1 1"),
        ("bool(x[0] > 0)", "1 1"),
        ("x.tolist()", "1 0"),
        ("x.cpu()", "1 0"),
        ("away.copy_(x, non_blocking=True)", "0 0"),
        ("torch.zeros(4).copy_(x, non_blocking=True)", "1 0"),
        ("torch.ones(4).to('cuda', non_blocking=True)", "0 0"),
        ("torch.ones(4).to('cuda')", "1 0"),
        ("torch.tensor([1.0], device='cuda')", "1 0"),
        ("torch._foreach_add_([x, torch.ones_like(x)], 1)", "0 2"),
    ],
)
def test_host_synchronisations_and_kernels_are_counted(
    software: GpuHost, statement: str, counted: str
) -> None:
    said = software("V100").python(COUNTS.replace("STATEMENT", statement))
    assert said == f"{counted}\n"


def test_nccl_adds_up_over_devices(gpus: GpuHost) -> None:
    found = pair(gpus(2), "dist.all_reduce(x); print(x.tolist()); dist.destroy_process_group()")
    assert [said for _, said, _ in found] == ["[3.0, 3.0, 3.0, 3.0]\n"] * 2


SUMMED = """
import _fakecuda
from hetflow.runtime.tensor.operators import TensorGroup, row_linear_to_tokens, sum_from
for keeps_order in (True, False):
    group = TensorGroup(2, rank, (0, 1), dist.group.WORLD, keeps_order)
    weight = torch.ones(4, 3, device="cuda", requires_grad=True)
    made, whole = weight * (rank + 1), torch.eye(3, device="cuda")
    _fakecuda.reset_counts()
    tokens = row_linear_to_tokens(made, whole, None, group)
    print(tokens.tolist(), _fakecuda.counts().get("kernel", 0))
made = weight * (rank + 1)
_fakecuda.reset_counts()
total = sum_from(made, group)
print(total[0].tolist(), _fakecuda.counts().get("kernel", 0))
total.sum().backward()
print(weight.grad[0].tolist())
dist.destroy_process_group()
"""


def test_tensor_parallel_sums_copy_nothing_that_they_need_not(software: GpuHost) -> None:
    found = pair(software("V100,V100"), SUMMED)
    tokens = [[3.0] * 3] * 2
    for rank, (code, said, errors) in enumerate(found):
        assert code == 0, errors
        first, second, whole, gradient = said.splitlines()
        # The layer's product, with a local sum and without.
        assert [first, second] == [f"{tokens} 2", f"{tokens} 1"]
        assert whole == "[3.0, 3.0, 3.0] 0"
        assert gradient == str([rank + 1.0] * 3)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("dist.all_reduce(torch.ones(4))", "No backend type associated with device type cpu"),
        ("dist.all_reduce(x.short())", "Unconvertible NCCL type Short"),
        (
            "torch.cuda.set_device(1 - rank); dist.all_reduce(x)",
            "the current device is cuda:",
        ),
    ],
)
def test_nccl_refuses_what_is_not_on_its_device(tmp_path: Path, statement: str, said: str) -> None:
    host = software_host(tmp_path, "V100,V100")
    found = pair(host, "dist.all_reduce(x); torch.cuda.synchronize()\n" + statement)
    assert all(code == 1 and said in errors for code, _, errors in found)
    if "cpu" not in said:  # torch itself knows of no backend for the host
        assert said in "".join(host.faults)


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("os.kill(os.getpid(), 9)", "remote process exited or there was a network error"),
        ("time.sleep(6)", "Watchdog caught collective operation timeout: allreduce"),
    ],
)
def test_the_watchdog_kills_whoever_waits_for_a_lost_peer(
    software: GpuHost, leaves: str, said: str
) -> None:
    host = software("V100,V100", FAKECUDA_WATCHDOG_SECONDS="0.5")
    waits = "dist.all_reduce(x); print('goes on', flush=True); x.tolist(); print('not reached')"
    survivor = pair(host, f"if rank: {leaves}\nelse:\n    {waits}")[0]
    assert survivor[:2] == (-6, "goes on\n")  # SIGABRT
    assert said in survivor[2]


def test_two_slices_of_one_gpu_cannot_share_a_communicator(software: GpuHost) -> None:
    found = pair(software("A100/2"), "")
    assert all("Duplicate GPU detected" in errors for _, _, errors in found)
