"""GPUs: what tells them apart, and what makes a child see one."""

from types import SimpleNamespace

import pytest
import torch

from hetflow.devices.backend import LocalDevice
from hetflow.devices.collectives import choose_collective
from hetflow.devices.cuda import CudaBackend
from hetflow.devices.doctor import Facts, Gpu, findings
from hetflow.devices.local import pinned, pinned_worker

GPUS = LocalDevice(
    device_type="A100",
    kind="cuda",
    name="NVIDIA A100",
    torch_devices=("cuda:0", "cuda:2"),
    memory_bytes=40 << 30,
)


def cut(bus: int, uuid: str) -> SimpleNamespace:
    return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0, uuid=uuid)


def test_two_slices_of_one_gpu_are_one_device_to_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, found = CudaBackend(), [cut(0x3B, "slice-a"), cut(0x3B, "slice-b"), cut(0x86, "whole")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found[device.index])
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    first, second, third = (backend.identity(torch.device("cuda", n)) for n in range(3))
    assert choose_collective(torch.device("cuda"), [first, third]) == "nccl"
    assert choose_collective(torch.device("cuda"), [first, second]) == "gloo"


def test_rocm_reads_its_own_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.2.41134")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    both = CudaBackend().visibility(["cuda:2"])
    assert both == {"HIP_VISIBLE_DEVICES": "6", "CUDA_VISIBLE_DEVICES": "6"}
    monkeypatch.delenv("HIP_VISIBLE_DEVICES")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert CudaBackend().visibility(["cuda:0"])["HIP_VISIBLE_DEVICES"] == "7"
    monkeypatch.setattr(torch.version, "hip", None)
    assert CudaBackend().visibility(["cuda:0"]) == {"CUDA_VISIBLE_DEVICES": "7"}


def test_doctor_knows_a_rocm_build() -> None:
    facts = Facts(python="3.12", torch="2.9.0+rocm6.2", torch_hip="6.2.41134", backends=("gloo",))
    assert ("ROCm build", "6.2.41134") in facts.rows()
    said = [
        f.text
        for f in findings(
            Facts(
                python="3.12",
                torch="2.9.0+rocm6.2",
                torch_hip="6.2",
                backends=("gloo", "nccl"),
                gpus=(Gpu(name="V100"),),
            )
        )
    ]
    assert "V100 cannot be used: torch 2.9.0+rocm6.2 is a ROCm build" in said


def test_a_measuring_process_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pin = pinned(GPUS, "cuda:2")
    assert (pin.device, pin.environment) == ("cuda:0", {"CUDA_VISIBLE_DEVICES": "2"})
    assert pinned_worker(GPUS, 1) == pin


def test_a_worker_on_a_gpu_has_one_thread_unless_told() -> None:
    assert CudaBackend().worker_environment({}) == {"OMP_NUM_THREADS": "1"}
    assert CudaBackend().worker_environment({"OMP_NUM_THREADS": "4"}) == {}
