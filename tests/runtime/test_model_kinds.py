"""Models as people write them are taken apart, and trained stage by stage as in one piece."""

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetflow
from hetflow.profilers.bench import Bench
from hetflow.profilers.layers import call_of, graph_of, measure_layers
from hetflow.profilers.targets import Workload
from hetflow.runtime.pipeline.cut import LayeredModel, check_crossing, cut, like
from hetflow.runtime.pipeline.evaluation import StageEvaluation
from hetflow.runtime.pipeline.stage import StageRunner
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.schema import files
from hetflow.schema.layers import LayerTrace
from hetflow.schema.profile import BatchPoint, Profile

from .gloo_workers import run_workers
from .model_kinds import GLOBAL_BATCH_SIZE, KINDS, build, train

pytestmark = pytest.mark.processes

KINDS_FILE = Path(__file__).with_name("model_kinds.py")

DROPOUT = 0.3
# Each export of a model takes seconds. All kinds run stage by stage, which is where they differ; of
# alike ones one does in evaluation mode, and on workers, which get parts whatever the model was.
EVALUATED = {"hf_llama", "nano_gpt", "plain_vit"}
TRAINED = ("nano_gpt", "hf_llama", "plain_vit", "resnet", "unet", "frozen_backbone")
EXPORTED = set(KINDS) - {"plain_vit", "resnet", "unet"}


def bench_of(model: nn.Module, make_batch: Any, loss: Any) -> Bench:
    return Bench(Workload(model=model, make_batch=make_batch, loss=loss), "cpu", "sgd")


class Piecewise:
    """A model run stage by stage: what crosses is cut from autograd, as between workers."""

    def __init__(self, layered: LayeredModel, num_stages: int, recompute: bool) -> None:
        names = [layer.id for layer in layered.layers]
        ends = [round(len(names) * s / num_stages) for s in range(num_stages + 1)]
        cuts = [names[a:b] for a, b in zip(ends, ends[1:], strict=False)]
        self.check_call, self.crossed = layered.check_call, []
        device = torch.device("cpu")
        self.stages = [
            StageRunner(part, recompute=recompute, device=device) for part in cut(layered, cuts)
        ]

    def answer(self, arguments: dict[str, Any]) -> Any:
        self.check_call(arguments)
        received: Any = ((), ())
        for number, stage in enumerate(self.stages[:-1]):
            made = stage.forward(0, arguments, received, None)
            check_crossing(stage.part, made, number)
            stage.keep(0, made)
            wants = tuple(isinstance(v, Tensor) and v.requires_grad for v in made)
            received = (tuple(detached(value) for value in made), wants)
        return self.stages[-1].forward(0, arguments, received, None)

    def backward(self, loss: Tensor) -> None:
        self.stages[-1].keep(0, (loss,))
        gradients: Any = None
        for stage in reversed(self.stages):
            gradients = stage.backward(0, gradients)


def detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def outcome(model: nn.Module, loss: Tensor) -> dict[str, Any]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    model.zero_grad()
    return {"loss": loss.detach(), "gradients": gradients, "buffers": buffers}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_stage_by_stage_is_as_in_one_piece(kind: str) -> None:
    layers = profile_of(kind).layers
    assert layers is not None
    assert (trace := layers.trace) is not None
    assert trace.way == ("export" if kind in EXPORTED else "fx"), trace.reason
    model, make_batch, loss_of = build(kind, DROPOUT)
    layered = layers_of(model, trace)
    bench = bench_of(model, make_batch, loss_of)
    # Batches of one, and of other sizes than the traced one.
    for num_stages, samples, recompute in ((2, 3, False), (3, 5, True), (4, 1, False)):
        batch = make_batch(samples, torch.Generator().manual_seed(samples))
        arguments = call_of(bench, batch).arguments
        model.load_state_dict(build(kind)[0].state_dict())  # that call has moved statistics
        torch.manual_seed(3)
        loss = loss_of(model, batch)
        loss.backward()
        expected = outcome(model, loss)
        model.load_state_dict(build(kind)[0].state_dict())
        pieces = Piecewise(layered, num_stages, recompute)
        torch.manual_seed(3)
        loss = loss_of(lambda *_, **__: pieces.answer(arguments), batch)  # noqa: B023
        pieces.backward(loss)
        torch.testing.assert_close(outcome(model, loss), expected, rtol=1e-10, atol=1e-12)
    if kind in EVALUATED:
        evaluate_stage_by_stage(model, layered, trace, loss_of, batch)


def evaluate_stage_by_stage(
    model: nn.Module, layered: LayeredModel, trace: LayerTrace, loss_of: Any, batch: Any
) -> None:
    """In evaluation mode the stages are those of training, without dropout."""
    names = [layer.id for layer in layered.layers]
    ends = [round(len(names) * s / 3) for s in range(4)]
    stages = [names[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    model.eval()
    again = layers_of(model, trace)
    found = like(again, stages)
    planned = [{name for name in layers if name in set(names)} for layers in found]
    assert all(part <= set(stage) for part, stage in zip(planned, stages, strict=True))
    assert sum(map(len, planned)) > 0.9 * len(names)
    place = SimpleNamespace(rank=0, device=torch.device("cpu"))
    signature = inspect.signature(model.forward)
    parts = cut(again, found)
    pieces = StageEvaluation(model, parts, [((0,),)] * 3, place, None, signature, again.check_call)
    with torch.no_grad():
        expected, answer = loss_of(model, batch), loss_of(pieces.call, batch)
    torch.testing.assert_close(answer, expected, rtol=1e-10, atol=1e-12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of each kind by its measured layers, and what two workers trained under it."""
    folder = tmp_path_factory.mktemp("kinds")
    for kind in TRAINED:
        plan = hetflow.solve(
            [profile_of(kind)], "2xcpu", batch_size=GLOBAL_BATCH_SIZE, strategy="pipeline",
            schedule="1f1b", num_stages=2, link_bytes_per_second=1e9, optimizer="sgd-momentum",
        )  # fmt: skip
        files.write(folder / f"{kind}.json", plan)
    train_on_two(folder)
    return folder


@cache
def profile_of(kind: str) -> Profile:
    """A profile whose layers are measured, as both tests of a kind need them."""
    measured = measure_layers(bench_of(*build(kind)), 2, 1)
    return Profile(
        model=kind,
        device_type="cpu",
        device_memory_bytes=1 << 30,
        weight_bytes=sum(node["weight_bytes"] for node in measured["nodes"]),
        update_seconds=0.001,
        batch_curve=(BatchPoint(batch_size=2, step_seconds=0.01, peak_memory_bytes=1),),
        layers=graph_of(measured),
    )


def train_on_two(folder: Path) -> None:
    """All kinds, one after another, in the same two processes."""
    run_workers(KINDS_FILE, 2, folder, *TRAINED, seconds=240, with_transformers=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_two_workers_train_as_one_process_does(
    kind: str, folder: Path, plan_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = files.read_any(folder / f"{kind}.json")
    assert plan.kind == "pipeline"
    assert len(plan.stages) == 2
    alone = plan_of([(plan.num_microbatches, plan.microbatch_size)])
    files.write(folder / f"{kind}-alone.json", alone)
    monkeypatch.setenv("HETFLOW_PLAN", str(folder / f"{kind}-alone.json"))
    expected = train(kind)
    for rank in range(2):
        found = torch.load(folder / f"rank{rank}.pt")[kind]
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        torch.testing.assert_close(found["state"], expected["state"], rtol=1e-10, atol=1e-12)
