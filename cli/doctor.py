"""``hetflow doctor``: what the installation lacks to use this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import HetflowError
from .common import ForceFlag, JsonFlag, emit, emit_json, note


def doctor(
    json: JsonFlag = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="Write versions, topology and findings here, to send."
        ),
    ] = None,
    suite: Annotated[
        Path | None,
        typer.Option(
            "--suite", help="With --report: results that `pytest --junitxml` has written."
        ),
    ] = None,
    force: ForceFlag = False,
) -> None:
    """Check torch, drivers, devices and extras, and say how to fix what is missing.

    \b
    hetflow doctor
    hetflow doctor --report report.json --suite suite.xml
    """
    from ..devices.doctor import collect_facts, findings, is_usable, suite_results
    from ..devices.doctor import report as report_of

    if suite is not None and report is None:
        raise HetflowError("--suite is a part of a report", hint="give --report FILE as well")
    facts = collect_facts()
    found = findings(facts)
    if report is not None:
        from ..schema import files

        results = None if suite is None else suite_results(suite)
        document = report_of(facts, found, results)
        files.write_bytes(report, files.to_json(document).encode(), force=force)
        note(
            f"{report} written, without names, paths or serial numbers; read it before you send it"
        )
    if json:
        emit_json({"facts": asdict(facts), "findings": [asdict(f) for f in found]})
    else:
        from ..formats.reports.grid import grid

        emit(grid(("what", "found"), facts.rows()))
        emit("")
        for finding in found:
            emit(f"{finding.level}: {finding.text}")
            if finding.mend:
                emit(f"    {finding.mend}")
    if not is_usable(found):
        first = next(finding for finding in found if finding.level == "error")
        raise HetflowError(first.text, hint=first.mend)
