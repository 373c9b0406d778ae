"""Show records as plain-text tables."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...schema.cluster import Cluster
from ...schema.jobs import Allocation, Jobs, Throughputs
from ...schema.launch import LaunchConfig
from ...schema.market import (
    Market,
    OddsReport,
    PriceReport,
    RentAdvice,
    RentReport,
    RentRun,
    RentState,
)
from ...schema.plan import Plan
from ...schema.profile import Profile
from ...schema.run import RunRecord, TermComparison
from ...schema.simulation import SimulationRun
from . import cluster_tables
from .grid import device_name, grid, mebibytes, milliseconds
from .market_tables import (
    advice_text,
    market_table,
    odds_table,
    rent_run_table,
    rent_table,
    state_text,
    strategies_table,
)
from .plan_tables import plan_table

if TYPE_CHECKING:
    from ...schema.files import Record


def table_of(record: "Record") -> str:
    """The table of a record of any kind."""
    return _TABLES[type(record)](record)


def cluster_table(pool: Cluster) -> str:
    """Device types of a pool: their number, memory and price."""
    rows = [
        (
            name,
            number,
            mebibytes(pool.device_types[name].memory_bytes),
            pool.device_types[name].dollars_per_hour or "-",
        )
        for name, number in pool.num_devices.items()
    ]
    return grid(("device type", "devices", "memory", "$/hour"), rows)


def profile_table(profile: Profile) -> str:
    """Step time, throughput (samples per second) and memory, by batch size."""
    rows = [
        (
            point.batch_size,
            milliseconds(point.step_seconds),
            f"{point.batch_size / point.step_seconds:.1f}",
            mebibytes(point.peak_memory_bytes),
        )
        for point in profile.batch_curve
    ]
    name = device_name(
        profile.device_type, profile.emulation is not None, profile.estimate is not None
    )
    lines = [
        f"{profile.model} on {name}: "
        f"weights {mebibytes(profile.weight_bytes)}, update "
        f"{milliseconds(profile.update_seconds)}, {_sync_text(profile)}",
        grid(("batch", "pass", "samples/s", "peak memory"), rows),
    ]
    if profile.out_of_memory_batch_size:
        lines.append(f"out of memory at batch {profile.out_of_memory_batch_size}")
    if profile.estimate is not None:
        lines.append(str(profile.estimate))
    return "\n".join(lines)


def launch_table(config: LaunchConfig) -> str:
    """Ranks, their device types and their virtual nodes."""
    rows = [
        (
            slot.rank,
            slot.device_type,
            " ".join(f"{node.index}:{node.batch_size}" for node in slot.virtual_nodes),
        )
        for slot in config.workers
    ]
    return grid(("rank", "device type", "virtual node:samples"), rows)


def run_table(run: RunRecord) -> str:
    """How the run ended, its events, and the predicted and measured times of devices and step."""
    rows = [
        (
            device.rank,
            device_name(device.device_type, device.emulated),
            milliseconds(device.predicted_compute_seconds),
            milliseconds(device.compute_seconds),
            milliseconds(device.sync_seconds),
            milliseconds(device.step_seconds),
            mebibytes(device.peak_memory_bytes),
        )
        for device in run.devices
    ]
    code = f" (exit code {run.exit_code})" if run.exit_code else ""
    error = "-" if run.step_seconds_error is None else f"{100 * run.step_seconds_error:+.1f} %"
    return "\n".join(
        [
            f"{run.plan.model}: {run.status}{code}, {run.num_steps} steps in "
            f"{run.wall_seconds:.1f} s",
            *(
                f"{event.kind} after {event.at_seconds:.1f} s: {event.detail}"
                for event in run.events
            ),
            grid(
                ("rank", "device", "compute predicted", "measured", "sync", "step", "peak memory"),
                rows,
            ),
            f"step predicted {milliseconds(run.predicted_step_seconds)}, measured "
            f"{milliseconds(run.measured_step_seconds)} ({error})",
            f"final loss {'-' if run.final_loss is None else f'{run.final_loss:.6g}'}, "
            f"parameters {(run.parameters_digest or '-')[:16]}",
            *([terms_table(run)] if run.terms else []),
        ]
    )


def run_summary(run: RunRecord) -> str:
    """One line: steps, workers, and the measured step beside the predicted one."""
    measured, predicted = run.measured_step_seconds, run.predicted_step_seconds
    parts = [f"{run.num_steps} steps on {run.world_size} worker(s)"]
    if measured is not None:
        parts.append(f"measured {measured * 1e3:.1f} ms a step")
    if predicted is not None:
        parts.append(f"predicted {predicted * 1e3:.1f} ms")
    if run.step_seconds_error is not None:
        parts.append(f"error {run.step_seconds_error:+.1%}")
    emulated = " (emulated)" if any(device.emulated for device in run.devices) else ""
    return ", ".join(parts) + emulated


def terms_table(run: RunRecord) -> str:
    """One row per term; terms that are off by more than 5 % of the step are marked."""
    rows = [
        (
            (entry.term if entry.times == 1 else f"{entry.term}, {entry.times} times"),
            entry.device_type or "-",
            milliseconds(entry.predicted_seconds),
            milliseconds(entry.measured_seconds),
            _of_step(entry, run.measured_step_seconds),
            "off" if entry.is_off else "",
        )
        for entry in run.terms
    ]
    return grid(("term", "device", "predicted", "measured", "error of the step", ""), rows)


def _of_step(entry: TermComparison, step: float | None) -> str:
    if entry.predicted_seconds is None or not step:
        return "-"
    error = entry.times * (entry.predicted_seconds - entry.measured_seconds)
    return f"{100 * error / step:+.1f} %"


def _sync_text(profile: Profile) -> str:
    if profile.sync is None:
        return "sync not measured"
    at_most = "" if profile.sync.sync_seconds is not None else "unknown, at most "
    seconds = milliseconds(profile.sync.counted_seconds)
    return f"sync {at_most}{seconds} on {profile.sync.num_devices} devices"


_TABLES: dict[type, Callable[[Any], str]] = {
    Allocation: cluster_tables.allocation_table,
    Cluster: cluster_table,
    Jobs: cluster_tables.jobs_table,
    LaunchConfig: launch_table,
    Market: market_table,
    OddsReport: odds_table,
    Plan: plan_table,
    PriceReport: strategies_table,
    Profile: profile_table,
    RentAdvice: advice_text,
    RentReport: rent_table,
    RentRun: rent_run_table,
    RentState: state_text,
    RunRecord: run_table,
    SimulationRun: lambda run: cluster_tables.simulation_table([run]),
    Throughputs: cluster_tables.throughputs_table,
}
