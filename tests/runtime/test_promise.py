"""A loss function is tested when it is first used: is its loss a mean over samples?"""

import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.runtime import start, totals
from hetflow.runtime.promise import promise
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.runtime.losses import RIGHT, WRONG
from hetflow.tests.runtime.sharded_plans import shared

BATCH = 16


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def data(dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * BATCH, 5, generator=generator).to(dtype)
    x[10, 0] = -1.0
    y = torch.randint(3, (2 * BATCH,), generator=generator)
    y[[1, 5, 6]] = -100
    return TensorDataset(x, y)


def model_of(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 3))
    return nn.Sequential(*layers).to(dtype)


@pytest.fixture
def jobs() -> Iterator[Callable[..., hf.Job]]:
    made = []

    def prepare(*arguments: object, **options: object) -> hf.Job:
        made.append(hf.prepare(*arguments, **options))
        return made[-1]

    yield prepare
    for job in made:
        job.finish()


def step(job: hf.Job, loss_of: Callable[..., object], dataset: TensorDataset, **options: object):
    batch = next(iter(job.batches(DataLoader(dataset, batch_size=BATCH))))
    return job.backward(loss_of, batch, **options)


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        pytest.param(torch.float32, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_means_over_samples_train(
    jobs: Callable[..., hf.Job], name: str, dtype: torch.dtype
) -> None:
    model = model_of(dtype)
    step(jobs(model), RIGHT[name](model), data(dtype))
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("name", WRONG)
def test_other_losses_are_refused_before_an_update(jobs: Callable[..., hf.Job], name: str) -> None:
    model, (make, said) = model_of(), WRONG[name]
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(TargetError, match=said) as refused:
        step(jobs(model), make(model), data())
    assert refused.value.hint
    after = model.state_dict().values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Cooling(nn.Module):
    """Divides by a temperature that falls with every call in training."""

    def __init__(self, *, in_a_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.calls = 0
        if in_a_buffer:
            del self.calls
            self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.linear(x) / (1 + 0.1 * self.calls)


def test_a_model_that_counts_its_calls_in_training_is_refused(jobs: Callable[..., hf.Job]) -> None:
    """A launch calls it once for each virtual node, so its numbers would run ahead."""
    model = Cooling(in_a_buffer=False)
    with pytest.raises(TargetError, match="when the function is called again") as refused:
        step(jobs(model), RIGHT["mean"](model), data())
    assert "in a buffer of the model" in str(refused.value.hint)
    assert model.calls == 0
    kept = Cooling(in_a_buffer=True)
    step(jobs(kept), RIGHT["mean"](kept), data())
    assert kept.calls == 1


@pytest.fixture
def small_virtual_nodes(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write(tmp_path / "plan.json", plan_of([(16, 1)]))
    monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / "plan.json"))


def hardest(model: nn.Module) -> Callable[..., torch.Tensor]:
    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(model(x), y.clamp(min=0), reduction="none")
        return each.topk(min(4, len(each))).values.mean()

    return loss_of


@pytest.mark.usefixtures("small_virtual_nodes")
def test_more_samples_are_tested_than_a_virtual_node_has(jobs: Callable[..., hf.Job]) -> None:
    model = nn.Linear(5, 3).double()
    with pytest.raises(TargetError, match="the loss of 16 samples"):
        step(jobs(model), hardest(model), data())


@pytest.mark.usefixtures("small_virtual_nodes")
def test_fewer_are_tested_where_memory_lacks(jobs: Callable[..., hf.Job]) -> None:
    model = nn.Linear(5, 3).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("no memory for more")
        return nn.functional.cross_entropy(model(x), y.clamp(min=0), reduction="sum")

    with pytest.raises(TargetError, match="the loss of 2 samples"):
        step(jobs(model), loss_of, data())


@pytest.mark.usefixtures("small_virtual_nodes")
def test_no_more_are_tested_where_a_plan_fills_the_memory(
    jobs: Callable[..., hf.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    def filling(*given: Any, **options: Any) -> promise.Promise:
        return promise.Promise(*given, **{**options, "fits_passes": True})

    monkeypatch.setattr(start, "Promise", filling)
    model = nn.Linear(5, 3).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y.clamp(min=0), reduction="sum")

    with pytest.raises(TargetError, match="the loss of 2 samples"):
        step(jobs(model), loss_of, data())


def test_a_loss_of_each_virtual_nodes_own_is_taken_where_the_script_says_so(
    jobs: Callable[..., hf.Job],
) -> None:
    model = model_of()
    step(jobs(model), WRONG["in-batch negatives"][0](model), data(), per_virtual_node=True)


def test_nothing_is_left_behind(jobs: Callable[..., hf.Job]) -> None:
    """The first step has the draws, buffers and variables that it would have without a test."""

    class Meter:
        def __init__(self) -> None:
            self.values: list[int] = []
            self.total, self.average = 0, torch.zeros(1)

        def add(self, number: int) -> None:
            self.values.append(number)
            self.total += number
            self.average += number

    def train(**options: object) -> tuple[object, ...]:
        model, meter, seen, count = model_of(), Meter(), [], 0
        generator, rng = torch.Generator().manual_seed(3), np.random.default_rng(3)
        torch.manual_seed(5)
        random.seed(5)
        job = jobs(model)

        def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += len(x)
            seen.append(len(x))
            meter.add(len(x))
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype) * rng.random()
            x = x + noise + torch.rand_like(x) + random.random()
            return nn.functional.cross_entropy(model(x), y.clamp(min=0))

        step(job, loss_of, data(), **options)
        drawn = torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        kept = count, seen, meter.values, meter.total, float(meter.average), drawn, rng.random()
        return (
            *kept,
            torch.rand(1, generator=generator),
            [p.grad for p in model.parameters()],
            [b.clone() for b in model.buffers()],
            model.training,
        )

    assert str(train()) == str(train(per_virtual_node=True))


def test_a_function_is_tested_again_where_the_samples_said_little(
    jobs: Callable[..., hf.Job],
) -> None:
    model = nn.Linear(5, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    job = jobs(model)
    batches = iter(job.batches(DataLoader(data(), batch_size=BATCH)))

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (1 + model(x).square()).mean().log()

    job.backward(loss_of, next(batches))  # all losses are equal: nothing can be said
    nn.init.ones_(model.weight)
    with pytest.raises(TargetError, match="something else than samples"):
        job.backward(loss_of, next(batches))


def test_weights_and_other_values(jobs: Callable[..., hf.Job]) -> None:
    model = model_of().eval()
    job = jobs(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, object]]:
        logits = model(x)
        return nn.functional.cross_entropy(logits, y), {"right": (logits.argmax(1) == y).sum()}

    loss, rest = step(
        job, loss_of, data(), has_aux=True, weight=lambda x, y: int((y != -100).sum())
    )
    assert len(rest) == 1
    x, y = data()[:BATCH]
    assert int(rest[0]["right"]) == int((model(x).argmax(1) == y).sum())
    assert loss.item() == pytest.approx(nn.functional.cross_entropy(model(x), y).item())
    with pytest.raises(TargetError, match=r"must return \(loss, other values\)"):
        step(jobs(model), lambda x, y: model(x).mean(), data(), has_aux=True)
    with pytest.raises(TargetError, match="weight must be a function of the batch"):
        step(jobs(model), loss_of, data(), weight=3)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
from hetflow import runtime as hf
from hetflow.runtime import start, totals
from hetflow.runtime.promise import promise
from hetflow.tests.runtime import test_promise, losses
model = test_promise.model_of()
job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
loss_of = losses.WRONG[sys.argv[1]][0](model)
for batch in job.batches(DataLoader(test_promise.data(), batch_size=16)):
    job.backward(loss_of, batch)
    open("updated", "w").close()
"""


@pytest.mark.processes
@pytest.mark.parametrize("launches", [False, True])
@pytest.mark.slow
def test_a_script_ends_with_one_line(
    tmp_path: Path, plan_of: Callable[..., Plan], launches: bool
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    files.write(tmp_path / "plan.json", plan_of([(2, 4), (2, 4)]))
    launch = ["-m", "hetflow.cli.main", "launch", "plan.json"] if launches else []
    done = programs.run(
        [sys.executable, *launch, "train.py", "log of the mean"], timeout=120, cwd=tmp_path
    )
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert "mean of their parts (10 + 1 + " in lines[0]
    assert "train.py, line" in lines[0]
    assert lines[1].startswith("hint: ")
    assert len(lines) == 2, done.stderr
    assert not (tmp_path / "updated").exists()


def masked_mean(each: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (each * mask).sum() / mask.sum()


def opaque(each: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A mean whose divisor no graph shows."""

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, each, mask):
            ctx.save_for_backward(mask)
            return (each * mask).sum() / mask.sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * ctx.saved_tensors[0] / ctx.saved_tensors[0].sum(), None

    return Mean.apply(each, mask)


MASKED = {
    "divided": masked_mean,
    "multiplied": lambda each, y, mask: (each * mask).sum() * (1 / mask.sum()),
    "by a number": lambda each, y, mask: (each * mask).sum() / int(mask.sum()),
    "chosen": lambda each, y, mask: each[mask > 0].mean(),
    "weighted by samples": lambda each, y, mask: hf.Weighted(masked_mean(each, y, mask), len(y)),
    "a term": lambda each, y, mask: 1 + 0.5 * masked_mean(each, y, mask),
    "opaque": opaque,
}


def train_on_later_masks(
    job: hf.Job,
    model: nn.Module,
    loss_of: Callable[..., object],
    batch: int,
    first: int,
    batches: int = 8,
) -> tuple[int, str]:
    """Train on batches of which some are masked from the first on: (updates made, refusal)."""
    number = batches * BATCH
    masked = torch.ones(number, dtype=torch.float64)
    masked[first::3] = 0
    x, y = torch.randn(number, 5, dtype=torch.float64), torch.randint(3, (number,))

    def called(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> object:
        return loss_of(nn.functional.cross_entropy(model(x), y, reduction="none"), y, mask)

    for done, part in enumerate(job.batches(DataLoader(TensorDataset(x, y, masked), batch))):
        try:
            job.backward(called, part)
        except TargetError as error:
            return done, error.message
        model.zero_grad()
    return number // batch, ""


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", MASKED)
def test_a_mask_that_first_matters_in_a_later_batch_is_met_there(
    jobs: Callable[..., hf.Job], name: str, planned: bool, request: pytest.FixtureRequest
) -> None:
    if planned:
        request.getfixturevalue("small_virtual_nodes")
    model = nn.Linear(5, 3).double()
    updates, said = train_on_later_masks(jobs(model), model, MASKED[name], BATCH, first=4 * BATCH)
    assert "so virtual nodes would train on another loss" in said
    assert updates == (7 if name == "opaque" else 4)  # no graph shows it: in step 8


def test_a_stated_weight_goes_on_where_masks_come_later(jobs: Callable[..., hf.Job]) -> None:
    def loss_of(each: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> hf.Weighted:
        return hf.Weighted(masked_mean(each, y, mask), mask.sum())

    model = nn.Linear(5, 3).double()
    assert train_on_later_masks(jobs(model), model, loss_of, BATCH, first=4 * BATCH) == (8, "")


def test_samples_are_chosen_only_in_large_batches(jobs: Callable[..., hf.Job]) -> None:
    """More than a test's samples, and more than a virtual node's, have to be seen."""

    def loss_of(each: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return each.topk(min(3 * BATCH, len(each))).values.mean()

    model = nn.Linear(5, 3).double()
    masked = torch.ones(4 * BATCH)
    data = TensorDataset(torch.randn(4 * BATCH, 5).double(), torch.arange(4 * BATCH) % 3, masked)

    def called(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> object:
        return loss_of(nn.functional.cross_entropy(model(x), y, reduction="none"), y, mask)

    batch = next(iter(jobs(model).batches(DataLoader(data, 4 * BATCH))))
    with pytest.raises(TargetError, match="4 times, as many as the batch has"):
        jobs(model).backward(called, batch)


def test_a_test_takes_20_passes_of_a_sample(jobs: Callable[..., hf.Job]) -> None:
    model, seen = nn.Linear(5, 3).double(), SimpleQueue[int]()  # a list would be put back
    model.register_forward_hook(lambda module, given, made: seen.put(len(made)))
    batches = iter(jobs(model).batches(DataLoader(data(), batch_size=2 * BATCH)))
    jobs(model).backward(mean_of(model), next(batches))
    assert [seen.get() for _ in range(6)] == [BATCH, 1, 1, 1, 1, 2 * BATCH]  # the last: the step
    assert seen.empty()


def mean_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    return lambda x, y: nn.functional.cross_entropy(model(x), y.clamp(min=0))


@pytest.mark.parametrize("mixes", ["all", "earlier", "later"])
def test_a_model_that_mixes_samples_is_asked_for_each_part(
    jobs: Callable[..., hf.Job], mixes: str
) -> None:
    class Mixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if mixes == "all":
                return super().forward(x - x.mean(0))
            x = x if mixes == "earlier" else x.flip(0)
            return super().forward(x.cumsum(0)).square()

    model = Mixed(5, 3).double()
    with pytest.raises(TargetError, match="mean of their parts"):
        step(jobs(model), mean_of(model), data())


def test_draws_inside_and_after_the_model_are_those_of_the_samples(
    jobs: Callable[..., hf.Job],
) -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.randn(len(x), 3, dtype=x.dtype)

    model = Noisy(5, 3).double()

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (model(x) * torch.rand(len(x), 1, dtype=x.dtype)).square().mean()

    step(jobs(model), loss_of, data())


class Device:
    """A device whose numbers have arrived a step later."""

    is_host = False

    def mark(self, _: torch.device) -> int:
        return 0

    def has_passed(self, _: int) -> bool:
        return True


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promise, "backend_of", lambda _: Device())
    monkeypatch.setattr(totals, "backend_of", lambda _: Device())
    unpinned = partial(torch.empty, pin_memory=False)
    monkeypatch.setattr(totals.torch, "empty", lambda *sizes, **_: unpinned(*sizes).double())


@pytest.mark.usefixtures("on_a_device")
def test_on_a_device_a_later_mask_is_met_a_step_later_or_at_the_end() -> None:
    model = nn.Linear(5, 3).double()
    job = hf.prepare(model)
    updates, said = train_on_later_masks(job, model, masked_mean, BATCH, first=4 * BATCH)
    job.abandon()
    assert "so virtual nodes would train on another loss" in said
    assert updates == 5
    job = hf.prepare(model)
    assert train_on_later_masks(job, model, masked_mean, 20, first=120)[1] == ""
    with pytest.raises(TargetError, match="so virtual nodes would train on another loss"):
        job.finish()
    job.abandon()


@pytest.mark.usefixtures("on_a_device")
def test_workers_that_share_weights_meet_it_another_step_later(
    tmp_path: Path, plan_of: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promise, "backend_of", lambda _: Device())
    files.write(tmp_path / "plan.json", shared(plan_of([(2, 8)]), "all", (1,)))
    monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / "plan.json"))
    for batches, expected in ((8, 6), (6, 6), (5, 5)):  # the last ones are met at the end
        model = nn.Linear(5, 3).double()
        job = hf.prepare(model)
        updates, said = train_on_later_masks(job, model, masked_mean, BATCH, 4 * BATCH, batches)
        assert updates == expected
        if not said:
            with pytest.raises(TargetError, match="so virtual nodes would train on another loss"):
                job.finish()
        job.abandon()
