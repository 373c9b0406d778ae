"""``hetflow show``: any hetflow file as a table, a picture or a timeline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import HetflowError
from .common import ForceFlag, JsonFlag, check_outputs, emit, emit_json, emit_table, note

if TYPE_CHECKING:
    from ..schedules.timing import Timing
    from ..schema.pipeline import PipelinePlan


def show(
    file: Annotated[Path, typer.Argument(help="Any hetflow file, or a folder of profiles.")],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw profiles, a plan, a simulated run, a market's prices, or when its spot "
            "machines were there, into this .png or .svg."
        ),
    ] = None,
    per_device: Annotated[
        bool, typer.Option("--per-device", help="Draw prices per device, not per machine.")
    ] = False,
    by_cloud: Annotated[
        bool,
        typer.Option("--by-cloud", help="Draw the least and the greatest price of each cloud."),
    ] = False,
    presence: Annotated[
        bool,
        typer.Option(
            "--presence", help="Draw when spot machines were there, in a market with prices too."
        ),
    ] = False,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Draw a pipeline plan's schedule in the terminal.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write a pipeline plan's timeline as one HTML file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the timeline as a trace file for Perfetto.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="List the terms of a plan's predicted step.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write a run's devices, or a simulated run's jobs, as a table."),
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show a profile, pool, plan, allocation or run as a table; some also as pictures.

    \b
    hetflow show plan.json
    hetflow show plan.json --explain
    hetflow show market.json --plot prices.svg
    hetflow show profiles --plot curves.svg
    hetflow show hetflow-runs/a/run.json --csv devices.csv
    hetflow show pipeline.json --timeline --html timeline.html --trace trace.json
    """
    from ..reports.tables import table_of
    from ..schema import files
    from ..schema.files import to_plain

    records = files.read_profiles(file) if file.is_dir() else (files.read_any(file),)
    if plot is not None:
        ways = {"--per-device": per_device, "--by-cloud": by_cloud, "--presence": presence}
        asked = [flag for flag, is_asked in ways.items() if is_asked]
        if len(asked) > 1:
            raise HetflowError(f"{' and '.join(asked)} are different pictures; ask for one")
        way = asked[0] if asked else ""
        _write(plot, _picture(records, plot, way), force=force)
    text = _timelines(records[0], html, trace, force=force) if timeline or html or trace else ""
    if csv is not None:
        _table(records[0], csv, force=force)
    if explain:
        _explain(records[0], json=json)
        return
    if json:
        documents = [to_plain(record) for record in records]
        emit_json(documents if file.is_dir() else documents[0])
        return
    emit("\n\n".join(table_of(record) for record in records))
    if timeline:
        emit(f"\n{text}")


def _table(record: object, path: Path, *, force: bool) -> None:
    from ..schema.run import RunRecord
    from ..schema.simulation import SimulationRun

    if not isinstance(record, RunRecord | SimulationRun):
        raise HetflowError("only runs are written as tables", hint="leave --csv out, or use --json")
    emit_table(record.to_frame(), path, force=force)


def _explain(record: object, *, json: bool) -> None:
    from ..reports.explain import explanation_document, explanation_table
    from ..reports.explain_pipeline import explain_pipeline
    from ..reports.explain_split import explain_split
    from ..schema.pipeline import PipelinePlan
    from ..schema.plan import SplitPlan

    if isinstance(record, SplitPlan):
        explanation = explain_split(record)
    elif isinstance(record, PipelinePlan):
        explanation = explain_pipeline(record)
    else:
        raise HetflowError(
            "only split and pipeline plans are explained", hint="leave --explain out"
        )
    if json:
        emit_json(explanation_document(explanation))
    else:
        emit(explanation_table(explanation))


def _write(path: Path, content: bytes, *, force: bool) -> None:
    from ..schema import files

    files.write_bytes(path, content, force=force)
    note(f"{path} written")


def _picture(records: tuple[object, ...], target: Path, way: str) -> bytes:
    from ..schema.market import Market
    from ..schema.pipeline import PipelinePlan
    from ..schema.plan import SplitPlan
    from ..schema.profile import Profile
    from ..schema.simulation import SimulationRun

    file_format = target.suffix.lower().lstrip(".")
    if file_format not in ("png", "svg"):
        raise HetflowError(f"--plot {target}: must end in .png or .svg", hint="rename the output")
    first = records[0]
    if isinstance(first, PipelinePlan):
        from ..reports.timeline import svg_timeline

        if file_format != "svg":
            raise HetflowError(f"--plot {target}: a timeline is drawn as .svg", hint="rename it")
        return svg_timeline(_timing(first)).encode()
    if isinstance(first, SimulationRun):
        from ..reports.gantt import simulation_image

        return simulation_image(first, file_format)
    if isinstance(first, Market):
        from ..reports.market_plots import presence_image, prices_image, spread_image

        if way == "--by-cloud":
            return spread_image(first, file_format)
        if way == "--presence" or not first.prices:
            return presence_image(first, file_format)
        return prices_image(first, file_format, per_device=way == "--per-device")
    from ..reports.plots import curves_image, split_image

    if isinstance(first, SplitPlan):
        return split_image(first, file_format)
    profiles = [record for record in records if isinstance(record, Profile)]
    if not profiles:
        raise HetflowError(
            "only profiles, plans, simulated runs and prices can be plotted",
            hint="leave --plot out",
        )
    return curves_image(profiles, file_format)


def _timelines(record: object, html: Path | None, trace: Path | None, *, force: bool) -> str:
    from ..reports.timeline import html_timeline, terminal_timeline
    from ..reports.trace import trace_json
    from ..schema.pipeline import PipelinePlan

    if not isinstance(record, PipelinePlan):
        raise HetflowError("only pipeline plans have a timeline", hint="leave --timeline out")
    check_outputs(html, trace, force=force)
    timing = _timing(record)
    if html is not None:
        title = f"{record.model}, {record.schedule}, {record.config}"
        _write(html, html_timeline(timing, title=title).encode(), force=force)
    if trace is not None:
        _write(trace, trace_json(timing).encode(), force=force)
    return terminal_timeline(timing)


def _timing(plan: "PipelinePlan") -> "Timing":
    from ..schedules.of_plan import schedule_of, times_of
    from ..schedules.timing import time_schedule

    return time_schedule(schedule_of(plan), times_of(plan))
