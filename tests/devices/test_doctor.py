"""Findings from facts, for machines that are not at hand."""

import pytest

from hetflow.devices.doctor import Facts, Gpu, findings, is_usable, parse_nvidia_smi

CU128 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")
V100 = Gpu(name="Tesla V100-SXM2-16GB", compute_capability="7.0")
P100 = Gpu(name="Tesla P100-PCIE-16GB", compute_capability="6.0")
H200 = Gpu(name="NVIDIA H200", compute_capability="9.0")
B300 = Gpu(name="NVIDIA B300", compute_capability="10.3")
K80 = Gpu(name="Tesla K80", compute_capability="3.7")


def facts(
    *gpus: Gpu,
    torch: str | None = "2.13.0+cu128",
    cuda: str | None = "12.8",
    archs: tuple[str, ...] = CU128,
    seen: tuple[str, ...] = (),
    backends: tuple[str, ...] = ("gloo", "nccl"),
    omp: str | None = None,
    disk: int = 1 << 40,
    missing: tuple[str, ...] = (),
) -> Facts:
    return Facts(
        python="3.12.1",
        torch=torch,
        torch_cuda=cuda,
        torch_archs=archs,
        torch_devices=seen,
        driver="570.86.15",
        gpus=gpus,
        backends=backends,
        missing_extras=missing,
        cores=2,
        omp_num_threads=omp,
        disk_free_bytes=disk,
    )


def warnings(of: Facts) -> list[str]:
    return [f"{f.text} | {f.mend}" for f in findings(of) if f.level == "warning"]


@pytest.mark.parametrize("gpu", [V100, P100])
@pytest.mark.parametrize("archs", [CU128, ()])
def test_a_dropped_generation_is_told_which_build_to_install(
    gpu: Gpu, archs: tuple[str, ...]
) -> None:
    (said,) = warnings(facts(gpu, archs=archs))
    assert gpu.name in said
    assert "starts at 7.5 and cannot use it" in said
    assert "cu126" in said
    assert "2.15" in said


@pytest.mark.parametrize("gpu", [V100, P100])
def test_the_older_build_serves_the_older_generation(gpu: Gpu) -> None:
    fine = facts(gpu, cuda="12.6", archs=CU126, seen=(gpu.name,))
    assert warnings(fine) == []
    assert findings(fine)[0].level == "ok"


def test_an_older_torch_with_the_same_cuda_is_not_accused_without_evidence() -> None:
    assert warnings(facts(V100, torch="2.10.0", archs=(), seen=(V100.name,))) == []


def test_a_generation_that_nothing_supports_is_not_promised_a_build() -> None:
    (said,) = warnings(facts(K80))
    assert "no current torch supports" in said


def test_a_newer_generation_runs_on_ptx_or_asks_for_a_newer_torch() -> None:
    assert warnings(facts(B300, archs=("sm_90", "compute_90"), seen=(B300.name,))) == []
    (said,) = warnings(facts(B300, cuda="12.6", archs=CU126))
    assert "too old for it" in said


def test_machine_code_serves_later_minors_of_its_generation_only() -> None:
    ada = Gpu(name="L4", compute_capability="8.9")
    assert warnings(facts(ada, archs=("sm_80", "sm_90"), seen=("L4",))) == []
    assert len(warnings(facts(ada, archs=("sm_75", "sm_90"), seen=("L4",)))) == 1


def test_a_cpu_build_beside_a_gpu_is_named() -> None:
    (said,) = warnings(facts(H200, torch="2.13.0+cpu", cuda=None, archs=()))
    assert "NVIDIA H200 cannot be used" in said
    assert "CPU build" in said


def test_gpus_that_torch_does_not_see_are_counted() -> None:
    (said,) = warnings(facts(H200, H200, seen=("NVIDIA H200",)))
    assert "the driver reports 2 GPUs, torch sees 1" in said
    assert "570.86.15" in said


def test_a_cpu_machine_is_usable_and_says_so() -> None:
    found = findings(facts(torch="2.13.0+cpu", cuda=None, archs=(), backends=("gloo",)))
    assert is_usable(found)
    assert [f.level for f in found] == ["ok"]


@pytest.mark.parametrize(
    "broken", [facts(torch=None, cuda=None), facts(backends=())], ids=["no torch", "no gloo"]
)
def test_what_makes_hetflow_unusable_is_an_error(broken: Facts) -> None:
    found = findings(broken)
    assert found[0].level == "error"
    assert not is_usable(found)


def test_threads_and_disk_are_watched() -> None:
    assert "OMP_NUM_THREADS=8 is more than the 2 cores" in warnings(facts(omp="8"))[0]
    assert warnings(facts(omp="2")) == []
    assert "100 MiB of disk left" in warnings(facts(disk=100 << 20))[0]


def test_a_missing_extra_is_information_with_the_command() -> None:
    found = findings(facts(missing=("matplotlib",)))
    assert [(f.level, f.mend) for f in found if f.level == "info"] == [
        ("info", "pip install 'hetflow[plots]'")
    ]


def test_the_answer_of_nvidia_smi_is_read_and_noise_ignored() -> None:
    text = "Tesla V100-SXM2-16GB, 7.0, 16384, 535.54\nOld, [N/A], [N/A], 390.1\nwarning\n"
    first, second = parse_nvidia_smi(text)
    assert first == Gpu(
        name="Tesla V100-SXM2-16GB", compute_capability="7.0", memory_bytes=16384 << 20
    )
    assert second == Gpu(name="Old")


def test_an_old_torch_is_an_error() -> None:
    found = findings(facts(torch="2.4.1+cu121"))
    assert not is_usable(found)
    assert found[0].text == "torch 2.4.1+cu121 is too old: training needs 2.9 or newer"
