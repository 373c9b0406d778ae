"""Read machines and their devices from a table such as ``Instance,GPU type,# GPUs``."""

import csv
from io import StringIO
from pathlib import Path

from ..schema.errors import FileError, ProblemError
from ..schema.files import read_text
from ..schema.market import InstanceType
from .price_cells import dollars_of

_NEEDED = ("Instance", "GPU type", "# GPUs")
_MORE = ("On demand $/h", "Spot $/h", "Egress $/GB", "Cloud", "Region")


def read_instance_types(path: Path) -> tuple[InstanceType, ...]:
    """Read machines, one per line; columns in any order; prices (dollars per hour) are optional.

    Raises:
        FileError: The file is no such table, or a value in it is invalid.
    """
    reader = csv.DictReader(StringIO(read_text(path).removeprefix("\ufeff")), strict=True)
    names = reader.fieldnames or ()
    unknown = [name for name in names if name not in (*_NEEDED, *_MORE)]
    missing = [name for name in _NEEDED if name not in names]
    if unknown or missing:
        raise FileError(
            f"{path}: line 1: "
            + (f"no column {missing[0]!r}" if missing else f"unknown column {unknown[0][:60]!r}"),
            hint=f"columns are {', '.join(_NEEDED)}, and any of {', '.join(_MORE)}",
        )
    found: list[InstanceType] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise ProblemError("has another number of cells than the first line")
            found.append(_instance_type(row))
    except (ProblemError, csv.Error) as error:
        message = error.message if isinstance(error, ProblemError) else str(error)
        raise FileError(f"{path}: line {reader.line_num}: {message}") from None
    return tuple(found)


def _instance_type(row: dict[str, str]) -> InstanceType:
    cells = {name: cell.strip() for name, cell in row.items()}
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
