"""Losses of the whole batch: one process, virtual nodes and unequal workers train the same."""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.runtime import over_batch, sync_norms

SCRIPT = Path(over_batch.__file__)
Results = dict[tuple[str, bool], tuple[list[float], dict[str, torch.Tensor]]]


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def launch(
    folder: Path, plan: Plan, script: Path = SCRIPT, determinism: str = "elastic"
) -> list[Any]:
    """Each worker's results."""
    folder.mkdir()
    files.write(folder / "plan.json", plan)
    command = ["-m", "hetflow.cli.main", "launch", "--determinism", determinism, "plan.json"]
    done = programs.run(
        [sys.executable, *command, str(script), str(folder)], timeout=120, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"results{n}.pt") for n in range(len(plan.groups))]


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]) -> list[Results]:
    """The results of two unequal workers with four virtual nodes."""
    return launch(tmp_path_factory.mktemp("over_batch") / "two", plan_of([(3, 4), (1, 4)]))


@cache
def alone(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the model of one process."""
    return over_batch.train(name)


def plainly(name: str) -> dict[str, torch.Tensor]:
    """The same training without hetflow."""
    from hetflow.runtime.determinism import generator_of

    model = over_batch.Net(norm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs, loss_of = over_batch.LOSSES[name](model)
    for epoch in range(2):
        generator = generator_of(0, "order", epoch)
        order = torch.randperm(over_batch.NUM_SAMPLES, generator=generator)
        for index in order.split(over_batch.GLOBAL_BATCH_SIZE):
            found = outputs(*over_batch.data()[index])
            loss = loss_of(*found) if isinstance(found, tuple) else loss_of(found)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


def near(one: Any, other: Any) -> None:
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", over_batch.LOSSES)
def test_one_process_trains_as_plain_pytorch(name: str) -> None:
    near(plainly(name), alone(name)[1])


@pytest.mark.processes
def test_virtual_nodes_and_unequal_workers_train_the_same(on_two: list[Results]) -> None:
    for name in over_batch.LOSSES:
        losses, state = alone(name)
        for found in on_two:
            near(state, found[name, False][1])
            assert found[name, False][0] == pytest.approx(losses, rel=1e-10)


@pytest.mark.slow
@pytest.mark.processes
def test_every_mapping_has_the_same_bits(
    tmp_path: Path, on_two: list[Results], plan_of: Callable[..., Plan]
) -> None:
    """With dropout and batch-norm too, whose buffers are updated once a step."""
    first, *others = [*launch(tmp_path / "one", plan_of([(4, 4)])), *on_two]
    for key, (losses, state) in first.items():
        for found in others:
            assert found[key][0] == losses, key
            assert all(torch.equal(found[key][1][n], v) for n, v in state.items()), key
    assert int(first["contrast", True][1]["body.1.0.num_batches_tracked"]) == 12


@pytest.mark.parametrize(
    ("outputs", "options", "message"),
    [
        (lambda z: z - z.mean(0), {}, "must treat each sample by itself"),
        (lambda z: z.mean(), {}, "one row for each of its"),
        (lambda z: z, {"has_aux": True}, "goes with neither has_aux nor weight"),
        (lambda z: z, {"over_batch": lambda z: (z.mean(), 3)}, "returned a tuple of 2"),
    ],
)
def test_what_cannot_be_a_loss_of_outputs_is_refused(
    outputs: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    model = nn.Linear(5, 3).double()
    job = hf.prepare(model)
    x = torch.randn(8, 5, dtype=torch.float64)
    batch = next(iter(job.batches(DataLoader(TensorDataset(x), batch_size=8))))
    with pytest.raises(TargetError, match=message):
        job.backward(
            lambda x: outputs(model(x)), batch, **{"over_batch": lambda z: z.mean(), **options}
        )
    job.finish()


@pytest.mark.processes
def test_sync_batch_norm_has_the_statistics_of_one_device(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    from hetflow.runtime.determinism import generator_of

    model = sync_norms.model_of()  # PyTorch's own layers, on whole batches
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for index in torch.randperm(43, generator=generator_of(0, "order", epoch)).split(16):
            x, y = sync_norms.data()[index]
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    script = Path(sync_norms.__file__)
    one, other = launch(tmp_path / "two", plan_of([(3, 4), (1, 4)]), script, "none")
    near(model.state_dict(), one[1])
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def test_sync_batch_norm_is_refused_where_it_cannot_be_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sync_norms.model_of()
    job = hf.prepare(model)
    batch = next(iter(job.batches(DataLoader(sync_norms.data(), batch_size=16))))
    with pytest.raises(TargetError, match="do not go with SyncBatchNorm"):
        job.backward(lambda x, y: (model(x).mean(), 1), batch, has_aux=True, per_virtual_node=True)
    job.finish()
    monkeypatch.setenv("HETFLOW_DETERMINISM", "elastic")
    with pytest.raises(TargetError, match="1 is a SyncBatchNorm, whose sums follow the workers"):
        hf.prepare(model)
