"""Plans for a small GPT over unlike types, and their steps on the virtual clock."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hetflow
from hetflow.planning.costs.estimate import Estimator, estimated_profile
from hetflow.profilers import targets
from hetflow.profilers.operator_counts import count_model
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.testing import Rates, Timeline
from hetflow.testing.fakecuda.cards import CARDS
from hetflow.testing.timeline import Device
from hetflow.tests.testing.hosts import Host, software_host

from . import planned

SCRIPT = Path(planned.__file__)
# Products of the small model then take as long as those of real models, and launches do not count.
SMALL = Rates(slower=4000.0)
TYPES = ("V100", "A100", "T4")  # T4 have PCIe links, the others NVLink
SIZES, MICROBATCHES = (1, 2, 4, 8, 16, 32), (1, 4, 8, 16)
# GPUs, and what each plan is asked for: the first questions of each kind that a seed drew and that
# have a plan of several types. Each pass is planned to add to gradients, and a step's first
# one writes them: steps of few samples, whose first pass is small, are planned too slow.
ASKED = ("strategy", "batch_size", "microbatch_size", "num_stages", "schedule")
QUESTIONS = (
    ("1xV100,1xA100", "split", 32),
    ("1xV100,1xA100", "split", 48),
    ("1xV100,2xT4", "split", 76),
    ("2xV100,2xA100", "pipeline", 48, 8, 4, "1f1b"),
    ("1xV100,2xT4", "pipeline", 16, 4, 4, "interleaved"),
    ("1xV100,1xA100", "pipeline", 48, 16, 2, "zb-h1"),
    ("1xV100,1xA100,1xT4", "pipeline", 16, 4, 4, "zb-v"),
    ("2xV100,2xA100", "pipeline", 48, 8, 2, "gpipe"),
    ("1xV100,1xA100,1xT4", "pipeline", 96, 16, 2, "1f1b"),
    ("1xV100,1xA100,1xT4", "parallel", 16, 1),
    ("1xV100,2xT4", "parallel", 16, 4),
    ("2xV100,2xA100", "parallel", 48, 16),
)


def profiles() -> tuple[Profile, ...]:
    """What ``hetflow profile --device spec:TYPE --layers`` estimates, on devices as slow."""
    target = targets.parse(f"{SCRIPT}:workload")
    counts = count_model(target, SIZES, MICROBATCHES, "sgd")
    return tuple(
        estimated_profile(counts, Estimator(spec=SMALL.spec(CARDS[kind].spec)), model="planned")
        for kind in TYPES
    )


def answers() -> list[Plan]:
    """The plans by which the questions are answered now."""
    known, found = profiles(), []
    for pool, *question in QUESTIONS:
        asked: dict[str, Any] = dict(zip(ASKED, question, strict=False))
        own = [profile for profile in known if f"x{profile.device_type}" in pool]
        found.append(hetflow.solve(own, pool, **asked))
    return found


def _told(plan: Plan) -> str:
    """A plan in short: of each stage its replicas."""
    stages = (
        " + ".join(
            f"{one.num_replicas} x {one.tensor_parallel_size} {one.device_type} "
            f"({one.virtual_nodes} of {one.virtual_node_batch_size})"
            for one in stage.replicas
        )
        for stage in plan.stages
    )
    return f"{plan.kind} {plan.schedule}: " + " | ".join(stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan and the timeline that its last step is in: from ``begin`` to ``end``, by device."""

    plan: Plan
    timeline: Timeline
    periods: dict[Device, tuple[float, float]]

    def __str__(self) -> str:
        return f"{self.virtual_seconds:.4f} s, planned {self.ratio:.3f} of it: {_told(self.plan)}"

    @property
    def virtual_seconds(self) -> float:
        """Of the step on the slowest device."""
        return max(end - begin for begin, end in self.periods.values())

    @property
    def ratio(self) -> float:
        """Planned over virtual."""
        return self.plan.predicted.step_seconds / self.virtual_seconds

    @property
    def hidden_share(self) -> float:
        """Of transfers, on the device where it is least."""
        return min(
            self.timeline.hidden_share_of(device, period) for device, period in self.periods.items()
        )


def trials(folder: Path, plans: Sequence[Plan], fault: str = "none") -> Iterator[Trial]:
    """Train under each plan, those with the same types in order of ranks in the same processes."""
    alike: dict[tuple[str, ...], list[Plan]] = defaultdict(list)
    for plan in plans:
        alike[tuple(slot.device_type for slot in lower(plan).workers)].append(plan)
    for number, (types, group) in enumerate(alike.items()):
        place = folder / f"{fault}-{number}"
        place.mkdir()
        host = software_host(place, ",".join(types), FAKECUDA_TIMELINE="timeline")
        yield from _launched(host, group, fault)


def _launched(host: Host, plans: Sequence[Plan], fault: str) -> Iterator[Trial]:
    paths = [host.folder / f"{number}.json" for number in range(len(plans))]
    for path, plan in zip(paths, plans, strict=True):
        files.write(path, plan)
    host.done("launch", "--determinism", "none", paths[0], SCRIPT, fault, *paths)
    assert host.faults == []
    timeline = host.timeline(SMALL)
    for number, plan in enumerate(plans):
        last = (number + 1) * planned.NUM_STEPS - 1
        ends = {device: timeline.steps(device, "end") for device in timeline.devices}
        periods = {device: (found[last - 1], found[last]) for device, found in ends.items()}
        yield Trial(plan=plan, timeline=timeline, periods=periods)
