"""One Trainer script, unchanged: `hetflow launch` with a solved plan against even shares.

The script (own_scripts_parts/train.py) knows nothing of hetflow. It is profiled and planned by
`hetflow profile` and `hetflow solve`, and trains the same global batches under `hetflow launch` and
torchrun, in turn. The second worker's device is as fast, half as fast, and a quarter
as fast. A slower device is the same in all of them: real arithmetic, and each pass held to one
table before its last gradients are summed (own_scripts_parts/site). The fast device is a real core.

    python benchmarks/own_scripts.py               three rounds; about 10 minutes on 2 quiet cores
    python benchmarks/own_scripts.py --quick       one round of half as many steps
    python benchmarks/own_scripts.py --fast 0.1    for a busy machine: the fast device is emulated
                                                   too, at this part of a core
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from truth_parts.load import Load

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord

PARTS = Path(__file__).with_name("own_scripts_parts")
SCRIPT = PARTS / "train.py"
BATCH = 60
SIZES = (12, 20, 30, 40, 48)
RATIOS = {"equal": 1.0, "1:2": 0.5, "1:4": 0.25}
WARM_UP = 5


@dataclass(frozen=True)
class Case:
    """Two devices, the second at ``ratio`` times the first's speed."""

    name: str
    folder: Path
    fast: float
    ratio: float
    steps: int
    is_quick: bool

    @property
    def types(self):
        """The devices' types, and what `hetflow profile` is told of each."""
        found = []
        for speed in (self.fast, self.fast * self.ratio):
            name = f"cpu:x{round(1000 * speed)}"
            found.append(("cpu", "cpu") if speed == 1 else (name, f"{name}={speed:g}"))
        return found

    def planned(self):
        """Profile and solve, by the commands of README."""
        sizes = (BATCH // 2,) if self.ratio == 1 else SIZES  # noise alone would make shares unlike
        devices = [word for _, asked in dict(self.types).items() for word in ("--device", asked)]
        hetflow(
            "profile", SCRIPT, "-o", self.folder / "profiles", "--force", *devices,
            "--batch-sizes", ",".join(map(str, sizes)), *(["--quick"] if self.is_quick else []),
            "--", "--out", self.folder / "profiled",
        )  # fmt: skip
        (first, _), (second, _) = self.types
        gpus = f"2x{first}" if first == second else f"1x{first},1x{second}"
        plan = self.folder / "plan.json"
        hetflow("solve", "--profiles", self.folder / "profiles", "--gpus", gpus,
                "--batch-size", BATCH, "-o", plan, "--force")  # fmt: skip
        return files.read(plan, Plan)

    def run(self, contender, number):
        """Train; median seconds of a step, CPU seconds of a step over both workers, the loss."""
        out = self.folder / f"{contender}-{number}"
        arguments = ["--steps", self.steps, "--out", out]
        even = ["--batch-size", BATCH // 2]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if contender == "hetflow":
            hetflow("launch", "-o", out / "run", self.folder / "plan.json", SCRIPT, *arguments)
        else:
            environment |= {
                "PYTHONPATH": str(PARTS / "site"),
                "HELD_RANKS": json.dumps(self.held()),
            }
            run([*LAUNCHERS[contender](), SCRIPT, *arguments, *even], environment)
        return measured_in(out)

    def held(self):
        """By rank, the table that an emulated device's passes are held to.

        Of the profiles: a plan may leave the slower device out, and even shares do not.
        """
        profiles = [files.read(p, Profile) for p in (self.folder / "profiles").glob("*.json")]
        tables = {
            profile.device_type: [[e.batch_size, e.step_seconds] for e in profile.batch_curve]
            for profile in profiles
            if profile.emulation is not None
        }
        return {str(n): tables[name] for n, (name, _) in enumerate(self.types) if name in tables}


def torchrun():
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2,
            "--master-addr", "127.0.0.1", "--master-port", free_port()]  # fmt: skip


# `accelerate launch` starts one process on a CPU, and on GPUs the workers that torchrun starts.
LAUNCHERS = {"torchrun": torchrun}


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def hetflow(*arguments):
    run([sys.executable, "-m", "hetflow.cli.main", *arguments], {**os.environ})


def run(command, environment):
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stderr[-4000:])
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}")


def measured_in(out):
    """What the script's callbacks wrote, without its first steps."""
    told = [json.loads(path.read_text()) for path in sorted(out.glob("times-*.json"))]
    walls = told[0]["walls"][WARM_UP:]
    return {
        "step_seconds": statistics.median(b - a for a, b in zip(walls, walls[1:], strict=False)),
        "cpu_seconds": sum(
            (t["cpus"][-1] - t["cpus"][WARM_UP]) / (len(t["cpus"]) - 1 - WARM_UP) for t in told
        ),
        "loss": told[0]["losses"][-1],
    }


def compared(case, rounds):
    """One case: all contenders in turn; medians over the rounds."""
    plan = case.planned()
    shares = [group.device_batch_size for group in plan.groups for _ in range(group.num_devices)]
    found = {"hetflow": [], **{name: [] for name in LAUNCHERS}}
    loads = []
    for number in range(rounds):
        for contender, runs in found.items():
            with Load() as load:
                runs.append(case.run(contender, number))
            loads.append(load.figures)
    record = files.read(case.folder / "hetflow-0" / "run" / "run.json", RunRecord)
    row = {
        "case": case.name,
        "shares": shares,
        "predicted_step_seconds": plan.predicted.step_seconds,
        "record_step_seconds": record.measured_step_seconds,
        "others_cores": statistics.median(load["others_cores"] or 0.0 for load in loads),
    }
    for name, runs in found.items():
        row[name] = {
            key: statistics.median(run[key] for run in runs)
            for key in ("step_seconds", "cpu_seconds", "loss")
        }
        row[name]["rounds_step_seconds"] = [run["step_seconds"] for run in runs]
        # Of one round: neighbours in time are alike.
        row[name]["over_hetflow"] = statistics.median(
            own["step_seconds"] / ours["step_seconds"]
            for own, ours in zip(runs, found["hetflow"], strict=True)
        )
    return row


def told(row):
    lines = [
        f"{row['case']}: shares {' + '.join(map(str, row['shares']))}; predicted "
        f"{1e3 * row['predicted_step_seconds']:.1f} ms; others used {row['others_cores']:.1f} cores"
    ]
    for name in ("hetflow", *LAUNCHERS):
        entry = row[name]
        rounds = entry["rounds_step_seconds"]
        lines.append(
            f"  {name:10} {1e3 * entry['step_seconds']:8.1f} ms a step (rounds "
            f"{', '.join(f'{1e3 * seconds:.1f}' for seconds in rounds)}; spread "
            f"{(max(rounds) - min(rounds)) / entry['step_seconds']:.1%}), "
            f"{1e3 * entry['cpu_seconds']:8.1f} ms of CPU, {entry['over_hetflow']:5.2f} times "
            f"hetflow's step, loss {entry['loss']:.4f}"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, half as many steps")
    parser.add_argument("--rounds", type=int, help="launches of each [default: 3, quick 1]")
    parser.add_argument("--steps", type=int, help="of a launch [default: 30, quick 15]")
    parser.add_argument("--case", action="append", choices=list(RATIOS), help="only this one")
    parser.add_argument("--fast", type=float, default=1.0, help="speed of the fast device")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    began = time.monotonic()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.case or RATIOS:
            case = Case(
                name,
                Path(folder) / name.replace(":", "-"),
                arguments.fast,
                RATIOS[name],
                arguments.steps or (15 if arguments.quick else 30),
                arguments.quick,
            )
            rows.append(compared(case, arguments.rounds or (1 if arguments.quick else 3)))
            print(told(rows[-1]), flush=True)
    print(f"took {(time.monotonic() - began) / 60:.1f} minutes; 1-minute load {os.getloadavg()[0]}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"fast": arguments.fast, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
