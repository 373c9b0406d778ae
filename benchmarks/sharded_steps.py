"""A step whose states are shared, under hetflow and FSDP2: kernels, host waits, exposed transfers.

Two workers on the software CUDA device (testing/) train a decoder with equal shares. Kernels, calls
of NCCL and host synchronisations are those of worker 0 in a steady step that tests no loss. The
step and what no computing hides of its transfers are the virtual clock's, of two V100 on NVLink.
``gradients`` and ``optimizer`` stand beside an FSDP2 that keeps its weights after a forward pass.

    python benchmarks/sharded_steps.py
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sharded_runtime import LENGTH, VOCABULARY, loss_of, model_of
from step_counters import WORKERS, can_count, config_of, counted_steps, run_workers

from hetflow.schema import files
from hetflow.testing import gpus

WIDTH, LAYERS, SIZE = 256, 6, 4
SKIPPED, COUNTED = 4, 3  # steps 1, 2, 4, 8 and 16 test the loss
WAYS = ("fsdp2", "fsdp2-kept", "all", "gradients", "optimizer")
MODES = ("eager", "compiled")
COLUMNS = ("kernel", "nccl", "host_sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="eager steps only")
    parser.add_argument("--ways", default=",".join(WAYS), help="which of the ways to share")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        work(*asked.worker)
        return
    if not can_count():
        return
    results = []
    columns = ("kernels", "nccl", "waits", "step ms", "exposed", "peak MiB")
    print(f"{'mode':<10}{'way':<12}" + "".join(f"{name:>10}" for name in columns))
    for mode in MODES[:1] if asked.quick else MODES:
        for way in asked.ways.split(","):
            found = measured(way, mode)
            results.append({"mode": mode, "way": way, **found})
            print(
                f"{mode:<10}{way:<12}{found['kernel']:>10.1f}{found['nccl']:>10.1f}"
                f"{found['host_sync']:>10.1f}{1e3 * found['step_seconds']:>10.3f}"
                f"{1e3 * found['exposed_seconds']:>10.3f}{found['peak_bytes'] / 2**20:>10.1f}",
                flush=True,
            )
    if asked.json:
        document = {"benchmark": "sharded_steps", "workers": WORKERS, "results": results}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


def measured(way: str, mode: str) -> dict[str, float]:
    """Counts a step of worker 0, and the virtual clock's seconds of a step."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        machine = gpus(",".join(["V100"] * WORKERS), folder)
        if not way.startswith("fsdp2"):
            files.write(folder / "config.json", config_of("decoder", SIZE, shard=way))
        run_workers(
            [__file__, "--worker", way, mode, text],
            {**machine.environment, "HETFLOW_PLAN": str(folder / "config.json")},
        )
        # FSDP2 frees gradients to another stream than the optimizer's, which counts as a race here.
        if not way.startswith("fsdp2") and machine.faults:
            raise SystemExit(f"{way}, {mode}: {machine.faults}")
        found: dict[str, float] = json.loads((folder / "counted.json").read_text())
        timeline = machine.timeline()
        found["step_seconds"] = timeline.step_seconds
        found["exposed_seconds"] = max(
            exposed_seconds(timeline, device) for device in timeline.devices
        )
        return found


def exposed_seconds(timeline: Any, device: Any) -> float:
    """Of a counted step, in which a device transfers and does not compute."""
    ends = timeline.steps(device)
    first, last = period = ends[SKIPPED - 1], ends[SKIPPED + COUNTED - 1]
    sent = sum(
        span.end_seconds - span.start_seconds
        for span in timeline.spans
        if span.device == device and span.kind == "nccl" and first <= span.start_seconds < last
    )
    return float((1 - timeline.hidden_share_of(device, period)) * sent / COUNTED)


def work(way: str, mode: str, folder: str) -> None:
    """One worker: steps, of which the last are counted."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    device, model = torch.device("cuda", rank), model_of(WIDTH, LAYERS)
    data = TensorDataset(torch.randint(VOCABULARY, (SIZE * WORKERS * 16, LENGTH)))
    dist.init_process_group("nccl")
    job: Any = None
    if way.startswith("fsdp2"):
        from torch.distributed.fsdp import fully_shard

        model.to(device)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=way == "fsdp2")
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not way.startswith("fsdp2"):
        from hetflow import runtime as hf

        job = hf.prepare(model, optimizer)
    if mode == "compiled":
        for block in model.blocks:
            block.compile(backend="aot_eager")

    def step(batch: Any) -> None:
        if job is None:
            loss_of(model, batch[0].to(device, non_blocking=True)).backward()
        else:
            job.backward(lambda ids: loss_of(model, ids), batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    if job is None:
        sampler = DistributedSampler(data, WORKERS, rank)
        batches: Any = DataLoader(data, batch_size=SIZE, sampler=sampler, pin_memory=True)
    else:
        batches = job.batches(DataLoader(data, batch_size=SIZE * WORKERS, shuffle=True))
    row = counted_steps(step, batches, SKIPPED, COUNTED, COLUMNS)
    if rank == 0:
        Path(folder, "counted.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
