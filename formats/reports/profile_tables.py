"""What profiling measured, and what runs changed in a profile, as tables."""

from ...schema.layers import LayerTrace
from ...schema.options import option
from ...schema.profile import BatchPoint, Profile
from .grid import grid

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
    shown = [changes[index] for index in sorted(ranked[:_MOST_ROWS])]
    rows = [
        (entry["term"], _number(entry["before"]), _number(entry["after"]), _percent(entry))
        for entry in shown
    ]
    lines = [
        f"{name}: corrected by {', '.join(run['run'] for run in entries[-1]['runs'])}",
        grid(("term", "before", "after", "change"), rows),
    ]
    if len(changes) > len(shown):
        lines.append(f"and {len(changes) - len(shown)} smaller changes (provenance.corrections)")
    return "\n".join(lines)


def _change(entry: dict[str, float | None]) -> float:
    before, after = entry["before"], entry["after"]
    if not before or after is None:
        return float("inf")
    return abs(after / before - 1)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _percent(entry: dict[str, float | None]) -> str:
    before, after = entry["before"], entry["after"]
    return "-" if not before or after is None else f"{100 * (after / before - 1):+.1f} %"
