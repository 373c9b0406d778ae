"""Type names from what drivers call their devices."""

import pytest

from hetflow.devices.naming import device_type_name
from hetflow.schema.cluster import Cluster


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000"),
        ("Tesla T4", "T4"),
    ],
)
def test_names(driver: str, name: str) -> None:
    assert device_type_name(driver) == name
    assert Cluster.parse(f"2x{device_type_name(driver)}").num_devices == {name: 2}


@pytest.mark.parametrize("driver", ["", "$(touch marker)", "80GB", "\n"])
def test_strange_names_still_fit_the_grammar(driver: str) -> None:
    assert Cluster.parse(device_type_name(driver)).num_devices == {device_type_name(driver): 1}
