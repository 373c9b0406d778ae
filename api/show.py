"""``hetflow.show``."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import files
from ..schema.errors import FileError, HetflowError
from ..schema.options import asked_of, option
from ..schema.plan import Plan
from ..schema.requests.files import DRAWN, MARKETS, PIPELINES, PLANS, RUNS, ShowRequest
from .calls import takes

if TYPE_CHECKING:
    from ..schema.files import Record

_log = logging.getLogger("hetflow")
_WORDS = {
    DRAWN: "profiles, split and pipeline plans, simulated runs and markets",
    MARKETS: "markets",
    PIPELINES: "pipeline plans",
    PLANS: "plans",
    RUNS: "runs, launched or simulated",
}
_WAYS = ("per_device", "by_cloud", "presence")


@takes(ShowRequest)
def show(request: ShowRequest) -> str:
    """Return a record as a table of text, and write the pictures and files that are asked for.

    Returns:
        What ``hetflow show`` prints.

    Raises:
        HetflowError: An option is not for such a record, or excludes another one.
        FileError: A file is missing, has faults, or is in the way.

    Example:
        >>> import hetflow
        >>> print(hetflow.show(hetflow.Cluster.parse("2xV100:16GB")))
        device type    devices    memory        $/hour
        -------------  ---------  ------------  --------
        V100           2          16,384.0 MiB  -
    """
    from ..formats.reports.explain import explain, explanation_table
    from ..formats.reports.tables import table_of

    records, timeline = _carried_out(request)
    if request.explain:
        return explanation_table(explain(records[0]))
    tables = "\n\n".join(table_of(record) for record in records)
    return f"{tables}\n\n{timeline}" if request.timeline else tables


def document_of(request: ShowRequest) -> Any:
    """Do what is asked for, and return the records, or a plan's explanation, as plain data.

    Raises:
        HetflowError: As ``show``.
    """
    from ..formats.reports.explain import explain, explanation_document

    records, _ = _carried_out(request, as_json=True)
    if request.explain:
        return explanation_document(explain(records[0]))
    documents = [files.to_plain(record) for record in records]
    source = request.source
    is_several = holds_profiles(source) if isinstance(source, Path) else len(records) > 1
    return documents if is_several else documents[0]


def _carried_out(request: ShowRequest, *, as_json: bool = False) -> tuple[Sequence[Any], str]:
    """Read the records, write the files that are asked for; the records, and a timeline's text."""
    source = request.source
    held: Any = records_of(Path(source)) if isinstance(source, Path | str) else source
    records = held if isinstance(held, Sequence) else (held,)
    record, force = records[0], request.force
    way = _way(request, as_json)
    _refuse_unread(record, request)
    if request.plot is not None:
        _write(request.plot, picture(records, Path(request.plot), way), force)
    text = ""
    if request.timeline or request.html is not None or request.trace is not None:
        text = _timelines(record, request)
    if request.csv is not None:
        frame = record.to_frame().to_csv(index=False, lineterminator="\n")
        _write(request.csv, frame.encode(), force)
    return records, text


def _way(request: ShowRequest, as_json: bool) -> str:
    """The way to draw prices that was asked for, or nothing; refuse options that exclude others."""
    ways = [name for name in _WAYS if getattr(request, name)]
    if len(ways) > 1:
        said = " and ".join(map(option, ways))
        raise HetflowError(f"{said} are different pictures; ask for one")
    if ways and request.plot is None:
        raise HetflowError(
            f"{option(ways[0])} says how prices are drawn", hint=f"add {option('plot', 'FILE.svg')}"
        )
    if request.timeline and (request.explain or as_json):
        other = option("explain" if request.explain else "json")
        raise HetflowError(
            f"{other} shows something else in the terminal than {option('timeline')}",
            hint=f"leave one out, or write the timeline with {option('html', 'FILE')}",
        )
    return ways[0] if ways else ""


def _refuse_unread(record: Any, request: ShowRequest) -> None:
    """Refuse an option that does nothing for this kind of record."""
    own = record.kind if isinstance(record, Plan) else type(record).__name__
    for asked in asked_of(ShowRequest):
        kinds = asked.option.read_by
        if kinds and own not in kinds and getattr(request, asked.name):
            schema = getattr(record, "schema", "")
            found = " ".join(filter(None, (schema, getattr(record, "kind", ""))))
            flag = option(asked.name)
            raise HetflowError(
                f"{flag} is for {_WORDS[kinds]}: it has no effect on this file ({found})",
                hint=f"leave {flag} out",
            )


def _timelines(plan: Plan, request: ShowRequest) -> str:
    from ..formats.reports.timeline import html_timeline, terminal_timeline, trace_json
    from ..planning.schedules.of_plan import timed

    paths = [Path(path) for path in (request.html, request.trace) if path is not None]
    files.check_outputs(*paths, force=request.force)
    timing = timed(plan)
    if request.html is not None:
        title = f"{plan.model}, {plan.schedule}, {plan.config}"
        _write(request.html, html_timeline(timing, title=title).encode(), request.force)
    if request.trace is not None:
        _write(request.trace, trace_json(timing).encode(), request.force)
    return terminal_timeline(timing)


def _write(path: Path | str, content: bytes, force: bool) -> None:
    files.write_bytes(Path(path), content, force=force)
    _log.info(f"{path} written")


def holds_profiles(path: Path) -> bool:
    """Whether a path is a folder of profiles, rather than a file or the folder of a run."""
    return path.is_dir() and not (path / "run.json").exists()


def records_of(path: Path) -> "Sequence[Record]":
    """Read a hetflow file, the profiles of a folder, or the record of a run from its folder.

    Raises:
        FileError: The file is missing or has faults, or the folder holds neither.
    """
    if holds_profiles(path):
        if (path / "launch.json").exists():
            raise FileError(
                f"{path}: this run has written no record yet",
                hint=f"show its plan: {path / 'plan.json'}",
            )
        runs = sorted(path.glob("*/run.json"), key=lambda record: record.stat().st_mtime)
        if runs and not any(path.glob("*.json")):
            raise FileError(
                f"{path}: is a folder of runs; show one of them",
                hint=f"for example {runs[-1].parent}",
            )
        return files.read_profiles(path)
    return (files.read_any(path / "run.json" if path.is_dir() else path),)


def picture(records: Sequence[object], target: Path, way: str = "") -> bytes:
    """Draw profiles, a plan, a simulated run or a market.

    Args:
        records: Profiles, or one record.
        target: The file to draw for, ``.png`` or ``.svg``.
        way: Which picture of a market: ``per_device``, ``by_cloud`` or ``presence``.

    Raises:
        HetflowError: Pictures of it have another ending, or matplotlib is not installed.
    """
    from ..formats.reports.plots import curves_image, image_format, split_image
    from ..schema.market import Market
    from ..schema.profile import Profile
    from ..schema.simulation import SimulationRun

    file_format, first = image_format(target), records[0]
    if isinstance(first, Plan) and first.kind == "pipeline":
        from ..formats.reports.timeline import svg_timeline
        from ..planning.schedules.of_plan import timed

        if file_format != "svg":
            raise HetflowError(
                f"{option('plot', target)}: a timeline is drawn as .svg", hint="rename it"
            )
        return svg_timeline(timed(first)).encode()
    if isinstance(first, SimulationRun):
        from ..formats.reports.plots import simulation_image

        return simulation_image(first, file_format)
    if isinstance(first, Market):
        from ..formats.reports.plots import presence_image, prices_image, spread_image

        if way == "by_cloud":
            return spread_image(first, file_format)
        if way == "presence" or not (way or first.prices):
            return presence_image(first, file_format)
        return prices_image(first, file_format, per_device=way == "per_device")
    if isinstance(first, Plan) and first.kind == "split":
        return split_image(first, file_format)
    return curves_image([record for record in records if isinstance(record, Profile)], file_format)
