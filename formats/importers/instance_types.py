"""Read machines and their devices from a table such as ``Instance,GPU type,# GPUs``."""

from pathlib import Path

from ...schema.errors import FileError, ProblemError
from ...schema.market import InstanceType
from .csv_tables import csv_lines, row_of
from .price_cells import dollars_of

_NEEDED = ("Instance", "GPU type", "# GPUs")
_MORE = ("On demand $/h", "Spot $/h", "Egress $/GB", "Cloud", "Region")


def read_instance_types(path: Path) -> tuple[InstanceType, ...]:
    """Read machines, one per line; columns in any order; prices (dollars per hour) are optional.

    Raises:
        FileError: The file is no such table, or a value in it is invalid.
    """
    names, lines = csv_lines(path)
    unknown = [name for name in names if name not in (*_NEEDED, *_MORE)]
    missing = [name for name in _NEEDED if name not in names]
    if unknown or missing:
        raise FileError(
            f"{path}: line 1: "
            + (f"no column {missing[0]!r}" if missing else f"unknown column {unknown[0][:60]!r}"),
            hint=f"columns are {', '.join(_NEEDED)}, and any of {', '.join(_MORE)}",
        )
    found: list[InstanceType] = []
    for number, cells in lines:
        try:
            found.append(_instance_type(row_of(names, cells)))
        except ProblemError as error:
            raise FileError(f"{path}: line {number}: {error.message}") from None
    return tuple(found)


def _instance_type(cells: dict[str, str]) -> InstanceType:
    if not cells["# GPUs"].isdecimal():
        raise ProblemError(f"# GPUs must be a whole number, got {cells['# GPUs'][:60]!r}")
    on_demand, spot = cells.get("On demand $/h"), cells.get("Spot $/h")
    egress = cells.get("Egress $/GB")
    return InstanceType(
        name=cells["Instance"],
        device_type=cells["GPU type"],
        num_devices=int(cells["# GPUs"]),
        on_demand_dollars_per_hour=dollars_of(on_demand) if on_demand else None,
        spot_dollars_per_hour=dollars_of(spot) if spot else None,
        egress_dollars_per_gigabyte=dollars_of(egress) if egress else None,
        cloud=cells.get("Cloud") or None,
        region=cells.get("Region") or None,
    )
