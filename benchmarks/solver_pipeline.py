"""The partition solver against a plain Python dynamic program of the thesis's recurrence.

Both answer the same inputs (chains drawn from a seed, two levels, at most all workers, the
text's prices) in one run and must agree on the objective. CPU seconds of this process; the
solver's is the median of five. Published profiles are timed first. The whole step is set beside the
bottleneck on unlike devices, placements in any order beside ordered ones on servers, and a deep
graph of many cuts is solved under several prices.

    python benchmarks/solver_pipeline.py --quick
    python benchmarks/solver_pipeline.py --json OUT
"""

import argparse
import dataclasses
import json
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers.translation_graph import translation

from hetflow.formats.importers.pipedream import read_graph, without_placeholders
from hetflow.planning.pipeline_problem import layers_of_graph
from hetflow.schema.optimizer import OptimizerState
from hetflow.schema.pipeline import DevicePool, PipelineLayer, PipelineProblem, TopologyLevel
from hetflow.solvers.effort import Effort
from hetflow.solvers.pipeline.solve import solve
from hetflow.tests.data import reference

# No memory is bounded here, so the optimizer plays no part.
SGD = OptimizerState(name="sgd", state_bytes_per_weight_byte=0.0)
QUICK = [(20, 8), (50, 8), (100, 4)]
FULL = [(20, 8), (50, 8), (100, 8), (200, 8), (500, 8)]
FAST_ONLY = [(200, 64), (500, 64)]
STEPS: dict[str, tuple[int, dict[str, tuple[int, float]], float, bool]] = {
    "50 layers, 8, no replicas": (50, {"A": (8, 1.0)}, 1e10, False),
    "50 layers, 8, no replicas, slow": (50, {"A": (8, 1.0)}, 5e8, False),
    "50 layers, 4+4": (50, {"A": (4, 1.0), "B": (4, 2.0)}, 1e10, True),
    "100 layers, 4+4+4": (100, {"A": (4, 1.0), "B": (4, 2.0), "C": (4, 3.0)}, 1e10, True),
    "500 layers, 16+16+16": (500, {"A": (16, 1.0), "B": (16, 2.0), "C": (16, 3.0)}, 1e10, True),
}
CLUSTERS = {"4x4": ((4, 12e9), (4, 1.25e9)), "2x8": ((8, 150e9), (2, 3.125e9))}
PLACED = {
    "2x4": ((4, 12e9), (2, 1.25e9)),
    "4x4": ((4, 12e9), (4, 1.25e9)),
    "2x8": ((8, 150e9), (2, 3.125e9)),
}
PRICES = (
    ("flat", "ring", "pipedream"),
    ("flat", "ring", "1f1b"),
    ("nested", "thesis", "pipedream"),
    ("nested", "published", "pipedream"),
)
MODELS = ["vgg16", "resnet18", "resnet50", "squeezenet1_0", "gnmt"]


def chain(num_layers: int, workers: int, seed: int = 0) -> PipelineProblem:
    """A chain whose compute and transfers are of one order of size."""
    draw = random.Random(seed)
    layers = tuple(
        PipelineLayer(
            id=f"l{i}",
            activation_bytes=draw.randint(10**5, 10**8),
            weight_bytes=draw.randint(10**4, 10**7),
        )
        for i in range(num_layers)
    )
    pool = DevicePool(
        device_type="V100",
        levels=(
            TopologyLevel(num_components=workers, bytes_per_second=1e11),
            TopologyLevel(num_components=workers, bytes_per_second=3e9),
        ),
        forward_seconds=tuple(draw.uniform(0.001, 0.01) for _ in layers),
        backward_seconds=tuple(draw.uniform(0.002, 0.02) for _ in layers),
    )
    return PipelineProblem(
        model=f"chain{num_layers}",
        layers=layers,
        pools=(pool,),
        microbatch_size=1,
        num_microbatches=16,
        optimizer=SGD,
        schedule="pipedream",
        solved="nested",
        stage_cost="thesis",
    )


def plain_dynamic_program(problem: PipelineProblem) -> float:
    """A^k(i -> j, m) of thesis 2.4.1 as it stands, with at most m workers."""
    pool = problem.pools[0]
    size = len(problem.layers)
    times = [f + b for f, b in zip(pool.forward_seconds, pool.backward_seconds, strict=True)]
    below = _ranges(times)
    weights = _ranges([float(layer.weight_bytes) for layer in problem.layers])
    for number, level in enumerate(pool.levels):
        is_top = number == len(pool.levels) - 1
        sent = [2 * layer.activation_bytes / level.bytes_per_second for layer in problem.layers]
        best = _level(below, weights, sent, level, 1 if is_top else size)
        below = [[cell[-1] if cell else 0.0 for cell in row] for row in best]
    return below[0][size - 1]


def _ranges(values: list[float]) -> list[list[float]]:
    rows = []
    for start in range(len(values)):
        total, row = 0.0, [0.0] * len(values)
        for end in range(start, len(values)):
            total += values[end]
            row[end] = total
        rows.append(row)
    return rows


def _level(
    below: list[list[float]],
    weights: list[list[float]],
    sent: list[float],
    level: TopologyLevel,
    num_starts: int,
) -> list[list[list[float]]]:
    size, most = len(sent), level.num_components
    single = [
        [
            [
                max(below[i][j], 2 * (m - 1) * weights[i][j] / level.bytes_per_second) / m
                for m in range(1, most + 1)
            ]
            for j in range(size)
        ]
        for i in range(size)
    ]
    table: list[list[list[float]]] = [[[] for _ in range(size)] for _ in range(num_starts)]
    for i in range(num_starts):
        for j in range(i, size):
            cell: list[float] = []
            for m in range(1, most + 1):
                least = single[i][j][m - 1]
                if cell and cell[-1] < least:
                    least = cell[-1]
                for s in range(i, j):
                    if sent[s] >= least:
                        continue
                    before, after = table[i][s], single[s + 1][j]
                    for q in range(1, m):
                        time_ = before[m - q - 1]
                        if after[q - 1] > time_:
                            time_ = after[q - 1]
                        if sent[s] > time_:
                            time_ = sent[s]
                        if time_ < least:
                            least = time_
                cell.append(least)
            table[i][j] = cell
    return table


def cpu_seconds(function: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """Median CPU seconds and the last answer."""
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        answer = function()
        taken.append(time.process_time() - start)
    return statistics.median(taken), answer


def against_plain(cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Rows with both times; the objectives must agree."""
    rows = []
    for num_layers, workers in cases:
        problem = chain(num_layers, workers)
        fast, plan = cpu_seconds(lambda problem=problem: solve(problem), 5)
        slow, objective = cpu_seconds(lambda problem=problem: plain_dynamic_program(problem))
        if abs(plan.proof.objective - objective) > 1e-9 * objective:
            sys.exit(f"{num_layers} layers: {plan.proof.objective} against {objective}")
        rows.append(
            {
                "layers": num_layers,
                "levels": [workers, workers],
                "solver_cpu_seconds": fast,
                "plain_cpu_seconds": slow,
                "ratio": slow / fast,
                "objective": objective,
            }
        )
        _say(f"N={num_layers:4} {workers}x{workers}: {fast * 1e3:8.1f} ms, "
             f"plain {slow:8.2f} s, {slow / fast:7.0f}x")  # fmt: skip
    return rows


def alone() -> list[dict[str, Any]]:
    """Large levels, where the plain program would take hours."""
    rows = []
    for num_layers, workers in FAST_ONLY:
        seconds, _ = cpu_seconds(lambda n=num_layers, w=workers: solve(chain(n, w)), 3)
        rows.append(
            {"layers": num_layers, "levels": [workers, workers], "solver_cpu_seconds": seconds}
        )
        _say(f"N={num_layers:4} {workers}x{workers}: {seconds * 1e3:8.1f} ms")
    return rows


def on_profiles(folder: Path) -> list[dict[str, Any]]:
    """The default solver on the published profiles, with and without 16 GB of memory."""
    rows = []
    for model in MODELS:
        graph = without_placeholders(read_graph((folder / f"{model}.graph.txt").read_text()))
        layers, edges, order = layers_of_graph(graph)
        for name, shape in CLUSTERS.items():
            for solved, cost, schedule in PRICES:
                pool = DevicePool(
                    device_type="V100",
                    levels=tuple(
                        TopologyLevel(num_components=m, bytes_per_second=b) for m, b in shape
                    ),
                    forward_seconds=tuple(node.forward_seconds for node in order),
                    backward_seconds=tuple(node.backward_seconds for node in order),
                )
                problem = PipelineProblem(
                    model=model, layers=layers, edges=edges, pools=(pool,), microbatch_size=1,
                    num_microbatches=16, schedule=schedule, solved=solved, stage_cost=cost,
                    optimizer=SGD,
                    workers="exactly" if cost == "published" else "at_most",
                )  # fmt: skip
                seconds, plan = cpu_seconds(lambda problem=problem: solve(problem), 3)
                rows.append(
                    {"model": model, "cluster": name, "prices": cost, "solved": solved,
                     "schedule": schedule, "gap": plan.proof.gap,
                     "cpu_seconds": seconds, "config": plan.config,
                     "objective": plan.proof.objective}
                )  # fmt: skip
                _say(f"{model:14} {name} {cost:9} {schedule:9} {seconds:6.3f} s  {plan.config}")
    return rows


def on_steps() -> list[dict[str, Any]]:
    """The whole step against the bottleneck: what each costs to solve, and the steps they plan."""
    rows = []
    for name, (layers, pools, rate, replication) in STEPS.items():
        problem = unlike(layers, pools, rate, replication=replication)
        seconds, plan = cpu_seconds(lambda p=problem: solve(p))
        steady = dataclasses.replace(problem, objective="bottleneck")
        before, other = cpu_seconds(lambda p=steady: solve(p))
        ratio = other.predicted.step_seconds / plan.predicted.step_seconds
        rows.append(
            {
                "case": name,
                "cpu_seconds": seconds,
                "step_seconds": plan.predicted.step_seconds,
                "gap": plan.proof.gap,
                "bottleneck_cpu_seconds": before,
                "bottleneck_step_seconds": other.predicted.step_seconds,
                "step_ratio": ratio,
            }
        )
        _say(f"{name:34} {seconds:6.2f} s, gap {plan.proof.gap:6.2%}; bottleneck {before:6.2f} s, "
             f"its step {ratio:.3f} of ours")  # fmt: skip
    return rows


def on_deep_graph() -> list[dict[str, Any]]:
    """A 16-layer translation model: what branching costs, medians of three."""
    rows = []
    cases = (
        ("flat", "ring", "pipedream"),
        ("flat", "ring", "1f1b"),
        ("nested", "thesis", "pipedream"),
    )
    for name, shape in CLUSTERS.items():
        for solved, cost, schedule in cases:
            problem = translation(shape, solved=solved, stage_cost=cost, schedule=schedule)
            seconds, plan = cpu_seconds(lambda p=problem: solve(p), 3)
            proof = plan.proof
            rows.append(
                {"cluster": name, "solved": solved, "schedule": schedule, "cpu_seconds": seconds,
                 "config": plan.config, "objective": proof.objective, "gap": proof.gap,
                 "method": proof.method}
            )  # fmt: skip
            _say(f"translation {name} {solved} {schedule:9} {seconds:6.2f} s, gap "
                 f"{_percent(proof.gap)}  {plan.config}; {proof.method}")  # fmt: skip
    return rows


def on_placements(count: int) -> list[dict[str, Any]]:
    """Drawn chains on servers: placements in any order against ordered ones, and their cost."""
    rows = []
    for name, shape in PLACED.items():
        taken, plain, ratios, gaps = [], [], [], []
        for seed in range(count):
            problem = on_servers(shape, seed)
            seconds, plan = cpu_seconds(lambda p=problem: solve(p))
            before, other = cpu_seconds(lambda p=problem: solve(p, effort=Effort(anywhere_work=0)))
            taken.append(seconds)
            plain.append(before)
            ratios.append(other.proof.objective / plan.proof.objective)
            gaps.append(plan.proof.gap or 0.0)
        better = sum(ratio > 1 + 1e-9 for ratio in ratios)
        rows.append(
            {"servers": name, "instances": count, "better": better, "largest_ratio": max(ratios),
             "proved_optimal": sum(gap <= 1e-9 for gap in gaps), "largest_gap": max(gaps),
             "median_cpu_seconds": statistics.median(taken), "most_cpu_seconds": max(taken),
             "ordered_median_cpu_seconds": statistics.median(plain)}
        )  # fmt: skip
        _say(f"{name}: {better} of {count} better out of order, at most {max(ratios):.3f}x; "
             f"{rows[-1]['proved_optimal']} proved; {statistics.median(taken):.3f} s (at most "
             f"{max(taken):.2f}), ordered alone {statistics.median(plain):.3f} s")  # fmt: skip
    return rows


def on_servers(shape: tuple[tuple[int, float], ...], seed: int) -> PipelineProblem:
    """A drawn chain without flushes on servers whose links are as slow as a layer's pass."""
    draw = random.Random(seed)
    num_layers = draw.randint(6, 12)
    pool = DevicePool(
        device_type="V100",
        levels=tuple(TopologyLevel(num_components=m, bytes_per_second=b) for m, b in shape),
        forward_seconds=tuple(draw.uniform(0.001, 0.01) for _ in range(num_layers)),
        backward_seconds=tuple(draw.uniform(0.002, 0.02) for _ in range(num_layers)),
    )
    layers = tuple(
        PipelineLayer(
            id=f"l{i}",
            activation_bytes=draw.randint(10**4, 10**7),
            weight_bytes=draw.randint(10**5, 10**8),
        )
        for i in range(num_layers)
    )
    return PipelineProblem(
        model="servers",
        layers=layers,
        pools=(pool,),
        microbatch_size=1,
        num_microbatches=16,
        optimizer=SGD,
        schedule="pipedream",
    )


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{fraction:.1%}"


def unlike(
    layers: int, pools: dict[str, tuple[int, float]], rate: float, *, replication: bool
) -> PipelineProblem:
    """Drawn layers on pools of (devices, slowness); 16 microbatches a step, 1F1B."""
    draw = random.Random(0)
    made = tuple(
        PipelineLayer(
            id=f"l{i}",
            activation_bytes=draw.randint(10**5, 10**8),
            weight_bytes=draw.randint(10**4, 10**7),
        )
        for i in range(layers)
    )
    forward = [draw.uniform(0.001, 0.01) for _ in made]
    backward = [draw.uniform(0.002, 0.02) for _ in made]

    def times(of_layers: list[float], slowness: float) -> tuple[float, ...]:
        return tuple(slowness * seconds * draw.uniform(0.8, 1.2) for seconds in of_layers)

    return PipelineProblem(
        model=f"unlike{layers}",
        layers=made,
        pools=tuple(
            DevicePool(
                device_type=name,
                levels=(TopologyLevel(num_components=count, bytes_per_second=rate),),
                forward_seconds=times(forward, slowness),
                backward_seconds=times(backward, slowness),
                update_seconds=0.01,
            )
            for name, (count, slowness) in pools.items()
        ),
        inter_bytes_per_second=rate / 10,
        microbatch_size=1,
        num_microbatches=16,
        optimizer=SGD,
        replication=replication,
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the cases, print ratios, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small cases only")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--profiles", type=Path, help="folder of published graph.txt files")
    arguments = parser.parse_args()
    profiles = arguments.profiles or reference.folder() / "pipedream"
    result: dict[str, Any] = {"profiles": on_profiles(profiles)}
    result["profiles_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _say(f"peak memory {result['profiles_peak_mib']:.0f} MiB")
    result["deep_graph"] = on_deep_graph()
    result["deep_graph_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    _say(f"peak memory {result['deep_graph_peak_mib']:.0f} MiB")
    result["placements"] = on_placements(20 if arguments.quick else 60)
    result["steps"] = on_steps()
    result["alone"] = [] if arguments.quick else alone()
    result["against_plain"] = against_plain(QUICK if arguments.quick else FULL)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
