"""What runs measured of the terms of a plan's step, finished or interrupted."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...schema.optimizer import OptimizerState
from ...schema.plan import ReplicaGroup
from ...schema.profile import Profile
from ...schema.run import DeviceRun, MeasuredTerm, MeasuredTerms, RunRecord

FEWEST_STEPS = 10
"""Full steps after the warm-up that a run must have to correct anything."""
_WARMUP_STEPS = 3  # records without terms count these in
_FEWEST_FOR_MEDIAN = 3
_INTERVAL_OF_MEDIAN = 1.96 * 1.2533 * 1.4826
"""Of 95 %, with normal errors: a median has 1.2533 times a mean's error, and sigma is 1.4826 of the
median distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run record, and where it was read from."""

    name: str
    record: RunRecord


class Measured(NamedTuple):
    """Seconds, with half the width of their 95 % interval; None where it is unknown."""

    seconds: float
    interval: float | None = None

    @classmethod
    def of(cls, term: MeasuredTerm) -> "Measured":
        """A run's term."""
        return cls(term.seconds, term.interval_seconds)


def together(values: Sequence[Measured]) -> Measured:
    """Several measurements of one thing, in any order."""
    # Three or more: their median, since one of them may have been disturbed, and the interval of a
    # measurement does not tell how far the next one is off. Two: their mean, weighted by inverse
    # variance where both have an interval; else with equal weights.
    if len(values) >= _FEWEST_FOR_MEDIAN:
        return _median(values)
    intervals = [value.interval for value in values if value.interval]
    if len(intervals) < len(values):
        return Measured(math.fsum(value.seconds for value in values) / len(values))
    if len(values) == 1:
        return values[0]
    narrowest = min(intervals)
    weights = [(narrowest / interval) ** 2 for interval in intervals]
    total = math.fsum(weights)
    products = [weight * value.seconds for weight, value in zip(weights, values, strict=True)]
    return Measured(math.fsum(products) / total, narrowest / math.sqrt(total))


def _median(values: Sequence[Measured]) -> Measured:
    """The median, its interval from how far the measurements are from it (their median too)."""
    middle = statistics.median(value.seconds for value in values)
    away = statistics.median(abs(value.seconds - middle) for value in values)
    return Measured(middle, _INTERVAL_OF_MEDIAN * away / math.sqrt(len(values)) or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker of a split's run.

    Attributes:
        num_host_devices: Workers on its host, itself included.
        step: Of which ``sync_seconds`` are exposed synchronisation (0 where it trained alone).
        virtual_node: What one more virtual node adds; None where the run does not tell.
        rest: The interval of what is left of the step beside virtual nodes, sync and update.
    """

    device_type: str
    batch_size: int
    virtual_nodes: int
    num_host_devices: int
    step: Measured
    sync_seconds: float
    update: Measured
    virtual_node: Measured | None
    load_seconds: float | None
    rest_interval: float | None
    peak_memory_bytes: int | None

    @property
    def own_seconds(self) -> float:
        """Virtual nodes and fixed cost: the step without synchronisation and update."""
        return self.step.seconds - self.sync_seconds - self.update.seconds


def workers_of(run: RunRecord) -> tuple[Worker, ...]:
    """The workers of a split's run that `why_not` has let pass."""
    plan = run.plan
    groups = [group for group in plan.groups for _ in range(group.num_devices)]
    on_host = Counter(device.host for device in run.devices)
    return tuple(
        _worker(device, groups[device.rank], on_host[device.host], len(run.devices) == 1)
        for device in run.devices
    )


def _worker(device: DeviceRun, group: ReplicaGroup, host: int, is_alone: bool) -> Worker:
    terms = device.terms or _older_terms(device)
    assert terms is not None
    return Worker(
        device_type=device.device_type,
        batch_size=group.virtual_node_batch_size,
        virtual_nodes=group.virtual_nodes,
        num_host_devices=host,
        step=Measured.of(terms.step),
        sync_seconds=0.0 if is_alone else terms.sync.seconds,
        update=Measured.of(terms.update),
        virtual_node=None if terms.virtual_node is None else Measured.of(terms.virtual_node),
        load_seconds=None if terms.load is None else terms.load.seconds,
        rest_interval=None if terms.fixed is None else terms.fixed.interval_seconds,
        peak_memory_bytes=device.peak_memory_bytes,
    )


def _older_terms(device: DeviceRun) -> MeasuredTerms | None:
    """What a record without terms has of them: the medians of whole parts of the step."""
    step, sync, update = device.step_seconds, device.sync_seconds, device.update_seconds
    steps = device.num_steps - _WARMUP_STEPS
    if step is None or sync is None or update is None or steps < 1:
        return None
    return MeasuredTerms(
        num_steps=steps,
        step=MeasuredTerm(seconds=step),
        sync=MeasuredTerm(seconds=sync),
        update=MeasuredTerm(seconds=update),
    )


def why_not(run: RunRecord, profiles: Sequence[Profile]) -> str | None:
    """Why a run cannot correct these profiles, as the end of a sentence; None if it can."""
    plan = run.plan
    if run.status == "failed":
        return f"it is {run.status}"
    if run.status == "interrupted" and len(run.devices) < run.world_size:
        return "it was interrupted before all of its workers had told what they measured"
    if plan.kind == "parallel":
        return f"a {plan.kind} plan's run does not tell what its layers took at degree 1"
    if run.generations:
        return "its workers changed, so it did not train as planned"
    if plan.model not in {profile.model for profile in profiles}:
        return f"it is of {plan.model}"
    terms = [device.terms or _older_terms(device) for device in run.devices]
    if not terms or any(t is None or t.num_steps < FEWEST_STEPS for t in terms):
        return f"it has fewer than {FEWEST_STEPS} full steps after the warm-up"
    known = {profile.device_type: profile for profile in profiles if profile.model == plan.model}
    for name in dict.fromkeys(device.device_type for device in run.devices):
        if name not in known:
            return f"there is no profile of {name}"
        own = known[name].optimizer
        if not _same(own, plan.optimizer):
            return f"it trained with {plan.optimizer}, the profile of {name} is of {own}"
    return None if plan.layers else _why_not_split(run, known)


def _why_not_split(run: RunRecord, known: dict[str, Profile]) -> str | None:
    planned = [g.device_type for g in run.plan.groups for _ in range(g.num_devices)]
    found = {device.rank: device.device_type for device in run.devices}
    if len(found) != len(run.devices) or found != dict(enumerate(planned)):
        return "its workers are not those of its plan"
    if run.measured_step_seconds is None:
        return "its step was not measured"
    for worker in workers_of(run):
        sizes = [point.batch_size for point in known[worker.device_type].batch_curve]
        if not sizes[0] <= worker.batch_size <= sizes[-1]:
            return (
                f"its virtual nodes of {worker.batch_size} samples lie outside the sizes "
                f"profiled on {worker.device_type}, {sizes[0]} to {sizes[-1]}"
            )
        if worker.own_seconds <= 0:
            return f"nothing is left of {worker.device_type}'s step beside sync and update"
    return None


def _same(profiled: OptimizerState | None, trained: OptimizerState | None) -> bool:
    """Whether the two are equal, or one of them is unknown."""
    if profiled is None or trained is None:
        return True
    return profiled.name == trained.name and math.isclose(
        profiled.state_bytes_per_weight_byte, trained.state_bytes_per_weight_byte, rel_tol=1e-6
    )
