"""The ``--gpus`` grammar."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.schema.cluster import Cluster, DeviceType, ServerGroup
from hetflow.schema.errors import ProblemError
from hetflow.tests.profiles import examples


@pytest.mark.parametrize(
    ("text", "devices", "servers"),
    [
        ("2xV100,8xP100", {"V100": 2, "P100": 8}, 1),
        ("V100:2", {"V100": 2}, 1),
        ("V100", {"V100": 1}, 1),
        (" 2xV100 , P100:3 ", {"V100": 2, "P100": 3}, 1),
        ("4x(4xV100)", {"V100": 16}, 4),
        ("2x(4xV100,2xK80),1x(8xT4)", {"V100": 8, "K80": 4, "T4": 8}, 3),
        ("1xcpu:fast,cpu:slow:3", {"cpu:fast": 1, "cpu:slow": 3}, 1),
        ("2xV100,1xV100", {"V100": 3}, 1),
        ("RTX2080Ti:2:11GiB", {"RTX2080Ti": 2}, 1),
    ],
)
def test_every_spelling_reads(text: str, devices: dict[str, int], servers: int) -> None:
    cluster = Cluster.parse(text)
    assert cluster.num_devices == devices
    assert cluster.num_servers == servers


def test_a_memory_is_kept() -> None:
    assert Cluster.parse("V100:2:16GB").device_types["V100"].memory_bytes == 16 << 30
    assert Cluster.parse("V100:1:1.5GB").device_types["V100"].memory_bytes == 3 << 29


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0xV100", "at least 1"),
        ("V100:0", "at least 1"),
        ("", "empty"),
        ("2xV100,,P100", "empty"),
        ("2yV100", "cannot read '2yV100'"),
        ("2xV100:3", "cannot read"),
        ("-1xV100", "cannot read"),
        ("2x(4xV100", "cannot read"),
        ("0x(4xV100)", "at least 1"),
        ("V100:2:16GB,V100:1:32GB", "two memories"),
        ("V100:1:0GB", "at least one byte"),
        ("2xV100;rm", "cannot read"),
    ],
)
def test_bad_text_is_refused_in_one_line(text: str, expected: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Cluster.parse(text)
    assert expected in caught.value.message
    assert "\n" not in caught.value.message


def test_an_unknown_device_in_a_server_gets_the_nearest_name() -> None:
    with pytest.raises(ProblemError, match="did you mean 'V100'"):
        Cluster(
            device_types={"V100": DeviceType()}, servers=(ServerGroup(count=1, devices={"V10": 1}),)
        )


names = st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,6}", fullmatch=True)


@settings(max_examples=examples(100))
@given(st.dictionaries(names, st.integers(1, 5000), min_size=1, max_size=6))
def test_what_is_written_is_read(pool: dict[str, int]) -> None:
    text = ",".join(f"{count}x{name}" for name, count in pool.items())
    assert Cluster.parse(text).num_devices == pool
