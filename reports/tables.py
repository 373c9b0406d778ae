"""Records as plain tables for people."""

from collections.abc import Sequence

from ..schema.cluster import Cluster
from ..schema.launch import LaunchConfig
from ..schema.plan import SplitPlan
from ..schema.profile import Profile
from ..schema.run import RunRecord

Anything = Profile | Cluster | SplitPlan | LaunchConfig | RunRecord


def table_of(record: Anything) -> str:
    """The table of whatever record a file held."""
    if isinstance(record, Profile):
        return profile_table(record)
    if isinstance(record, Cluster):
        return cluster_table(record)
    if isinstance(record, SplitPlan):
        return plan_table(record)
    if isinstance(record, LaunchConfig):
        return launch_table(record)
    return run_table(record)


def profile_table(profile: Profile) -> str:
    """Step time, throughput and memory over batch sizes."""
    rows = [
        (
            point.batch_size,
            milliseconds(point.step_seconds),
            f"{point.batch_size / point.step_seconds:.1f}",
            mebibytes(point.peak_memory_bytes),
        )
        for point in profile.batch_curve
    ]
    lines = [
        f"{profile.model} on {device_name(profile.device_type, profile.emulation is not None)}: "
        f"weights {mebibytes(profile.weight_bytes)}, update "
        f"{milliseconds(profile.update_seconds)}, {_sync_text(profile)}",
        _grid(("batch", "pass", "samples/s", "peak memory"), rows),
    ]
    if profile.out_of_memory_batch_size:
        lines.append(f"out of memory at batch {profile.out_of_memory_batch_size}")
    return "\n".join(lines)


def plan_table(plan: SplitPlan) -> str:
    """Who gets how much, how long a step takes, and how good that is."""
    emulated = {device.device_type for device in plan.emulated}
    names = {
        g.device_type: device_name(g.device_type, g.device_type in emulated) for g in plan.groups
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
        )
        for group in plan.groups
    ]
    predicted, proof = plan.predicted, plan.proof
    head = f"{plan.model}, global batch {plan.global_batch_size}"
    parts = (
        f"step {milliseconds(predicted.step_seconds)} = compute "
        f"{milliseconds(predicted.compute_seconds)} + sync {milliseconds(predicted.sync_seconds)}"
        f" + update {milliseconds(predicted.update_seconds)}; "
        f"{predicted.samples_per_second:.1f} samples/s"
    )
    lines = [
        head,
        _grid(("devices", "batch per device", "virtual nodes", "compute"), rows),
        parts,
        f"{proof.termination}, gap {_percent(proof.gap)}: {proof.method}",
    ]
    return "\n".join(lines + _est_lines(plan))


def _est_lines(plan: SplitPlan) -> list[str]:
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
    ]
    first = (
        f"EasyScale: throughput {plan.est.throughput:.3f} mini-batches/s, waste "
        f"{plan.est.waste:.3f}, maxP {plan.est.max_p}"
    )
    table = _grid(("alternative", "throughput", "waste", "overload"), rows)
    return [first, table] if rows else [first]


def cluster_table(cluster: Cluster) -> str:
    """Device types, how many there are, their memory and price."""
    rows = [
        (
            name,
            number,
            mebibytes(cluster.device_types[name].memory_bytes),
            cluster.device_types[name].dollars_per_hour or "-",
        )
        for name, number in cluster.num_devices.items()
    ]
    return _grid(("device type", "devices", "memory", "$/hour"), rows)


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
    return _grid(("rank", "device type", "virtual node:samples"), rows)


def run_table(run: RunRecord) -> str:
    """Predicted beside measured, per device and for the step."""
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
    error = "-" if run.step_seconds_error is None else f"{100 * run.step_seconds_error:+.1f} %"
    return "\n".join(
        [
            f"{run.plan.model}: {run.status}, {run.num_steps} steps in {run.wall_seconds:.1f} s",
            _grid(
                ("rank", "device", "compute predicted", "measured", "sync", "step", "peak memory"),
                rows,
            ),
            f"step predicted {milliseconds(run.predicted_step_seconds)}, measured "
            f"{milliseconds(run.measured_step_seconds)} ({error})",
            f"final loss {'-' if run.final_loss is None else f'{run.final_loss:.6g}'}, "
            f"parameters {(run.parameters_digest or '-')[:16]}",
        ]
    )


def device_name(device_type: str, emulated: bool) -> str:
    """The type's name; an emulated one always says so."""
    return f"{device_type} (emulated)" if emulated else device_type


def milliseconds(seconds: float | None) -> str:
    """Seconds as milliseconds with a unit; unknown is a dash."""
    return "-" if seconds is None else f"{seconds * 1e3:.4g} ms"


def mebibytes(size: int | None) -> str:
    """Bytes as MiB with a unit; unknown is a dash."""
    return "-" if size is None else f"{size / (1 << 20):,.1f} MiB"


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.3g} %"


def _sync_text(profile: Profile) -> str:
    if profile.sync is None:
        return "sync not measured"
    return f"sync {milliseconds(profile.sync.sync_seconds)} on {profile.sync.num_devices} devices"


def _grid(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    from tabulate import tabulate

    return str(tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True))
