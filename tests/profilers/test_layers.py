"""Layer profiles: the graph the runtime cuts by, times that sum to the whole, bytes by hand."""

from functools import partial
from itertools import accumulate
from operator import add
from typing import Any

import pytest
import torch
from torch import nn

from hetflow.planning.parallel_problem import parallel_problem
from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.profilers import zoo
from hetflow.profilers.bench import Bench
from hetflow.profilers.layer_memory import footprint
from hetflow.profilers.layer_passes import measuring_seconds, weight_row
from hetflow.profilers.layers import as_in_the_loop, graph_of, measure_layers
from hetflow.profilers.targets import Workload, as_workload
from hetflow.schema.cluster import Cluster
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.problem import Problem
from hetflow.schema.profile import BatchPoint, Profile
from hetflow.tests.runtime.tensor_cases import drop_weights


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
    assert [node.weight_bytes for node in graph.nodes] == [(64 + 8) * 4] * 2 + [8 * 4]
    assert graph.nodes[0].activation_bytes == 4 * 8 * 4


def test_layer_times_sum_to_the_whole_and_stretch_with_the_speed() -> None:
    measured = measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Skip())), 4, 3)
    facts, graph, slow = measured["provenance"], graph_of(measured), graph_of(measured, 0.5)
    assert sum(n.forward_seconds for n in graph.nodes) == pytest.approx(
        facts["whole_forward_seconds"]
    )
    assert slow.nodes[0].forward_seconds == pytest.approx(2 * graph.nodes[0].forward_seconds)
    assert facts["isolated_over_whole_forward"] > 0


def test_layers_sum_to_a_pass_in_the_loop_and_the_ratio_is_told() -> None:
    measured = measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Skip())), 4, 3)
    before = graph_of(measured)
    found = as_in_the_loop(measured, 0.125)
    graph, how = graph_of(found), found["provenance"]
    assert sum(n.forward_seconds + n.backward_seconds for n in graph.nodes) == pytest.approx(0.125)
    factor = how["loop_over_whole"]
    for node, alone in zip(graph.nodes, before.nodes, strict=True):
        assert node.forward_seconds == pytest.approx(factor * alone.forward_seconds)
        assert node.backward_seconds == pytest.approx(factor * alone.backward_seconds)
    whole = how["whole_forward_seconds"] + how["whole_backward_seconds"]
    assert factor == pytest.approx(0.125 / whole)


def test_a_module_with_control_flow_stays_whole() -> None:
    graph = graph_of(measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Closed())), 4, 2))
    assert [node.id for node in graph.nodes] == ["0", "1"]


def test_stashes_are_counted_once_and_by_whom_the_output_was_made() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 8))
    graph = graph_of(measure_layers(bench_of(model), 4, 2))
    # The first output is overwritten and then kept by the ReLU; Flatten only views it. The loss
    # keeps the last layer's output, to square it, and is itself four bytes.
    assert [node.stashed_bytes for node in graph.nodes] == [4 * 8 * 4, 0, 0, 4 * 8 * 4 + 4]
    assert [node.activation_bytes for node in graph.nodes] == [4 * 8 * 4] * 4
    # A stage that ends with the first layer need not keep its output: only the ReLU saves it.
    assert [node.saved_later for node in graph.nodes] == [{"1": 4 * 8 * 4}, None, None, None]


def test_batch_norm_has_buffers_and_statistics_of_each_microbatch() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    graph = graph_of(measure_layers(bench_of(model), 4, 2))
    assert [node.buffer_bytes for node in graph.nodes] == [0, 2 * 8 * 4 + 8]
    assert [node.statistics_bytes for node in graph.nodes] == [0, 2 * 8 * 4 + 8]
    assert [node.padding_bytes for node in graph.nodes] == [0, 0]  # a host's memory
    held: dict[int, str] = {}
    assert weight_row("0", model[0].parameters(), held, 512)["padding_bytes"] == 1024 - 4 * 72


def test_stashes_sum_to_what_the_allocator_holds_after_the_forward_pass() -> None:
    inner = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 8))
    facts = measure_layers(bench_of(nn.Sequential(inner, nn.Sigmoid())), 512, 2)["provenance"]
    # The loss adds its own: the square keeps the last output, which Sigmoid keeps already.
    assert facts["stashed_bytes"] == pytest.approx(facts["whole_kept_bytes"], rel=0.01)


def test_workspace_is_what_a_pass_needs_for_a_moment() -> None:
    class Wasteful(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.detach().repeat(100, 1).sum() * 0 + 1) * x

    graph = graph_of(measure_layers(bench_of(nn.Sequential(nn.Linear(8, 8), Wasteful())), 64, 2))
    waste = 100 * 64 * 8 * 4
    assert graph.nodes[0].workspace_bytes is not None
    assert graph.nodes[0].workspace_bytes + graph.nodes[-1].workspace_bytes >= waste


def test_a_shared_weight_counts_once_and_is_marked() -> None:
    bench = bench_of(nn.Sequential(nn.Linear(8, 8), Skip()))
    graph = graph_of(measure_layers(bench, 4, 2))
    assert sum(node.weight_bytes for node in graph.nodes) == bench.weight_bytes
    assert graph.nodes[2].shared_with == ("1.first",)
    assert graph.nodes[2].shared_weight_bytes == 64 * 4


def test_the_clock_and_autograds_start_are_no_layers_time() -> None:
    """Thirty layers that do nothing must not be thirty times the cost of asking."""
    bench = bench_of(nn.Sequential(nn.Linear(8, 8), *[nn.Identity() for _ in range(30)]))
    forward, backward = measuring_seconds(bench)
    assert forward > 0
    assert backward > 0
    facts = measure_layers(bench, 4, 7)["provenance"]
    whole = facts["whole_backward_seconds"] * facts["isolated_over_whole_backward"]
    assert whole < 30 * backward


@pytest.mark.parametrize(("name", "size"), [("mlp", 64), ("gpt-small", 4)])
def test_what_the_planner_counts_bounds_what_a_pass_allocates(name: str, size: int) -> None:
    bench = Bench(as_workload(zoo.factory_of(name)(), name), "cpu", "sgd")
    profile = Profile(
        model=name, device_type="cpu", device_memory_bytes=10**9, weight_bytes=bench.weight_bytes,
        update_seconds=0.0, layers=graph_of(measure_layers(bench, size, 1)),
        batch_curve=(BatchPoint(batch_size=size, step_seconds=1.0, peak_memory_bytes=1),),
    )  # fmt: skip
    problem = pipeline_problem(
        Problem([profile], Cluster.parse("1xcpu"), size, optimizer=named_optimizer("sgd"))
    )
    (pool,) = problem.pools
    behind = accumulate(layer.kept_bytes for layer in problem.layers)
    counted = max(map(add, behind, pool.layer_workspace_bytes)) + pool.workspace_bytes
    batch = bench.make_batch(size)
    bench.run_step(batch)
    bench.optimizer.zero_grad(set_to_none=False)
    peak = footprint(lambda: bench.run_pass(batch), "cpu")
    assert peak is not None
    # What the loss needs for a while is no layer's workspace.
    assert 0.95 * peak.peak_bytes < counted < 1.1 * peak.peak_bytes


@pytest.mark.slow
def test_attention_cores_are_timed_and_measured() -> None:
    """Four blocks; the weights of attention with dropout are 4 x 4 x 32 x 32 numbers a block."""
    workload = as_workload(zoo.factory_of("gpt-small")(), "gpt-small")
    bench = Bench(workload, "cpu", "sgd")
    for block in workload.model.blocks:
        block.attention.forward = partial(drop_weights, block.attention)
    measured = measure_layers(bench, 4, 1)
    graph, slow = graph_of(measured), graph_of(as_in_the_loop(measured, 1.0), 0.5)
    weights = 4 * 4 * 32 * 32 * 4
    found = [node for node in graph.nodes if node.core is not None and node.core.made_bytes]
    assert len(found) == 4
    for node in found:
        assert node.core is not None
        assert node.core.made_bytes > 2 * weights
        assert 0 < node.core.forward_seconds
    before = sum(node.stashed_bytes or 0 for node in graph.nodes)
    after = sum(
        (node.stashed_bytes or 0) if node.core is None else node.core.stashed_bytes
        for node in graph.nodes
    )
    assert before - after > 4 * 2 * weights
    stretched = [node.core.forward_seconds for node in slow.nodes if node.core is not None]
    factor = 2 * measured_factor(measured, 1.0)
    assert stretched == pytest.approx(
        [factor * node.core.forward_seconds for node in graph.nodes if node.core is not None]
    )
    profile = Profile(
        model="m", device_type="cpu", device_memory_bytes=10**9, weight_bytes=bench.weight_bytes,
        update_seconds=0.0, layers=graph,
        batch_curve=(BatchPoint(batch_size=4, step_seconds=1.0, peak_memory_bytes=1),),
    )  # fmt: skip
    problem = parallel_problem(
        Problem([profile], Cluster.parse("1xcpu"), 8, optimizer=named_optimizer("sgd"))
    )
    assert problem.recompute == ("none", "selective", "full")
    assert sum(problem.sizes[0].selective_bytes) == after / 4
    assert max(problem.sizes[0].core_bytes) == max(n.core.made_bytes for n in found if n.core) / 4
    assert problem.pools[0].times[0].core_seconds == tuple(
        0.0 if node.core is None else node.core.forward_seconds for node in graph.nodes
    )


def measured_factor(measured: dict[str, Any], pass_seconds: float) -> float:
    """How much longer layers take in a loop whose passes take so long."""
    return float(as_in_the_loop(measured, pass_seconds)["provenance"]["loop_over_whole"])


def test_what_the_loss_keeps_counts_for_the_last_layer() -> None:
    """Cross-entropy keeps the logarithms of all probabilities, which no layer made."""
    workload = Workload(
        model=nn.Sequential(nn.Linear(8, 1000)),
        make_batch=lambda size: (torch.randn(size, 8), torch.randint(1000, (size,))),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    )
    measured = measure_layers(Bench(workload, "cpu", "sgd"), 4, 1)
    (row,) = measured["nodes"]
    kept = 4 * 1000 * 4
    assert kept <= row["stashed_bytes"] < kept + 1000
    assert measured["provenance"]["loss_stashed_bytes"] == row["stashed_bytes"]


def test_an_lstm_is_cut_between_its_layers() -> None:
    bench = Bench(as_workload(zoo.factory_of("lstm")(), "zoo:lstm"), "cpu", "sgd")
    graph = graph_of(measure_layers(bench, 2, 1))
    assert graph.trace is not None
    assert graph.trace.obstacle is None
    names = ["tokens", "stack.0.lstm", "stack.1.lstm", "stack.2.lstm", "head"]
    assert [node.id for node in graph.nodes] == names
    assert graph.edges == tuple(zip(names, names[1:], strict=False))
    assert sum(node.weight_bytes for node in graph.nodes) == 4 * 659_456
