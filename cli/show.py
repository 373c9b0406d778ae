"""``hetflow show``: any hetflow file as a table, a picture or a timeline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..schema.errors import HetflowError
from .common import ForceFlag, JsonFlag, check_outputs, emit, emit_json, emit_table, note

if TYPE_CHECKING:
    from ..schema.plan import Plan
    from ..schema.run import RunRecord
    from ..schema.simulation import SimulationRun


def show(
    file: Annotated[
        Path, typer.Argument(help="Any hetflow file, or the folder of profiles or of a run.")
    ],
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
    hetflow show hetflow-runs/a
    hetflow show hetflow-runs/a/run.json --csv devices.csv
    hetflow show pipeline.json --timeline --html timeline.html --trace trace.json
    """
    from ..api.show import holds_profiles, picture, records_of
    from ..reports.tables import table_of
    from ..schema.files import to_plain

    records = records_of(file)
    ways = {"--per-device": per_device, "--by-cloud": by_cloud, "--presence": presence}
    files_asked = {"--plot": plot, "--html": html, "--trace": trace, "--csv": csv}
    pages = {"--timeline": timeline, "--explain": explain, "--json": json}
    record: Any = records[0]  # its type is judged by the options that were given
    given = [flag for flag, value in {**ways, **files_asked, **pages}.items() if value]
    way = _way(given)
    _refuse_unread(record, given)
    if plot is not None:
        _write(plot, picture(records, plot, way.lstrip("-").replace("-", "_")), force=force)
    text = _timelines(record, html, trace, force=force) if timeline or html or trace else ""
    if csv is not None:
        _table(record, csv, force=force)
    if explain:
        _explain(record, json=json)
        return
    if json:
        documents = [to_plain(record) for record in records]
        emit_json(documents if holds_profiles(file) else documents[0])
        return
    emit("\n\n".join(table_of(record) for record in records))
    if timeline:
        emit(f"\n{text}")


def _way(given: list[str]) -> str:
    """The way to draw prices that was asked for, or nothing; refuse options that exclude others."""
    ways = [flag for flag in given if flag in ("--per-device", "--by-cloud", "--presence")]
    if len(ways) > 1:
        raise HetflowError(f"{' and '.join(ways)} are different pictures; ask for one")
    if ways and "--plot" not in given:
        raise HetflowError(f"{ways[0]} says how prices are drawn", hint="add --plot FILE.svg")
    instead = [flag for flag in given if flag in ("--json", "--explain")]
    if "--timeline" in given and instead:
        raise HetflowError(
            f"{instead[0]} shows something else in the terminal than --timeline",
            hint="leave one out, or write the timeline with --html FILE",
        )
    return ways[0] if ways else ""


def _refuse_unread(record: object, flags: list[str]) -> None:
    """Refuse an option that does nothing for this kind of file."""
    from ..schema.plan import Plan

    pipelines = ("pipeline plans", ("pipeline",))
    markets = ("markets", ("Market",))
    drawn = ("Profile", "split", "pipeline", "SimulationRun", "Market")
    shown_of: dict[str, tuple[str, tuple[str, ...]]] = {
        "--plot": ("profiles, split and pipeline plans, simulated runs and markets", drawn),
        "--per-device": markets,
        "--by-cloud": markets,
        "--presence": markets,
        "--timeline": pipelines,
        "--html": pipelines,
        "--trace": pipelines,
        "--explain": ("plans", ("split", "pipeline", "parallel")),
        "--csv": ("runs, launched or simulated", ("RunRecord", "SimulationRun")),
    }
    own = record.kind if isinstance(record, Plan) else type(record).__name__
    for flag in flags:
        words, kinds = shown_of.get(flag, ("", (own,)))
        if own not in kinds:
            schema = getattr(record, "schema", "")
            found = " ".join(filter(None, (schema, getattr(record, "kind", ""))))
            raise HetflowError(
                f"{flag} is for {words}: it has no effect on this file ({found})",
                hint=f"leave {flag} out",
            )


def _table(record: "RunRecord | SimulationRun", path: Path, *, force: bool) -> None:
    emit_table(record.to_frame(), path, force=force)


def _explain(record: "Plan", *, json: bool) -> None:
    from ..reports.explain import explain, explanation_document, explanation_table

    explanation = explain(record)
    if json:
        emit_json(explanation_document(explanation))
    else:
        emit(explanation_table(explanation))


def _write(path: Path, content: bytes, *, force: bool) -> None:
    from ..schema import files

    files.write_bytes(path, content, force=force)
    note(f"{path} written")


def _timelines(record: "Plan", html: Path | None, trace: Path | None, *, force: bool) -> str:
    from ..api.show import timing_of
    from ..reports.timeline import html_timeline, terminal_timeline
    from ..reports.trace import trace_json

    check_outputs(html, trace, force=force)
    timing = timing_of(record)
    if html is not None:
        title = f"{record.model}, {record.schedule}, {record.config}"
        _write(html, html_timeline(timing, title=title).encode(), force=force)
    if trace is not None:
        _write(trace, trace_json(timing).encode(), force=force)
    return terminal_timeline(timing)
