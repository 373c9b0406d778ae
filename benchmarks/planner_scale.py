"""A GPT-3-like model of 175 billion parameters on 64 to 4,096 devices of three types.

Times follow from counts of operations and bytes (thesis 4.2 and 4.3.2) and from the rates below, so
every number is reproducible without a GPU. Each size is solved in a process of its own, whose CPU
seconds and peak memory are stated.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from hetflow.planning.checks.parallel import check
from hetflow.schema.parallel import (
    DegreeLink,
    LinkCurve,
    ParallelPool,
    ParallelProblem,
    ShardSizes,
    ShardTimes,
)
from hetflow.solvers.effort import Effort
from hetflow.solvers.parallel.solve import solve

BLOCKS, HIDDEN, HEADS, TOKENS, VOCABULARY = 96, 12288, 96, 2048, 51200
BATCH = 1536  # of GPT-3 on 1,024 GPUs in thesis 4.5.1
DEGREES, MICROBATCHES = (1, 2, 4, 8), (1, 2, 4)
SERVER = 8
TYPES = {  # peak FLOP/s in 16 bits, bytes of memory, bytes/s in a server and of a device outside
    "H100": (989e12, 80 << 30, 450e9, 50e9),
    "A100": (312e12, 80 << 30, 300e9, 25e9),
    "V100": (125e12, 32 << 30, 150e9, 12.5e9),
}
SHARES = {"H100": 1, "A100": 2, "V100": 1}  # of the pool, in quarters
GAPS = {64: 0.05, 256: 0.05, 1024: 0.10, 4096: 0.10}  # accepted, by number of devices
EFFICIENCY, HALF_TOKENS = 0.55, 384  # of the peak, and tokens per shard at which half of it is lost
STATE = 4.5  # 18 bytes a parameter of 4: weights and gradients in 16 bits, Adam in 32 (4.2)


def problem(num_devices: int, *, shares: dict[str, int] | None = None) -> ParallelProblem:
    """The model on so many devices, in servers of 8; ``shares`` are of a quarter of them each."""
    shares = shares or SHARES
    whole = sum(shares.values())
    pools = tuple(
        pool(name, num_devices * share // whole) for name, share in shares.items() if share
    )
    sizes = tuple(
        ShardSizes(
            tensor_parallel_size=t,
            weight_bytes=each_layer(
                4 * VOCABULARY * HIDDEN // t, 4 * 12 * HIDDEN**2 // t, 4 * VOCABULARY * HIDDEN // t
            ),
            stashed_bytes=each_layer(
                2.0 * TOKENS * HIDDEN,
                TOKENS * HIDDEN * (10 + 24 / t) + 5.0 * HEADS * TOKENS**2 / t,
                2.0 * TOKENS * HIDDEN + 4.0 * TOKENS * VOCABULARY / t,
            ),
            selective_bytes=each_layer(
                2.0 * TOKENS * HIDDEN,
                TOKENS * HIDDEN * (10 + 24 / t),
                2.0 * TOKENS * HIDDEN + 4.0 * TOKENS * VOCABULARY / t,
            ),
            core_bytes=each_layer(0.0, 5.0 * HEADS * TOKENS**2 / t, 0.0),
        )
        for t in DEGREES
    )
    return ParallelProblem(
        model="gpt-175b",
        global_batch_size=BATCH,
        layers=("embedding", *(f"block{i}" for i in range(BLOCKS)), "head"),
        output_bytes=(2 * TOKENS * HIDDEN,) * (BLOCKS + 2),
        pools=pools,
        sizes=sizes,
        bytes_per_weight_byte=STATE,
        reserved_bytes=1 << 30,
        recompute=("none", "selective", "full"),
    )


def each_layer(embedding: float, block: float, head: float) -> tuple[Any, ...]:
    """[layers] one value for the embedding, one for every block and one for the head."""
    return (embedding, *(block,) * BLOCKS, head)


def pool(name: str, num_devices: int) -> ParallelPool:
    """Devices of one type with the model's times on them."""
    peak, memory, inside, outside = TYPES[name]
    return ParallelPool(
        device_type=name,
        num_devices=num_devices,
        devices_per_server=SERVER,
        memory_bytes=memory,
        times=tuple(times(peak, inside, t, b) for t in DEGREES for b in MICROBATCHES),
        links=tuple(
            DegreeLink(
                tensor_parallel_size=t,
                curve=LinkCurve(coefficients=(outside,), latency_seconds=10e-6),
            )
            for t in DEGREES
        ),
    )


def times(peak: float, inside: float, t: int, b: int) -> ShardTimes:
    """Operations over the rate that so many tokens reach, and two all-reduces a pass (4.3.2)."""
    tokens = b * TOKENS
    rate = t * peak * EFFICIENCY * tokens / (tokens + HALF_TOKENS * t)
    core = 4.0 * tokens * TOKENS * HIDDEN / rate
    matrices = 24.0 * tokens * HIDDEN**2 / rate
    reduces = 2 * 2 * (t - 1) / t * 2.0 * tokens * HIDDEN / inside
    looked_up = 4.0 * tokens * HIDDEN / 1e12
    logits = 2.0 * tokens * HIDDEN * VOCABULARY / rate
    forward = each_layer(looked_up, matrices + core + reduces, logits)
    return ShardTimes(
        tensor_parallel_size=t,
        microbatch_size=b,
        forward_seconds=forward,
        backward_seconds=each_layer(looked_up, 2 * (matrices + core) + reduces, 2 * logits),
        update_seconds=tuple(
            weights / t * STATE / 1e12
            for weights in each_layer(
                4 * VOCABULARY * HIDDEN, 48 * HIDDEN**2, 4 * VOCABULARY * HIDDEN
            )
        ),
        core_seconds=each_layer(0.0, core, 0.0),
    )


def solved(num_devices: int, limit: float | None, gap: float) -> dict[str, Any]:
    """Solve one size in this process."""
    asked = problem(num_devices)
    start = time.process_time()
    effort = Effort(gap=gap)
    if limit is not None:
        effort = effort.until(lambda: time.process_time() - start > limit)
    plan = solve(asked, effort=effort)
    seconds = time.process_time() - start
    faults = check(plan, asked)
    if faults:
        raise SystemExit(f"the plan fails its check: {'; '.join(faults)}")
    return {
        "devices": num_devices,
        "step_seconds": plan.predicted.step_seconds,
        "gap": plan.proof.gap,
        "termination": plan.proof.termination,
        "cpu_seconds": seconds,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "stages": len(plan.stages),
        "replicas": plan.stages[0].num_replicas,
        "microbatch_size": plan.microbatch_size,
        "devices_in_use": plan.num_devices,
    }


def main() -> None:
    """Print it; ``--json FILE`` keeps it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 devices only")
    parser.add_argument("--devices", type=int, help="only this size, in this process")
    parser.add_argument("--limit", type=float, help="CPU seconds after which a search ends")
    parser.add_argument("--gap", type=float, help="accept a plan proved this near at any size")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    if arguments.devices is not None:
        gap = arguments.gap or 0.0
        print(json.dumps(solved(arguments.devices, arguments.limit, gap)))
        return
    rows = []
    for devices, gap in list(GAPS.items())[: 1 if arguments.quick else None]:
        command = [sys.executable, __file__, "--devices", str(devices)]
        command += [] if arguments.limit is None else ["--limit", str(arguments.limit)]
        command += ["--gap", str(gap if arguments.gap is None else arguments.gap)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        rows.append(row)
        print(
            f"{devices} devices: {row['step_seconds']:.4g} s a step, gap {100 * row['gap']:.1f} %, "
            f"{row['cpu_seconds']:.1f} CPU s, {row['peak_bytes'] / 2**30:.2f} GiB"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
