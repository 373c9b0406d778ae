"""Number formats that GPUs do not share, in every command that meets them."""

import logging

import pytest

import hetflow
from hetflow.devices.backend import LocalDevice
from hetflow.devices.cuda import CudaBackend
from hetflow.devices.doctor import Facts, Gpu, findings
from hetflow.devices.torch_support import emulated_bfloat16, mixed_tf32
from hetflow.runtime.launcher.spawn import remarks
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

OLD, NEW = {"P100": "6.0", "V100": "7.0"}, {"A100": "8.0"}


def test_older_generations_emulate_bfloat16() -> None:
    said = emulated_bfloat16(OLD | NEW | {"cpu": None})
    assert said is not None
    assert said.startswith("P100, V100 emulate bfloat16")
    assert "dtype=torch.float16" in said
    assert emulated_bfloat16(NEW | {"cpu": None}) is None


def test_a_mix_computes_in_two_precisions_until_a_flag_settles_it() -> None:
    said = mixed_tf32(OLD | NEW, {})
    assert said is not None
    assert "A100 computes convolutions in TF32, P100, V100 in FP32" in said
    assert "NVIDIA_TF32_OVERRIDE=0" in said
    assert mixed_tf32(OLD | NEW, {"NVIDIA_TF32_OVERRIDE": "0"}) is None
    assert mixed_tf32(OLD, {}) is None
    assert mixed_tf32(NEW | {"cpu": None}, {}) is None


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has a V100 and an A100."""
    found = tuple(
        LocalDevice(
            device_type=name,
            kind="cuda",
            name=name,
            torch_devices=(f"cuda:{index}",),
            memory_bytes=16 << 30,
            compute_capability=capability,
        )
        for index, (name, capability) in enumerate([("V100", "7.0"), ("A100", "8.0")])
    )
    monkeypatch.setattr(CudaBackend, "local_devices", lambda backend: found)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)


def config_of(*types: str) -> LaunchConfig:
    slots = tuple(
        WorkerSlot(
            rank=rank, device_type=name, virtual_nodes=(VirtualNode(index=rank, batch_size=1),)
        )
        for rank, name in enumerate(types)
    )
    return LaunchConfig(model="m", global_batch_size=len(types), workers=slots)


@pytest.mark.usefixtures("host")
def test_a_launch_names_both_and_only_of_the_plans_devices() -> None:
    mixed = config_of("V100", "A100")
    said = remarks(mixed.workers, mixed, {})
    assert [text.split()[1] for text in said] == ["emulates", "computes"]
    settled = remarks(mixed.workers, mixed, {"NVIDIA_TF32_OVERRIDE": "0"})
    assert ["TF32" in text for text in settled] == [False]
    alike = config_of("A100")
    assert remarks(alike.workers, alike, {}) == []


@pytest.mark.usefixtures("host")
def test_a_profile_names_both(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetflow.profilers.profile.profile_target", lambda *given: ())
    with caplog.at_level(logging.WARNING, logger="hetflow"):
        hetflow.profile("zoo:mlp", ["V100", "A100"])
    assert "V100 emulates bfloat16" in caplog.text
    assert "A100 computes convolutions in TF32, V100 in FP32" in caplog.text


def test_doctor_names_both() -> None:
    gpus = (Gpu(name="Tesla V100", compute_capability="7.0"),
            Gpu(name="NVIDIA A100", compute_capability="8.0"))  # fmt: skip
    facts = Facts(
        python="3.12", torch="2.9.0", torch_cuda="12.6", torch_archs=("sm_70", "sm_80"),
        torch_devices=("Tesla V100", "NVIDIA A100"), gpus=gpus, backends=("gloo", "nccl"),
    )  # fmt: skip
    said = [(finding.level, finding.text) for finding in findings(facts)]
    assert any(level == "info" and "V100 emulates bfloat16" in text for level, text in said)
    assert any(level == "warning" and "in TF32, Tesla V100 in FP32" in text for level, text in said)
