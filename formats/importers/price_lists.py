"""Read lists of machines with their prices: a plain table, SkyPilot's, Azure's, Google's.

``instance-types`` is a table such as ``Instance,GPU type,# GPUs``, with prices where known.
``skypilot-catalogue`` is a ``vms.csv`` of SkyPilot's catalogue; its folder names the cloud.
``azure-price-list`` is what Azure's retail prices API answers (JSON); it does not say which GPUs a
machine has, so only those in a table here are read. ``gcp-price-list`` are the SKUs of Google's
billing catalogue (JSON): prices of GPUs alone, to which those of a machine's cores and memory are
added by whoever rents one. Machines without GPUs are left out.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...schema.cluster import is_device_type
from ...schema.errors import FileError, ProblemError
from ...schema.market import InstanceType
from .csv_tables import csv_lines, each_row
from .spot_prices import dollars_of

_NEEDED = ("Instance", "GPU type", "# GPUs")
_MORE = ("On demand $/h", "Spot $/h", "Egress $/GB", "Cloud", "Region")

CATALOGUE_COLUMNS = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price", "SpotPrice")
_AZURE: Mapping[str, tuple[str, int]] = {
    name: (kind, number)
    for kind, machines in {
        "K80": {"NC6": 1, "NC12": 2, "NC24": 4},
        "P100": {"NC6s_v2": 1, "NC12s_v2": 2, "NC24s_v2": 4},
        "P40": {"ND6s": 1, "ND12s": 2, "ND24s": 4},
        "M60": {"NV6": 1, "NV12": 2, "NV24": 4},
        "V100": {"NC6s_v3": 1, "NC12s_v3": 2, "NC24s_v3": 4, "ND40rs_v2": 8},
        "T4": {"NC4as_T4_v3": 1, "NC8as_T4_v3": 1, "NC16as_T4_v3": 1, "NC64as_T4_v3": 4},
        "A10": {"NV36ads_A10_v5": 1, "NV72ads_A10_v5": 2},
        "A100": {"ND96asr_v4": 8},
        "A100-80GB": {"NC24ads_A100_v4": 1, "NC48ads_A100_v4": 2, "NC96ads_A100_v4": 4,
                      "ND96amsr_A100_v4": 8},
        "H100": {"NC40ads_H100_v5": 1, "NC80adis_H100_v5": 2, "ND96isr_H100_v5": 8},
    }.items()
    for name, number in machines.items()
}  # fmt: skip
_GOOGLE = re.compile(
    r"(?:Nvidia )?(?:Tesla )?([A-Z]{1,2}[0-9]+(?: [0-9]+GB)?) (?:Mega )?GPU", re.IGNORECASE
)


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
    return tuple(each_row(path, names, lines, _instance_type))


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


@dataclass(frozen=True, slots=True)
class _Price:
    """One price of a machine in a region."""

    machine: InstanceType
    is_spot: bool
    dollars: float


def read_skypilot_catalogue(path: Path) -> tuple[InstanceType, ...]:
    """Read a table of SkyPilot's catalogue; of a region's zones the cheapest spot price counts.

    Raises:
        FileError: The file is no such table, or a value in it is invalid.
    """
    names, lines = csv_lines(path)
    missing = [name for name in (*CATALOGUE_COLUMNS, "Region") if name not in names]
    if missing:
        raise FileError(f"{path}: line 1: no column {missing[0]!r}")
    cloud = path.resolve().parent.name if path.stem == "vms" else path.stem
    found = each_row(path, names, lines, lambda cells: _of_catalogue(cells, cloud))
    return _machines((price for prices in found for price in prices), path)


def _of_catalogue(cells: dict[str, str], cloud: str) -> list[_Price]:
    name, count = cells["AcceleratorName"], cells["AcceleratorCount"]
    if not is_device_type(name) or not re.fullmatch(r"[1-9][0-9]*(\.0)?", count):
        return []  # no GPU, or a part of one
    machine = InstanceType(
        name=cells["InstanceType"] or name,
        device_type=name,
        num_devices=int(float(count)),
        cloud=cloud,
        region=cells["Region"] or None,
    )
    prices = (cells["Price"], False), (cells["SpotPrice"], True)
    return [_Price(machine, is_spot, dollars_of(text)) for text, is_spot in prices if text]


def read_azure_price_list(data: Any, path: Path) -> tuple[InstanceType, ...]:
    """Read Azure's retail prices, as parsed from JSON: virtual machines with Linux, by the hour.

    Raises:
        FileError: A record has no price in dollars an hour, or no machine is known to have GPUs.
    """
    found: list[_Price] = []
    for index, item in enumerate(data["Items"]):
        words = [item.get(key) if isinstance(item, dict) else None for key in
                 ("armSkuName", "armRegionName", "skuName", "productName")]  # fmt: skip
        name, region, sku, product = (word if isinstance(word, str) else "" for word in words)
        known = _AZURE.get(name.removeprefix("Standard_"))
        is_other = "Windows" in product or "Low Priority" in sku
        if known is None or is_other or item.get("type", "Consumption") != "Consumption":
            continue
        where = f"{path}: Items[{index}]"
        if item.get("currencyCode") != "USD" or item.get("unitOfMeasure") != "1 Hour":
            raise FileError(f"{where}: must be in USD for 1 Hour")
        machine = InstanceType(
            name=name, device_type=known[0], num_devices=known[1], cloud="azure",
            region=region or None,
        )  # fmt: skip
        dollars = _number(item.get("retailPrice"), where)
        found.append(_Price(machine, sku.endswith("Spot"), dollars))
    return _machines(found, path)


def read_gcp_price_list(data: Any, path: Path) -> tuple[InstanceType, ...]:
    """Read Google's SKUs, as parsed from JSON: GPUs by the hour, one at a time.

    Raises:
        FileError: A GPU has no price in dollars an hour, or there is none.
    """
    found: list[_Price] = []
    for index, sku in enumerate(data["skus"]):
        where = f"{path}: skus[{index}]"
        try:
            category, title = sku["category"], str(sku["description"])
            if category["resourceGroup"] != "GPU" or (
                category["usageType"] not in ("OnDemand", "Preemptible")
            ):
                continue
            price = sku["pricingInfo"][-1]["pricingExpression"]
            rate = price["tieredRates"][-1]["unitPrice"]
            dollars = int(rate["units"]) + int(rate["nanos"]) / 1e9
            is_hour = price["usageUnit"] == "h" and rate.get("currencyCode", "USD") == "USD"
            regions = [str(region) for region in sku["serviceRegions"]]
        except (KeyError, IndexError, TypeError, ValueError):
            raise FileError(
                f"{where}: is no SKU with category, pricingInfo and serviceRegions"
            ) from None
        kind = _GOOGLE.search(title)
        if kind is None:
            continue
        if not is_hour:
            raise FileError(f"{where}: must be in USD for an hour")
        name = kind[1].upper().replace(" ", "-")
        for region in regions:
            machine = InstanceType(name=name, device_type=name, cloud="gcp", region=region)
            is_spot = category["usageType"] == "Preemptible"
            found.append(_Price(machine, is_spot, _number(dollars, where)))
    return _machines(found, path)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileError(f"{where}: its price must be a number, got {str(value)[:60]!r}")
    try:
        return dollars_of(str(value))
    except ProblemError as error:
        raise FileError(f"{where}: {error.message}") from None


def _machines(found: Iterable[_Price], path: Path) -> tuple[InstanceType, ...]:
    """Each machine of a region once, with the cheapest of its prices of each kind."""
    machines: dict[tuple[str, str | None], InstanceType] = {}
    for one in found:
        key = one.machine.name, one.machine.region
        known = machines.setdefault(key, one.machine)
        what = "spot_dollars_per_hour" if one.is_spot else "on_demand_dollars_per_hour"
        before = getattr(known, what)
        if one.dollars > 0 and (before is None or one.dollars < before):
            machines[key] = replace(known, **{what: one.dollars})  # type: ignore[arg-type]
    if not machines:
        raise FileError(f"{path}: holds no machine that is known to have GPUs")
    return tuple(machines.values())
