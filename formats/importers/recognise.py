"""Tell which form a file of jobs, throughputs or market data has, and read it.

Each form of market data is known by its keys or its columns; what has none of these is refused,
never guessed.
"""

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...schema import files
from ...schema.errors import FileError
from ...schema.jobs import Jobs, Throughputs
from ...schema.market import InstanceType, Market
from .availability import read_windows
from .price_lists import (
    CATALOGUE_COLUMNS,
    read_azure_price_list,
    read_gcp_price_list,
    read_instance_types,
    read_skypilot_catalogue,
)
from .registry import PRICE_IMPORTERS, TraceOptions, json_of

_FORMS = (
    "hetflow.market/1; the JSON of `aws ec2 describe-spot-price-history`; Can't Be Late's windows; "
    "Azure's and Google's price lists (JSON); SkyPilot's catalogue (vms.csv); a CSV with Time, "
    "Instance, $/h and Zone or Region; a CSV with Instance, GPU type and # GPUs; a table of "
    "Azure's prices by Date"
)
Read = Callable[[Path], Market]


def read_market(path: Path) -> Market:
    """Read a file, or a folder of files of one form.

    Raises:
        FileError: It is of no form that is known, or has faults.
    """
    return _form_of(_first(path))(path)


def read_markets(given: Sequence[Market | Path | str]) -> tuple[Market, ...]:
    """Read files as markets; prices without machines get the machines that the others describe.

    Of such prices those of machines that nobody describes are left out, unless all are.

    Raises:
        FileError: A file is of no form that is known, or has faults.
    """
    markets = [one if isinstance(one, Market) else read_market(Path(one)) for one in given]
    known = [
        replace(machine, on_demand_dollars_per_hour=None, spot_dollars_per_hour=None)
        for market in markets
        for machine in market.instance_types
    ]
    return tuple(
        _described(market, known) if market.prices and not market.instance_types else market
        for market in markets
    )


def _described(market: Market, known: Sequence[InstanceType]) -> Market:
    market = replace(market, instance_types=tuple(known))
    told = tuple(one for one in market.prices if market.instance_type_of(one) is not None)
    return replace(market, prices=told or market.prices)


def is_market(path: Path) -> bool:
    """Whether a file, or the first of a folder, is of a known form."""
    try:
        _form_of(_first(path))
    except FileError:
        return False
    return True


def _first(path: Path) -> Path:
    if not path.is_dir():
        return path
    found = sorted(one for one in path.rglob("*") if one.suffix in (".json", ".csv"))
    if not found:
        raise FileError(f"{path}: holds no .json file, and no .csv file")
    return found[0]


def _form_of(path: Path) -> Read:
    text = files.read_text(path).removeprefix("\ufeff")
    if text.lstrip()[:1] in ("{", "["):
        return _json_form(path, text)
    first = next((row for row in csv.reader(text.splitlines()[:1])), [])
    names = {name.strip() for name in first}
    if names.issuperset(CATALOGUE_COLUMNS):
        return _machines(read_skypilot_catalogue)
    if {"Instance", "GPU type", "# GPUs"} <= names:
        return _machines(read_instance_types)
    if {"Time", "Instance", "$/h"} <= names:
        return _prices("csv-spot-prices")
    if first[:1] == ["Date"]:
        return _prices("azure-spot-prices")
    raise _unknown(path)


def _json_form(path: Path, text: str) -> Read:
    data = json_of(text, path)
    if isinstance(data, dict):
        if "schema" in data or "metadata" in data:
            return lambda given: read_windows(given, TraceOptions())
        if "SpotPriceHistory" in data:
            return _prices("aws-spot-prices")
        if isinstance(data.get("Items"), list):
            return _list(read_azure_price_list, data)
        if isinstance(data.get("skus"), list):
            return _list(read_gcp_price_list, data)
    raise _unknown(path)


def _unknown(path: Path) -> FileError:
    return FileError(f"{path}: is no market data of a known form", hint=f"known are {_FORMS}")


def _prices(name: str) -> Read:
    return lambda path: Market(prices=PRICE_IMPORTERS.get(name)(path))


def _machines(read: Callable[[Path], Any]) -> Read:
    def market(path: Path) -> Market:
        if path.is_dir():
            found = [one for file in sorted(path.rglob("*.csv")) for one in read(file)]
        else:
            found = read(path)
        return Market(instance_types=tuple(found))

    return market


def _list(read: Callable[[Any, Path], Any], data: Any) -> Read:
    def market(path: Path) -> Market:
        if not path.is_dir():
            return Market(instance_types=read(data, path))
        found: list[InstanceType] = []
        for file in sorted(path.rglob("*.json")):
            found += read_market(file).instance_types
        return Market(instance_types=tuple(found))

    return market


SAMPLE = "sample:"


def path_of(path: Path) -> Path:
    """The file that ``sample:NAME`` stands for (examples/cluster); any other path is unchanged.

    Raises:
        FileError: There is no such sample.
    """
    text = str(path)
    if not text.startswith(SAMPLE):
        return path
    folder = Path(__file__).resolve().parents[2] / "examples" / "cluster"
    names = sorted(found.name for found in folder.glob("*.csv"))
    name = text.removeprefix(SAMPLE)
    if name not in names:
        raise FileError(f"{text[:60]}: no such sample", hint=f"samples are {', '.join(names)}")
    return folder / name


def read_jobs(path: Path) -> Jobs:
    """Read jobs from a hetflow file, a CSV, a Gavel ``.trace``, or a plug-in's format.

    Raises:
        FileError: The file is missing or has faults.
    """
    from .registry import JOBS_IMPORTERS

    path = path_of(path)
    foreign = JOBS_IMPORTERS.find(path.suffix) if path.suffix else None
    return files.read(path, Jobs) if foreign is None else foreign(path)


def read_throughputs(path: Path, *, pairs: bool) -> Throughputs:
    """Read throughputs from a hetflow file, a CSV, or Gavel's table.

    Args:
        path: The file.
        pairs: Whether colocated pairs of models are needed; most of Gavel's table is pairs.

    Raises:
        FileError: The file is missing or has faults.
    """
    from .csv_tables import read_throughputs_csv
    from .gavel import read_gavel_throughputs

    path = path_of(path)
    if path.suffix == ".csv":
        return read_throughputs_csv(path)
    try:
        document = json.loads(files.read_text(path))
    except (ValueError, RecursionError):
        document = {"schema": None}  # the strict reader reports what is wrong with it
    if isinstance(document, dict) and "schema" not in document:
        return read_gavel_throughputs(path, pairs=pairs)
    return files.read(path, Throughputs)
