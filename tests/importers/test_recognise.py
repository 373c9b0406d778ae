"""Market data is known by its form, or refused in one line; lists of prices are read."""

import json
from pathlib import Path

import pytest

from hetflow.formats.importers.price_lists import read_skypilot_catalogue
from hetflow.formats.importers.recognise import is_market, read_market, read_markets
from hetflow.schema.errors import FileError
from hetflow.schema.market import InstanceType

CATALOGUE = """InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Price,\
SpotPrice,Region,AvailabilityZone
p3.2xlarge,8,61,V100,1.0,"{'Gpus': [{'Name': 'V100'}]}",3.06,0.95,us-east-1,us-east-1a
p3.2xlarge,8,61,V100,1.0,"{'Gpus': [{'Name': 'V100'}]}",3.06,0.91,us-east-1,us-east-1b
p3.2xlarge,8,61,V100,1.0,"{'Gpus': [{'Name': 'V100'}]}",3.06,,eu-west-1,eu-west-1a
m5.large,2,8,,,,0.096,0.03,us-east-1,us-east-1a
"""
AZURE = {"Items": [
    {"armSkuName": name, "armRegionName": "eastus", "skuName": sku, "productName": product,
     "type": "Consumption", "currencyCode": "USD", "unitOfMeasure": "1 Hour", "retailPrice": price}
    for name, sku, product, price in (
        ("Standard_NC12s_v3", "NC12s v3", "Virtual Machines NCSv3 Series", 6.12),
        ("Standard_NC12s_v3", "NC12s v3 Spot", "Virtual Machines NCSv3 Series", 1.2),
        ("Standard_NC12s_v3", "NC12s v3 Low Priority", "Virtual Machines NCSv3 Series", 0.1),
        ("Standard_NC12s_v3", "NC12s v3", "Virtual Machines NCSv3 Series Windows", 7.0),
        ("Standard_D2s_v3", "D2s v3", "Virtual Machines DSv3 Series", 0.1),
    )
]}  # fmt: skip


def sku(title: str, usage: str, nanos: int, unit: str = "h") -> dict[str, object]:
    rate = {"unitPrice": {"currencyCode": "USD", "units": "2", "nanos": nanos}}
    return {
        "description": title, "serviceRegions": ["us-central1", "us-west1"],
        "category": {"resourceGroup": "GPU", "usageType": usage},
        "pricingInfo": [{"pricingExpression": {"usageUnit": unit, "tieredRates": [rate]}}],
    }  # fmt: skip


GOOGLE = {"skus": [
    sku("Nvidia Tesla V100 GPU running in Americas", "OnDemand", 480_000_000),
    sku("Nvidia Tesla V100 GPU attached to Spot Preemptible VMs", "Preemptible", 0),
    sku("Nvidia Tesla A100 80GB GPU running in Americas", "OnDemand", 0),
    sku("Commitment v1: Nvidia V100 GPU", "Commit1Yr", 0),
]}  # fmt: skip
AWS = {"SpotPriceHistory": [
    {"AvailabilityZone": zone, "InstanceType": name, "SpotPrice": price, "Timestamp": time}
    for zone, name, price, time in (
        ("us-east-1a", "p3.2xlarge", "0.9", "2024-01-01T01:00:00+01:00"),
        ("us-east-1b", "g4dn.xlarge", "0.2", "2024-01-03T00:00:00Z"),
    )
]}  # fmt: skip


def write_all(folder: Path) -> None:
    """Write one file of each form."""
    (folder / "aws").mkdir()
    (folder / "aws" / "vms.csv").write_text(CATALOGUE)
    for name, data in (("azure", AZURE), ("google", GOOGLE), ("prices", AWS)):
        (folder / f"{name}.json").write_text(json.dumps(data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_all(tmp_path)
    return tmp_path


def test_skypilots_catalogue_has_a_machine_of_each_region(folder: Path) -> None:
    east, west = read_market(folder / "aws" / "vms.csv").instance_types
    assert east == InstanceType(
        name="p3.2xlarge", device_type="V100", cloud="aws", region="us-east-1",
        on_demand_dollars_per_hour=3.06, spot_dollars_per_hour=0.91,
    )  # fmt: skip
    assert (west.region, west.spot_dollars_per_hour) == ("eu-west-1", None)


def test_azures_list_has_machines_with_linux(folder: Path) -> None:
    assert read_market(folder / "azure.json").instance_types == (
        InstanceType(
            name="Standard_NC12s_v3", device_type="V100", num_devices=2, cloud="azure",
            region="eastus", on_demand_dollars_per_hour=6.12, spot_dollars_per_hour=1.2,
        ),
    )  # fmt: skip


def test_googles_list_has_gpus_in_each_region(folder: Path) -> None:
    found = {
        (one.device_type, one.region): (one.on_demand_dollars_per_hour, one.spot_dollars_per_hour)
        for one in read_market(folder / "google.json").instance_types
    }
    assert found == {
        ("V100", "us-central1"): (2.48, 2.0), ("V100", "us-west1"): (2.48, 2.0),
        ("A100-80GB", "us-central1"): (2.0, None), ("A100-80GB", "us-west1"): (2.0, None),
    }  # fmt: skip


def test_the_newest_price_holds_until_the_file_says_no_more(folder: Path) -> None:
    here, other = read_market(folder / "prices.json").prices
    assert other.times == ("2024-01-01T00:00:00Z",)  # an hour before its offset
    assert here.known_until == other.known_until == "2024-01-03T00:00:00Z"


def test_prices_get_the_machines_that_another_file_describes(folder: Path) -> None:
    prices, machines = read_markets([folder / "prices.json", folder / "aws" / "vms.csv"])
    (history,) = prices.prices  # g4dn is nowhere described
    assert prices.described(history).device_type == "V100"
    assert prices.instance_types[0].on_demand_dollars_per_hour is None  # told once
    assert machines.instance_types[0].on_demand_dollars_per_hour == 3.06


def test_own_tables_are_known_by_their_columns(folder: Path) -> None:
    own = folder / "own.csv"
    own.write_text("Time,Zone,Instance,$/h\n2024-01-01T02:00:00+02:00,a,p3,1\n")
    assert read_market(own).prices[0].times == ("2024-01-01T00:00:00Z",)
    own.write_text("Instance,GPU type,# GPUs,Spot $/h\np3,V100,1,2\n")
    assert read_market(own).instance_types[0].spot_dollars_per_hour == 2
    own.write_text("Date,NC6\n2/28/2020,$0.1\n")
    assert read_market(own).prices[0].cloud == "azure"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no market data of a known form"),
        ("a,b\n1,2\n", "is no market data of a known form"),
        ('{"prices": 1}', "is no market data of a known form"),
        ("[1, 2]", "is no market data of a known form"),
        ("{", "not JSON"),
        ('{"skus": [{}]}', r"skus\[0\]: is no SKU with"),
        ('{"Items": [7]}', "no machine that is known to have GPUs"),
        (json.dumps({"skus": [sku("V100 GPU", "OnDemand", 0, "mo")]}), "in USD for an hour"),
        (json.dumps({"Items": [{**AZURE["Items"][0], "currencyCode": "EUR"}]}), "must be in USD"),
        (json.dumps({"Items": [{**AZURE["Items"][0], "retailPrice": "x"}]}), "must be a number"),
        ("Time,Zone,Instance,$/h\n2024-01-01T02:00:00,a,p3,1\n", "does not say its offset"),
    ],
)
def test_what_is_of_no_form_is_refused_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        read_market(path)


def test_a_catalogue_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "aws.csv"
    path.write_text(CATALOGUE.replace("0.95", "abc"))
    with pytest.raises(FileError, match="line 2: a price must be in US dollars"):
        read_skypilot_catalogue(path)
    assert is_market(path)
    assert not is_market(tmp_path / "none")
