"""Faults, drawn from a seed: what is done, and when."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetflow.schema.options import Shard

from ..runtime import crafted

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
    "crafted": 4,  # the newest checkpoint holds nonsense, and its checksum is right
    "all broken": 3,  # each checkpoint is cut short or has a bit flipped
    "lost host": 0,  # SIGKILL of one of two launchers, and its workers with it
    "disk full at the end": 0,  # of all workers, until the launch is over
    "SIGTERM after finish": 0,  # of the launch or of a worker, when the job is over
}
# What happens to a pipeline: nobody can go on, all start again from the last checkpoint.
PIPELINE_KINDS = {
    **{"kill": 4, "freeze": 3, "pause": 2, "slow link": 1, "cut": 2, "full disk": 2},
    **{"all killed": 1, "SIGTERM": 1, "launcher killed": 1},
    **{"torn": 1, "bit flip": 1, "crafted": 1, "all broken": 1},
}
HOSTS_KINDS = {"lost host": 5, "kill": 2, "SIGTERM": 1}  # one host's launch gets the SIGTERM
LAST_KINDS = ("disk full at the end", "SIGTERM after finish")  # a run has one, as its last
PIPELINE = "pipeline"  # in place of a mapping: two stages
HOSTS = "hosts"  # two launchers, with a worker each
MAPPINGS = [
    *("2xcpu:fast", "3xcpu:fast", "4xcpu:fast", "1xcpu:fast,1xcpu:slow"),
    *("1xcpu:fast,2xcpu:slow", "2xcpu:fast,2xcpu:slow"),
]
EVEN_MAPPINGS = [MAPPINGS[0], *MAPPINGS[2:4], MAPPINGS[5]]


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
    """One run: where it starts, what happens, and the mappings that it goes on with.

    Workers of a split may share states, ``shard``, and keep them twice, ``redundancy`` 1.
    """

    on_failure: str
    mappings: tuple[str, ...]
    faults: tuple[Fault, ...]
    shard: Shard | None = None
    redundancy: int = 0

    @property
    def own_mappings(self) -> list[str]:
        """Those to resize to: workers that share states have equally many virtual nodes."""
        return MAPPINGS if self.shard is None else EVEN_MAPPINGS

    @property
    def is_pipeline(self) -> bool:
        """Whether it is a pipeline's."""
        return self.mappings[0] == PIPELINE

    @property
    def is_on_hosts(self) -> bool:
        """Whether it is of two launchers."""
        return self.mappings[0] == HOSTS


def stories(seed: int, num_faults: int, faults_a_run: int = 25) -> list[Story]:
    """Runs with so many faults; the same for the same arguments.

    A fifth is for pipelines, and one in 25 for launches over two hosts; at least one for each.
    """
    draw = random.Random(seed)
    found = []
    others = {PIPELINE: max(1, num_faults // 5), HOSTS: max(1, num_faults // 25)}
    for_split = num_faults - sum(others.values())
    while for_split > 0:
        number = min(for_split, faults_a_run)
        for_split -= number
        policy = draw.choice(["shrink", "shrink", "replace"])
        shard: Shard | None = draw.choice([None, None, None, "optimizer", "gradients", "all"])
        copies = 0 if shard is None else draw.randint(0, 1)
        if shard is not None and not copies:
            policy = "replace"
        own = MAPPINGS if shard is None else EVEN_MAPPINGS
        mappings = tuple(draw.choice(own) for _ in range(4))
        found.append(Story(policy, mappings, _drawn(draw, KINDS, number), shard, copies))
    for name, kinds in ((PIPELINE, PIPELINE_KINDS), (HOSTS, HOSTS_KINDS)):
        while others[name] > 0:
            number = min(others[name], faults_a_run)
            others[name] -= number
            faults = _drawn(draw, kinds, number, has_last=name == PIPELINE)
            found.append(Story("replace", (name,), faults))
    return found


def _drawn(
    draw: random.Random, kinds: dict[str, int], number: int, *, has_last: bool = True
) -> tuple[Fault, ...]:
    drawn = draw.choices(list(kinds), list(kinds.values()), k=number - has_last)
    return _faults(draw, [*drawn, draw.choice(LAST_KINDS)] if has_last else drawn)


def _faults(draw: random.Random, kinds: Sequence[str]) -> tuple[Fault, ...]:
    return tuple(
        Fault(kind, draw.randint(1, 6), draw.uniform(0, 0.05), draw.random(), draw.random())
        for kind in kinds
    )


def folder_to_harm(checkpoint: Path, fault: Fault) -> Path:
    """The checkpoint itself, or one of its parts."""
    parts = sorted(checkpoint.glob("part-*"))
    return parts[int(fault.second * len(parts))] if parts else checkpoint


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


def craft(checkpoint: Path, fault: Fault) -> None:
    """Put something into a checkpoint that no job writes, under a checksum that is right."""
    manifest = crafted.content_of(checkpoint)
    # Not the numbers of the state itself, nor a seed: one value of theirs is as good as another.
    shallow = [at for at in crafted.places(manifest) if 1 <= len(at) <= 3 and at[0] != "state"]
    shallow = [at for at in shallow if at[-1] not in ("seed", "registered_sha256")]
    at = shallow[int(fault.first * len(shallow))]
    value = [None, -1, 10**30, "x", [[]], {"tensor": -1}][int(fault.second * 6)]
    for how in (crafted.replaced(value), crafted.removed):
        harmed = crafted.changed(manifest, at, how)
        if harmed != manifest:
            break
    crafted.put(checkpoint, harmed)
