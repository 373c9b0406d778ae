"""A loop of the script's own over the parts of a batch: it trains as one process does."""

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
from hetflow.tests.launcher.elastic_runs import Launch
from hetflow.tests.runtime import looping

SCRIPT = Path(looping.__file__)
# (virtual nodes, samples of each) per device
WHOLE = {"24/8": [(1, 24), (1, 8)]}
PARTS = {"one": [(6, 4), (2, 4)], "three": [(3, 4), (1, 4), (4, 4)]}


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def launched(
    tmp_path_factory: pytest.TempPathFactory, plan_of: Callable[..., Plan]
) -> dict[str, list[dict[str, looping.Result]]]:
    found = {}
    for name, devices in {**WHOLE, **PARTS}.items():
        folder = tmp_path_factory.mktemp("looping")
        files.write(folder / "plan.json", plan_of(devices))
        form, level = ("whole", "none") if name in WHOLE else ("parts", "elastic")
        command = ["-m", "hetflow.cli.main", "launch", "--determinism", level, "plan.json"]
        done = programs.run(
            [sys.executable, *command, str(SCRIPT), str(folder), form], timeout=240, cwd=folder
        )
        assert done.returncode == 0, done.stderr
        found[name] = [torch.load(folder / f"results{n}.pt") for n in range(len(devices))]
    return found


@cache
def plainly(name: str) -> looping.Result:
    """The same training without hetflow."""
    return {**looping.EXACT, "whole": looping.whole}[name](looping.OneProcess)


def near(found: looping.Result, expected: looping.Result) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.processes
@pytest.mark.parametrize("training", [*looping.EXACT, "whole"])
@pytest.mark.slow
def test_uneven_workers_train_as_one_process_does(
    launched: dict[str, list[dict[str, Any]]], training: str
) -> None:
    for name in WHOLE if training == "whole" else (*WHOLE, *PARTS):
        for result in launched[name]:
            near(result[training], plainly(training))


@pytest.mark.processes
@pytest.mark.slow
def test_any_mapping_of_the_same_virtual_nodes_has_the_same_bits(
    launched: dict[str, list[dict[str, Any]]],
) -> None:
    first = launched["one"][0]
    for result in (*launched["one"], *launched["three"]):
        for name in [*looping.EXACT, "noisy"]:
            losses, state = first[name]
            assert result[name][0] == losses, name
            assert all(torch.equal(result[name][1][key], state[key]) for key in state), name


@pytest.mark.parametrize("training", [*looping.EXACT, "whole"])
def test_plain_python_trains_as_one_process_does(training: str) -> None:
    near({**looping.EXACT, "whole": looping.whole}[training](hf.prepare), plainly(training))


@pytest.mark.processes
def test_a_logger_gets_the_global_batchs_loss_and_the_shares(
    launched: dict[str, list[dict[str, Any]]],
) -> None:
    for result in launched["24/8"]:
        found = result["scalars"]
        assert found["loss"] == pytest.approx(plainly("classifier")[0][-1], rel=1e-9)
        assert found["step_seconds/predicted"] == 0.01
        assert found["step_seconds/measured"] > 0
        assert found["samples/0 cpu:fast"] == 24
        assert found["samples/1 cpu:fast"] == 8


# What is refused, or left out


def started() -> tuple[nn.Module, Any, hf.Job]:
    model = looping.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, hf.prepare(model, optimizer)


def sum_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


LOSSES = {
    "a sum": (sum_of, "the loss is a sum over samples"),
    "a sum by a fixed number": (lambda m, x, y: sum_of(m, x, y) / 30, "a sum divided by 30"),
    "a mean over targets": (
        lambda m, x, y: nn.functional.cross_entropy(m(x), torch.where(x[:, 0] > 0, -100, y)),
        "ignores some targets",
    ),
    "a mean over some": (
        lambda m, x, y: nn.functional.cross_entropy(m(x), y, reduction="none")[:5].mean(),
        "a mean over 5 things",
    ),
    "a vector": (lambda m, x, y: m(x), "must return a scalar mean loss"),
    "a detached loss": (lambda m, x, y: m(x).mean().detach(), "the loss has no gradient"),
    "a function of the batch": (lambda m, x, y: lambda: 1, "a function and a batch"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_is_seen_to_be_no_mean_over_samples_is_refused(case: str) -> None:
    loss_of, said = LOSSES[case]
    model, _, job = started()
    batch = next(iter(job.batches(looping.loader())))
    for x, y in job.parts(batch):
        with pytest.raises(TargetError, match=said):
            job.backward(loss_of(model, x, y))
        break
    job.abandon()


def test_losses_that_are_means_are_taken() -> None:
    model, _, job = started()
    for number, (x, y) in enumerate(job.batches(looping.loader())):
        mean = nn.functional.cross_entropy(model(x), y)
        penalty = sum(p.square().sum() for p in model.parameters())
        each = nn.functional.cross_entropy(model(x), y, reduction="none")
        means = [mean + penalty, sum_of(model, x, y) / len(x), each.square().sum() / len(x)]
        job.backward(means[number])
    job.finish()


def twice(job: hf.Job, batch: Any, model: nn.Module) -> None:
    for x, _ in job.parts(batch):
        job.backward(model(x).square().mean())
        job.backward(model(x).square().mean())


def never(job: hf.Job, batch: Any, model: nn.Module) -> None:
    for _ in job.parts(batch):
        pass


def left(job: hf.Job, batch: Any, model: nn.Module) -> None:
    for _ in job.parts(batch):
        break
    for _ in job.parts(batch):
        pass


def whole_twice(job: hf.Job, batch: Any, model: nn.Module) -> None:
    x, _ = batch
    job.backward(model(x).square().mean())
    assert batch[0] is x
    job.backward(model(x).square().mean())


def after_a_function(job: hf.Job, batch: Any, model: nn.Module) -> None:
    job.backward(lambda x, y: model(x).square().mean(), batch)
    for _ in job.parts(batch):
        pass


WRONG = {
    "two losses of a part": (twice, "no part of a batch waits"),
    "a part without a loss": (never, "a part of job.parts.batch. has no loss"),
    "a loop that is left": (left, "left before its last part"),
    "two losses of a whole batch": (whole_twice, "no part of a batch waits"),
    "a function before": (after_a_function, "this batch was used already"),
    "a loss with a batch": (
        lambda job, batch, model: job.backward(torch.ones(()), batch),
        "a batch goes with a function",
    ),
    "a function with the loader's own batch": (
        lambda job, batch, model: job.backward(lambda x: model(x).mean(), (torch.ones(2, 4),)),
        "it got function and a tuple as batch",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_right_is_refused_in_one_line(case: str) -> None:
    try_it, said = WRONG[case]
    model, _, job = started()
    with pytest.raises(TargetError, match=said) as caught:
        try_it(job, next(iter(job.batches(looping.loader()))), model)
    assert "\n" not in str(caught.value)
    job.abandon()


def test_a_batch_can_be_looked_at_and_left_out() -> None:
    model, optimizer, job = started()
    seen = []
    for number, batch in enumerate(job.batches(DataLoader(looping.data(), batch_size=32))):
        x, y = batch
        seen.append(x)
        if number != 1:
            job.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(torch.cat(seen), looping.data().tensors[0])
    assert job.num_steps == 2
    with pytest.raises(TargetError, match="this batch is over"):
        batch[0]
    job.finish()


def test_a_plain_backward_is_refused() -> None:
    model, optimizer, job = started()
    batches = iter(job.batches(looping.loader()))
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.zero_grad()
    with pytest.raises(TargetError, match=r"the script called loss.backward\(\)"):
        next(batches)
    job.abandon()


class Texts(TensorDataset):
    """Samples as dicts."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.tensors[0][index], "y": self.tensors[1][index]}


def test_a_batch_is_what_the_loader_gives() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = looping.net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layers(x), y)

    model = Net()
    job = hf.prepare(model)
    for batch in job.batches(DataLoader(Texts(*looping.data().tensors), batch_size=32)):
        assert list(batch.keys()) == ["x", "y"]
        assert len(batch["x"]) == len(batch["y"])
        job.backward(model(**batch))
    for batch in job.batches(DataLoader(looping.data().tensors[0], batch_size=32)):
        job.backward(model.layers(batch.samples).square().mean())
    job.finish()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("training", "said"),
    [
        ("whole", "a device of this plan has 2 virtual nodes"),
        ("clearing", "the script clears or changes gradients between two parts"),
    ],
)
def test_what_parts_cannot_be_is_refused(
    tmp_path: Path, plan_of: Callable[..., Plan], training: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(
        "from hetflow import runtime as hf\n"
        "from hetflow.tests.runtime import looping\n"
        f"looping.{training}(hf.prepare)\n"
    )
    files.write(tmp_path / "plan.json", plan_of([(1, 24), (2, 4)]))
    command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--determinism", "elastic"]
    done = programs.run([*command, "plan.json", "train.py"], timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "job.parts(batch)" in done.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("awkward", ["", "1"])
def test_a_resize_and_a_restart_change_no_bit_of_what_a_function_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, awkward: str
) -> None:
    monkeypatch.setenv("AWKWARD", awkward)
    expected = Launch(tmp_path / "function", [8]).digest()
    monkeypatch.setenv("IN_PARTS", "1")
    saved = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "1")
    run = Launch(tmp_path / "parts", [5, 3], *saved, holds=[4, 8])
    run.wait_for_step(4, 2)
    asked = run.resize_later("--gpus", "3xcpu:fast")
    run.wait_for_newcomers(3)
    run.go(4)
    _, said = asked.communicate(timeout=60)
    assert asked.returncode == 0, said
    run.wait_for_step(8, 3)
    if not awkward:  # else gradients are kept over steps, which no checkpoint has
        run.kill(1)
    run.go(8)
    code, said = run.end()
    assert code == 0, said
    assert awkward or "starting again from the last checkpoint" in said, said
    assert (tmp_path / "parts" / "digest").read_text() == expected


F = nn.functional


def contrast(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    a, b = F.normalize(model(x)), F.normalize(model(x.flip(1)))
    return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))


def each_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def ragged(x: torch.Tensor) -> torch.Tensor:
    """[samples, 2] a mask of one entry a sample, but two of the first, none of the next."""
    mask = torch.ones(len(x), 2).to(x)
    mask[2:, 1] = 0
    mask[1] = 0
    return mask


def masked(model: nn.Module, x: torch.Tensor, y: torch.Tensor, mask: Any = None) -> torch.Tensor:
    mask = ragged(x) if mask is None else mask
    return (each_of(model, x, y)[:, None] * mask).sum() / mask.sum()


def standardised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    gain = (x[:, 0] - x[:, 0].mean()) / x[:, 0].std()
    return (each_of(model, x, y) * gain).mean()


OF_OTHERS = {
    "contrast": (contrast, "depends on others"),
    "a root": (lambda m, x, y: each_of(m, x, y).mean().sqrt(), "depends on others"),
    "the hardest": (lambda m, x, y: each_of(m, x, y).topk(len(x) // 2).values.mean(), "over 16"),
    "a mask": (masked, "something else than samples"),
    "standardised": (standardised, "depends on others"),
}


@pytest.mark.parametrize("case", OF_OTHERS)
def test_a_loss_that_sees_other_samples_is_refused_before_an_update(case: str) -> None:
    loss_of, said = OF_OTHERS[case]
    model, _, job = started()
    batch = next(iter(job.batches(looping.loader())))
    for x, y in job.parts(batch):
        loss = loss_of(model, x, y)
        with pytest.raises(TargetError, match=said) as refused:
            job.backward(loss)
        assert refused.value.hint
    job.abandon()
    model, _, job = started()
    for x, y in job.parts(next(iter(job.batches(looping.loader())))):
        job.backward(loss_of(model, x, y), per_virtual_node=True)
    job.abandon()


def test_a_mask_that_hides_something_later_is_refused_there_unless_it_is_the_weight() -> None:
    for weighted in (False, True):
        model, _, job = started()
        for number, batch in enumerate(job.batches(looping.loader())):
            for x, y in job.parts(batch):
                mask = torch.ones(len(x), 2).to(x) if number == 0 else ragged(x)
                loss = masked(model, x, y, mask)
                if weighted:
                    job.backward(loss, weight=mask.sum())
                elif number == 0:
                    job.backward(loss)
                else:
                    with pytest.raises(TargetError, match="mean over 0.5 of what a part holds"):
                        job.backward(loss)
            model.zero_grad()
            if number == 1:
                break
        job.abandon()


MEANS = {
    "augmented": lambda m, x, y: each_of(m, x + torch.randn_like(x), y).mean(),
    "distilled": lambda m, x, y: F.kl_div(
        F.log_softmax(m(x), 1), m(x.flip(1)).softmax(1).detach(), reduction="batchmean"
    ),
    "weighted samples": lambda m, x, y: (each_of(m, x, y) * x[:, 0].abs()).mean(),
    "a penalty": lambda m, x, y: each_of(m, x, y).mean() + sum(p.norm() for p in m.parameters()),
    "a constant of as many entries": lambda m, x, y: (
        each_of(m, x, y).mean() * torch.arange(len(x)).to(x).std()
    ),
}


@pytest.mark.parametrize("case", MEANS)
def test_other_means_over_samples_are_taken(case: str) -> None:
    model, _, job = started()
    for x, y in job.batches(looping.loader()):
        if len(x) > 1:
            job.backward(MEANS[case](model, x, y))
        else:
            job.backward(each_of(model, x, y).mean())
        model.zero_grad()
    job.finish()
