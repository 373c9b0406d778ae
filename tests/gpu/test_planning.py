"""What a host has and how fast it is: devices, doctor, profile."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from hetflow.schema import files
from hetflow.schema.profile import Profile
from hetflow.schema.run import RunRecord
from hetflow.tests.plan_parts import with_replicas
from hetflow.tests.runtime.test_pipeline import CHAIN2, make_plan
from hetflow.tests.testing.hosts import GpuHost

TARGET = """
import torch
from torch import nn
from hetflow import runtime as hf

def deferred():
    with hf.deferred():
        return mine()

def mine():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    return model, lambda n: torch.randn(n, 64), lambda model, x: model(x).square().mean()
"""
TRAINING = """
import torch
from torch.utils.data import DataLoader
from target import mine
from hetflow import runtime as hf

model, _, loss_of = mine()
optimizer = torch.optim.Adam(model.parameters())
job = hf.prepare(model, optimizer)
for batch in job.batches(DataLoader(torch.randn(960, 64), batch_size=96)):
    job.backward(lambda x: loss_of(model, x), batch)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_devices_lists_types_and_how_to_ask_for_them(gpus: GpuHost) -> None:
    host = gpus(2, 1)
    found = json.loads(host.done("devices", "--json"))["devices"]
    numbers = {device["device_type"]: device["num_devices"] for device in found}
    assert numbers[host.types[0]] >= 2
    assert numbers[host.types[1]] >= 1
    assert all(
        device["compute_capability"] and device["memory_bytes"] > 1 << 30
        for device in found
        if device["device_type"] in host.types
    )


def test_devices_sees_what_the_environment_leaves(gpus: GpuHost) -> None:
    host = gpus(2)
    found = json.loads(host.also(CUDA_VISIBLE_DEVICES="1").done("devices", "--json"))["devices"]
    assert [(d["device_type"], d["num_devices"]) for d in found][:1] == [(host.types[0], 1)]
    hidden = host.also(CUDA_VISIBLE_DEVICES="").done("devices", "--json")
    assert [d["device_type"] for d in json.loads(hidden)["devices"]] == ["cpu"]


def test_doctor_finds_nothing_wrong(gpus: GpuHost) -> None:
    said = gpus(2).done("doctor")
    assert "ok: everything the main job needs is here" in said
    assert "nccl" in said


def test_a_report_of_a_trial_tells_versions_and_topology(gpus: GpuHost) -> None:
    host = gpus(2)
    host.done("doctor", "--report", "report.json")
    report = json.loads((host.folder / "report.json").read_text())
    assert report["schema"] == "hetflow.report/1"
    assert len(report["topology"]["gpus"]) >= 2
    assert report["suite"] is None


def test_a_profile_of_two_types_and_a_plan_by_it(
    gpus: GpuHost, record_property: Callable[[str, object], None]
) -> None:
    host = gpus(2, 1).also(FAKECUDA_BESIDE_TENSORS="300MiB,40MiB,2MiB")
    (host.folder / "target.py").write_text(TARGET)
    asked = ["--quick", "--batch-sizes", "8,32", "--sync-devices", "2", "--links"]
    devices = [word for kind in host.types for word in ("--device", kind)]
    host.done("profile", "target.py:mine", *asked, *devices, "-o", "profiles")
    for kind in host.types:
        profile = files.read(host.folder / f"profiles/target.mine.{kind}.json", Profile)
        assert [point.batch_size for point in profile.batch_curve] == [8, 32]
        assert profile.weight_bytes == 4 * (64 * 256 + 256 + 256 * 64 + 64)
        # Weights, gradients and momenta at least, and no whole process.
        assert all(
            3 * profile.weight_bytes <= point.peak_memory_bytes <= 64 << 20
            for point in profile.batch_curve
        )
        assert all(point.step_seconds > 0 for point in profile.batch_curve)
        (across,) = profile.links_to
        assert across.device_type in set(host.types) - {kind}
        assert across.links.bytes_per_second > 0
        beside = profile.beside_tensors
        assert beside is not None
        assert beside.context_bytes > 0
        if not host.is_real:
            assert beside.context_bytes == 300 << 20
            assert across.links.channel_bytes == 40 << 20
            for point in profile.batch_curve:
                assert point.fragmentation_bytes is not None
                # The loop's own comes in blocks of 2 MiB; training takes samples ahead, and more.
                held = point.peak_memory_bytes + point.fragmentation_bytes
                assert 0 < held % (2 << 20) < 256 << 10
        if kind == host.types[0]:
            assert profile.sync is not None
            assert profile.links is not None
            if not host.is_real:
                assert beside.group_bytes == 40 << 20
                assert profile.links.channel_bytes == 40 << 20
    (host.folder / "train.py").write_text(TRAINING)
    pool = ["--gpus", f"2x{host.types[0]},{host.types[1]}", "--batch-size", "96"]
    host.done("solve", "split", "--profiles", "profiles", *pool, "-o", "plan.json")
    host.done("launch", "-o", "run", "plan.json", "train.py")
    run = files.read(host.folder / "run/run.json", RunRecord)
    for name in ("predicted_step_seconds", "measured_step_seconds"):
        assert getattr(run, name) > 0
        record_property(name, getattr(run, name))  # for `hetflow doctor --suite`


def test_a_profile_ends_its_curve_where_memory_does(software: GpuHost) -> None:
    host = software("V100:4MiB,A100")
    (host.folder / "target.py").write_text(TARGET)
    command = ["profile", "target.py:deferred", "--quick", "--sync-devices", "0", "--no-links"]
    host.done(*command, "--device", "V100", "--max-batch-size", "65536", "-o", "profiles")
    profile = files.read(host.folder / "profiles/target.deferred.V100.json", Profile)
    assert profile.weight_bytes == 4 * (64 * 256 + 256 + 256 * 64 + 64)
    assert 64 <= profile.batch_curve[-1].batch_size <= 4096
    # What training takes beside the loop that was measured is counted on top.
    assert max(point.peak_memory_bytes for point in profile.batch_curve) <= (4 << 20) + (256 << 10)


def test_a_model_that_does_not_fit_is_said_in_a_line(software: GpuHost) -> None:
    host = software("V100:200KiB")
    (host.folder / "target.py").write_text(TARGET)
    found = host.run("profile", "target.py:deferred", "--quick", "-o", "profiles")
    assert found.returncode == 2
    assert "does not fit the device's memory at batch size 1" in found.stderr
    assert "--device spec:NAME --layers estimates the profile" in found.stderr


def test_amd_devices_by_rocms_variables(software: GpuHost) -> None:
    host = software(
        "MI250X,MI250X",
        FAKECUDA_PLATFORM="rocm",
        HIP_VISIBLE_DEVICES="0",
        HETFLOW_PRELOAD="off",
    )
    found = json.loads(host.done("devices", "--json"))["devices"]
    assert (found[0]["device_type"], found[0]["num_devices"]) == ("MI250X", 1)


def test_unlike_gpus_have_unlike_names(software: GpuHost) -> None:
    host = software("QuadroRTX6000,RTX6000Ada,H100,H100PCIe")
    found = json.loads(host.done("devices", "--json"))["devices"]
    types = [device["device_type"] for device in found if device["device_type"] != "cpu"]
    assert types == ["RTX6000", "RTX6000Ada", "H100", "H100PCIe"]


CURRENT = """
import torch
from torch import nn

def loss(model, x):
    # As kernels outside torch do: they run on the current device, wherever their inputs are.
    if torch.cuda.current_device() != x.device.index:
        raise RuntimeError("an illegal memory access was encountered")
    return model(x).square().mean()

def mine():
    return nn.Linear(8, 8).cuda(), lambda n: torch.randn(n, 8).cuda(), loss
"""


def test_a_target_that_takes_the_current_gpu_is_profiled_on_the_one_asked_for(
    gpus: GpuHost,
) -> None:
    host = gpus(1, 1)
    (host.folder / "current.py").write_text(CURRENT)
    asked = ["--quick", "--batch-sizes", "8", "--sync-devices", "0", "--no-links"]
    host.done("profile", "current.py:mine", *asked, "--device", host.types[1], "-o", "profiles")
    profile = files.read(host.folder / f"profiles/current.mine.{host.types[1]}.json", Profile)
    assert profile.device_type == host.types[1]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_plan_for_a_larger_card_of_the_name_is_refused(
    software: GpuHost, options: list[str]
) -> None:
    host = software("A100:64MiB,A100:64MiB")
    made = make_plan("1f1b", CHAIN2, (1, 1), 6)
    asked = [with_replicas(s, device_type="A100", memory_bytes=100 << 20) for s in made.stages]
    files.write(host.folder / "plan.json", replace(made, stages=tuple(asked)))
    (host.folder / "train.py").write_text("")
    found = host.run("launch", *options, "plan.json", "train.py")
    assert found.returncode == 2
    assert "the plan fills 104,857,600 bytes on each A100" in found.stderr
    assert "has 67,108,864" in found.stderr
