"""What is predicted of one GPU beside what it does: estimates from its data sheet, and plans.

Ten models are profiled on the GPU (`hetflow profile --device TYPE --quick`) and estimated
(`--device spec:TYPE`, on the CPU). Plans of one virtual node and of four are launched. What was
measured is never given to an estimate. Loading and the runtime's own work are left out of a
measured pass, since estimates count neither.

    python benchmarks/one_gpu.py                 10 models; 8 took 6 minutes on an H200
    python benchmarks/one_gpu.py --quick         two of them
    python benchmarks/one_gpu.py --keep DIR      keep all in DIR, and go on from what is there
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from hetflow.devices.local import accelerators
from hetflow.schema import files
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord

PARTS = Path(__file__).resolve().parent
TARGETS, TRAIN = PARTS / "one_gpu_parts" / "targets.py", PARTS / "truth_parts" / "train.py"
# Batch sizes, and the steps of a launch at the largest; none where only the profile is wanted.
MODELS = {
    "gpt2_bf16": ((4, 8, 16), 40), "resnet50_bf16": ((32, 64, 128), 40),
    "llama1b_bf16": ((1, 2, 4), 20), "gpt2": ((4, 8), None), "resnet50": ((32, 64, 128), None),
    "bert_large_bf16": ((16, 32, 64), None), "vit_bf16": ((32, 64, 128), None),
    "convnext_bf16": ((32, 64), None), "gpt2_bf16_compiled": ((4, 8, 16), 40),
    "resnet50_bf16_compiled": ((64, 128), None),
}  # fmt: skip
VIRTUAL_NODES = (1, 4)


def main() -> None:
    """Measure, estimate, and print both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first two models")
    parser.add_argument("--device", help="device type [default: the first GPU's]")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep profiles and runs here")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    arguments = parser.parse_args()
    gpus = accelerators()
    if not arguments.device and not gpus:
        parser.error("torch sees no GPU here; see `hetflow doctor`")
    device = arguments.device or gpus[0].device_type
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        names = list(MODELS)[: 2 if arguments.quick else None]
        document = {"benchmark": "one_gpu", "device": device, "passes": [], "plans": []}
        for name in names:
            passes = passes_of(name, device, folder)
            document["passes"] += passes
            document["plans"] += plans_of(name, device, folder) if passes else []
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    say(document)


def passes_of(name: str, device: str, folder: Path) -> list[dict[str, object]]:
    """A row for each batch size: what was measured and what was estimated."""
    measured = profile_of(name, device, folder / "measured", "--quick", "--sync-devices", "0")
    estimated = measured and profile_of(name, f"spec:{device}", folder / "estimated")
    if measured is None or estimated is None:
        return []
    reserve = int(estimated.provenance.get("reserve_bytes", 0))
    by_size = {point.batch_size: point for point in estimated.batch_curve}
    return [
        {
            "model": name,
            "batch_size": point.batch_size,
            "measured_pass_seconds": point.step_seconds
            - (point.load_seconds or 0.0)
            - (point.virtual_node_seconds or 0.0),
            "measured_error": point.step_seconds_error,
            "load_seconds": point.load_seconds,
            "estimated_pass_seconds": by_size[point.batch_size].step_seconds,
            "measured_peak_bytes": point.peak_memory_bytes,
            "estimated_peak_bytes": by_size[point.batch_size].peak_memory_bytes - reserve,
        }
        for point in measured.batch_curve
        if point.batch_size in by_size
    ]


def profile_of(name: str, device: str, folder: Path, *flags: str) -> Profile | None:
    """Profile a model once; None where that failed."""
    path = folder / f"{name}.{device.removeprefix('spec:')}.json"
    if not path.exists():
        sizes = ",".join(map(str, MODELS[name][0]))
        hetflow("profile", f"{TARGETS}:{name}", "--name", name, "--device", device,
                "--batch-sizes", sizes, *flags, "-o", str(folder))  # fmt: skip
    return files.read(path, Profile) if path.exists() else None


def plans_of(name: str, device: str, folder: Path) -> list[dict[str, object]]:
    """A row for each plan: its step as predicted and as measured, and the peaks."""
    sizes, steps = MODELS[name]
    rows: list[dict[str, object]] = []
    for nodes in VIRTUAL_NODES if steps else ():
        plan, run = folder / f"plan-{name}-{nodes}.json", folder / f"run-{name}-{nodes}"
        batch = str(sizes[-1])
        if not plan.exists():
            hetflow("solve", "split", "--profiles", str(folder / "measured"), "--model", name,
                    "--gpus", f"1x{device}", "--batch-size", batch, "--virtual-nodes", str(nodes),
                    "-o", str(plan))  # fmt: skip
        if not (run / "run.json").exists():
            hetflow("launch", "-o", str(run), str(plan), str(TRAIN), "--target",
                    f"{TARGETS}:{name}", "--steps", str(steps), "--batch-size", batch)  # fmt: skip
        if (run / "run.json").exists():
            record = files.read(run / "run.json", RunRecord)
            rows.append(
                {
                    "model": name,
                    "virtual_nodes": nodes,
                    "predicted_step_seconds": record.predicted_step_seconds,
                    "measured_step_seconds": record.measured_step_seconds,
                    "measured_peak_bytes": record.devices[0].peak_memory_bytes,
                }
            )
    return rows


def hetflow(*arguments: str) -> None:
    """Run one command; what it says is shown where it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "hetflow.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PARTS), *sys.path])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        print(f"hetflow {' '.join(arguments[:2])}: {done.stderr.strip()[-400:]}", file=sys.stderr)


def say(document: dict[str, list[dict[str, float]]]) -> None:
    """Both tables and their means."""
    print(f"{'model':<23}{'batch':>6}{'measured':>11}{'estimated':>11}{'':>8}{'peak':>11}{'':>8}")
    off: dict[str, list[float]] = {"seconds": [], "bytes": []}
    for row in document["passes"]:
        seconds = row["estimated_pass_seconds"] / row["measured_pass_seconds"] - 1
        size = row["estimated_peak_bytes"] / row["measured_peak_bytes"] - 1
        off["seconds"].append(abs(seconds))
        off["bytes"].append(abs(size))
        print(
            f"{row['model']:<23}{row['batch_size']:>6}{1e3 * row['measured_pass_seconds']:>8.1f} ms"
            f"{1e3 * row['estimated_pass_seconds']:>8.1f} ms{100 * seconds:>+6.0f} %"
            f"{row['measured_peak_bytes'] / 2**30:>7.2f} GiB{100 * size:>+6.1f} %"
        )
    for what, errors in off.items():
        if errors:
            mean, worst = 100 * statistics.mean(errors), 100 * max(errors)
            print(f"{what}: mean {mean:.1f} %, worst {worst:.1f} %")
    for row in document["plans"]:
        error = row["predicted_step_seconds"] / row["measured_step_seconds"] - 1
        print(
            f"{row['model']}, {row['virtual_nodes']} virtual node(s): predicted "
            f"{1e3 * row['predicted_step_seconds']:.1f} ms, measured "
            f"{1e3 * row['measured_step_seconds']:.1f} ms ({100 * error:+.1f} %)"
        )


if __name__ == "__main__":
    main()
