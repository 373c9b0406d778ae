"""``hetflow show``: any hetflow file as a table or a picture."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import HetflowError
from .common import ForceFlag, JsonFlag, emit, emit_json, note


def show(
    file: Annotated[Path, typer.Argument(help="Any hetflow file, or a folder of profiles.")],
    plot: Annotated[
        Path | None, typer.Option(help="Draw it into this .png or .svg file as well.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Show a profile, a pool, a plan or a run as a table; profiles and plans also as plots.

    \b
    hetflow show plan.json
    hetflow show profiles --plot curves.svg
    """
    from ..reports.tables import table_of
    from ..schema import files
    from ..schema.files import to_plain

    records = files.read_profiles(file) if file.is_dir() else (files.read_any(file),)
    if plot is not None:
        files.write_bytes(plot, _picture(records, plot), force=force)
        note(f"picture written to {plot}")
    if json:
        documents = [to_plain(record) for record in records]
        emit_json(documents if file.is_dir() else documents[0])
    else:
        emit("\n\n".join(table_of(record) for record in records))


def _picture(records: tuple[object, ...], target: Path) -> bytes:
    from ..reports.plots import curves_image, split_image
    from ..schema.plan import SplitPlan
    from ..schema.profile import Profile

    file_format = target.suffix.lower().lstrip(".")
    if file_format not in ("png", "svg"):
        raise HetflowError(f"--plot {target}: must end in .png or .svg", hint="rename the output")
    first = records[0]
    if isinstance(first, SplitPlan):
        return split_image(first, file_format)
    profiles = [record for record in records if isinstance(record, Profile)]
    if not profiles:
        raise HetflowError("only profiles and plans can be plotted", hint="leave --plot out")
    return curves_image(profiles, file_format)
