"""Pipelines as they run: speed against torch's own 1F1B, and predicted against measured time.

    python benchmarks/pipeline_runtime.py [--quick] [--json PATH] [--only speed|prediction]

Speed: hetflow's executor and torch.distributed.pipelining's Schedule1F1B run the same stages in
the same processes, one step of each in turn, on the same microbatches, drawn before the clock
starts. Both clocks stop when every worker is done. Beside the step times stand the CPU seconds of
all workers, which a busy machine changes less, and the time per microbatch above computation.

Prediction: partitions of one model on two emulated device types, one half as fast. Passes are held
to stated times; the planner's formula and the schedule's timer stand beside the measured step.
"""

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage

MICROBATCHES, LAYERS = 8, 8
# name: (width, samples of a microbatch); a pass of a quarter of the model and back takes about
# 0.5 ms of the one and 10 ms of the other.
SIZES = {"small": (256, 32), "large": (1024, 64)}
STAGES = (2, 4)
FAST, SLOW = 0.012, 0.024  # seconds of one layer, forward and backward, on an emulated device
# schedule, then (layers, device type's seconds, replicas) of each stage
PARTITIONS = {
    "fast 4, slow 4": ("1f1b", (4, FAST, 1), (4, SLOW, 1)),
    "fast 5, slow 3": ("1f1b", (5, FAST, 1), (3, SLOW, 1)),
    "fast 6, slow 2": ("1f1b", (6, FAST, 1), (2, SLOW, 1)),
    "fast 7, slow 1": ("1f1b", (7, FAST, 1), (1, SLOW, 1)),
    "slow 3, fast 5": ("1f1b", (3, SLOW, 1), (5, FAST, 1)),
    "fast 6 twice, slow 2": ("1f1b", (6, FAST, 2), (2, SLOW, 1)),
    "fast 4, slow 4 twice": ("1f1b", (4, FAST, 1), (4, SLOW, 2)),
    "fast 3, fast 3, slow 2": ("1f1b", (3, FAST, 1), (3, FAST, 1), (2, SLOW, 1)),
    "gpipe, fast 5, slow 3": ("gpipe", (5, FAST, 1), (3, SLOW, 1)),
    "pipedream, fast 5, slow 3": ("pipedream", (5, FAST, 1), (3, SLOW, 1)),
}


def make_plan(schedule, stages, microbatch, *, emulated):
    """A plan of stages given as (layers, seconds of a layer, replicas)."""
    from hetflow.schema.plan import Prediction, Proof

    parts, first, device = [], 0, 0
    for layers, seconds, replicas in stages:
        names = tuple(str(index) for index in range(2 * first, 2 * (first + layers)))
        compute = layers * seconds if emulated else 0.0
        parts.append(
            pipeline_stage(
                layers=names, num_replicas=replicas,
                device_type=f"cpu:{seconds}" if emulated else "cpu", first_device=device,
                num_in_flight=1, weight_versions=1, seconds_per_input=0.0,
                compute_seconds=compute, forward_seconds=compute / 3, output_seconds=0.0,
                memory_bytes=1,
            )
        )  # fmt: skip
        first, device = first + layers, device + replicas
    return pipeline_plan(
        model="mlp", global_batch_size=MICROBATCHES * microbatch, microbatch_size=microbatch,
        num_microbatches=MICROBATCHES, schedule=schedule, recompute=False, stages=tuple(parts),
        predicted=Prediction(step_seconds=0.1, samples_per_second=1.0),
        proof=Proof(
            termination="feasible", objective=0, lower_bound=None, gap=None, method="stated"
        ),
        noam=2, stage_cost="ring", solved="flat",
    )  # fmt: skip


def build(width):
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [m for _ in range(LAYERS) for m in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*blocks)


def run_world(plan, size, *arguments, script=__file__):
    """Run ``size`` workers of a script under a plan; what the first of them said."""
    from torch.distributed import TCPStore

    from hetflow.schema import files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        files.write(path, plan)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workers = [
            subprocess.Popen(
                [sys.executable, script, "--worker", *map(str, arguments)],
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size),
                    "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(store.port), "HETFLOW_SLOT": str(rank),
                    "TORCHELASTIC_USE_AGENT_STORE": "True", "HETFLOW_PLAN": str(path),
                    "HETFLOW_TIMEOUT": "100",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            said = [worker.communicate(timeout=500)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed")
    return json.loads(said[0].splitlines()[-1])


def start_job(width, microbatch, num_batches):
    """(model, job, function that gives an epoch's batches) of a worker."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from hetflow import runtime as hf

    class Rows(TensorDataset):
        """Gives a whole microbatch at once."""

        def __getitems__(self, indices):
            return [tensor[indices[0] : indices[-1] + 1] for tensor in self.tensors]

    torch.set_num_threads(1)
    batch_size = MICROBATCHES * microbatch
    rows = (
        torch.randn(batch_size * num_batches, width),
        torch.randn(batch_size * num_batches, width),
    )
    loader = DataLoader(Rows(*rows), batch_size, collate_fn=lambda items: items)
    model = build(width)
    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return model, job, rows, lambda: job.batches(loader)


def compare_speed(width, microbatch, steps):
    """One worker: step and CPU seconds of both executors, and seconds of computation alone."""
    import torch
    import torch.distributed as dist

    model, job, (x, y), batches = start_job(width, microbatch, 1)
    batch_size = MICROBATCHES * microbatch
    theirs, part = torch_schedule(width, job.rank, job.world_size)
    seconds = {"ours": [], "torch": [], "compute": []}
    cpu_seconds = {"ours": [], "torch": []}

    def clocked(name, run):
        dist.barrier()
        began, cpu_began = time.perf_counter(), time.process_time()
        run()
        cpu = time.process_time() - cpu_began
        dist.barrier()
        seconds[name].append(time.perf_counter() - began)
        cpu_seconds[name].append(cpu)

    def ours():
        job.backward(lambda a, b: torch.nn.functional.mse_loss(model(a), b), batch)

    for number in range(steps):
        batch = next(iter(batches()))
        drawn = [inputs for _, inputs in batch.inputs()]
        batch = dataclasses.replace(batch, _feed=iter(drawn), _taken=False)
        both = [("ours", ours), ("torch", lambda: theirs(x[:batch_size], y[:batch_size]))]
        for name, run in both if number % 2 else both[::-1]:
            clocked(name, run)
            model.zero_grad()
            part.zero_grad()
        inputs = [torch.randn(microbatch, width, requires_grad=True) for _ in range(MICROBATCHES)]
        dist.barrier()
        began = time.perf_counter()
        for item in inputs:
            answer = part(item)
            answer.backward(torch.ones_like(answer))
        seconds["compute"].append((time.perf_counter() - began) / MICROBATCHES)
        part.zero_grad()
    rank = job.rank
    sums = torch.tensor([cpu_seconds["ours"], cpu_seconds["torch"]])
    dist.all_reduce(sums)
    slowest = torch.tensor(seconds["compute"])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    job.finish()
    if rank == 0:
        cpu = dict(zip(("ours", "torch"), sums.tolist(), strict=True))
        print(json.dumps({"seconds": {**seconds, "compute": slowest.tolist()}, "cpu": cpu}))


def torch_schedule(width, rank, size):
    """Torch's Schedule1F1B over the same stages; (function of a batch, this worker's stage)."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    length = 2 * LAYERS // size
    part = build(width)[rank * length : (rank + 1) * length]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step(x, y):
        last = {"target": y, "losses": []} if rank == size - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)

    return step, part


def measure_step(width, microbatch, steps):
    """One worker: seconds of a step in the middle of an epoch."""
    import torch

    model, job, _, batches = start_job(width, microbatch, steps)
    ends = []
    for batch in batches():
        job.backward(lambda a, b: torch.nn.functional.mse_loss(model(a), b), batch)
        model.zero_grad()
        ends.append(time.perf_counter())
    rank = job.rank
    job.finish()
    if rank == 0:
        print(json.dumps([after - before for before, after in itertools.pairwise(ends[2:-1])]))


def speed(steps):
    """[size x stages] medians and quartiles of both executors."""
    found = {}
    for name, (width, microbatch) in SIZES.items():
        for size in STAGES:
            stages = [(LAYERS // size, 0.0, 1)] * size
            plan = make_plan("1f1b", stages, microbatch, emulated=False)
            said = run_world(plan, size, "speed", width, microbatch, steps)
            kept = {key: values[4:] for key, values in said["seconds"].items()}
            cpu = {key: values[4:] for key, values in said["cpu"].items()}
            ideal = statistics.median(kept["compute"]) * (MICROBATCHES + size - 1)
            medians = {key: statistics.median(values) for key, values in kept.items()}
            found[f"{name}, {size} stages"] = {
                "ours_step_seconds": quartiles(kept["ours"]),
                "torch_step_seconds": quartiles(kept["torch"]),
                "ours_over_torch": ratio(kept["ours"], kept["torch"]),
                "ours_over_torch_cpu_seconds": ratio(cpu["ours"], cpu["torch"]),
                "compute_seconds_per_microbatch": medians["compute"],
                "overhead_seconds_per_microbatch": {
                    key: (medians[key] - ideal) / MICROBATCHES for key in ("ours", "torch")
                },
            }
    return found


def quartiles(values):
    """[first quartile, median, third]."""
    return statistics.quantiles(values, n=4, method="inclusive")


def ratio(ours, theirs):
    """The median over pairs of steps, one right after the other."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def planned_seconds(schedule, stages):
    """The planner's prediction for a partition (costs/), with links of no cost."""
    from hetflow.planning.costs.pipeline import rounds
    from hetflow.planning.schedules.replay import StepStage, flush_step_seconds

    computes = [(layers * seconds, replicas) for layers, seconds, replicas in stages]
    if schedule in ("gpipe", "1f1b"):
        timed = [StepStage(m, c / 3, c * 2 / 3, 0.0, 0.0, 0.0) for c, m in computes]
        return flush_step_seconds(schedule, tuple(timed), MICROBATCHES)
    return max(rounds(schedule, m, MICROBATCHES) * c for c, m in computes)


def timed_seconds(plan):
    """The schedule's timer: the makespan of a flush, or a batch of the steady state."""
    from hetflow.planning.schedules.of_plan import timed

    timing = timed(plan)
    if timing.schedule.weight_semantics == "flush":
        return timing.makespan_seconds
    return timing.steady_seconds_per_microbatch * MICROBATCHES


def prediction(steps):
    """Predicted and measured step times of all partitions."""
    rows = {}
    for name, (schedule, *stages) in PARTITIONS.items():
        plan = make_plan(schedule, stages, 4, emulated=True)
        size = sum(replicas for _, _, replicas in stages)
        measured = run_world(plan, size, "step", 32, 4, steps)
        rows[name] = {
            "planned_seconds": planned_seconds(schedule, stages),
            "timed_seconds": timed_seconds(plan),
            "measured_seconds": statistics.median(measured),
            "measured_quartiles": quartiles(measured),
        }
    errors = {
        key: statistics.mean(abs(row[key] / row["measured_seconds"] - 1) for row in rows.values())
        for key in ("planned_seconds", "timed_seconds")
    }
    best = {key: min(rows, key=lambda name: rows[name][key]) for key in next(iter(rows.values()))
            if key != "measured_quartiles"}  # fmt: skip
    # Of the partitions that use the same devices in the same way only the cut differs.
    cuts = [name for name in rows if name.startswith("fast ") and name.count(",") == 1
            and "twice" not in name]  # fmt: skip
    ranked = {key: sorted(cuts, key=lambda name: rows[name][key]) for key in best}
    return {
        "partitions": rows,
        "mean_error": errors,
        "best": best,
        "best_predicted_is_best_measured": best["planned_seconds"] == best["measured_seconds"],
        "cuts_ranked_alike": ranked["planned_seconds"] == ranked["measured_seconds"],
    }


def show(result):
    """Print both tables."""
    for name, row in result.get("speed", {}).items():
        ours, theirs = (row[f"{key}_step_seconds"][1] * 1e3 for key in ("ours", "torch"))
        above = [row["overhead_seconds_per_microbatch"][key] * 1e3 for key in ("ours", "torch")]
        print(f"{name}: hetflow {ours:.1f} ms a step, torch {theirs:.1f} ms "
              f"(ratio {row['ours_over_torch']:.3f}, of CPU seconds "
              f"{row['ours_over_torch_cpu_seconds']:.3f}); above computation "
              f"{above[0]:.2f} and {above[1]:.2f} ms a microbatch")  # fmt: skip
    if "prediction" in result:
        for name, row in result["prediction"]["partitions"].items():
            print(f"{name}: planned {row['planned_seconds'] * 1e3:.1f} ms, timed "
                  f"{row['timed_seconds'] * 1e3:.1f}, measured "
                  f"{row['measured_seconds'] * 1e3:.1f}")  # fmt: skip
        for key, error in result["prediction"]["mean_error"].items():
            print(f"mean error of {key}: {error:.1%}")
        print("best predicted is best measured:",
              result["prediction"]["best_predicted_is_best_measured"])  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--only", choices=["speed", "prediction"])
    arguments = parser.parse_args()
    result = {}
    if arguments.only != "prediction":
        result["speed"] = speed(15 if arguments.quick else 100)
    if arguments.only != "speed":
        result["prediction"] = prediction(12 if arguments.quick else 30)
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        kind, *numbers = sys.argv[2:]
        {"speed": compare_speed, "step": measure_step}[kind](*map(int, numbers))
    else:
        main()
