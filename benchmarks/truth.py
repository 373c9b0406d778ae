"""Is what is predicted what happens? Predicted beside measured steps and peaks on real devices.

Nothing is emulated. Six models are profiled as the docs say. Splits and pipelines of each, the
solver's own among them, are predicted by the tool and launched with `hetflow launch`, all plans of
a model in turn and three rounds of that, so that drift of the machine meets all alike. What is
compared are medians over the launches. The machine's load stands beside every launch.

    python benchmarks/truth.py                     six models; about 30 minutes on 2 quiet cores
    python benchmarks/truth.py --quick             two models, four plans each, one launch
    python benchmarks/truth.py --keep DIR          go on where an earlier run with DIR ended
    python benchmarks/truth.py --corrected         then fold the runs into the profiles, predict all
                                                   plans anew, and launch each once more
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from truth_parts import figures
from truth_parts.load import Load
from truth_parts.plans import (
    MODELS,
    PIPELINES,
    QUICK_PIPELINES,
    QUICK_SPLITS,
    SPLITS,
    Split,
    peaks_of,
    pipeline_plan,
    signature,
    split_plan,
)

from hetflow.devices.local import local_devices
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord

PARTS = Path(__file__).with_name("truth_parts")
QUICK_MODELS = ("mlp", "cnn")
ROUNDS, CORRECTED_ROUNDS = 3, 1
# What other processes may use of the machine's cores during a launch or a profile. Above it, it is
# made again, whatever was measured, and so often at most.
QUIET_CORES, MOST_TRIES = 0.1, 3
# Beside training: processes start and import torch, a profile is taken. Of two quiet cores.
LAUNCH_SECONDS, PROFILE_SECONDS = 4.5, 45.0


@dataclass(frozen=True)
class Task:
    """One model in a folder of its own, on up to two devices of a type.

    ``folder`` keeps profiles, plans and runs; what is there already is not made again.
    """

    name: str
    folder: Path
    device_type: str
    quick: bool
    seconds: float

    @property
    def model(self):
        """How it is profiled and trained."""
        return MODELS[self.name]

    @property
    def target(self):
        """What `hetflow profile` is given."""
        return f"{PARTS / 'workloads.py'}:{self.model.factory}"

    @property
    def profile_path(self):
        """Where its profile is."""
        return self.folder / "profiles" / f"{self.name}.{self.device_type}.json"

    def profiled(self):
        """Profile as docs/profiling.md says, once."""
        microbatches = (self.model.size, 2 * self.model.size)

        def profile():
            hetflow(
                "profile", self.target, "--name", self.name, "--device", self.device_type,
                "--batch-sizes", ",".join(map(str, self.model.batch_sizes)),
                "--layers", "--microbatch-size", ",".join(map(str, microbatches)), "--links",
                *(["--quick"] if self.quick else []), "--force",
                "-o", self.folder / "profiles",
            )  # fmt: skip

        undisturbed(self.folder / "profile-load.json", self.profile_path.exists, profile)
        return files.read(self.profile_path, Profile)

    def plans(self):
        """By name: (plan, whether it is the solver's own). Equal ones stand once."""
        profile, found = self.profiled(), {}
        splits, pipelines = (QUICK_SPLITS, QUICK_PIPELINES) if self.quick else (SPLITS, PIPELINES)
        own = {
            "solved split": ("split",),
            "solved pipeline": ("pipeline",),
            "solved pipeline of 2 stages": ("pipeline", "--num-stages", "2"),
        }
        for name, flags in own.items():
            found[name] = (self.solved(name, *flags), "stages" not in name)
        for entry in (*splits, *pipelines):
            make = split_plan if isinstance(entry, Split) else pipeline_plan
            found[entry.name] = (make(profile, self.model, entry), False)
        known, kept = set(), {}
        for name, (plan, is_solved) in found.items():
            if signature(plan) not in known:
                known.add(signature(plan))
                kept[name] = (plan, is_solved)
        return kept

    def solved(self, name, strategy, *flags):
        """The solver's own plan for two devices."""
        path = self.folder / "solved" / f"{file_name(name)}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            hetflow(
                "solve", "--profiles", self.folder / "profiles", "--gpus", f"2x{self.device_type}",
                "--batch-size", str(12 * self.model.size), "--strategy", strategy, *flags,
                "-o", path,
            )  # fmt: skip
        return files.read(path, Plan if strategy == "split" else Plan)

    def launched(self, name, plan, number):
        """The record of launch ``number`` of a plan, made once; None where it failed."""
        folder = self.folder / "runs" / file_name(name) / str(number)
        record = folder / "run.json"
        path = self.folder / "plans" / f"{file_name(name)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, plan, force=True)
        steps = figures.steps_of(plan.predicted.step_seconds, self.seconds)

        def launch():
            hetflow(
                "launch", "--force", "-o", folder, path, PARTS / "train.py",
                "--target", self.target, "--steps", str(steps),
                "--batch-size", str(plan.global_batch_size), check=False,
            )  # fmt: skip

        if not undisturbed(folder / "load.json", lambda: is_done(record), launch):
            say(f"{self.name}, {name}: the launch failed; see {folder}")
            return None
        return files.read(record, RunRecord)

    def rows(self, rounds):
        """A row for each plan, once all its launches are done; plans take turns."""
        plans = self.plans()
        runs = {name: [] for name in plans}
        for number in range(rounds):
            for name, (plan, _) in plans.items():
                run = self.launched(name, plan, number)
                if run is not None and run.measured_step_seconds is not None:
                    runs[name].append(run)
        profile, rows = self.profiled(), []
        for name, (plan, is_solved) in plans.items():
            if not runs[name]:
                continue
            row = figures.row_of(
                plan, runs[name], peaks_of(profile, plan), name, is_solved=is_solved
            )
            paths = (self.folder / "runs" / file_name(name) / str(n) for n in range(rounds))
            loads = (read_json(path / "load.json") for path in paths)  # none of a killed launch
            row["loads"] = [load for load in loads if load is not None]
            rows.append(row)
            say_row(self.name, row)
        return rows

    def corrected(self, folder):
        """The same task with a profile into which the runs of this one are folded."""
        to = Task(self.name, folder, self.device_type, self.quick, self.seconds)
        if not to.profile_path.exists():
            records = sorted((self.folder / "runs").glob("*/*/run.json"))
            runs = [argument for path in records for argument in ("--from-run", path.parent)]
            hetflow("profile", *runs, "--profiles", self.folder / "profiles",
                    "-o", folder / "profiles")  # fmt: skip
        return to


def undisturbed(load_path, is_made, make):
    """Make something while the machine does nothing else, unless that was done before.

    Where other processes used more than ``QUIET_CORES``, it is made again; the last try of
    ``MOST_TRIES`` stays. What was measured does not decide. Returns whether it was made.
    """
    known = read_json(load_path) if is_made() else None
    if known is None and is_made():
        return True  # its load is not known
    tries = known.get("tries", 1) if known else 0
    while known is None or (tries < MOST_TRIES and is_disturbed(known)):
        with Load() as load:
            make()
        if not is_made():
            return False
        tries += 1
        known = {**load.figures, "tries": tries}
        write_json(load_path, known)
    return True


def is_disturbed(load):
    """Whether others used the machine; False where that is not known."""
    return (load["others_cores"] or 0.0) > QUIET_CORES


def hetflow(*arguments, check=True):
    """Run one hetflow command; its exit code. What it said is shown where it failed."""
    done = subprocess.run(
        [sys.executable, "-m", "hetflow.cli.main", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        say(done.stderr.rstrip())
    if done.returncode and check:
        raise SystemExit(f"hetflow {arguments[0]} ended with exit code {done.returncode}")
    return done.returncode


def is_done(record):
    """Whether a launch has left a whole record."""
    return record.exists() and files.read(record, RunRecord).status == "done"


def file_name(name):
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def write_json(path, document):
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def say(text):
    print(text, flush=True)


def say_row(model, row):
    """One line: the step, the term that is most off, and the peaks."""
    worst, line = row["worst_term"], ""
    if worst is not None:
        term = row["terms"][worst]
        line = (
            f"; {worst} {term['predicted_seconds'] * 1e3:.1f} for "
            f"{term['measured_seconds'] * 1e3:.1f} ms"
        )
    memory = ", ".join(f"{100 * error:+.0f} %" for error in figures.memory_errors(row))
    say(
        f"{model:11} {row['plan']:38} predicted {row['predicted_step_seconds'] * 1e3:7.1f} ms  "
        f"measured {row['measured_step_seconds'] * 1e3:7.1f} ms  {100 * row['error']:+6.1f} %"
        f"  peaks {memory or 'not predicted'}{line}"
    )


def say_summary(title, rows, models):
    """Mean and worst errors, and the regret of each model."""
    for kind, entry in figures.summary_of(rows).items():
        say(
            f"{title}, {entry['num_plans']} {kind}s: mean |error| {100 * entry['mean_error']:.1f} "
            f"%, worst {100 * entry['worst_error']:.1f} %{_said_memory(entry)}"
        )
    drift = figures.speed_drift(rows)
    if drift is not None:
        say(f"{title}: the machine's own speed drifted by {100 * drift:.0f} % (a fixed loop)")
    for model, own in models.items():
        regrets = {kind: figures.regret_of(own, kind) for kind in ("split", "pipeline")}
        told = [f"{kind} {100 * r:.1f} %" for kind, r in regrets.items() if r is not None]
        say(f"{title}, {model}: the solver's plan over the best measured: {', '.join(told)}")


def _said_memory(entry):
    if entry["mean_memory_error"] is None:
        return "; peaks not predicted"
    return (
        f"; peaks {100 * entry['mean_memory_error']:.1f} % off on average, at most "
        f"{100 * entry['most_under_memory']:.1f} % under"
    )


def document_of(models):
    """What is written with --json, of one turn."""
    rows = [row for own in models.values() for row in own]
    return {
        "models": {
            name: {
                "rows": own,
                "summary": figures.summary_of(own),
                "regret": {kind: figures.regret_of(own, kind) for kind in ("split", "pipeline")},
            }
            for name, own in models.items()
        },
        "summary": figures.summary_of(rows),
        "speed_drift": figures.speed_drift(rows),
    }


def main():
    """Profile, plan, launch and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two models, four plans, one launch")
    parser.add_argument("--model", action="append", choices=list(MODELS), help="only this one")
    parser.add_argument("--device", help="device type [default: the first GPU type, else cpu]")
    parser.add_argument("--rounds", type=int, help="launches of each plan [default: 3, quick 1]")
    parser.add_argument("--seconds", type=float, default=2.5, help="of training in a launch")
    parser.add_argument("--keep", type=Path, help="folder to keep all in, and to go on from")
    parser.add_argument("--corrected", action="store_true", help="fold the runs in, and repeat")
    parser.add_argument(
        "--corrected-rounds", type=int, help="launches of each plan then [default: 1]"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    device_type = arguments.device or local_devices()[0].device_type
    names = arguments.model or (QUICK_MODELS if arguments.quick else tuple(MODELS))
    rounds = arguments.rounds or (1 if arguments.quick else ROUNDS)
    num_plans = 3 + (4 if arguments.quick else len(SPLITS) + len(PIPELINES))
    more = (arguments.corrected_rounds or CORRECTED_ROUNDS) if arguments.corrected else 0
    launches = len(names) * num_plans * (rounds + more)
    expected = launches * (LAUNCH_SECONDS + arguments.seconds) + len(names) * PROFILE_SECONDS
    say(f"at most {launches} launches on {device_type}; about {expected / 60:.0f} minutes")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        root = (arguments.keep or Path(temporary)).resolve()
        tasks = [
            Task(name, root / name, device_type, arguments.quick, arguments.seconds)
            for name in names
        ]
        first = {task.name: task.rows(rounds) for task in tasks}
        document = {"device_type": device_type, "rounds": rounds}
        tell("as profiled", first, began, document, arguments.json)
        if arguments.corrected:
            again = [task.corrected(root / f"{task.name}-corrected") for task in tasks]
            corrected = {task.name: task.rows(more) for task in again}
            document["corrected_rounds"] = more
            document["repeat"] = figures.repeat_of(first, corrected)
            tell("corrected", corrected, began, document, arguments.json)
            for kind, entry in document["repeat"].items():
                say(
                    f"the same {entry['num_plans']} {kind}s as first measured: mean |error| "
                    f"{100 * entry['mean_error']:.1f} %, worst {100 * entry['worst_error']:.1f} %"
                )


def tell(title, models, began, document, path):
    """Say what one turn has given, and write it beside the one before."""
    say_summary(title, [row for rows in models.values() for row in rows], models)
    document[title] = document_of(models)
    say(f"took {(time.monotonic() - began) / 60:.0f} minutes")
    if path:
        files.write_text(path, json.dumps(document, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
