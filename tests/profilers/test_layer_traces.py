"""Ways to find layers: torch.fx, torch.export, hooks; each keeps branches and shared weights."""

from typing import Any

import pytest
import torch
from torch import nn

from hetflow.profilers.bench import Bench
from hetflow.profilers.layers import find_layers, graph_of, measure_layers
from hetflow.profilers.targets import Workload
from hetflow.runtime.pipeline.cut import cut
from hetflow.runtime.pipeline.trace import layers_of
from hetflow.schema.errors import TargetError
from hetflow.schema.profile import LayerGraph


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        update = self.down(torch.relu(self.up(hidden)))
        return hidden + (update if mask is None else update * mask)


class Transformer(nn.Module):
    """Calls as in transformers: options and missing arguments decide, the output is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        scale: float = 1.0,
        **extra: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        if input_ids is None or input_ids.shape[1] > 12:
            raise ValueError("no input, or too long")
        hidden = self.tokens(input_ids)
        if "bias" in extra:
            hidden = hidden + extra["bias"]
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        hidden = self.norm(hidden)
        return {"logits": nn.functional.linear(hidden, self.tokens.weight) * scale}


class Steered(nn.Module):
    """Tensor values decide which way a sample goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.deep = nn.Linear(8, 8)
        self.shallow = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        branch = self.deep(hidden) if float(hidden.detach().sum()) < 1e9 else self.shallow(hidden)
        return self.last(branch + hidden) * self.gain


class Fixed(nn.Module):
    """Its code takes another way for each size of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * sum(range(x.shape[0]))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x
        return self.norm(self.inner(x))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x
        self.calls.add_(1)
        return self.inner(x)


def bench_of(model: nn.Module) -> Bench:
    def make_batch(size: int) -> Any:
        if isinstance(model, Transformer):
            return {"input_ids": torch.randint(20, (size, 6)), "bias": torch.zeros(size, 1, 8)}
        return torch.randn(size, 8)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        answer = model(**batch, scale=2.0) if isinstance(batch, dict) else model(batch)
        return (answer["logits"] if isinstance(batch, dict) else answer).square().mean()

    return Bench(Workload(model=model, make_batch=make_batch, loss=loss), "cpu", "sgd")


def profiled(model: nn.Module, size: int = 4) -> LayerGraph:
    return graph_of(measure_layers(bench_of(model), size, 2))


def test_options_and_missing_arguments_go_through_export() -> None:
    graph = profiled(Transformer())
    assert graph.trace is not None
    assert graph.trace.way == "export"
    assert "torch.fx" in (graph.trace.reason or "")
    assert [node.id for node in graph.nodes] == [
        "tokens", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "norm",
    ]  # fmt: skip
    assert ("tokens", "blocks.0.down") in graph.edges  # the skip over blocks.0.up
    assert graph.nodes[-1].shared_with == ("tokens",)
    assert sum(node.weight_bytes for node in graph.nodes) == bench_of(Transformer()).weight_bytes


def test_an_exported_model_is_cut_alike_and_computes_the_same_at_another_batch_size() -> None:
    model = Transformer()
    trace = find_layers(bench_of(model), 1).trace
    layered = layers_of(model, trace)
    names = [layer.id for layer in layered.layers]
    parts = cut(layered, [names[:2], names[2:]])
    ids, bias = torch.randint(20, (5, 6)), torch.randn(5, 1, 8)
    given = {"input_ids": ids, "bias": bias}
    crossing = parts[0](*(given[name] for name in parts[0].arguments))
    answer = parts[1](*(given[name] for name in parts[1].arguments), *crossing)
    whole = model(**given, scale=2.0)["logits"]
    assert torch.equal(answer["logits"], whole)
    weights = dict(parts[1].module.named_parameters())
    assert weights["tokens.weight"] is model.tokens.weight


def test_control_flow_on_values_is_seen_by_hooks() -> None:
    graph = profiled(Steered())
    assert graph.trace is not None
    assert graph.trace.way == "hooks"
    assert "torch.export" in (graph.trace.reason or "")
    # The way not taken is no layer; its weights and the bare parameter are the first one's.
    assert [node.id for node in graph.nodes] == ["first", "deep", "last"]
    assert graph.edges == (("first", "deep"), ("first", "last"), ("deep", "last"))
    assert graph.nodes[2].shared_with == ("first",)
    assert sum(node.weight_bytes for node in graph.nodes) == bench_of(Steered()).weight_bytes
    # What functions between the layers make and a layer keeps is the layer's before it.
    assert [node.stashed_bytes for node in graph.nodes[:2]] == [4 * 8 * 4] * 2
    assert all(node.forward_seconds > 0 for node in graph.nodes)


def test_a_tracer_that_fails_by_itself_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise AttributeError("no attribute of_the_tracer")

    monkeypatch.setattr("hetflow.runtime.pipeline.trace.exported_layers", fails)
    graph = profiled(Transformer())
    assert graph.trace is not None
    assert graph.trace.way == "hooks"
    assert "torch.export: AttributeError: no attribute of_the_tracer" in (graph.trace.reason or "")
    assert (graph.trace.obstacle or "").startswith("found by hooks: can be profiled and planned")


def test_a_trace_that_fixes_the_batch_is_not_relied_on() -> None:
    graph = profiled(Fixed())
    assert graph.trace is not None
    assert graph.trace.way == "hooks"
    assert "does not hold for a batch of 5" in (graph.trace.reason or "")


def test_a_module_within_that_decides_by_values_stays_one_layer_of_fx() -> None:
    graph = profiled(nn.Sequential(nn.Linear(8, 8), Steered()))
    assert graph.trace is not None
    assert graph.trace.way == "fx"
    assert [node.id for node in graph.nodes] == ["0", "1"]


def test_batch_norm_of_an_exported_model_is_its_own_module() -> None:
    model = Normed()
    trace = find_layers(bench_of(model), 4).trace
    assert trace.way == "export"
    layered = layers_of(model, trace)
    part = cut(layered, [[layer.id for layer in layered.layers]])[0]
    assert any(module is model.norm for module in part.module.modules())
    counted = int(model.norm.num_batches_tracked)
    x = torch.randn(5, 8)
    made, mean = part(x), model.norm.running_mean.clone()
    assert int(model.norm.num_batches_tracked) == counted + 1
    assert torch.equal(made, model(x))
    assert not torch.equal(model.norm.running_mean, mean)
    assert [node.id for node in profiled(model).nodes] == ["inner", "norm"]


def test_other_buffers_that_a_forward_updates_keep_export_from_being_used() -> None:
    graph = profiled(Counting())
    assert graph.trace is not None
    assert graph.trace.way == "hooks"
    assert "'calls'" in (graph.trace.reason or "")


def test_a_loss_without_the_model_is_refused() -> None:
    workload = Workload(
        model=nn.Linear(8, 8),
        make_batch=lambda size: torch.randn(size, 8),
        loss=lambda model, x: next(model.parameters()).sum(),
    )
    with pytest.raises(TargetError, match="does not call the model"):
        find_layers(Bench(workload, "cpu", "sgd"), 2)
