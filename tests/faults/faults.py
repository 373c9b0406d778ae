"""Faults, drawn from a seed: what is done, and when."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# How many of each there are in a hundred, about.
KINDS = {
    "kill": 17,  # SIGKILL of a worker
    "freeze": 5,  # SIGSTOP of a worker, for good
    "pause": 8,  # SIGSTOP of a worker or the launcher, shorter than the heartbeat's limit
    "slow link": 7,  # a worker that only moves half of the time, for a second
    "cut": 14,  # all connections of a worker are shut down
    "full disk": 9,  # no worker can write a checkpoint (RLIMIT_FSIZE), for some steps
    "resize": 9,
    "resize, kill": 6,  # and a worker or a newcomer dies on the way
    "resize, freeze": 3,  # a newcomer is stopped as soon as it is there
    "kill in predict": 6,  # SIGKILL of a worker that is in its part of a prediction
    "all killed": 4,  # every worker
    "SIGTERM": 4,  # of the launch
    "launcher killed": 4,  # SIGKILL
    "torn": 7,  # the newest checkpoint is cut short, or a file of it is gone; all starts again
    "bit flip": 7,  # one bit of the newest checkpoint; all starts again
}
# What happens to a pipeline: nobody can go on, all start again from the last checkpoint.
PIPELINE_KINDS = {
    **{"kill": 4, "freeze": 4, "pause": 2, "slow link": 1, "cut": 2},
    **{"all killed": 1, "SIGTERM": 1, "launcher killed": 1},
}
PIPELINE = "pipeline"  # in place of a mapping: two stages
MAPPINGS = [
    *("2xcpu:fast", "3xcpu:fast", "4xcpu:fast", "1xcpu:fast,1xcpu:slow"),
    *("1xcpu:fast,2xcpu:slow", "2xcpu:fast,2xcpu:slow"),
]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    It comes ``steps`` steps and ``seconds`` after the one before was over; ``first`` and
    ``second`` in [0, 1) choose what it hits.
    """

    kind: str
    steps: int
    seconds: float
    first: float
    second: float

    def __str__(self) -> str:
        return (
            f"{self.kind}: {self.steps} steps and {self.seconds * 1e3:.0f} ms later, "
            f"choices {self.first:.3f} {self.second:.3f}"
        )


@dataclass(frozen=True, slots=True)
class Story:
    """One run: where it starts, what happens, and the mappings that it goes on with."""

    on_failure: str
    mappings: tuple[str, ...]
    faults: tuple[Fault, ...]

    @property
    def is_pipeline(self) -> bool:
        """Whether it is a pipeline's."""
        return self.mappings[0] == PIPELINE


def stories(seed: int, num_faults: int, faults_a_run: int = 25) -> list[Story]:
    """Runs with so many faults, a fifth of them in pipelines; the same for the same arguments."""
    draw = random.Random(seed)
    found = []
    for_pipelines = num_faults // 5
    num_faults -= for_pipelines
    while num_faults > 0:
        number = min(num_faults, faults_a_run)
        num_faults -= number
        kinds = draw.choices(list(KINDS), list(KINDS.values()), k=number)
        faults = _faults(draw, kinds)
        policy = draw.choice(["shrink", "shrink", "replace"])
        mappings = tuple(draw.choice(MAPPINGS) for _ in range(4))
        found.append(Story(policy, mappings, faults))
    if for_pipelines:
        weights = list(PIPELINE_KINDS.values())
        kinds = draw.choices(list(PIPELINE_KINDS), weights, k=for_pipelines)
        found.append(Story("replace", (PIPELINE,), _faults(draw, kinds)))
    return found


def _faults(draw: random.Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    return tuple(
        Fault(kind, draw.randint(1, 6), draw.uniform(0, 0.05), draw.random(), draw.random())
        for kind in kinds
    )


def tear(checkpoint: Path, fault: Fault) -> None:
    """Cut a file of a checkpoint short, or take it away."""
    path = checkpoint / ("tensors.bin" if fault.first < 0.5 else "manifest.json")
    if fault.second < 0.1:
        path.unlink()
    else:
        with path.open("r+b") as stream:
            stream.truncate(int(path.stat().st_size * (fault.second - 0.1) / 0.9))


def flip(checkpoint: Path, fault: Fault) -> None:
    """Change one bit of a file of a checkpoint."""
    path = checkpoint / ("tensors.bin" if fault.first < 0.7 else "manifest.json")
    bit = int(fault.second * path.stat().st_size * 8)
    with path.open("r+b") as stream:
        stream.seek(bit // 8)
        (byte,) = stream.read(1)
        stream.seek(bit // 8)
        stream.write(bytes([byte ^ 1 << bit % 8]))
