"""Type names from what drivers call their devices."""

import pytest

from hetflow.schema.cluster import (
    Cluster,
    GpuFacts,
    device_type_name,
    device_type_names,
    former_name,
    is_former_name,
)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla P100-PCIE-16GB", "P100"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla T4", "T4"),
        # Unlike chips that were one type:
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("Quadro RTX 4000", "RTX4000"),
        ("NVIDIA RTX 4000 Ada Generation", "RTX4000Ada"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100PCIe"),
        ("NVIDIA H100 NVL", "H100NVL"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090Laptop"),
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "RTXPRO6000BlackwellWorkstationEdition",
        ),
        ("AMD Instinct MI250X", "MI250X"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
    ],
)
def test_names(driver: str, name: str) -> None:
    assert device_type_name(driver) == name
    assert Cluster.parse(f"2x{device_type_name(driver)}").num_devices == {name: 2}


@pytest.mark.parametrize("driver", ["", "$(touch marker)", "80GB", "\n"])
def test_strange_names_still_fit_the_grammar(driver: str) -> None:
    assert Cluster.parse(device_type_name(driver)).num_devices == {device_type_name(driver): 1}


def gpu(
    name: str, gib: float = 39.4, sms: int = 108, capability: tuple[int, int] = (8, 0)
) -> GpuFacts:
    return GpuFacts(
        name=name,
        capability=capability,
        num_multiprocessors=sms,
        memory_bytes=int(gib * 2**30),
    )


def test_unlike_gpus_of_one_name_on_a_host_are_told_apart_by_what_differs() -> None:
    forty, eighty = gpu("NVIDIA A100-SXM4-40GB"), gpu("NVIDIA A100 80GB PCIe", gib=79.2)
    assert device_type_names([forty, eighty, forty]) == ["A100-40GB", "A100-80GB", "A100-40GB"]
    assert device_type_names([forty, forty]) == ["A100", "A100"]
    card, module = gpu("NVIDIA A100-PCIE-40GB"), gpu("NVIDIA A100-SXM4-40GB")
    assert device_type_names([card, module]) == ["A100-PCIe", "A100-SXM"]
    cut, older = gpu("A100", sms=98), gpu("A100", capability=(7, 5))
    names = device_type_names([forty, cut, older, gpu("Tesla T4", capability=(7, 5))])
    assert names == ["A100-sm80-108SM", "A100-sm80-98SM", "A100-sm75", "T4"]
    for name in names:
        assert Cluster.parse(f"2x{name}").num_devices == {name: 2}


@pytest.mark.parametrize(
    ("name", "former"),
    [
        ("RTX6000Ada", "RTX6000"),
        ("H100PCIe", "H100"),
        ("A100-sm80-108SM", "A100"),
        ("A100-80GB", "A100"),
        ("A100-PCIe", "A100"),
        ("A100-80GB-SXM", "A100"),
        ("RTX4090Laptop", "RTX4090"),
        ("V100", "V100"),
    ],
)
def test_what_a_type_was_called(name: str, former: str) -> None:
    assert former_name(name) == former
    assert is_former_name(former, name) is (name != former)


def test_a_file_that_says_which_gpu_it_was_means_no_other() -> None:
    assert is_former_name("RTX6000", "RTX6000Ada", "NVIDIA RTX 6000 Ada Generation")
    assert not is_former_name("RTX6000", "RTX6000Ada", "Quadro RTX 6000")
    assert is_former_name("A100", "A100-80GB", "NVIDIA A100 80GB PCIe")
