"""Show records as plain-text tables."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...schema.cluster import Cluster
from ...schema.jobs import Allocation, Jobs, Throughputs
from ...schema.launch import LaunchConfig
from ...schema.layers import LayerTrace
from ...schema.market import (
    Market,
    OddsReport,
    PriceReport,
    RentAdvice,
    RentReport,
    RentRun,
    RentState,
)
from ...schema.options import option
from ...schema.plan import Alternative, Gain, Plan, Prediction, Stage, claim_of
from ...schema.profile import BatchPoint, Profile
from ...schema.run import RunRecord, TermComparison
from ...schema.simulation import SimulationRun
from . import cluster_tables
from .explain import group_terms
from .grid import device_name, grid, layers_text, mebibytes, milliseconds, shown
from .market_tables import (
    advice_text,
    market_table,
    odds_table,
    rent_run_table,
    rent_table,
    state_text,
    strategies_table,
)

if TYPE_CHECKING:
    from ...schema.files import Record

_MINIMISED = {"step_seconds": "the whole step", "bottleneck": "the slowest stage or boundary"}


def plan_table(plan: Plan) -> str:
    """Who runs what, the predicted step, and the proof.

    A plan of the whole model has a row for each group of devices, others one for each stage.
    """
    headers, rows = _stage_rows(plan) if plan.layers else _group_rows(plan)
    goal = f"minimised: {_MINIMISED[plan.objective]}; " if plan.layers else ""
    lines = [
        _title(plan),
        grid(headers, rows),
        _step_text(plan.predicted, estimated=bool(plan.estimates)),
        f"{goal}{_proof_text(plan)}",
    ]
    if plan.proof.space is not None:
        lines.append(f"searched: {plan.proof.space}")
    if not plan.layers:
        lines += [*_simpler_lines(plan), *_est_lines(plan)]
    elif plan.alternatives:
        lines.append(_points(plan))
    lines += [_gain(plan, gain) for gain in plan.with_more_devices]
    lines += [f"assumed: {sentence}" for sentence in plan.assumptions if plan.layers]
    if plan.trace is not None and plan.trace.obstacle is not None:
        lines.append(f"layers {plan.trace.obstacle}")
    return "\n".join([*lines, *map(str, (*plan.estimates, *plan.reserves, *plan.sync_bounds))])


def _title(plan: Plan) -> str:
    text = f"{plan.model}, global batch {plan.global_batch_size}"
    if not plan.layers:
        return text
    text += f" = {plan.num_microbatches} microbatches of {plan.microbatch_size}"
    text += f"; {plan.config}, {plan.schedule}"
    if plan.num_model_chunks > 1 and plan.traits.placement == "round-robin":
        second = plan.num_positions
        text += f" ({plan.num_model_chunks} stages a device: 0, {second}, ... on the same)"
    if plan.optimizer is not None:
        text += f"; memory counts {plan.optimizer}"
    shared = plan.shared_states
    text += ", shared by the replicas of a stage" if shared else ""
    more = {"gradients": "gradients", "all": "gradients and weights"}.get(shared or "")
    return text + (f", which share {more} too" if more else "")


def _group_rows(plan: Plan) -> tuple[list[str], list[tuple[object, ...]]]:
    names = _names(plan)
    rows = [
        (
            f"{group.num_devices} x {names[group.device_type]}",
            group.device_batch_size,
            f"{group.virtual_nodes} x {group.virtual_node_batch_size}"
            + (" (interpolated)" if group.interpolated else "")
            + (f", {group.activations}" if group.activations else "")
            + (
                f" ({pinned / 2**20:,.1f} MiB of the host)"
                if (pinned := group.pinned_bytes)
                else ""
            ),
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
    return columns + ([f"share ({plan.shard})", "memory"] if plan.shard is not None else []), rows


def _stage_rows(plan: Plan) -> tuple[list[str], list[list[object]]]:
    """A row for each stage; columns that no stage fills are left out."""
    names = _names(plan)
    is_mixed = any(len(stage.replicas) > 1 for stage in plan.stages)
    again = any(stage.recompute != "none" for stage in plan.stages)
    columns: dict[str, list[object]] = {
        "stage": list(range(len(plan.stages))),
        "devices": [_replicas(stage, names) for stage in plan.stages],
        "layers": [layers_text(stage.layers) for stage in plan.stages],
        "samples": [
            ", ".join(str(group.samples) for group in stage.replicas) if is_mixed else None
            for stage in plan.stages
        ],
        "recompute": [stage.recompute if again else None for stage in plan.stages],
        "pass": [milliseconds(stage.compute_seconds) for stage in plan.stages],
        "gathers": [milliseconds(stage.gather_seconds) for stage in plan.stages],
        "transfer": [
            milliseconds(
                stage.transfer_seconds if stage.output_seconds is None else stage.output_seconds
            )
            for stage in plan.stages
        ],
        "in flight": [stage.num_in_flight for stage in plan.stages],
        "versions": [stage.weight_versions for stage in plan.stages],
        "memory": [mebibytes(stage.memory_bytes) for stage in plan.stages],
    }
    filled = {name: cells for name, cells in columns.items() if set(cells) != {None}}
    return list(filled), [list(row) for row in zip(*filled.values(), strict=True)]


def _names(plan: Plan) -> dict[str, str]:
    """Device type -> its name, marked where it is emulated or estimated."""
    emulated = {device.device_type for device in plan.emulated}
    estimated = {estimate.device_type for estimate in plan.estimates}
    return {
        group.device_type: device_name(
            group.device_type, group.device_type in emulated, group.device_type in estimated
        )
        for stage in plan.stages
        for group in stage.replicas
    }


def _replicas(stage: Stage, names: dict[str, str]) -> str:
    """Text such as ``16 x A100, 11 x (4 V100)``."""
    return ", ".join(
        f"{group.num_replicas} x "
        + (
            names.get(group.device_type, group.device_type)
            if group.tensor_parallel_size == 1
            else f"({group.tensor_parallel_size} {names.get(group.device_type, group.device_type)})"
        )
        for group in stage.replicas
    )


def _step_text(predicted: Prediction, *, estimated: bool) -> str:
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
    if predicted.compute_seconds is None:  # then the parts do not add up
        total = ", ".join([total, *parts])
    elif parts:
        total += f" = {' + '.join(parts)}"
    if predicted.bubble_fraction is not None:
        total += f", bubble {100 * predicted.bubble_fraction:.3g} %"
    if predicted.step_seconds_low is not None and predicted.step_seconds_high is not None:
        low, high = (
            milliseconds(predicted.step_seconds_low),
            milliseconds(predicted.step_seconds_high),
        )
        total += f"; the {'estimates' if estimated else 'measurements'} allow {low} to {high}"
    return f"{total}; {predicted.samples_per_second:.1f} samples/s{_dollars_text(predicted)}"


def _proof_text(plan: Plan) -> str:
    proof = plan.proof
    stated = " (stated)" if proof.gap and proof.bound in (None, "stated") else ""
    return f"{claim_of(plan)}, gap {_percent(proof.gap)}{stated}: {proof.method}"


def _simpler_lines(plan: Plan) -> list[str]:
    """The cost of choosing another plan than the fastest."""
    proof, taken = plan.proof, (plan.provenance or {}).get("taken", "simpler")
    if proof.tolerance is None or proof.lower_bound is None or not proof.gap:
        return []
    return [
        f"{taken} than the fastest on paper, {milliseconds(proof.lower_bound)}, which the "
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


def _percent(fraction: float | None) -> str:
    return "unknown" if fraction is None else f"{100 * fraction:.3g} %"


def _dollars_text(predicted: Prediction) -> str:
    """Text such as ``; 12.24 $/hour, 0.0354 $/million samples``; empty without prices."""
    if predicted.dollars_per_hour is None:
        return ""
    text = f"; {predicted.dollars_per_hour:.2f} $/hour"
    if predicted.dollars_per_million_samples is not None:
        text += f", {predicted.dollars_per_million_samples:.4g} $/million samples"
    return text


def _points(plan: Plan) -> str:
    """Time against devices and memory; the plan itself comes first."""
    own = Alternative(
        stages=plan.stages,
        microbatch_size=plan.microbatch_size,
        num_microbatches=plan.num_microbatches,
        num_model_chunks=plan.num_model_chunks,
        predicted=plan.predicted,
    )
    rows = [
        (
            milliseconds(predicted.step_seconds),
            one.num_devices,
            mebibytes(max(stage.memory_bytes or 0 for stage in one.stages)),
            shown(predicted.dollars_per_hour, ".2f"),
            shown(predicted.dollars_per_million_samples),
            _what_grew(own, one),
            _layout(one),
        )
        for one in (own, *plan.alternatives)
        if (predicted := one.predicted) is not None
    ]
    headers = (
        "step", "devices", "fullest device", "$/hour", "$/million samples", "slower by",
        "layers: replicas",
    )  # fmt: skip
    return grid(headers, rows)


def _layout(one: Alternative) -> str:
    """Text such as ``7: 2 x A100 | 5: 2 x V100``; the layers of a device's chunks are added."""
    positions = len(one.stages) // one.num_model_chunks
    chunks = f" in {one.num_model_chunks} chunks" if one.num_model_chunks > 1 else ""
    return " | ".join(
        f"{sum(len(stage.layers) for stage in one.stages[position::positions])}{chunks}: "
        f"{_replicas(one.stages[position], {})}"
        for position in range(positions)
    )


def _gain(plan: Plan, gain: Gain) -> str:
    saved = 1.0 - gain.step_seconds / plan.predicted.step_seconds
    effect = f"the step is {saved:.1%} shorter" if saved > 0 else "no faster plan was found"
    return f"with {gain.num_devices} more {gain.device_type}: {effect}"


def _what_grew(best: Alternative, other: Alternative) -> str:
    """The term of the step that grows most from ``best`` to ``other``."""
    before = group_terms(best.num_rounds, best.stages, best.num_model_chunks)
    after = group_terms(other.num_rounds, other.stages, other.num_model_chunks)
    if other is best or before is None or after is None:
        return "-"
    grown = {name: seconds - before[name] for name, seconds in after.items()}
    most = max(grown, key=lambda name: grown[name])
    if grown[most] <= 0.0:
        return "-"
    return f"{most} +{milliseconds(grown[most])}"


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
            f"final loss {shown(run.final_loss, '.6g')}, "
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


_MOST_ROWS = 12
TOOLS = {"fx": "torch.fx", "export": "torch.export", "hooks": "hooks"}
"""What took a model apart, by ``LayerTrace.way``."""


def measured_table(measured: Profile) -> str:
    """What was measured: the batch curve, and what a step costs beside it."""
    busy = measured.busy.batch_curve if measured.busy else ()
    of_busy = {point.batch_size: point for point in busy}
    has_parts = any(point.load_seconds is not None for point in measured.batch_curve)
    rows = []
    for point in measured.batch_curve:
        row = [
            str(point.batch_size),
            _step(point),
            *((_ms(point.pass_seconds), _ms(point.load_seconds), _ms(point.virtual_node_seconds))
              if has_parts else ()),
            f"{point.batch_size / point.step_seconds:.1f}",
            f"{point.peak_memory_bytes / 2**20:.0f}",
        ]  # fmt: skip
        if busy:
            row.append(_step(of_busy[point.batch_size]) if point.batch_size in of_busy else "-")
        rows.append(row)
    parts = ["pass ms", "load ms", "runtime ms"] if has_parts else []
    headers = ["batch size", "step ms", *parts, "samples/s", "peak MiB"]
    if measured.busy:
        headers.append(f"step ms, {measured.busy.num_devices} busy")
    table = grid(headers, rows)
    ending = f"ended: {(measured.provenance or {}).get('curve_stopped', '')}"
    if measured.out_of_memory_batch_size:
        ending += f" at batch size {measured.out_of_memory_batch_size}"
    if measured.only_batch_size is not None:
        ending += (
            f"; only batch size {measured.only_batch_size} was measured, and plans can use no "
            f"other: state some ({option('batch_sizes', '1,8,32')}), or measure longer with "
            f"{option('thorough')}"
        )
    return "\n".join(
        [_head(measured), table, ending, *_step_lines(measured), *_layer_lines(measured)]
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f}"


def _step(point: BatchPoint) -> str:
    """Milliseconds and how well they are known."""
    error = point.step_seconds_error
    return _ms(point.step_seconds) + (f" +-{error:.1%}" if error is not None else "")


def _step_lines(measured: Profile) -> list[str]:
    """What a step costs beside its virtual nodes, what is wide, what was not measured."""
    how, lines = measured.provenance or {}, []
    if measured.fixed_seconds is not None:
        line = f"a step adds: fixed {_ms(measured.fixed_seconds)} ms, update "
        line += f"{_ms(measured.update_seconds)} ms alone"
        if measured.busy:
            line += f"; fixed {_ms(measured.busy.fixed_seconds)} ms, update "
            line += f"{_ms(measured.busy.update_seconds)} ms with {measured.busy.num_devices} busy"
        if measured.step_error is not None:
            line += f"; steps put together so are off by {measured.step_error:.1%}"
        lines.append(line)
    for kind in ("alone", "busy"):
        found = how.get(kind, {})
        if found.get("wide_batch_sizes") and (kind == "alone" or measured.busy):
            sizes = ", ".join(map(str, found["wide_batch_sizes"]))
            lines.append(
                f"wider than +-{found['tolerance']:.0%} {kind}, at batch size {sizes}: a quieter "
                f"machine or {option('thorough')} makes it narrower"
            )
    if how.get("loading", "measured") != "measured":
        lines.append(f"loading not measured: {how['loading']}")
    of_sync = how.get("sync", {})
    no_ring = of_sync.get("at_batch_1", of_sync).get("messages", {}).get("no_ring")
    if no_ring is not None:
        lines.append(f"no ring was fitted, so sync is known for as many devices only: {no_ring}")
    return lines


def _layer_lines(measured: Profile) -> list[str]:
    """How layers were found; by microbatch size their raw sums, and their memory."""
    found = None if measured.layers is None else _how_found(measured.layers.trace)
    lines = [] if found is None else [found]
    for graph, how in zip(
        measured.layer_tables, (measured.provenance or {}).get("layers", ()), strict=True
    ):
        stashed = sum(node.stashed_bytes or 0 for node in graph.nodes) / 2**20
        spaces = [n.workspace_bytes for n in graph.nodes if n.workspace_bytes is not None]
        space = f"{max(spaces) / 2**20:.1f} MiB" if spaces else "not measured"
        lines.append(
            f"{len(graph.nodes)} layers at {graph.microbatch_size}: alone they sum to "
            f"{how['isolated_over_whole_forward']:.0%} of the forward and "
            f"{how['isolated_over_whole_backward']:.0%} of the backward pass (scaled to it); "
            f"stash {stashed:.1f} MiB, largest workspace {space}"
        )
    return lines + _pipeline_lines(measured)


def _pipeline_lines(measured: Profile) -> list[str]:
    """What rehearsed pipelines cost beyond layers and bytes; why links were not measured."""
    costs, why = measured.pipeline, (measured.provenance or {}).get("links", {}).get("skipped")
    lines = [] if measured.layers is None or why is None else [f"links not measured ({why})"]
    if costs is not None:
        off = "" if costs.step_error is None else f"; steps off by {costs.step_error:.1%}"
        lines.append(
            f"pipelines: {costs.pass_seconds * 1e3:.2f} ms a pass, "
            f"{costs.message_seconds * 1e3:.2f} ms a message, "
            f"{costs.fixed_seconds * 1e3:.2f} ms a step beyond layers and bytes{off}"
        )
    return lines


def _head(measured: Profile) -> str:
    """One line: what was measured where, and what is not in the table."""
    how, sync, emulated = measured.provenance or {}, measured.sync, measured.emulation
    facts = [f"update {measured.update_seconds * 1e3:.2f} ms"]
    if measured.optimizer is not None:
        chosen = ", by default" if measured.optimizer.is_default else ""
        facts[0] += f" by {measured.optimizer.name}{chosen}"
    if sync is None:
        facts.append(f"sync not measured ({how.get('sync', {}).get('skipped', 'unknown')})")
    else:
        at_most = "" if sync.sync_seconds is not None else "unknown, at most "
        facts.append(
            f"sync {at_most}{sync.counted_seconds * 1e3:.2f} ms over {sync.num_devices} devices"
        )
    if measured.links is not None:
        rate = measured.links.bytes_per_second / 1e9
        facts.append(f"links {measured.links.latency_seconds * 1e6:.0f} us + {rate:.2f} GB/s")
    kind = ""
    if emulated:
        kind = f" (emulated: {emulated.speed:g} of {emulated.base_device_type})"
        facts.append(f"held passes off by at most {how['emulation']['worst_error']:.1%}")
    return f"{measured.model} on {measured.device_type}{kind}; {', '.join(facts)}"


def _how_found(trace: LayerTrace | None) -> str | None:
    """Which way took the model apart, and what that means for a launch."""
    if trace is None:
        return None
    if trace.obstacle is not None:
        return f"layers {trace.obstacle}"
    return f"layers found by {TOOLS[trace.way]}: pipelines of them can be launched"


def corrections_table(profile: Profile) -> str:
    """The newest correction's values before and after; of many, only the largest changes."""
    name = f"{profile.model} on {profile.device_type}"
    entries = (profile.provenance or {}).get("corrections", ())
    if not entries:
        return f"{name}: unchanged"
    changes = entries[-1]["changes"]
    ranked = sorted(range(len(changes)), key=lambda index: (-_change(changes[index]), index))
    listed = [changes[index] for index in sorted(ranked[:_MOST_ROWS])]
    rows = [
        (entry["term"], shown(entry["before"]), shown(entry["after"]), _change_text(entry))
        for entry in listed
    ]
    lines = [
        f"{name}: corrected by {', '.join(run['run'] for run in entries[-1]['runs'])}",
        grid(("term", "before", "after", "change"), rows),
    ]
    if len(changes) > len(listed):
        lines.append(f"and {len(changes) - len(listed)} smaller changes (provenance.corrections)")
    return "\n".join(lines)


def _change(entry: dict[str, float | None]) -> float:
    before, after = entry["before"], entry["after"]
    if not before or after is None:
        return float("inf")
    return abs(after / before - 1)


def _change_text(entry: dict[str, float | None]) -> str:
    before, after = entry["before"], entry["after"]
    return "-" if not before or after is None else f"{100 * (after / before - 1):+.1f} %"
