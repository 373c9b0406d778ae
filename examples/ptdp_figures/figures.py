"""The takeaways of PTD-P (thesis 4.3) and the shapes of its figures, out of the cost model.

    python examples/ptdp_figures/figures.py

A cluster of servers of 8 A100 is described by a few figures of data sheets (below), not measured
and not fitted. So figures have shapes to compare, not values: which degrees win, and where the
order turns. Plans of a figure are counted by the checker; plans that are not asked for are solved.
"""

import argparse
import json
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from hetflow.papers import ptdp as parallel
from hetflow.planning.checks.parallel import counted_memory, counted_step
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.schema.plan import Plan, Prediction, Proof, ReplicaGroup, Stage
from hetflow.solvers.parallel.solve import solve

SEQUENCE, VOCABULARY, SERVER = 2048, 51_200, 8
MEMORY_BYTES = 80 * 10**9
MATRIX_FLOPS = 0.6 * 312e12  # a second, of products that fill all multiprocessors
MULTIPROCESSORS = 108  # each computes one tile of a product at a time
TILE = (256, 128)  # rows and columns; the most efficient one, by NVIDIA's guide to matrix products
MEMORY_BYTES_PER_SECOND = 0.7 * 2.0e12
LAUNCH_SECONDS = 0.2e-3  # of a block's kernels, forward: some 40 that start and end in 5 us each
NVLINK_BYTES_PER_SECOND = 0.65 * 300e9  # within a server
NETWORK_BYTES_PER_SECOND = 0.8 * 25e9  # of each device, between servers
BYTES_PER_WEIGHT_BYTE = 9.0  # weights and gradients in 2 bytes, Adam and a copy in 14
MICROBATCHES_4_8 = (1, 2, 4, 8, 16)
MICROBATCHES, DEGREES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Gpt:
    """A GPT by its size."""

    layers: int
    hidden: int
    heads: int

    @property
    def block_weights(self) -> int:
        """Bytes of a block, 2 a weight."""
        return 2 * 12 * self.hidden**2


def product_seconds(rows: int, inner: int, columns: int) -> float:
    """Seconds of a matrix product; the last wave of tiles may leave multiprocessors idle."""
    tiles = ceil(rows / TILE[0]) * ceil(columns / TILE[1])
    waves = ceil(tiles / MULTIPROCESSORS)
    return 2 * waves * MULTIPROCESSORS * TILE[0] * TILE[1] * inner / MATRIX_FLOPS


def block_seconds(model: Gpt, microbatch: int, degree: int) -> tuple[float, float]:
    """Forward and backward of a block on a tensor-parallel group.

    Products by 4.2.3, what norms and dropouts read and write, the attention's scores, and two
    all-reduces a pass (4.3.2), within a server or between servers.
    """
    tokens, h = microbatch * SEQUENCE, model.hidden
    products = [(h, 3 * h // degree), (h // degree, h), (h, 4 * h // degree), (4 * h // degree, h)]
    multiplied = sum(product_seconds(tokens, inner, columns) for inner, columns in products)
    multiplied += 4 * tokens * SEQUENCE * h / degree / MATRIX_FLOPS
    scores = 2 * 5 * microbatch * model.heads * SEQUENCE**2 / degree
    moved = 2 * (10 + 24 / degree) * tokens * h + scores
    computed = multiplied + moved / MEMORY_BYTES_PER_SECOND
    rate = NVLINK_BYTES_PER_SECOND if degree <= SERVER else NETWORK_BYTES_PER_SECOND
    reduced = 2 * 2 * (degree - 1) / degree * 2 * tokens * h / rate
    return computed + LAUNCH_SECONDS + reduced, 2 * computed + LAUNCH_SECONDS + reduced


def problem_of(
    model: Gpt, num_devices: int, batch: int, adapters_of_a_ring: int = 1
) -> ParallelProblem:
    """A model on servers of 8; the embedding and the logits are left out.

    Args:
        model: The GPT.
        num_devices: Devices of the cluster.
        batch: Global batch.
        adapters_of_a_ring: Network adapters of a server that a ring of replicas uses. A server has
            one for each device: if all its devices hold the same shard, their ring has all eight.
    """
    times = []
    for microbatch in MICROBATCHES:
        for degree in DEGREES:
            forward, backward = block_seconds(model, microbatch, degree)
            update = BYTES_PER_WEIGHT_BYTE * model.block_weights / degree / MEMORY_BYTES_PER_SECOND
            times.append(
                ShardTimes(
                    tensor_parallel_size=degree,
                    microbatch_size=microbatch,
                    forward_seconds=(forward,) * model.layers,
                    backward_seconds=(backward,) * model.layers,
                    update_seconds=(update,) * model.layers,
                )
            )
    network = LinkCurve(
        coefficients=(adapters_of_a_ring * NETWORK_BYTES_PER_SECOND,), latency_seconds=10e-6
    )
    pool = ParallelPool(
        device_type="A100",
        num_devices=num_devices,
        devices_per_server=SERVER,
        memory_bytes=MEMORY_BYTES,
        times=tuple(times),
        links=tuple(
            DegreeLink(
                tensor_parallel_size=degree,
                curve=LinkCurve(
                    coefficients=(NETWORK_BYTES_PER_SECOND * min(degree, SERVER),),
                    latency_seconds=10e-6,
                ),
            )
            if degree > 1
            else DegreeLink(tensor_parallel_size=1, curve=network)
            for degree in DEGREES
        ),
    )
    tokens_bytes = 2 * SEQUENCE * model.hidden
    stashed = [
        (10 + 24 / degree) * SEQUENCE * model.hidden + 5 * model.heads * SEQUENCE**2 / degree
        for degree in DEGREES
    ]
    return ParallelProblem(
        model="gpt",
        global_batch_size=batch,
        layers=tuple(f"block{i}" for i in range(model.layers)),
        output_bytes=(tokens_bytes,) * model.layers,
        pools=(pool,),
        sizes=tuple(
            ShardSizes(
                tensor_parallel_size=degree,
                weight_bytes=(model.block_weights // degree,) * model.layers,
                stashed_bytes=(kept,) * model.layers,
            )
            for degree, kept in zip(DEGREES, stashed, strict=True)
        ),
        bytes_per_weight_byte=BYTES_PER_WEIGHT_BYTE,
        recompute=("none", "full"),
        num_model_chunks=(1, 2, 4),
    )


GPT_3 = Gpt(96, 12288, 96)


@dataclass(frozen=True)
class Shape:
    """A configuration (p, t, d) with its microbatch; ``chunks`` is v, stages a device."""

    pipeline: int
    tensor: int
    data: int
    microbatch: int = 1
    recompute: bool = True
    chunks: int = 1


def plan_of(model: Gpt, batch: int, shape: Shape) -> Plan:
    """The plan of equal stages."""
    group = ReplicaGroup(
        device_type="A100",
        tensor_parallel_size=shape.tensor,
        num_replicas=shape.data,
        samples=batch,
        virtual_nodes=batch // (shape.microbatch * shape.data),
        virtual_node_batch_size=shape.microbatch,
    )
    each = model.layers // (shape.pipeline * shape.chunks)
    stages = tuple(
        Stage(
            layers=tuple(f"block{i}" for i in range(start, start + each)),
            recompute="full" if shape.recompute else "none",
            replicas=(group,),
        )
        for start in range(0, model.layers, each)
    )
    return Plan(
        model="gpt",
        global_batch_size=batch,
        microbatch_size=shape.microbatch,
        num_microbatches=batch // shape.microbatch,
        schedule="1f1b" if shape.chunks == 1 else "interleaved",
        num_model_chunks=shape.chunks,
        stages=stages,
        predicted=Prediction(step_seconds=0.0, samples_per_second=0.0),
        proof=Proof(
            termination="feasible", objective=0.0, lower_bound=None, gap=None, method="", space=""
        ),
    )


def teraflops(
    model: Gpt, num_devices: int, batch: int, shape: Shape, *, is_scattered: bool = True
) -> float:
    """Of a device, by the FLOPs of 4.2 (recomputation included, whether it is done or not).

    Args:
        model: The GPT.
        num_devices: Devices of the cluster.
        batch: Global batch.
        shape: The degrees.
        is_scattered: Whether devices of a group send a part of a boundary's activations each.
    """
    adapters = max(1, SERVER // shape.tensor)  # Megatron-LM places a stage's replicas side by side
    problem = replace(
        problem_of(model, num_devices, batch, adapters),
        boundary_rule="scattered" if is_scattered else "whole",
    )
    step = counted_step(plan_of(model, batch, shape), problem)
    flops = parallel.flops_per_batch(batch, SEQUENCE, model.layers, model.hidden, VOCABULARY)
    return flops / step / num_devices / 1e12


def by_equation_4_1(batch: int) -> list[float]:
    """Figure 4.8: throughput by microbatch at (p, t) = (8, 8), a GPT of 4 blocks."""
    model = Gpt(4, 4096, 128)
    rates = []
    for microbatch in MICROBATCHES_4_8:
        forward, backward = block_seconds(model, microbatch, 1)
        seconds = parallel.batch_seconds(
            batch / microbatch, 8, model.layers * forward, model.layers * backward
        )
        rates.append(batch / seconds)
    return [rate / max(rates) for rate in rates]


def figures() -> dict[str, dict[str, list[float]]]:
    """Figures 4.8 and 4.12 to 4.18: teraFLOP/s a device; 4.8 relative, 4.17 sequences a second."""
    large, small = Gpt(32, 20480, 128), Gpt(32, 3840, 32)
    found: dict[str, dict[str, list[float]]] = {
        "4.8: microbatch 1, 2, ... 16 by equation 4.1, over the best": {
            f"batch {batch}": by_equation_4_1(batch) for batch in (128, 512)
        },
        "4.12 and 4.18: 175 billion, (t, p) = (8, 12), batch 12, 24, 36, 48, 60": {
            name: [
                teraflops(GPT_3, 96, batch, Shape(12, 8, 1, chunks=v), is_scattered=is_scattered)
                for batch in (12, 24, 36, 48, 60)
            ]
            for name, v, is_scattered in (
                ("1F1B", 1, True),
                ("interleaved, 4 stages a device", 4, True),
                ("interleaved, no scatter/gather", 4, False),
            )
        },
    }
    halves = [(2**i, 64 >> i) for i in range(1, 6)]  # (2, 32) ... (32, 2)
    for batch in (32, 128):
        found.setdefault("4.13: (p, t) = (2, 32) ... (32, 2)", {})[f"batch {batch}"] = [
            teraflops(large, 64, batch, Shape(p, t, 1)) for p, t in halves
        ]
    for batch in (32, 128, 512):
        found.setdefault("4.14: (p, d) = (2, 32) ... (32, 2)", {})[f"batch {batch}"] = [
            teraflops(small, 64, batch, Shape(p, 1, d)) for p, d in halves
        ]
        found.setdefault("4.15: (t, d) = (2, 32) ... (32, 2)", {})[f"batch {batch}"] = [
            teraflops(small, 64, batch, Shape(1, t, d)) for t, d in halves
        ]
    middle = Gpt(72, 10240, 80)  # 91 billion parameters
    for batch in (128, 512):
        found.setdefault("4.16: microbatch 1, 2, 4, 8 at (t, p) = (8, 8)", {})[f"batch {batch}"] = [
            teraflops(middle, 64, batch, Shape(8, 8, 1, b)) for b in MICROBATCHES
        ]
    found["4.17: batch 1, 2, ... 256 at (t, p) = (8, 16), sequences a second"] = {
        name: _sequences_per_second(recompute)
        for name, recompute in (("recomputing", True), ("not recomputing (0: no memory)", False))
    }
    return found


def _sequences_per_second(recompute: bool) -> list[float]:
    model, rates = Gpt(80, 12288, 96), []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        shape = Shape(16, 8, 1, 1, recompute)
        plan, problem = plan_of(model, batch, shape), problem_of(model, 128, batch)
        fits = max(counted_memory(plan, problem, 0)) <= MEMORY_BYTES
        rates.append(batch / counted_step(plan, problem) if fits else 0.0)
    return rates


def takeaways() -> dict[str, str]:
    """What the planner itself chooses on 64 devices."""
    asked = {
        "1, 162 billion parameters": (Gpt(32, 20480, 128), 128),
        "2, 5.9 billion parameters": (Gpt(32, 3840, 32), 512),
        "3, 91 billion parameters": (Gpt(72, 10240, 80), 512),
    }
    chosen = {}
    for name, (model, batch) in asked.items():
        plan = solve(problem_of(model, 64, batch))
        stage = plan.stages[0]
        degrees = sorted({s.replicas[0].tensor_parallel_size for s in plan.stages})
        chosen[name] = (
            f"p {plan.num_positions}, v {plan.num_model_chunks}, "
            f"t {'/'.join(map(str, degrees))}, d {stage.num_replicas}, "
            f"microbatch {plan.microbatch_size}, gap {100 * (plan.proof.gap or 0):.0f} %"
        )
    return chosen


def main() -> None:
    """Print both; ``--json FILE`` keeps them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    drawn = figures()
    for name, series in drawn.items():
        print(name)
        for label, values in series.items():
            print(f"  {label}: {', '.join(f'{value:.3g}' for value in values)}")
    chosen = takeaways()
    for name, plan in chosen.items():
        print(f"takeaway {name}: {plan}")
    if arguments.json is not None:
        results = {"figures": drawn, "takeaways": chosen}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
