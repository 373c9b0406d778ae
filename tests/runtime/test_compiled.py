"""A compiled model's gradients are summed during its backward pass, as an eager one's are."""

import json
import os
import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.tests import programs
from hetflow.tests.launcher.elastic_runs import plan_of
from hetflow.tests.parallel_plans import parallel_plan

pytestmark = pytest.mark.processes

# Each layer fills a bucket. The profiler sees matrix products and collectives in their order.
SCRIPT = """
import json
import sys
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf

layers = [layer for _ in range(5) for layer in (nn.Linear(1100, 1100), nn.Tanh())]
torch.manual_seed(0)
model = nn.Sequential(*layers, nn.Linear(1100, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = hf.prepare(model, optimizer)
called = model if sys.argv[1] == "eager" else torch.compile(model, backend=sys.argv[1])
for batch in job.batches(DataLoader(TensorDataset(torch.randn(24, 1100)), batch_size=8)):
    for (x,) in job.parts(batch):
        loss = called(x).pow(2).mean()
        with profile() as seen:
            job.backward(loss, per_virtual_node=True)
    optimizer.step()
    optimizer.zero_grad()
kinds = {"aten::mm": "product", "c10d::allreduce_": "sum"}
events = sorted(seen.events(), key=lambda event: event.time_range.start)
order = [kinds[event.name] for event in events if event.name in kinds]
if job.is_main:
    stats = sys.modules["torch._dynamo.utils"].counters["stats"] if called is not model else {}
    print(json.dumps([order, stats.get("unique_graphs", 0)]))
"""


def run(folder: Path, backend: str) -> tuple[list[str], int]:
    (folder / "train.py").write_text(SCRIPT)
    files.write(folder / "plan.json", plan_of([2, 2]))
    command = ["-m", "hetflow.cli.main", "launch", "--determinism", "none", "plan.json"]
    done = programs.run(
        [sys.executable, *command, "train.py", backend],
        timeout=240,
        cwd=folder,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    order, num_graphs = json.loads(next(x for x in done.stdout.splitlines() if x[:2] == "[["))
    return order, num_graphs


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.slow
def test_sums_begin_between_the_parts_of_a_backward_pass(tmp_path: Path, backend: str) -> None:
    order, num_graphs = run(tmp_path, backend)
    assert (num_graphs > 0) == (backend != "eager")
    assert order.count("sum") >= 5
    # Of the last pass: all but the first layer's sum can begin before its products.
    before_the_last_product = order[: len(order) - order[::-1].index("product")].count("sum")
    assert before_the_last_product >= 4, order


# A launch under tensor parallelism, compiled; in one process, as it is.
SHARED_LAYERS = """
import json
import os
import sys
import torch
from torch.profiler import profile
from torch.utils.data import DataLoader, TensorDataset
from hetflow import runtime as hf
from hetflow.profilers.zoo.models import GPT

torch.manual_seed(0)
model = GPT(vocabulary=18, max_tokens=6, depth=2, num_heads=4, channels=16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randint(18, (24, 6)), torch.randint(18, (24, 6)))
called = torch.compile(model, backend="aot_eager") if "RANK" in os.environ else model
job, losses = hf.prepare(model, optimizer), []


def loss_of(tokens, targets):
    return torch.nn.functional.cross_entropy(called(tokens).flatten(0, -2), targets.flatten())


for batch in job.batches(DataLoader(data, batch_size=8)):
    with profile() as seen:
        losses.append(float(job.backward(loss_of, batch)))
    optimizer.step()
    optimizer.zero_grad()
kinds = [e.name for e in sorted(seen.events(), key=lambda event: event.time_range.start)]
order = [kind for kind in kinds if kind in ("aten::mm", "c10d::allreduce_")]
if job.is_main:
    stats = sys.modules["torch._dynamo.utils"].counters["stats"] if called is not model else {}
    print(json.dumps([losses, order, stats.get("unique_graphs", 0)]))
"""


@pytest.mark.slow
def test_a_compiled_model_shares_its_layers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHARED_LAYERS)
    files.write(tmp_path / "plan.json", parallel_plan([(("all",), (2,))]))
    launch = ["-m", "hetflow.cli.main", "launch", "plan.json"]
    found = []
    for way in (launch, []):
        done = programs.run([sys.executable, *way, "train.py"], timeout=240, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found.append(json.loads(next(x for x in done.stdout.splitlines() if x[:2] == "[[")))
    (losses, order, num_graphs), (alone, _, none) = found
    assert num_graphs > 0 == none
    assert losses == pytest.approx(alone, rel=1e-5)
    # Sums of activations stand between the products, forwards and backwards, not at their end.
    first, last = order.index("aten::mm"), len(order) - order[::-1].index("aten::mm")
    assert order[first:last].count("c10d::allreduce_") >= 4, order
