"""Launches of split plans on GPUs, at every level of determinism."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetflow.schema import files
from hetflow.schema.plan import split_plan
from hetflow.tests import programs
from hetflow.tests.launcher.elastic_runs import plan_of
from hetflow.tests.plan_parts import whole_group
from hetflow.tests.runtime import test_unlike_scales as unlike_scales
from hetflow.tests.testing.hosts import GpuHost, Host, host_for

SCRIPT = Path(__file__).with_name("training.py")
SLICES = "A100MIG12"  # the type of halves of an A100
LAYERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.criterion = nn.Sequential(nn.Conv2d(3, 6, 3), LAYERS), nn.NLLLoss()

    def forward(self, x, y):
        return self.criterion(self.body(x).log_softmax(1), y)

model = Net()
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(16, 3, 6, 6), torch.arange(16) % 4)
for batch in job.batches(DataLoader(data, batch_size=16)):
    job.backward(model, batch)
"""
# Its own device, under plain python and in a launch; batches with graphs and packed sequences.
STATED = """
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader
from hetflow import runtime as hf

class Graphs:  # as DGL's: no other argument
    def __init__(self, x):
        self.x = x
    def to(self, device):
        return Graphs(self.x.to(device))
    def clone(self):
        return Graphs(self.x.clone())

def collate(rows):
    return Graphs(torch.stack(rows)), pack_sequence(rows)

model = nn.Linear(3, 1)
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cuda")
told = []
def loss_of(graphs, packed):
    same = torch.stack(unpack_sequence(packed)).equal(graphs.x)
    told.append((same, str(graphs.x.device), packed.batch_sizes.is_cuda))
    return model(graphs.x).mean()

for batch in job.batches(DataLoader([torch.ones(3) * n for n in range(32)], batch_size=16,
                                    collate_fn=collate)):
    job.backward(loss_of, batch)
print(set(told), model.weight.device)
"""
RECURRENT = """
import sys
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader
from hetflow import runtime as hf

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = getattr(nn, sys.argv[1])(3, 8, num_layers=2), nn.Linear(8, 2)

    def forward(self, packed):
        state = self.cells(packed)[1]
        return self.head(state[0][-1] if isinstance(state, tuple) else state[-1])

def collate(rows):
    x, y = zip(*rows)
    return pack_sequence(x, enforce_sorted=False), torch.tensor(y)

torch.manual_seed(0)
model, losses = Tagger(), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
job = hf.prepare(model, optimizer)
rows = [(torch.randn(1 + n % 5, 3), n % 2) for n in range(48)]

def loss_of(packed, y):
    return nn.functional.cross_entropy(model(packed), y)

for batch in job.batches(DataLoader(rows, batch_size=16, shuffle=True, collate_fn=collate)):
    losses.append(float(job.backward(loss_of, batch)))
    optimizer.step()
    optimizer.zero_grad()
job.print(job.device.type, losses)
"""
CAST = """kind = torch.float16 if scaled else torch.bfloat16
    with torch.autocast("cuda", kind):
        answer = model(x)
    assert answer.dtype == kind
    loss = nn.functional.cross_entropy(answer.float(), y)"""
POOLED = "nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4)"


def launch(
    host: Host,
    name: str,
    workers: Sequence[tuple[str, int]],
    *options: str,
    epochs: int = 2,
    how: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run the script on these (device type, virtual nodes)."""
    folder = host.folder / name
    folder.mkdir(exist_ok=True)
    run = folder / f"run{len(list(folder.glob('run*')))}"
    types, nodes = zip(*workers, strict=True)
    files.write(folder / "plan.json", plan_of(nodes, types), force=True)
    words = ["launch", *options, "-o", run, folder / "plan.json", SCRIPT]
    return host.run(*words, folder, str(epochs), "0", how)


def told(host: Host, name: str, *rest: Any, **more: Any) -> dict[str, Any]:
    """What the script of a launch that succeeds tells."""
    found = launch(host, name, *rest, **more)
    assert found.returncode == 0, found.stderr
    result: dict[str, Any] = json.loads((host.folder / name / "told.json").read_text())
    return result


def test_two_types_train_over_nccl(gpus: GpuHost) -> None:
    host = gpus(2, 1)
    first, second = host.types
    found = told(host, "a", [(first, 3), (first, 3), (second, 2)])
    assert (found["backend"], found["device"]) == ("nccl", "cuda:0")
    alone = told(host, "b", [(first, 8)])
    assert alone["backend"] is None
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3)


def test_a_scaler_on_one_type_alone_trains_as_none(gpus: GpuHost) -> None:
    host = gpus(1, 1)
    text = unlike_scales.SCRIPT.replace('GradScaler("cpu"', 'GradScaler("cuda"')
    (host.folder / "train.py").write_text(text)
    files.write(host.folder / "plan.json", plan_of([5, 3], host.types))
    host.done("launch", "--determinism", "none", "plan.json", "train.py", "whole", "first")
    for rank in range(2):
        found = torch.load(host.folder / f"state{rank}.pt", map_location="cpu")
        for name, value in unlike_scales.alone().items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-7), name


def test_float16_on_one_type_and_bfloat16_on_another_train_as_neither(gpus: GpuHost) -> None:
    """The third step overflows on the worker that scales, and neither updates."""
    host = gpus(1, 1)
    loss = "loss = nn.functional.cross_entropy(model(x), y)"
    text = unlike_scales.SCRIPT.replace('GradScaler("cpu"', 'GradScaler("cuda"')
    text = text.replace(".double()", "").replace(
        "dtype=torch.float64)", "dtype=torch.float64).float()"
    )
    assert loss in text
    text = text.replace(loss, CAST)
    (host.folder / "train.py").write_text(text)
    files.write(host.folder / "plan.json", plan_of([5, 3], host.types))
    host.done("launch", "--determinism", "none", "plan.json", "train.py", "whole", "first")
    states = [torch.load(host.folder / f"state{rank}.pt", map_location="cpu") for rank in range(2)]
    for name, value in unlike_scales.alone().items():
        assert states[0][name].equal(states[1][name]), name
        assert torch.allclose(states[0][name].double(), value, rtol=0, atol=5e-3), name


@pytest.mark.parametrize("cells", ["LSTM", "GRU"])
def test_packed_sequences_train_as_on_one_host(gpus: GpuHost, cells: str) -> None:
    host = gpus(1, 1)
    (host.folder / "train.py").write_text(RECURRENT)
    files.write(host.folder / "plan.json", plan_of([5, 3], host.types))
    kind, losses = host.done("launch", "plan.json", "train.py", cells).split(maxsplit=1)
    python = [sys.executable, "train.py", cells]
    alone = programs.run(python, timeout=150, cwd=host.folder, env=dict(os.environ))
    assert (kind, alone.stdout[:4]) == ("cuda", "cpu "), alone.stderr
    assert json.loads(losses) == pytest.approx(json.loads(alone.stdout[4:]), rel=1e-5)


@pytest.mark.parametrize("how", ["accelerate", "lightning"])
def test_a_librarys_scaler_on_one_type_alone_trains_as_none(tmp_path: Path, how: str) -> None:
    host = host_for(tmp_path, 1, 1)
    script = Path(unlike_scales.__file__).parent / "adapters/scaled.py"
    host.also(CUDA_VISIBLE_DEVICES="0").python(
        f"import runpy, sys\nsys.argv[1:] = [{how!r}, 'told']\nrunpy.run_path({str(script)!r})"
    )
    groups = [
        whole_group(
            device_type=kind,
            num_devices=1,
            device_batch_size=samples,
            virtual_nodes=1,
            virtual_node_batch_size=samples,
        )
        for kind, samples in zip(host.types, (10, 6), strict=True)
    ]
    other = plan_of([1])
    plan = split_plan(
        model="m",
        global_batch_size=16,
        groups=groups,
        predicted=other.predicted,
        proof=other.proof,
    )
    files.write(host.folder / "plan.json", plan)
    host.done("launch", "plan.json", script, how, host.folder / "told")
    alone, *found = (json.loads((host.folder / f"told{n}").read_text()) for n in (-1, 0, 1))
    assert found[0] == found[1]
    assert found[0]["rate"] == alone["rate"]  # accelerate's schedule waits for the update
    assert found[0]["parameters"] == pytest.approx(alone["parameters"], abs=1e-3)
    assert host.faults == []


def test_two_slices_of_one_gpu_train_over_gloo(software: GpuHost) -> None:
    host, level = software("A100/2"), "elastic"
    found = told(host, "a", [(SLICES, 5), (SLICES, 3)], "--determinism", level)
    assert (found["backend"], found["device"]) == ("gloo", "cuda:0")
    alone = told(host, "b", [(SLICES, 8)], "--determinism", level)
    assert found["digest"] == alone["digest"]


@pytest.mark.parametrize("level", ["static", "elastic", "heterogeneous"])
def test_a_small_resnet_trains_at_every_level(gpus: GpuHost, level: str) -> None:
    host = gpus(2)
    kind = host.types[0]
    one = told(host, "a", [(kind, 5), (kind, 3)], "--determinism", level)
    again = told(host, "b", [(kind, 5), (kind, 3)], "--determinism", level)
    assert one["digest"] == again["digest"]
    if level != "static":
        alone = told(host, "c", [(kind, 8)], "--determinism", level)
        assert one["digest"] == alone["digest"]


@pytest.mark.parametrize(
    ("layers", "refused"),
    [
        (POOLED, None),
        # Torch has other forms of these for it.
        (f"nn.Upsample(scale_factor=2, mode='bilinear'), {POOLED}", None),
        (f"nn.ReflectionPad2d(1), {POOLED}", None),
        (
            "nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 4)",
            "adaptive_avg_pool2d_backward_cuda",
        ),
    ],
)
def test_torch_says_what_has_no_deterministic_form(
    gpus: GpuHost, layers: str, refused: str | None
) -> None:
    host = gpus(1)
    (host.folder / "train.py").write_text(LAYERS.replace("LAYERS", layers))
    files.write(host.folder / "plan.json", plan_of([8], host.types))
    found = host.run("launch", "--determinism", "elastic", "plan.json", "train.py")
    assert found.returncode == (0 if refused is None else 2), found.stderr
    if refused is not None:
        line = f"determinism elastic cannot hold: {refused} has no deterministic form"
        assert line in found.stderr
        assert "replace the operator, or use --determinism none" in found.stderr


def test_a_checkpoint_continues_on_another_type(gpus: GpuHost) -> None:
    host = gpus(1, 1)
    first, second = host.types
    saving = ["--checkpoint", host.folder / "saved", "--checkpoint-every", "2"]
    part = told(host, "a", [(first, 8)], *saving, epochs=1)
    whole = told(host, "a", [(second, 8)], *saving, epochs=3)
    straight = told(host, "b", [(first, 8)], epochs=3)
    assert len(part["losses"]) == 3
    assert len(whole["losses"]) == 6
    assert whole["losses"] == pytest.approx(straight["losses"][3:], rel=2e-3)


DDP_HABIT = """
import os
import torch
from hetflow import runtime as hf

before = torch.cuda.current_device()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = torch.nn.Linear(2, 1).cuda()
job = hf.prepare(model)
print("on", torch.cuda.get_device_name(job.device), before == torch.cuda.current_device())
"""


def test_local_rank_is_the_number_of_a_workers_own_gpu(gpus: GpuHost) -> None:
    host = gpus(1, 1)
    (host.folder / "script.py").write_text(DDP_HABIT)
    files.write(host.folder / "plan.json", plan_of((1, 1), host.types[:2]))
    found = host.run("launch", "-o", host.folder / "run", host.folder / "plan.json",
                     host.folder / "script.py")  # fmt: skip
    assert found.returncode == 0, found.stderr
    said = [(host.folder / f"run/logs/rank{rank}.out").read_text().split() for rank in range(2)]
    assert [words[0] for words in said] == ["on", "on"]
    assert said[0][1:-1] != said[1][1:-1]  # each on its own type
    assert [words[-1] for words in said] == ["True", "True"]  # which was current from the start


CAPTURED = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from hetflow.schema.errors import TargetError

model = nn.Linear(2, 1).cuda()
job = hf.prepare(model)
for batch in job.batches(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)):
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            job.backward(lambda x: model(x).mean(), batch)
    except TargetError as error:
        print(error.message, "/", error.hint)
    print(job.backward(lambda x: model(x).mean(), batch).isfinite().item())
"""


def test_a_step_is_not_captured_in_a_cuda_graph(gpus: GpuHost) -> None:
    said = gpus(1).python(CAPTURED)
    assert said.startswith("job.backward cannot be captured in a graph of kernels: ")
    assert said.endswith("/ take batches and call it outside of the capture\nTrue\n")


def test_a_kind_without_a_number_is_the_workers_own_device(gpus: GpuHost) -> None:
    host = gpus(2)
    assert host.python(STATED) == "{(True, 'cuda:0', False)} cuda:0\n"
    (host.folder / "train.py").write_text(STATED)
    files.write(host.folder / "plan.json", plan_of([4, 4], [host.types[0]] * 2))
    found = host.run("launch", "-o", "run", "plan.json", "train.py")
    assert found.returncode == 0, found.stderr
    logs = sorted((host.folder / "run" / "logs").glob("rank*.out"))
    assert [log.read_text() for log in logs] == [
        f"{{(True, 'cuda:{rank}', False)}} cuda:{rank}\n" for rank in range(2)
    ]
