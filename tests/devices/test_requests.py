"""``--device`` items against the devices of a machine."""

import pytest

from hetflow.devices.backend import LocalDevice
from hetflow.devices.cpu import cpu_device
from hetflow.devices.local import parse_requests
from hetflow.schema.errors import ProblemError

CPU = LocalDevice(
    device_type="cpu",
    kind="cpu",
    name="Some CPU",
    torch_devices=("cpu", "cpu"),
    memory_bytes=1 << 33,
)
V100 = LocalDevice(
    device_type="V100",
    kind="cuda",
    name="Tesla V100-SXM2-16GB",
    torch_devices=("cuda:0", "cuda:2"),
    memory_bytes=1 << 34,
    compute_capability="7.0",
)
P100 = LocalDevice(
    device_type="P100",
    kind="cuda",
    name="Tesla P100-PCIE-16GB",
    torch_devices=("cuda:1",),
    memory_bytes=1 << 34,
    compute_capability="6.0",
)
MACHINE = (V100, P100, CPU)


def asked(*texts: str) -> list[tuple[str, str, float | None]]:
    return [
        (request.device_type, request.torch_device, request.speed)
        for request in parse_requests(texts, MACHINE)
    ]


def test_types_and_torch_names_and_emulated_types() -> None:
    assert asked("v100") == [("V100", "cuda:0", None)]
    assert asked("cuda:2") == [("V100", "cuda:2", None)]
    assert asked("cpu,P100") == [("cpu", "cpu", None), ("P100", "cuda:1", None)]
    assert asked("cpu:fast", "cpu:slow=0.25", "cpu:k80=1") == [
        ("cpu:fast", "cpu", 0.5),
        ("cpu:slow", "cpu", 0.25),
        ("cpu:k80", "cpu", 1.0),
    ]


def test_without_a_wish_every_gpu_type_and_never_an_emulated_one() -> None:
    assert asked() == [("V100", "cuda:0", None), ("P100", "cuda:1", None)]
    assert [r.device_type for r in parse_requests([], (CPU,))] == ["cpu"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("V10O", "did you mean 'V100'"),
        ("cuda:7", "did you mean 'cuda:"),
        ("H100", "no such device"),
        ("", "no such device"),
        ("cpu:slow=2", "fraction from 0.001 to 1"),
        ("cpu:slow=0", "fraction from 0.001 to 1"),
        ("cpu:slow=nan", "fraction from 0.001 to 1"),
        ("cpu:slow=", "fraction from 0.001 to 1"),
        ("cpu:medium", "state its speed"),
        ("cpu:slow,cpu:slow=0.25", "asked for twice"),
        ("V100,cuda:2", "asked for twice"),
    ],
)
def test_a_bad_item_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        parse_requests([text], MACHINE)


def test_the_local_cpu_shares_its_memory_among_its_cores() -> None:
    cpu = cpu_device()
    assert cpu.num_devices >= 1
    assert 0 < cpu.memory_bytes * cpu.num_devices
    assert cpu.name
