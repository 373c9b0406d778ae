"""What a script does beside the model comes out under a pipeline as on one device."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetflow.schema import files
from hetflow.schema.plan import Plan

from . import pipeline_scripts as scripts
from . import test_pipeline as plans
from .gloo_workers import run_workers

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HERE = Path(__file__).parent
# number: (case, schedule, stages, microbatches)
AS_ONE = {
    "inf": ("clip:inf", "1f1b", plans.CHAIN2, 6),
    "one": ("clip:1", "gpipe", plans.CHAIN2, 6),
    "turns": ("turns:", "1f1b", plans.CHAIN2, 6),
    "turns-frozen": ("turns:frozen", "1f1b", plans.CHAIN2, 6),
    "turns-adds": ("turns:adds", "gpipe", plans.CHAIN2, 6),
    "value": ("clip:value", "1f1b", plans.CHAIN2, 6),
    "scaled": ("scaled:", "1f1b", plans.CHAIN2, 6),
    "scaled-zb": ("scaled:", "zb-h1", plans.CHAIN2, 6),
    "decay-last": ("decayed:last", "1f1b", plans.CHAIN2, 6),
}
OTHERS = {
    "slow-stash": ("slower:momentum", "pipedream", plans.CHAIN2, 6),
    "slow-2bw": ("slower:adam", "2bw", plans.CHAIN2, 6),
    "left": ("left:left", "pipedream", plans.CHAIN2, 6),
    "left-short": ("left:short", "pipedream", plans.CHAIN2, 6),
    "left-2bw": ("left:left", "2bw", plans.CHAIN2, 6),
    "left-2bw-short": ("left:short", "2bw", plans.CHAIN2, 6),
    "three": ("clip:3", "1f1b", plans.CHAIN2, 6),
    "stash-scaled": ("scaled:", "pipedream", plans.CHAIN2, 6),
    "half-scaled": ("scaled:first", "1f1b", plans.CHAIN2, 6),
    "rest": ("one_epoch:27", "interleaved", plans.CHAIN4, 6),
    "lbfgs": ("one_epoch:24,lbfgs", "1f1b", plans.CHAIN2, 6),
    "hooked": ("hooked:", "1f1b", plans.CHAIN2, 6),
    "alone": ("alone:", "1f1b", plans.CHAIN2, 6),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """All cases on two workers, one after another."""
    folder = tmp_path_factory.mktemp("scripts")
    asked = []
    for number, (case, schedule, stages, microbatches) in {**AS_ONE, **OTHERS}.items():
        plan = plans.make_plan(schedule, stages, (1, 1), microbatches)
        files.write(folder / f"{number}.json", plan)
        asked.append(f"{number}={case}")
    run_workers(HERE / "pipeline_scripts.py", 2, folder, *asked, seconds=120)
    return [torch.load(folder / f"rank{r}.pt") for r in range(2)]


@pytest.mark.parametrize("number", AS_ONE)
def test_it_comes_out_as_on_one_device(
    number: str,
    two: list[dict],
    tmp_path: Path,
    plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, _, _, microbatches = AS_ONE[number]
    files.write(tmp_path / "plan.json", plan_of([(microbatches, 24 // microbatches)]))
    monkeypatch.setenv("HETFLOW_PLAN", str(tmp_path / "plan.json"))
    expected = scripts.train(case)
    for answer in two:
        assert "error" not in answer[number], answer[number]
        assert answer[number]["noted"] == pytest.approx(expected["noted"], rel=1e-10)
        torch.testing.assert_close(
            answer[number]["state"], expected["state"], rtol=1e-10, atol=1e-12
        )


def test_an_overflow_in_one_stage_skips_the_step_in_all(two: list[dict]) -> None:
    for answer in two:
        scales = answer["scaled"]["noted"][::2]
        assert scales == [1024.0, 512.0, 512.0, 1024.0, 1024.0, 2048.0]


class Halving(torch.optim.SGD):
    """What a learning rate halved with each batch is, counted in updates."""

    def __init__(self, parameters, per_batch, lr=0.1, **options):
        super().__init__(parameters, lr=lr, **options)
        self.first, self.per_batch, self.count = lr, per_batch, 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = self.first * 0.5 ** (self.count // self.per_batch)
        self.count += 1
        super().step(closure)


class HalvingAdam(torch.optim.Adam):
    """The same, for one update a batch."""

    def step(self, closure=None):
        self.count = getattr(self, "count", -1) + 1
        for group in self.param_groups:
            group["lr"] = 0.02 * 0.5**self.count
        super().step(closure)


@pytest.mark.parametrize(("number", "version"), [("slow-stash", "stash"), ("slow-2bw", "2bw")])
def test_an_update_takes_the_learning_rate_of_its_own_batch(
    number: str, version: str, two: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        plans.cases.OPTIMIZERS,
        "halving",
        (lambda p: Halving(p, 6, momentum=0.9, weight_decay=0.01))
        if version == "stash"
        else (lambda p: HalvingAdam(p, lr=0.02)),
    )
    expected = plans.reference("chain:halving:", plans.CHAIN2, (1, 1), 6, version)
    for answer in two:
        torch.testing.assert_close(answer[number]["state"], expected, rtol=0, atol=0)


@pytest.mark.parametrize("number", ["left", "left-2bw"])
def test_an_epoch_that_is_left_is_drained(number: str, two: list[dict]) -> None:
    for answer in two:
        expected = answer[f"{number}-short"]["state"]
        torch.testing.assert_close(answer[number]["state"], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        ("three", "the 3-norm of a gradient that another worker"),
        ("stash-scaled", "a GradScaler needs a schedule that flushes"),
        ("half-scaled", "1 of 2 workers gave job.backward a GradScaler"),
        ("rest", "the last batch of an epoch has 3 samples for 6 microbatches"),
        ("hooked", "6.weight has the hook"),
        ("lbfgs", "LBFGS needs all gradients at once"),
    ],
)
def test_what_would_come_out_otherwise_is_refused(number: str, said: str, two: list[dict]) -> None:
    for answer in two:
        assert said in answer[number]["error"]
        assert "\n" not in answer[number]["error"]


def test_a_norm_that_one_worker_asks_for_is_not_waited_for(two: list[dict]) -> None:
    assert two[0]["alone"]["error"].startswith(
        "worker 0 asks for the inf-norm of all gradients for the first time, and 0.5 s later "
        "worker 1 does not"
    )
