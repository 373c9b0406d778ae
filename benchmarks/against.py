"""CPU seconds of commands beside those of an earlier version: each pair in turn, in one run.

    git worktree add ../before 6405743
    python benchmarks/against.py ../before --json FILE
    python benchmarks/against.py ../before --only "solve*" --turns 21
    python benchmarks/against.py ../before --instructions

Both versions run under this Python, with its libraries, on the same inputs, each in a folder of its
own. A turn runs every command once with either version, and the next turn begins with the other
one; the ratio of a command is the median over turns. ``--instructions`` counts instructions under
valgrind instead (one run each, no ratio of medians): other work on the machine does not change
these, but they say nothing about memory and leave compiled loops out.

An earlier version without ``solve split`` and ``solve pipeline``, as 6405743, is asked for ``solve
--strategy split`` and ``--strategy pipeline``. One number of each answer is compared (``ANSWERS``),
and unlike ones are said: a version that computes something else is neither slower nor faster.
"""

import argparse
import json
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from hetflow.schema import files
from hetflow.tests.data import reference
from hetflow.tests.golden import inputs

ROOT = Path(__file__).resolve().parent.parent
HETFLOW = ("-m", "hetflow")
POOL = "--gpus 2xV100,3xP100"
LINK = "--link-bytes-per-second 1e9"
PAIRS = "--throughputs throughputs.json --gpus 200xV100,200xP100,200xK80"
GAVEL = "--throughputs gavel.json --gpus 36xv100,36xp100,36xk80 --policy las"


@dataclass(frozen=True)
class Command:
    """What is run: arguments of Python, and of the earlier version's where they differ."""

    name: str
    arguments: tuple[str, ...]
    earlier: tuple[str, ...] | None = None
    counts: bool = True  # instructions can be counted: no compiled loops


@dataclass(frozen=True)
class Version:
    """One checkout, importable as ``hetflow`` through ``home``, with a folder of inputs."""

    name: str
    home: Path
    folder: Path
    has_kinds: bool


def commands() -> Iterator[Command]:
    """All of them; those that write a file are read by later ones."""
    yield Command("python alone", ("-c", "pass"))
    yield Command("import hetflow", ("-c", "import hetflow"))
    yield Command("--help", (*HETFLOW, "--help"))
    yield Command("solve --help", (*HETFLOW, "solve", "--help"))
    split = f"--profiles flat {POOL} --batch-size 256 -o split.json --force"
    yield _of_kind("solve split", "split", split)
    pipeline = f"--profiles layered {POOL} --batch-size 64 {LINK} -o pipeline.json --force"
    yield _of_kind("solve pipeline", "pipeline", pipeline)
    published = (
        "--profiles gnmt --gpus 4x(4xV100) --batch-size 1024 --schedule pipedream "
        "--optimizer sgd --link-bytes-per-second 1.25e9 -o gnmt.json --force"
    )
    yield _of_kind("solve pipeline, GNMT", "pipeline", published)
    both = f"solve --profiles layered {POOL} --batch-size 64 {LINK} -o plan.json --force"
    yield _plain("solve", both)
    for jobs in JOBS:
        yield _plain(
            f"allocate, {jobs} jobs", f"allocate jobs{jobs}.json {PAIRS} -o a{jobs}.json --force"
        )
    yield _plain(
        "allocate, 512, water filling",
        f"allocate jobs512.json {PAIRS} --policy las_water_filling -o water.json --force",
    )
    yield _plain("check, a split", f"check split.json --profiles flat {POOL}")
    yield _plain("check, a pipeline", f"check pipeline.json --profiles layered {POOL} {LINK}")
    yield _plain("check, 512 jobs", f"check a512.json --jobs jobs512.json {PAIRS}")
    for name, trace in TRACES.items():
        yield _plain(
            f"simulate, {name}", f"simulate {trace} {GAVEL} -o {trace}.json --force", counts=False
        )


JOBS = (32, 512, 2048)
TRACES = {
    "60 jobs": "small_single_n60_lam1800_seed0.trace",
    "1,000 jobs": "cont_single_n1000_lam640_seed0.trace",
    "1,000 jobs of 1 to 8": "cont_multi_n1000_lam1385_seed0.trace",
}


def _plain(name: str, line: str, *, counts: bool = True) -> Command:
    return Command(name, (*HETFLOW, *line.split()), counts=counts)


def _of_kind(name: str, kind: str, options: str) -> Command:
    words = tuple(options.split())
    return Command(
        name,
        (*HETFLOW, "solve", kind, *words),
        (*HETFLOW, "solve", "--strategy", kind, *words),
    )


def prepared(name: str, checkout: Path, place: Path) -> Version:
    """A version with its inputs.

    Every command is run once: Python and numba compile, and ``check`` has what it reads.
    """
    home, folder = place / name / "home", place / name / "work"
    home.mkdir(parents=True)
    folder.mkdir()
    (home / "hetflow").symlink_to(checkout.resolve(strict=True), target_is_directory=True)
    inputs.write_inputs(folder)
    table = json.loads((folder / "throughputs.json").read_text(encoding="utf-8"))
    for count in JOBS:
        drawn = json.dumps(_jobs(count, [row["model"] for row in table["models"]]))
        (folder / f"jobs{count}.json").write_text(drawn, encoding="utf-8")
    published = reference.folder()
    for trace in TRACES.values():
        (folder / trace).write_bytes((published / "gavel" / "traces" / trace).read_bytes())
    rates = published / "gavel" / "throughputs" / "simulation_throughputs.json"
    (folder / "gavel.json").write_bytes(rates.read_bytes())
    (folder / "gnmt.graph.txt").write_bytes(
        (published / "pipedream" / "gnmt.graph.txt").read_bytes()
    )
    (folder / "gnmt").mkdir()
    version = Version(name, home, folder, "def solve_split" in _text(checkout / "cli" / "solve.py"))
    _call(version, (*HETFLOW, "import", "gnmt.graph.txt", "--device-type", "V100",
                    "--device-memory", "16GB", "-o", "gnmt/v100.json"))  # fmt: skip
    for command in commands():
        _call(version, arguments_of(command, version))
    return version


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _jobs(count: int, models: Iterable[str]) -> dict[str, Any]:
    draw = random.Random(f"against {count}")
    known = sorted(set(models))
    rows = [
        {
            "id": f"job{number}",
            "model": draw.choice(known),
            "steps": float(round(10 ** draw.uniform(3.5, 5))),
            "scale_factor": draw.choice((1, 1, 1, 2, 4)),
            "priority_weight": draw.choice((1.0, 1.0, 5.0)),
            "arrival_seconds": 0.0,
        }
        for number in range(count)
    ]
    return {"schema": "hetflow.jobs/1", "jobs": rows}


def _environment(version: Version) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(version.home),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
    }


def _call(version: Version, arguments: tuple[str, ...], *, tool: tuple[str, ...] = ()) -> str:
    """Run Python with the version's ``hetflow``; what it wrote to stderr."""
    answer = subprocess.run(
        [*tool, sys.executable, "-P", *arguments],
        cwd=version.folder,
        env=_environment(version),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"{version.name}: {' '.join(arguments)}\n{answer.stderr}")
    return answer.stderr


def arguments_of(command: Command, version: Version) -> tuple[str, ...]:
    """The command as this version spells it."""
    if command.earlier is not None and not version.has_kinds:
        return command.earlier
    return command.arguments


def cpu_seconds(version: Version, command: Command) -> float:
    """User and system seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _call(version, arguments_of(command, version))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def instructions(version: Version, command: Command) -> float:
    """Instructions of one run."""
    tool = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")
    told = _call(version, arguments_of(command, version), tool=tool)
    found = re.search(r"I +refs: +([\d,]+)", told)
    assert found is not None, told
    return float(found[1].replace(",", ""))


# File that a command wrote -> keys down to the number that both versions should agree on.
ANSWERS = {
    "split.json": ("predicted", "step_seconds"),
    "pipeline.json": ("predicted", "step_seconds"),
    "gnmt.json": ("proof", "objective"),
    "plan.json": ("predicted", "step_seconds"),
    **{f"a{jobs}.json": ("certificate", "objective") for jobs in JOBS},
    "water.json": ("certificate", "objective"),
    **{f"{trace}.json": ("metrics", "average_jct_seconds") for trace in TRACES.values()},
}


def answers(version: Version) -> dict[str, Any]:
    """One number of each file that the version has written."""
    found = {}
    for name, keys in ANSWERS.items():
        path = version.folder / name
        if path.exists():
            value = json.loads(_text(path))
            for key in keys:
                value = value[key]
            found[name] = value
    return found


def measured(
    before: Version, now: Version, chosen: list[Command], turns: int
) -> dict[str, dict[str, float]]:
    """Run the pairs in turn; medians, and the middle half of the turns' ratios."""
    seconds: dict[str, list[tuple[float, float]]] = {command.name: [] for command in chosen}
    for turn in range(turns):
        for command in chosen:
            order = (before, now) if turn % 2 else (now, before)
            used = {version.name: cpu_seconds(version, command) for version in order}
            seconds[command.name].append((used[before.name], used[now.name]))
    rows = {}
    for name, pairs in seconds.items():
        ratios = sorted(second / first for first, second in pairs)
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        rows[name] = {
            "before_cpu_seconds": statistics.median(first for first, _ in pairs),
            "now_cpu_seconds": statistics.median(second for _, second in pairs),
            "ratio": middle,
            "ratio_lower_quartile": low,
            "ratio_upper_quartile": high,
        }
    return rows


def counted(before: Version, now: Version, chosen: list[Command]) -> dict[str, dict[str, float]]:
    """Instructions of either version, where they can be counted."""
    rows = {}
    for command in chosen:
        if not command.counts:
            continue
        first, second = instructions(before, command), instructions(now, command)
        rows[command.name] = {
            "before_instructions": first,
            "now_instructions": second,
            "ratio": second / first,
        }
    return rows


def main() -> None:
    """Measure every command with both versions and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="a checkout of the earlier version")
    parser.add_argument("--only", action="append", help="commands of this name (allocate*)")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--instructions", action="store_true", help="count, under valgrind")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    wanted = asked.only or ["*"]
    chosen = [each for each in commands() if any(fnmatch(each.name, name) for name in wanted)]
    with tempfile.TemporaryDirectory() as place:
        before, now = (
            prepared(name, checkout, Path(place))
            for name, checkout in (("before", asked.before), ("now", ROOT))
        )
        if asked.instructions:
            rows = counted(before, now, chosen)
        else:
            rows = measured(before, now, chosen, asked.turns)
        unlike = {
            name: (first, answers(now).get(name))
            for name, first in answers(before).items()
            if answers(now).get(name) != first
        }
    for name, row in rows.items():
        if asked.instructions:
            first, second = (row[f"{key}_instructions"] / 1e6 for key in ("before", "now"))
            told = f"{first:9,.0f} {second:9,.0f} M   {row['ratio']:.3f}"
        else:
            first, second = (row[f"{key}_cpu_seconds"] for key in ("before", "now"))
            told = f"{first:7.3f} {second:7.3f} s   {row['ratio']:.3f} "
            told += f"({row['ratio_lower_quartile']:.3f} to {row['ratio_upper_quartile']:.3f})"
        print(f"{name:30} {told}")
    for name, (first, second) in unlike.items():
        print(f"unlike answers, {name}: before {first}, now {second}")
    if asked.json:
        document = {"turns": asked.turns, "commands": rows, "unlike_answers": unlike}
        files.write_text(asked.json, json.dumps(document, indent=1) + "\n", force=True)


if __name__ == "__main__":
    main()
