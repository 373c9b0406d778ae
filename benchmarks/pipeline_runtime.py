"""1F1B through hetflow's executor against torch.distributed.pipelining's, on the same stages.

    python benchmarks/pipeline_runtime.py [--quick] [--json]

Each round is a fresh set of two processes that alternate between both; medians over steps. The
second part holds passes to stated times on emulated devices and puts the schedule timer's step
time beside the measured one, for several cuts of one model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WIDTH, DEPTH, MICROBATCHES, MICROBATCH = 256, 8, 8, 32
UNIT_SECONDS = 0.012  # one layer, forward and backward, on an emulated device
CUTS = {"2+6": 2, "4+4": 4, "6+2": 6}


def make_plan(cut, compute_unit=0.0):
    from hetflow.schema.pipeline import PipelinePlan, StagePlan
    from hetflow.schema.plan import Prediction, Proof

    layers = [str(index) for index in range(2 * DEPTH)]
    parts = [layers[: 2 * cut], layers[2 * cut :]]
    stages = tuple(
        StagePlan(
            layers=tuple(part), num_replicas=1, device_type="cpu:x" if compute_unit else "cpu",
            first_device=number, num_in_flight=1, weight_versions=1, seconds_per_input=0.0,
            compute_seconds=compute_unit * len(part) / 2, output_seconds=0.0, memory_bytes=1,
        )
        for number, part in enumerate(parts)
    )  # fmt: skip
    return PipelinePlan(
        model="mlp", global_batch_size=MICROBATCHES * MICROBATCH, microbatch_size=MICROBATCH,
        microbatches=MICROBATCHES, schedule="1f1b", recompute=False, stages=stages,
        predicted=Prediction(step_seconds=0.1, samples_per_second=1.0),
        proof=Proof(
            termination="feasible", objective=0, lower_bound=None, gap=None, method="stated"
        ),
        noam=2, stage_cost="ring", solved="flat",
    )  # fmt: skip


def build():
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [m for _ in range(DEPTH) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks)


def train(plan_path, steps, torch_schedule):
    """One worker: step times of ours, and where asked of torch's schedule, alternating."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from hetflow import runtime as hf

    torch.set_num_threads(1)
    os.environ["HETFLOW_PLAN"] = plan_path
    batch_size = MICROBATCHES * MICROBATCH
    x, y = torch.randn(batch_size * steps, WIDTH), torch.randn(batch_size * steps, WIDTH)
    theirs = None
    model = build()
    job = hf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    if torch_schedule:
        theirs = make_torch(job.rank)
    ours_times, torch_times = [], []
    for index, batch in enumerate(job.batches(DataLoader(TensorDataset(x, y), batch_size))):
        job._executor._outbox.flush()
        torch.distributed.barrier()
        began = time.perf_counter()
        job.backward(lambda a, b: torch.nn.functional.mse_loss(model(a), b), batch)
        torch.distributed.barrier()
        ours_times.append(time.perf_counter() - began)
        model.zero_grad()
        if theirs is not None:
            rows = slice(index * batch_size, (index + 1) * batch_size)
            began = time.perf_counter()
            theirs(x[rows], y[rows])
            torch.distributed.barrier()
            torch_times.append(time.perf_counter() - began)
    rank = job.rank
    job.finish()
    if rank == 0:
        print(json.dumps([ours_times, torch_times]))


def make_torch(rank):
    """Torch's Schedule1F1B over the same two halves of the same model."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = build()
    part = whole[:DEPTH] if rank == 0 else whole[DEPTH:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step(x, y):
        part.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])

    return step


def run_world(plan, steps, torch_schedule):
    from torch.distributed import TCPStore

    from hetflow.schema import files

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        files.write(path, plan)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, __file__, "--worker", str(path), str(steps)]
        workers = [
            subprocess.Popen(
                [*command, *(["--torch"] if torch_schedule else [])],
                env={
                    **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
                    "HETFLOW_SLOT": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True",
                },
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        said = [worker.communicate(timeout=300)[0] for worker in workers]
        if any(worker.returncode for worker in workers):
            raise SystemExit("a worker failed")
    ours, theirs = json.loads(said[0].splitlines()[-1])
    return [statistics.median(times[3:]) if times else None for times in (ours, theirs)]


def predicted_seconds(plan):
    """The schedule timer's makespan for the held pass times."""
    from hetflow.runtime.lower_pipeline import lower_pipeline, schedule_of
    from hetflow.schedules.timing import StageTimes, time_schedule

    work = lower_pipeline(plan).pipeline
    times = StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in work.stages),
        backward_seconds=tuple(stage.backward_seconds for stage in work.stages),
    )
    return time_schedule(schedule_of(work, MICROBATCHES), times).makespan_seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    steps, rounds = (15, 1) if arguments.quick else (60, 5)
    pairs = [run_world(make_plan(DEPTH // 2), steps, True) for _ in range(rounds)]
    ours, theirs = (statistics.median(pair[index] for pair in pairs) for index in range(2))
    cuts = {}
    for name, cut in CUTS.items():
        plan = make_plan(cut, UNIT_SECONDS)
        measured = run_world(plan, 10 if arguments.quick else 30, False)[0]
        cuts[name] = {"predicted_seconds": predicted_seconds(plan), "measured_seconds": measured}
    errors = [abs(c["predicted_seconds"] / c["measured_seconds"] - 1) for c in cuts.values()]
    result = {
        "ours_step_seconds": ours,
        "torch_step_seconds": theirs,
        "ours_over_torch": ours / theirs,
        "cuts": cuts,
        "mean_prediction_error": statistics.mean(errors),
        "best_predicted_is_best_measured": min(cuts, key=lambda c: cuts[c]["predicted_seconds"])
        == min(cuts, key=lambda c: cuts[c]["measured_seconds"]),
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    print(f"1f1b, 2 workers: hetflow {ours * 1e3:.1f} ms a step, torch {theirs * 1e3:.1f} ms")
    for name, cut in cuts.items():
        print(f"{name}: predicted {cut['predicted_seconds'] * 1e3:.1f} ms, measured "
              f"{cut['measured_seconds'] * 1e3:.1f} ms")  # fmt: skip
    print(f"mean prediction error {result['mean_prediction_error']:.1%}")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        train(sys.argv[2], int(sys.argv[3]), "--torch" in sys.argv)
    else:
        main()
