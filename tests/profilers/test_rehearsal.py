"""Rehearsals: the runtime's loop inside a measuring process, and nothing left behind."""

import gc
import random
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hetflow.devices import memory
from hetflow.profilers.bench import Bench
from hetflow.profilers.process import Child
from hetflow.profilers.rehearsal import config_of, rehearse
from hetflow.profilers.targets import Workload
from hetflow.runtime.gradients import GradientReducer
from hetflow.runtime.measurements import StepTimes
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.launch import LaunchConfig, PipelineStage, PipelineWork, VirtualNode, WorkerSlot

pytestmark = pytest.mark.measures


class Normed(nn.Module):
    """Parameters, and buffers that virtual nodes keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x), y)


def make_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(number, 4), torch.randint(2, (number,))


def bench_of(**extra: Any) -> Bench:
    given = {"model": Normed(), "make_batch": make_batch, "loss": loss_of, **extra}
    return Bench(Workload(**given), "cpu", "sgd-momentum")


def rehearsed(bench: Bench, sizes: list[int], **extra: Any) -> tuple[list[StepTimes], Any]:
    found = rehearse(bench, config=files.to_json(config_of([sizes])), **extra)
    return [StepTimes.of_json(step) for step in found["steps"]], found["no_loading"]


def test_every_part_of_every_step_is_told_in_order() -> None:
    steps, obstacle = rehearsed(bench_of(), [4, 4, 2], num_steps=5, warm_up_steps=2)
    assert obstacle is None
    assert len(steps) == 5
    for step in steps:
        ends = [end for marks in step.passes for end in marks]
        marks = [0.0, *ends, step.computed, step.synchronised, step.ended]
        assert len(step.passes) == 3
        assert marks == sorted(marks)
        assert all(seconds > 0 for seconds in [*step.pass_seconds, *step.gap_seconds])
    asked = [step.asked_seconds for step in steps]
    assert asked == sorted(asked)
    # A step begins where the script asks for its batch: nothing between two steps is left out.
    for before, after in zip(steps, steps[1:], strict=False):
        between = after.asked_seconds - before.asked_seconds - before.ended
        assert 0 <= between < 0.1 * before.ended + 1e-3


def test_a_rehearsal_trains_as_the_script_does() -> None:
    """Its gradients are the global batch's mean, and the optimizer has stepped."""
    bench = bench_of(model=nn.Linear(4, 2), make_batch=lambda n: make_batch(n))
    before = bench.model.weight.detach().clone()
    rehearsed(bench, [4, 4], num_steps=2)
    assert not torch.equal(bench.model.weight, before)
    assert len(bench.optimizer.state) == 2
    empty = bench.model.weight.detach().clone()
    rehearsed(bench, [4, 4], num_steps=2, is_empty=True)
    assert torch.equal(bench.model.weight, empty)


def test_nothing_stays_but_trained_values() -> None:
    bench = bench_of()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    bench.samples.source(4)  # makes batches, and draws for them as the target does
    expected = random.getstate()[1], np.random.get_state()[1][:4], torch.get_rng_state()  # noqa: NPY002
    tensors = {name: value.data_ptr() for name, value in bench.model.state_dict().items()}
    hooks = dict(_global_optimizer_pre_hooks)
    collected: list[weakref.ref[Any]] = []
    original = GradientReducer.__init__

    def watched(self: GradientReducer, *arguments: Any, **named: Any) -> None:
        collected.append(weakref.ref(self))
        original(self, *arguments, **named)

    gc.collect()
    gc.disable()
    try:
        GradientReducer.__init__ = watched  # type: ignore[method-assign]
        for sizes in ([4, 4], [2], [3, 2, 4]):
            rehearsed(bench, sizes, num_steps=2)
    finally:
        GradientReducer.__init__ = original  # type: ignore[method-assign]
        gc.enable()
    assert [reference() for reference in collected] == [None] * 3  # freed at once
    now = random.getstate()[1], np.random.get_state()[1][:4], torch.get_rng_state()  # noqa: NPY002
    assert now[0] == expected[0]
    assert (now[1] == expected[1]).all()
    assert torch.equal(now[2], expected[2])
    assert {n: v.data_ptr() for n, v in bench.model.state_dict().items()} == tensors
    assert dict(_global_optimizer_pre_hooks) == hooks
    assert all(not p._post_accumulate_grad_hooks for p in bench.model.parameters())
    assert all(p.grad is None for p in bench.model.parameters())
    bench.run_step(bench.make_batch(2))


def pipeline(schedule: str, ranks: list[int]) -> LaunchConfig:
    """Three layers on two stages, two microbatches of 4."""
    nodes = tuple(VirtualNode(index=index, batch_size=4) for index in range(2))
    return LaunchConfig(
        model="model",
        global_batch_size=8,
        workers=tuple(
            WorkerSlot(rank=rank, device_type="cpu", virtual_nodes=nodes)
            for rank in sorted(set(ranks))
        ),
        pipeline=PipelineWork(
            schedule=schedule,
            num_microbatches=2,
            recompute=False,
            stages=tuple(
                PipelineStage(layers=layers, ranks=(rank,))
                for layers, rank in zip((("first",), ("norm", "last")), ranks, strict=True)
            ),
        ),
    )


def test_a_pipeline_is_rehearsed_and_gives_the_model_back(tmp_path: Path) -> None:
    """In two processes: a pipeline, synchronised split, and two that train side by side."""
    target = tmp_path / "target.py"
    target.write_text(_TARGET, encoding="utf-8")
    with ExitStack() as stack:
        children = [stack.enter_context(Child({"GLOO_SOCKET_IFNAME": "lo"})) for _ in range(2)]
        for child in children:
            child.send(
                "load",
                target=f"{target}:normed",
                device="cpu",
                memory_bytes=8 << 30,
                optimizer="adam",
            )
        for child in children:
            child.receive(60)

        def together(number: int, config: LaunchConfig, **named: Any) -> list[list[StepTimes]]:
            for rank, child in enumerate(children):
                child.send(
                    "rehearse",
                    config=files.to_json(config),
                    rank=rank,
                    num_steps=3,
                    group={"path": str(tmp_path / f"store-{number}"), "backend": "gloo"},
                )
            answers = [child.receive(60) for child in children]
            return [[StepTimes.of_json(step) for step in a["steps"]] for a in answers]

        for number, schedule in enumerate(("1f1b", "2bw", "gpipe")):
            steps = together(number, pipeline(schedule, [0, 1]))
            assert [len(found) for found in steps] == [3, 3]
            assert all(len(step.passes) == 2 for found in steps for step in found)
        split = config_of([[4, 4], [4]])
        steps = together(9, split)
        assert [len(step.passes) for step in (steps[0][0], steps[1][0])] == [2, 1]
        alone = files.to_json(config_of([[4, 4]]))
        for index, child in enumerate(children):
            folder = tmp_path / "line"
            folder.mkdir(exist_ok=True)
            child.send(
                "rehearse",
                config=alone,
                num_steps=3,
                beside={"folder": str(folder), "index": index, "number": 2},
            )
        assert [len(child.receive(60)["steps"]) for child in children] == [3, 3]


_TARGET = """
import torch
from torch import nn


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def normed():
    def make_batch(number):
        return torch.randn(number, 4), torch.randint(2, (number,))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Normed(), make_batch, loss
"""


class Slow(Dataset[Any]):
    """The script's own dataset, which takes its time."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return torch.randn(4), torch.tensor(index % 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_targets_own_dataset_is_loaded(wrapped: bool) -> None:
    slow = Slow()
    dataset = DataLoader(slow, batch_size=99, collate_fn=collate) if wrapped else slow
    steps, obstacle = rehearsed(bench_of(dataset=dataset), [4, 3], num_steps=3)
    assert obstacle is None
    assert len(steps) == 3
    assert len(slow.read) == 4 * 7
    assert (collate.called > 0) is wrapped  # type: ignore[attr-defined]


def collate(samples: list[Any]) -> Any:
    collate.called += 1  # type: ignore[attr-defined]
    return torch.utils.data.default_collate(samples)


collate.called = 0  # type: ignore[attr-defined]


def test_a_dataset_with_other_batches_than_make_batch_is_refused() -> None:
    dataset = TensorDataset(torch.randn(9, 4))
    with pytest.raises(TargetError, match="gives 1 tensors a batch, and make_batch 2"):
        rehearsed(bench_of(dataset=dataset), [4], num_steps=1)


def test_batches_of_every_form_come_back_as_they_were() -> None:
    """What the loss gets has the form, types and sizes of what make_batch gives."""
    seen: list[Any] = []

    def make(number: int) -> Any:
        return {"y": torch.arange(number), "x": [torch.zeros(number, 3), None], "scale": 2.0}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return model(batch["x"][0]).sum() * batch["scale"]

    bench = bench_of(model=nn.Linear(3, 1), make_batch=make, loss=loss)
    _, obstacle = rehearsed(bench, [4, 2], num_steps=1)
    assert obstacle is None
    assert [list(batch) for batch in seen] == [["y", "x", "scale"]] * 4
    assert [len(batch["y"]) for batch in seen] == [4, 2] * 2
    assert all(type(batch["x"]) is list and batch["x"][1] is None for batch in seen)


def test_batches_that_cannot_be_taken_apart_are_ready_and_it_is_said() -> None:
    """Time-major: the first dimension is the length of the sequence, also where it is the size."""

    def make(number: int) -> torch.Tensor:
        return torch.randn(4, number, 3)

    bench = bench_of(model=nn.Linear(3, 1), make_batch=make, loss=lambda m, x: m(x).sum())
    for size in (4, 5):
        steps, obstacle = rehearsed(bench, [size], num_steps=2)
        assert len(steps) == 2
        assert obstacle is not None
        assert "dataset (its fifth value)" in obstacle


def test_processes_side_by_side_do_not_wait_for_one_that_failed(tmp_path: Path) -> None:
    """Its own fault is told at once, and theirs is that another failed."""

    def fails(model: nn.Module, batch: Any) -> torch.Tensor:
        raise MemoryError

    beside = {"folder": str(tmp_path), "number": 2}
    with pytest.raises(MemoryError):
        rehearsed(
            bench_of(loss=fails), [4], num_steps=1, beside={**beside, "index": 0}, warm_up_steps=2
        )
    with pytest.raises(TargetError, match="another measuring process failed"):
        rehearsed(bench_of(), [4], num_steps=1, beside={**beside, "index": 1})


@pytest.mark.skipif(not memory.reset_peak(), reason="the kernel does not start peaks anew")
def test_a_peak_is_of_its_own_rehearsal() -> None:
    config = files.to_json(config_of([[4]]))

    def peak_with(mebibytes: int) -> int:
        def loss(model: nn.Module, batch: Any) -> torch.Tensor:
            torch.ones(mebibytes << 18)
            return loss_of(model, batch)

        found = rehearse(bench_of(loss=loss), config=config, num_steps=1, measures_peak=True)
        return found["peak_memory_bytes"] >> 20

    before, high, after = (peak_with(mebibytes) for mebibytes in (8, 256, 8))
    assert high - before > 200
    assert high - after > 200
    assert "peak_memory_bytes" not in rehearse(bench_of(), config=config, num_steps=1)
