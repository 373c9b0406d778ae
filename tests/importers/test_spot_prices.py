"""AWS's and Azure's price histories: what is told, what is unknown, what is wrong."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from hetflow.formats.importers.price_lists import read_instance_types
from hetflow.formats.importers.spot_prices import (
    read_aws_spot_prices,
    read_azure_spot_prices,
    read_csv_spot_prices,
)
from hetflow.schema.errors import FileError
from hetflow.tests.data import reference


def told(time: str, price: str = "0.9000", **others: str) -> dict[str, str]:
    return {"AvailabilityZone": "us-east-1a", "InstanceType": "p2.xlarge", "SpotPrice": price,
            "ProductDescription": "Linux/UNIX", "Timestamp": time, **others}  # fmt: skip


def aws(path: Path, *records: dict[str, str]) -> Path:
    path.write_text(json.dumps({"NextToken": "", "SpotPriceHistory": records}))
    return path


def test_files_that_do_not_overlap_leave_an_unknown_stretch(tmp_path: Path) -> None:
    aws(tmp_path / "a.json", told("2020-03-01T06:00:00.000Z", "0.2"),
        told("2020-03-01T00:00:00.000Z", "0.1"),
        told("2020-03-01T09:00:00.000Z", AvailabilityZone="us-east-1b"))  # fmt: skip
    aws(tmp_path / "b.json", told("2020-03-02T00:00:00.000Z", "0.3"))
    here, other = read_aws_spot_prices(tmp_path)
    assert (here.cloud, here.region, here.zone) == ("aws", "us-east-1", "us-east-1a")
    assert here.times == ("2020-03-01T00:00:00Z", "2020-03-01T06:00:00Z",
                          "2020-03-01T09:00:00Z", "2020-03-02T00:00:00Z")  # fmt: skip
    assert here.dollars_per_hour == (0.1, 0.2, None, 0.3)
    assert here.known_until == "2020-03-02T00:00:00Z"
    assert other.known_until == "2020-03-01T09:00:00Z"


def test_azure_days_that_nobody_told_are_unknown(tmp_path: Path) -> None:
    path = tmp_path / "us_east.csv"
    path.write_text("Date,NC6,NC12,NC24\n2/28/2020,$0.1,,\n2/29/2020,$0.2,$0.4,\n3/2/2020,,$1,\n")
    one, two = read_azure_spot_prices(path)
    assert (one.cloud, one.region, one.zone, one.instance_type) == ("azure", "us_east", None, "NC6")
    assert one.times == ("2020-02-28T00:00:00Z", "2020-02-29T00:00:00Z",
                         "2020-03-01T00:00:00Z", "2020-03-02T00:00:00Z")  # fmt: skip
    assert one.dollars_per_hour == (0.1, 0.2, None, None)
    assert two.dollars_per_hour == (None, 0.4, None, 1.0)
    assert two.known_until == "2020-03-03T00:00:00Z"


def test_a_file_nested_too_deep_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(FileError, match=r"deep\.json: not JSON"):
        read_aws_spot_prices(tmp_path / "deep.json")


def test_a_plain_table_has_a_change_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text(
        "Time,Zone,Instance,$/h\n2026-03-01T00:00:00Z,a,p3,0.9\n2026-03-01T01:00:00Z,b,p3,$0.8\n"
        "2026-03-01T06:00:00Z,a,p3,\n2026-03-01T07:00:00Z,a,p3,1 USD\n"
    )
    one, two = read_csv_spot_prices(tmp_path)
    assert (one.cloud, one.zone, one.region, one.instance_type) == ("own", "a", None, "p3")
    assert one.dollars_per_hour == (0.9, None, 1.0)
    assert two.times == ("2026-03-01T01:00:00Z",)
    assert two.known_until == "2026-03-01T07:00:00Z"  # the last time in the file


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Time,Instance,$/h\n", "line 1: must name the columns Time, Instance, \\$/h and Zone"),
        ("Time,Zone,Instance,$/h,x\n", "line 1: must name the columns"),
        ("2026-03-01T00:00:00,a,p3,1\n", "line 2: .* does not say its offset from UTC"),
        ("2026-03-01T00:00:00Z,a,p3,-1\n", "line 2: a price must be finite and >= 0"),
        ("2026-03-01T00:00:00Z,a,p3,nan\n", "line 2: a price must be finite and >= 0"),
        ("2026-03-01T00:00:00Z,a,p3,1 EUR\n", "line 2: a price must be in US dollars"),
        ("2026-03-01T00:00:00Z,,p3,1\n", "line 2: must name an Instance, and a Zone"),
        ("2026-03-01T00:00:00Z,a,p3\n", "line 2: has [23] cells, the first line has [34]"),
        (
            "2026-03-01T02:00:00Z,a,p3,1\n2026-03-01T01:00:00Z,a,p3,1\n",
            "line 3: 2026-03-01T01:00:00Z does not come after the line of own a p3 before",
        ),
        ("", "holds no prices"),
    ],
)
def test_what_is_wrong_with_a_plain_table_is_said(tmp_path: Path, text: str, said: str) -> None:
    head = "" if text.startswith("Time") else "Time,Zone,Instance,$/h\n"
    (tmp_path / "log.csv").write_text(head + text)
    with pytest.raises(FileError, match=said):
        read_csv_spot_prices(tmp_path / "log.csv")


def test_the_published_histories_are_read() -> None:
    place = reference.spot_prices()
    found = read_aws_spot_prices(place / "aws")
    assert len(found) == 29
    gaps = [sum(price is None for price in one.dollars_per_hour) for one in found]
    assert sorted(set(gaps)) == [1, 2]  # one day at the start of March was not fetched
    steady = [one for one in found if one.instance_type == "p3.16xlarge"]
    assert {price for one in steady for price in one.dollars_per_hour} == {7.344, None}
    azure = read_azure_spot_prices(place / "azure")
    assert len(azure) == 28
    assert {one.known_until for one in azure} == {"2020-03-24T00:00:00Z"}
    for one in (*found, *azure):
        assert all(a < b for a, b in pairwise(one.start_seconds()))
    machines = read_instance_types(place / "instance_types.csv")
    assert {one.instance_type for one in (*found, *azure)} <= {one.name for one in machines}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            [told("2020-03-01T00:00:00", "1")],
            r"SpotPriceHistory\[0\]: Timestamp .* its offset",
        ),
        ([told("yesterday", "1")], "Timestamp must be a time such as"),
        ([told("2020-03-01T00:00:00Z", "-1")], r"SpotPriceHistory\[0\]: a price must be finite"),
        ([told("2020-03-01T00:00:00Z", "nan")], "a price must be finite and >= 0, got 'nan'"),
        ([told("2020-03-01T00:00:00Z", "0.9 EUR")], "must be in US dollars"),
        ([told("2020-03-01T00:00:00Z", "1"), told("2020-03-01T00:00:00Z", "2")], "at once"),
        ([{"SpotPrice": "1"}], "must have AvailabilityZone"),
        ([told("2020-03-01T00:00:00Z", ProductDescription="Windows")], "no prices of Linux"),
    ],
)
def test_what_is_wrong_with_aws_is_said(tmp_path: Path, records: list, said: str) -> None:
    with pytest.raises(FileError, match=said):
        read_aws_spot_prices(aws(tmp_path / "x.json", *records))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Date,NC6\n2/2/2020,\u20ac0.1\n", "line 2: a price must be in US dollars"),
        ("Date,NC6\n2/2/2020,$-1\n", "line 2: a price must be finite"),
        ("Date,NC6\n2/2/2020,$1\n2/1/2020,$1\n", "line 3: 2/1/2020 does not come after"),
        ("Date,NC6\n2020-02-01,$1\n", "line 2: Date must be such as"),
        ("Date,NC6\n2/2/2020,$1,$2\n", "line 2: has 3 cells, the first line has 2"),
        ("Day,NC6\n", "line 1: must be Date"),
        ("Date,NC6\n2/2/2020,\n", "holds no prices"),
    ],
)
def test_what_is_wrong_with_azure_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=said):
        read_azure_spot_prices(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Instance,GPU type\na,K80\n", "no column '# GPUs'"),
        ("Instance,GPU type,# GPUs,Colour\na,K80,1,red\n", "unknown column 'Colour'"),
        ("Instance,GPU type,# GPUs\na,K80,two\n", "line 2: # GPUs must be a whole number"),
        ("Instance,GPU type,# GPUs\na,K80\n", "line 2: has [23] cells, the first line has [34]"),
    ],
)
def test_what_is_wrong_with_machines_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(FileError, match=said):
        read_instance_types(path)
