"""Build the run record, with predicted and measured times, from the workers' reports."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...devices.cpu import is_emulated
from ...schema.launch import LaunchConfig
from ...schema.plan import Plan
from ...schema.records import Index, Seconds, adapter_of, record
from ...schema.run import (
    DeviceRun,
    Generation,
    RunEvent,
    RunRecord,
    TermComparison,
)
from .lower import lower

OFF_FRACTION = 0.05
"""Terms that differ by more than this fraction of the measured step are marked as off."""


def compared(
    plan: Plan, devices: Sequence[DeviceRun], step_seconds: float
) -> tuple[TermComparison, ...]:
    """Compare the terms of a plan's predicted step with those of its run."""
    found = [*(_of_stages(plan, devices) if plan.layers else _of_replicas(plan, devices))]
    found += _of_speed(plan, devices)
    return tuple(_marked(entry, step_seconds) for entry in found)


def _of_speed(plan: Plan, devices: Sequence[DeviceRun]) -> Iterator[TermComparison]:
    """What a step's passes would take by how fast each type is now, on its slowest device."""
    for name, profiled in (plan.reference_seconds or {}).items():
        now = [
            (device.reference_seconds / profiled, device.predicted_compute_seconds)
            for device in devices
            if device.device_type == name
            and device.reference_seconds
            and device.predicted_compute_seconds
        ]
        if now:
            ratio, seconds = max(now)
            yield TermComparison(
                term="passes, if only the device's speed has changed",
                device_type=name,
                predicted_seconds=seconds,
                measured_seconds=ratio * seconds,
            )


def _marked(entry: TermComparison, step_seconds: float) -> TermComparison:
    if entry.predicted_seconds is None:
        return entry
    # Of the step, not of the term: an error of half in a term of a thousandth does not matter.
    error = entry.times * abs(entry.predicted_seconds - entry.measured_seconds)
    return replace(entry, is_off=error > OFF_FRACTION * step_seconds)


def _of_replicas(plan: Plan, devices: Sequence[DeviceRun]) -> Iterator[TermComparison]:
    """Compare each group's slowest worker's virtual nodes, and the slowest worker's other terms."""
    known = {device.rank: device for device in devices if device.terms is not None}
    first, slowest = 0, None
    for group in plan.groups:
        ranks = range(first, first + group.num_devices)
        first += group.num_devices
        workers = [known[rank] for rank in ranks if rank in known]
        if not workers:
            continue
        worker = max(workers, key=_own_seconds)
        seconds = group.pass_seconds
        node = None if worker.terms is None else worker.terms.virtual_node
        name = f"{group.virtual_nodes} virtual nodes of {group.virtual_node_batch_size}"
        yield TermComparison(
            term=name if group.virtual_nodes > 1 else name.replace("nodes", "node"),
            device_type=group.device_type,
            predicted_seconds=None if seconds is None else group.virtual_nodes * seconds,
            measured_seconds=_own_seconds(worker)
            if node is None
            else group.virtual_nodes * node.seconds,
        )
        if slowest is None or _own_seconds(worker) > _own_seconds(slowest[0]):
            slowest = (worker, group.virtual_nodes)
    if slowest is not None:
        yield from _of_step(plan, *slowest, is_alone=plan.num_devices == 1)


def _own_seconds(device: DeviceRun) -> float:
    """Seconds of a worker's virtual nodes and fixed cost."""
    terms = device.terms
    if terms is None:
        return 0.0
    # Medians of parts do not add up to the median of the whole, so this may come out negative.
    return max(0.0, terms.step.seconds - terms.sync.seconds - terms.update.seconds)


def _of_step(
    plan: Plan, device: DeviceRun, virtual_nodes: int, *, is_alone: bool
) -> Iterator[TermComparison]:
    """Compare a worker's terms of the whole step."""
    terms, predicted = device.terms, plan.predicted
    assert terms is not None
    sync = terms.sync.seconds
    if terms.load is not None and predicted.load_seconds is not None:
        yield TermComparison(
            term="of these, loading",
            device_type=device.device_type,
            predicted_seconds=predicted.load_seconds,
            measured_seconds=virtual_nodes * terms.load.seconds,
        )
    if terms.fixed is not None:
        # A worker that trains alone does not synchronise: the time of its sums is fixed cost.
        yield TermComparison(
            term="fixed cost",
            predicted_seconds=predicted.fixed_seconds,
            measured_seconds=terms.fixed.seconds + (sync if is_alone else 0.0),
        )
    if not is_alone:
        yield TermComparison(
            term="sync", predicted_seconds=predicted.sync_seconds, measured_seconds=sync
        )
    yield TermComparison(
        term="update",
        predicted_seconds=predicted.update_seconds,
        measured_seconds=terms.update.seconds,
    )


def _of_stages(plan: Plan, devices: Sequence[DeviceRun]) -> Iterator[TermComparison]:
    """Compare each stage's passes of a microbatch on its slowest replica, and the update."""
    for number, stage in enumerate(plan.stages):
        runs = [run for device in devices for run in device.stages if run.stage == number]
        if not runs:
            continue
        forward, both = stage.forward_seconds, stage.compute_seconds
        if forward is None:  # the plan has one time for both passes
            taken = max(run.forward.seconds + run.backward.seconds for run in runs)
            terms = [("passes", both, taken)]
        else:
            backward = max(0.0, (both or 0.0) - forward)
            terms = [
                ("forward", forward, max(run.forward.seconds for run in runs)),
                ("backward", backward, max(run.backward.seconds for run in runs)),
            ]
        for name, predicted, measured in terms:
            yield TermComparison(
                term=f"stage {number} {name}",
                device_type=stage.device_type,
                predicted_seconds=predicted,
                measured_seconds=measured,
                times=-(-plan.num_microbatches // stage.num_replicas),
            )
    updates = [device.terms.update.seconds for device in devices if device.terms is not None]
    if updates:
        stated = plan.predicted.update_seconds
        known = [stage.update_seconds for stage in plan.stages if stage.update_seconds is not None]
        yield TermComparison(
            term="update",
            predicted_seconds=max(known, default=None) if stated is None else stated,
            measured_seconds=max(updates),
        )


Status = Literal["done", "failed", "interrupted"]


@record
class WorkerReport:
    """The measurements of one worker: its part of the run record, and what concerns the whole."""

    device: DeviceRun
    final_loss: float | None
    parameters_digest: str | None
    emulated_passes: Index = 0
    emulated_overruns: Index = 0
    worst_overrun_seconds: Seconds = 0.0


def parse_report(text: bytes | str) -> WorkerReport:
    """Decode and validate a report."""
    report: WorkerReport = adapter_of(WorkerReport).validate_json(text)
    return report


def assemble(
    plan: Plan,
    reports: Sequence[WorkerReport],
    *,
    status: Status,
    exit_code: int,
    wall_seconds: float,
    events: Iterable[RunEvent] = (),
    generations: Sequence[Generation] = (),
    provenance: dict[str, Any] | None = None,
) -> RunRecord:
    """Build a run record from the workers' reports.

    The measured step is the slowest worker's median, because all workers step together. Workers
    with different final parameters are recorded as a failure event; a correct run has none. After a
    resize or a failure there is no prediction, because the workers are not those of the plan.
    """
    as_planned = len(generations) < 2
    ordered = sorted(reports, key=lambda report: report.device.rank)
    steps = [report.device.step_seconds for report in ordered]
    measured = max((seconds for seconds in steps if seconds is not None), default=None)
    predicted = (plan.predicted.step_seconds or None) if as_planned else None
    on_host = Counter(report.device.host for report in ordered)
    config = lower(plan) if as_planned and ordered else None
    devices = tuple(
        replace(_predicted(plan, r, config), num_host_devices=on_host[r.device.host])
        for r in ordered
    )
    if len({r.parameters_digest for r in ordered if r.parameters_digest}) > 1:
        detail = "workers ended with different parameters; the script changes them by rank"
        events = (*events, RunEvent(kind="failure", at_seconds=wall_seconds, detail=detail))
    return RunRecord(
        plan=plan,
        status=status,
        exit_code=exit_code,
        world_size=plan.num_devices if as_planned else len(generations[-1].workers),
        wall_seconds=wall_seconds,
        num_steps=max((device.num_steps for device in devices), default=0),
        predicted_step_seconds=predicted,
        measured_step_seconds=measured,
        step_seconds_error=(predicted - measured) / measured if predicted and measured else None,
        final_loss=next((r.final_loss for r in ordered), None),
        parameters_digest=next((r.parameters_digest for r in ordered), None),
        devices=devices,
        events=tuple(events),
        generations=tuple(generations) if not as_planned else (),
        terms=compared(plan, devices, measured) if as_planned and measured else (),
        provenance={**_emulation(ordered), **(provenance or {})} or None,
    )


def _predicted(plan: Plan, report: WorkerReport, config: LaunchConfig | None) -> DeviceRun:
    """What one worker did beside what was predicted."""
    device = report.device
    if config is None:  # after a change its rank is no longer one of the plan's
        return replace(device, emulated=report.emulated_passes > 0)
    if config.pipeline is None:
        times = [group.pass_seconds for group in plan.groups for _ in range(group.num_devices)]
        seconds = times[device.rank] or 0.0
    else:
        stages = config.pipeline.stages_of_rank[device.rank]
        seconds = sum(plan.stages[stage].compute_seconds or 0.0 for stage in stages)
    passes = len(config.workers[device.rank].virtual_nodes)
    return replace(
        device,
        emulated=is_emulated(device.device_type),
        predicted_compute_seconds=seconds * passes or None,
    )


def _emulation(reports: Sequence[WorkerReport]) -> dict[str, Any]:
    passes = sum(report.emulated_passes for report in reports)
    if not passes:
        return {}
    return {
        "emulation": {
            "passes": passes,
            "overruns": sum(report.emulated_overruns for report in reports),
            "worst_overrun_seconds": max(report.worst_overrun_seconds for report in reports),
        }
    }
