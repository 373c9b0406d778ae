"""Layer profiles: the graph the runtime cuts by, times that sum to the whole, bytes by hand."""

import pytest
import torch
from torch import nn

from hetflow.profilers.bench import Bench
from hetflow.profilers.layers import graph_of, measure_layers
from hetflow.profilers.targets import Workload
from hetflow.schema.errors import TargetError


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.first(x))
        return self.second(a) + a


class Closed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if bool(x.sum() > 0) else x


def bench_of(model: nn.Module) -> Bench:
    workload = Workload(
        model=model,
        make_batch=lambda size: torch.randn(size, 8),
        loss=lambda model, x: model(x).square().mean(),
    )
    return Bench(workload, "cpu", "sgd")


def test_layers_are_a_graph_with_skips_and_shared_weights() -> None:
    bench = bench_of(nn.Sequential(nn.Linear(8, 8), Skip()))
    measured = measure_layers(bench, 4, 3)
    graph = graph_of(measured)
    assert [node.id for node in graph.nodes] == ["0", "1.first", "1.second"]
    assert [node.op for node in graph.nodes] == ["Linear", "Linear", "Linear"]
    assert graph.edges == (("0", "1.first"), ("1.first", "1.second"))
    assert [node.weight_bytes for node in graph.nodes] == [(64 + 8) * 4] * 3
    assert graph.nodes[0].activation_bytes == 4 * 8 * 4


def test_layer_times_sum_to_the_whole_and_stretch_with_the_speed() -> None:
    measured = measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Skip())), 4, 3)
    facts, graph, slow = measured["provenance"], graph_of(measured), graph_of(measured, 0.5)
    assert sum(n.forward_seconds for n in graph.nodes) == pytest.approx(
        facts["whole_forward_seconds"]
    )
    assert slow.nodes[0].forward_seconds == pytest.approx(2 * graph.nodes[0].forward_seconds)
    assert facts["isolated_over_whole_forward"] > 0


def test_a_module_with_control_flow_stays_whole() -> None:
    graph = graph_of(measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Closed())), 4, 2))
    assert [node.id for node in graph.nodes] == ["0", "1"]


def test_a_model_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(TargetError, match="Closed cannot be traced"):
        measure_layers(bench_of(Closed()), 4, 2)
