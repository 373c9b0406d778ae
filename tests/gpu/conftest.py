"""Tests here run on GPUs: real ones, or the software device. Races fail them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetflow.tests.testing.hosts import GpuHost, Host, host_for, real_types, software_host

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for mark in (pytest.mark.gpu, pytest.mark.slow, pytest.mark.processes):
                item.add_marker(mark)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    """The hosts of this test; none may have seen a race or a wrong collective."""
    used: list[Host] = []
    yield used
    assert [fault for host in used for fault in host.faults] == []


@pytest.fixture
def gpus(tmp_path: Path, hosts: list[Host]) -> GpuHost:
    """``gpus(2, 1)``: a host with two GPUs of one type and one of another."""

    def make(*numbers: int) -> Host:
        hosts.append(host_for(tmp_path, *numbers))
        return hosts[-1]

    return make


@pytest.fixture
def software(tmp_path: Path, hosts: list[Host]) -> GpuHost:
    """``software("V100:64MiB", NAME=value)``: a host only the software device can pose as."""

    def make(machine: str, **settings: str) -> Host:
        if real_types():
            pytest.skip("this machine has GPUs of its own")
        hosts.append(software_host(tmp_path, machine, **settings))
        return hosts[-1]

    return make
