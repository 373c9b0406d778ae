"""Random faults over short runs, from a seed; every run must end with the same digest.

python -m tests.faults.campaign --seed 1 --faults 100
"""

import argparse
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from .faults import KINDS, PIPELINE, Story, stories
from .processes import Commands, marked_commands
from .run import NUM_EPOCHS, Run, Violation

Expected = tuple[str, str, str]  # digests of a split, of a pipeline, and of a split's weights


def undisturbed(folder: Path, commands: Commands, num_epochs: int = NUM_EPOCHS) -> Expected:
    """Digests of runs to which nothing happens."""
    runs = []
    for name in ("1xcpu:fast", PIPELINE):
        runs.append(Run(folder / name, Story("stop", (name,), ()), commands, num_epochs))
        runs[-1].go()
    return runs[0].digest(), runs[1].digest(), runs[0].digest_of("weights")


def campaign(
    folder: Path,
    seed: int,
    num_faults: int,
    expected: Expected,
    commands: Commands,
    *,
    num_epochs: int = NUM_EPOCHS,
    say: Callable[[str], object] = lambda text: None,
) -> Counter[str]:
    """Go through the stories of a seed; how many faults of each kind, and how launches ended.

    Args:
        folder: Where runs have their folders; those of runs that ended well are removed.
        seed: Of the stories.
        num_faults: How many faults.
        expected: The digests at the end.
        commands: How launches start.
        num_epochs: How long each run trains, as the undisturbed ones did.
        say: Told after each run how it went.

    Raises:
        Violation: With the seed, the faults so far and the folder, to look at it and repeat it.
    """
    counts: Counter[str] = Counter()
    for number, story in enumerate(stories(seed, num_faults)):
        part = 0
        while story.faults:
            began, own = time.monotonic(), folder / f"seed-{seed}-run-{number}-{part}"
            run = Run(own, story, commands, num_epochs)
            try:
                left = run.go()
                if run.digest() != expected[2 if story.shard else story.is_pipeline]:
                    raise Violation(f"ended with digest {run.digest()}, not {expected}")
            except Exception as error:
                raise Violation(_report(seed, num_faults, run, error)) from error
            counts += run.counts
            say(
                f"run {number}: {len(run.did)} faults by step {run.last_step}, "
                f"{run.num_launches} launches, {time.monotonic() - began:.0f} s, the right digest"
            )
            shutil.rmtree(own)
            story, part = replace(story, faults=tuple(left)), part + 1
    return counts


def _report(seed: int, num_faults: int, run: Run, error: Exception) -> str:
    return "\n".join(
        [
            f"{type(error).__name__}: {error}",
            f"seed {seed}, {run.folder}, --on-failure {run._story.on_failure}, "
            f"shared {run._story.shard}, redundancy {run._story.redundancy}, faults so far:",
            *(f"  {fault}" for fault in run.did),
            "output of the last launch:",
            *(f"  {line}" for line in run.output().splitlines()[-30:]),
            f"repeat it with: python -m tests.faults.campaign --seed {seed} --faults {num_faults}",
        ]
    )


def table(counts: Counter[str]) -> str:
    """Faults by kind, and how commands ended."""
    rows = [f"{kind:<16} {counts[kind]:4}" for kind in KINDS]
    merged: Counter[str] = Counter()
    for what, number in counts.items():
        if what not in KINDS:
            merged[re.sub(r"worker \d+", "worker N", what)] += number
    rows += [f"{number:4} {what}" for what, number in sorted(merged.items())]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--keep", type=Path, help="folder for runs; what failed stays there")
    arguments = parser.parse_args()
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="hetflow-faults-"))
    began = time.monotonic()
    say = lambda text: print(text, flush=True)  # noqa: E731, T201
    with marked_commands() as commands:
        expected = undisturbed(folder / f"undisturbed-{time.time_ns()}", commands)
        try:
            counts = campaign(folder, arguments.seed, arguments.faults, expected, commands, say=say)
        except Violation as error:
            sys.exit(str(error))
    say(table(counts))
    number = sum(counts[kind] for kind in KINDS)
    say(f"{number} faults from seed {arguments.seed} in {time.monotonic() - began:.0f} s")
    if arguments.keep is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
