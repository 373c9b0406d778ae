"""A compiled model's gradients are summed during its backward pass, as an eager one's are."""

import json
import os
import sys
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.tests import programs
from hetflow.tests.launcher.elastic_runs import plan_of

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
