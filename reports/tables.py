"""Show records as plain-text tables."""

from typing import TYPE_CHECKING

from ..schema.cluster import Cluster
from ..schema.launch import LaunchConfig
from ..schema.market import Market, PriceReport, RentAdvice, RentReport, RentRun, RentState
from ..schema.odds import OddsReport
from ..schema.options import option
from ..schema.plan import Plan, Prediction, Proof, claim_of
from ..schema.profile import Profile
from ..schema.run import RunRecord
from . import cluster_tables
from .grid import grid, layers_text, mebibytes, milliseconds
from .market_tables import (
    advice_text,
    market_table,
    odds_table,
    rent_run_table,
    rent_table,
    state_text,
    strategies_table,
)
from .parallel_tables import dollars_text, parallel_table
from .terms import terms_table

if TYPE_CHECKING:
    from ..schema.files import Record


def table_of(record: "Record") -> str:
    """The table of a record of any kind."""
    if isinstance(record, Profile):
        return profile_table(record)
    if isinstance(record, Cluster):
        return cluster_table(record)
    if isinstance(record, Plan):
        tables = {"split": plan_table, "pipeline": pipeline_table, "parallel": parallel_table}
        return tables[record.kind](record)
    if isinstance(record, LaunchConfig):
        return launch_table(record)
    if isinstance(record, Market):
        return market_table(record)
    if isinstance(record, RentReport):
        return rent_table(record)
    if isinstance(record, RentState):
        return state_text(record)
    if isinstance(record, RentAdvice):
        return advice_text(record)
    if isinstance(record, RentRun):
        return rent_run_table(record)
    if isinstance(record, PriceReport):
        return strategies_table(record)
    if isinstance(record, OddsReport):
        return odds_table(record)
    if isinstance(record, RunRecord):
        return run_table(record)
    return cluster_tables.table_of(record)


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


def plan_table(plan: Plan) -> str:
    """The batch of each device, the predicted step, and the proof."""
    emulated = {device.device_type for device in plan.emulated}
    estimated = {estimate.device_type for estimate in plan.estimates}
    names = {
        g.device_type: device_name(
            g.device_type, g.device_type in emulated, g.device_type in estimated
        )
        for g in plan.groups
    }
    rows = [
        (
            f"{group.num_devices} x {names[group.device_type]}",
            group.device_batch_size,
            f"{group.virtual_nodes} x {group.virtual_node_batch_size}"
            + (" (interpolated)" if group.interpolated else ""),
            milliseconds(
                None if group.pass_seconds is None else group.pass_seconds * group.virtual_nodes
            ),
            *(
                f"{(number or 0) / 2**20:,.1f} MiB"
                for number in (group.state_share_bytes, group.memory_bytes)
                if plan.shard is not None
            ),
        )
        for group in plan.groups
    ]
    columns = ["devices", "batch per device", "virtual nodes", "compute"]
    columns += [f"share ({plan.shard})", "memory"] if plan.shard is not None else []
    lines = [
        f"{plan.model}, global batch {plan.global_batch_size}",
        grid(columns, rows),
        _parts_text(plan.predicted, estimated=bool(plan.estimates)),
        _proof_text(plan),
    ]
    lines += [
        *_simpler_lines(plan.proof),
        *_est_lines(plan),
        *map(str, plan.estimates),
        *map(str, plan.reserves),
        *map(str, plan.sync_bounds),
    ]
    return "\n".join(lines)


def pipeline_table(plan: Plan) -> str:
    """Which layers run where, the time of a microbatch there, and the proof."""
    estimated = {estimate.device_type for estimate in plan.estimates}
    rows = [
        (
            number,
            f"{stage.num_replicas} x "
            f"{device_name(stage.device_type, False, stage.device_type in estimated)}",
            layers_text(stage.layers),
            milliseconds(stage.compute_seconds),
            milliseconds(stage.output_seconds),
            stage.num_in_flight,
            stage.weight_versions,
            mebibytes(stage.memory_bytes),
        )
        for number, stage in enumerate(plan.stages)
    ]
    headers = (
        "stage", "devices", "layers", "pass", "transfer", "in flight", "versions", "memory",
    )  # fmt: skip
    lines = [
        f"{plan.model}, global batch {plan.global_batch_size} = {plan.num_microbatches} "
        f"microbatches of {plan.microbatch_size}; {plan.config}, {plan.schedule}"
        f"{', recomputation' if plan.recomputes else ''}"
        f"{'' if plan.optimizer is None else f'; memory counts {plan.optimizer}'}",
        grid(headers, rows),
        _parts_text(plan.predicted, estimated=bool(plan.estimates)),
        f"minimised: {_MINIMISED[plan.objective]}; {_proof_text(plan)}",
    ]
    lines += [f"assumed: {sentence}" for sentence in plan.assumptions]
    if plan.trace is not None and plan.trace.obstacle is not None:
        lines.append(f"layers {plan.trace.obstacle}")
    return "\n".join([*lines, *map(str, plan.estimates), *map(str, plan.reserves)])


_MINIMISED = {"step_seconds": "the whole step", "bottleneck": "the slowest stage or boundary"}


def _parts_text(predicted: Prediction, *, estimated: bool) -> str:
    parts = [
        f"{name} {milliseconds(seconds)}"
        for name, seconds in (
            ("compute", predicted.compute_seconds),
            ("loading", predicted.load_seconds),
            ("virtual nodes", predicted.virtual_node_seconds),
            ("fixed", predicted.fixed_seconds),
            ("transfers", predicted.transfer_seconds),
            ("sync", predicted.sync_seconds),
            ("update", predicted.update_seconds),
        )
        if seconds is not None
    ]
    total = f"step {milliseconds(predicted.step_seconds)}"
    if parts:
        total += f" = {' + '.join(parts)}"
    if predicted.step_seconds_low is not None and predicted.step_seconds_high is not None:
        low, high = (
            milliseconds(predicted.step_seconds_low),
            milliseconds(predicted.step_seconds_high),
        )
        total += f"; the {'estimates' if estimated else 'measurements'} allow {low} to {high}"
    return f"{total}; {predicted.samples_per_second:.1f} samples/s{dollars_text(predicted)}"


def _proof_text(plan: Plan) -> str:
    return f"{claim_of(plan)}, gap {_percent(plan.proof.gap)}: {plan.proof.method}"


def _simpler_lines(proof: Proof) -> list[str]:
    """The cost of choosing a plan that is simpler than the fastest."""
    if proof.tolerance is None or proof.lower_bound is None or not proof.gap:
        return []
    return [
        f"simpler than the fastest on paper, {milliseconds(proof.lower_bound)}, which the "
        f"measurements cannot tell from it ({option('fastest')} takes that one)"
    ]


def _est_lines(plan: Plan) -> list[str]:
    if plan.est is None:
        return []
    rows = [
        (
            ", ".join(
                f"{g.num_devices}x{g.device_type} A={g.virtual_nodes}" for g in choice.groups
            ),
            f"{choice.est.throughput:.3f}",
            f"{choice.est.waste:.3f}",
            f"{choice.est.overload_factor:.4g}",
        )
        for choice in plan.alternatives
        if choice.est is not None
    ]
    first = (
        f"EasyScale: throughput {plan.est.throughput:.3f} mini-batches/s, waste "
        f"{plan.est.waste:.3f}, maxP {plan.est.max_p}"
    )
    table = grid(("alternative", "throughput", "waste", "overload"), rows)
    return [first, table] if rows else [first]


def cluster_table(cluster: Cluster) -> str:
    """Device types, their numbers, memory and price."""
    rows = [
        (
            name,
            number,
            mebibytes(cluster.device_types[name].memory_bytes),
            cluster.device_types[name].dollars_per_hour or "-",
        )
        for name, number in cluster.num_devices.items()
    ]
    return grid(("device type", "devices", "memory", "$/hour"), rows)


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


def device_name(device_type: str, emulated: bool, estimated: bool = False) -> str:
    """The type's name, marked if it is emulated or estimated."""
    kind = " (emulated)" if emulated else " (estimated)" if estimated else ""
    return f"{device_type}{kind}"


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.3g} %"


def _sync_text(profile: Profile) -> str:
    if profile.sync is None:
        return "sync not measured"
    at_most = "" if profile.sync.sync_seconds is not None else "unknown, at most "
    seconds = milliseconds(profile.sync.counted_seconds)
    return f"sync {at_most}{seconds} on {profile.sync.num_devices} devices"
