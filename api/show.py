"""``hetflow.show``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schema import files
from ..schema.errors import FileError, HetflowError
from ..schema.options import option
from ..schema.requests.kinds import Profiles
from .calls import checks

if TYPE_CHECKING:
    from ..schedules.timing import Timing
    from ..schema.files import Record
    from ..schema.plan import Plan


@checks
def show(
    source: "Record | Profiles",
    *,
    plot: Path | str | None = None,
    force: bool = False,
) -> str:
    """Return a record as a table of text, and draw it if asked.

    Args:
        source: A record, profiles, the file of a record, or the folder of profiles or of a run.
        plot: Draw profiles, a plan, a simulated run or a market into this .png or .svg.
        force: Whether to overwrite an existing picture.

    Returns:
        What ``hetflow show`` prints.

    Raises:
        HetflowError: There is no picture of such a record.
        FileError: A file is missing, has faults, or is in the way.

    Example:
        >>> import hetflow
        >>> print(hetflow.show(hetflow.Cluster.parse("2xV100:16GB")))
        device type    devices    memory        $/hour
        -------------  ---------  ------------  --------
        V100           2          16,384.0 MiB  -
    """
    from ..reports.tables import table_of

    held: Any = records_of(Path(source)) if isinstance(source, Path | str) else source
    records = held if isinstance(held, Sequence) else (held,)
    if plot is not None:
        files.write_bytes(Path(plot), picture(records, Path(plot)), force=force)
    return "\n\n".join(table_of(record) for record in records)


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
        HetflowError: There is no such picture of the record, or matplotlib is not installed.
    """
    from ..schema.market import Market
    from ..schema.plan import Plan
    from ..schema.profile import Profile
    from ..schema.simulation import SimulationRun

    file_format = target.suffix.lower().lstrip(".")
    if file_format not in ("png", "svg"):
        raise HetflowError(
            f"{option('plot', target)}: must end in .png or .svg", hint="rename the output"
        )
    first = records[0]
    if isinstance(first, Plan) and first.kind == "pipeline":
        from ..reports.timeline import svg_timeline

        if file_format != "svg":
            raise HetflowError(
                f"{option('plot', target)}: a timeline is drawn as .svg", hint="rename it"
            )
        return svg_timeline(timing_of(first)).encode()
    if isinstance(first, SimulationRun):
        from ..reports.gantt import simulation_image

        return simulation_image(first, file_format)
    if isinstance(first, Market):
        from ..reports.market_plots import presence_image, prices_image, spread_image

        if way == "by_cloud":
            return spread_image(first, file_format)
        if way == "presence" or not (way or first.prices):
            return presence_image(first, file_format)
        return prices_image(first, file_format, per_device=way == "per_device")
    from ..reports.plots import curves_image, split_image

    if isinstance(first, Plan) and first.kind == "split":
        return split_image(first, file_format)
    profiles = [record for record in records if isinstance(record, Profile)]
    if not profiles:
        raise HetflowError(
            "only profiles, plans, simulated runs and prices can be plotted",
            hint=f"leave {option('plot')} out",
        )
    return curves_image(profiles, file_format)


def timing_of(plan: "Plan") -> "Timing":
    """Return when each pass and message of a pipeline's schedule begins and ends."""
    from ..schedules.of_plan import timed

    return timed(plan)
