"""Plans as Markdown tables, for a pull request or a wiki page."""

from hetflow import Plan
from hetflow.plugins import exporter


@exporter("markdown", takes=(Plan,))
def table(plan: Plan, name: str) -> str:
    """A Markdown table of a plan's devices and the work of each."""
    if plan.kind != "split":
        heads = ("stage", "devices", "layers", "ms a microbatch")
        rows = [
            (
                str(number),
                ", ".join(f"{group.num_devices}x{group.device_type}" for group in stage.replicas),
                f"{stage.layers[0]} to {stage.layers[-1]} ({len(stage.layers)})",
                f"{stage.compute_seconds * 1e3:.4g}",
            )
            for number, stage in enumerate(plan.stages)
        ]
    else:
        heads = ("devices", "batch a device", "virtual nodes a device")
        rows = [
            (
                f"{group.num_devices}x{group.device_type}",
                str(group.device_batch_size),
                str(group.virtual_nodes),
            )
            for group in plan.groups
        ]
    milliseconds = plan.predicted.step_seconds * 1e3
    lines = [
        f"{plan.model}, batch {plan.global_batch_size}: {milliseconds:.4g} ms a step",
        "",
        *(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows)),
    ]
    return "\n".join(lines) + "\n"
