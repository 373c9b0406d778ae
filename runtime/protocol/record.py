"""Build the run record, with predicted and measured times, from the workers' reports."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from ...devices.emulated import is_emulated
from ...schema.files import to_json
from ...schema.launch import LaunchConfig
from ...schema.plan import Plan
from ...schema.records import Bytes, Index, Name, Seconds, adapter_of, record
from ...schema.run import DeviceRun, Generation, RunEvent, RunRecord, StageRun, StepTerms
from .compared import compared
from .lower import lower

Status = Literal["done", "failed", "interrupted"]


@record
class WorkerReport:
    """The measurements of one worker. Times are medians over full steps after the warm-up."""

    rank: Index
    device_type: Name
    host: str
    num_samples: Index
    num_steps: Index
    pass_seconds: Seconds | None
    compute_seconds: Seconds | None
    sync_seconds: Seconds | None
    update_seconds: Seconds | None
    step_seconds: Seconds | None
    step_seconds_spread: Seconds | None
    peak_memory_bytes: Bytes | None
    final_loss: float | None
    parameters_digest: str | None
    emulated_passes: Index = 0
    emulated_overruns: Index = 0
    worst_overrun_seconds: Seconds = 0.0
    backend: str | None = None
    terms: StepTerms | None = None
    stages: tuple[StageRun, ...] = ()


def report_text(report: WorkerReport) -> str:
    """Encode a report for the store."""
    return to_json(report)


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
    ordered = sorted(reports, key=lambda report: report.rank)
    measured = max((r.step_seconds for r in ordered if r.step_seconds is not None), default=None)
    predicted = (plan.predicted.step_seconds or None) if as_planned else None
    on_host = Counter(r.host for r in ordered)
    config = lower(plan) if as_planned and ordered else None
    devices = tuple(_device_run(plan, report, on_host[report.host], config) for report in ordered)
    digests = {r.parameters_digest for r in ordered if r.parameters_digest}
    return RunRecord(
        plan=plan,
        status=status,
        exit_code=exit_code,
        world_size=plan.num_devices if as_planned else len(generations[-1].workers),
        wall_seconds=wall_seconds,
        num_steps=max((r.num_steps for r in ordered), default=0),
        predicted_step_seconds=predicted,
        measured_step_seconds=measured,
        step_seconds_error=(predicted - measured) / measured if predicted and measured else None,
        final_loss=next((r.final_loss for r in ordered), None),
        parameters_digest=next((r.parameters_digest for r in ordered), None),
        devices=devices,
        events=(*events, *_differing(digests, wall_seconds)),
        generations=tuple(generations) if not as_planned else (),
        terms=compared(plan, devices, measured) if as_planned and measured else (),
        provenance={**_emulation(ordered), **(provenance or {})} or None,
    )


def _device_run(
    plan: Plan, report: WorkerReport, num_host_devices: int, config: LaunchConfig | None
) -> DeviceRun:
    """What one worker did; ``config`` is the plan lowered, None where workers are not its own."""
    if config is not None:
        predicted, emulated = _prediction(plan, config, report)
    else:
        predicted, emulated = None, report.emulated_passes > 0
    return DeviceRun(
        rank=report.rank,
        device_type=report.device_type,
        host=report.host,
        emulated=emulated,
        num_samples=report.num_samples,
        num_steps=report.num_steps,
        predicted_compute_seconds=predicted,
        pass_seconds=report.pass_seconds,
        compute_seconds=report.compute_seconds,
        sync_seconds=report.sync_seconds,
        update_seconds=report.update_seconds,
        step_seconds=report.step_seconds,
        step_seconds_spread=report.step_seconds_spread,
        peak_memory_bytes=report.peak_memory_bytes,
        num_host_devices=num_host_devices,
        terms=report.terms,
        stages=report.stages,
    )


def _prediction(
    plan: Plan, config: LaunchConfig, report: WorkerReport
) -> tuple[float | None, bool]:
    """Return a worker's predicted seconds of passes per step, and whether it is emulated."""
    passes = len(config.workers[report.rank].virtual_nodes)
    if config.pipeline is None:
        times = [group.pass_seconds for group in plan.groups for _ in range(group.num_devices)]
        seconds = times[report.rank] or 0.0
    else:
        stages = config.pipeline.stages_of_rank[report.rank]
        seconds = sum(plan.stages[stage].compute_seconds or 0.0 for stage in stages)
    return seconds * passes or None, is_emulated(report.device_type)


def _differing(digests: set[str], at_seconds: float) -> list[RunEvent]:
    if len(digests) < 2:
        return []
    detail = "workers ended with different parameters; the script changes them by rank"
    return [RunEvent(kind="failure", at_seconds=at_seconds, detail=detail)]


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
