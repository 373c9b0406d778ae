"""``hetflow profile``, ``devices`` and ``doctor`` from the command line."""

import json
import os
from pathlib import Path

import pytest

import hetflow
from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.profile import Emulation, Profile

pytestmark = pytest.mark.measures

SOURCE = """
import pathlib
import torch
from torch import nn

pathlib.Path(__file__).with_name("ran").touch()

def tiny():
    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), lambda model, x: model(x).sum()

def raises():
    raise ValueError("no data")
"""


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return f"{tmp_path}/mine.py:tiny"


@pytest.mark.slow
def test_a_real_profile_of_unlike_devices(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles"
    arguments = ["profile", target, "--quick", "--batch-sizes", "256,2048", "--links", "-o"]
    devices = ["--device", "cpu", "--device", "cpu:fast,cpu:slow=0.01"]
    assert run([*arguments, str(out), *devices, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = ["mine.tiny.cpu.json", "mine.tiny.cpu-fast.json", "mine.tiny.cpu-slow.json"]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    plain, fast, slow = (files.read(out / name, Profile) for name in names)
    assert told == [files.to_plain(profile) for profile in (plain, fast, slow)]
    assert plain.emulation is None
    assert plain.optimizer is not None
    assert (plain.optimizer.name, plain.optimizer.is_default) == ("sgd-momentum", True)
    assert plain.optimizer.state_bytes_per_weight_byte == 1.0
    assert slow.optimizer == plain.optimizer
    assert slow.emulation == Emulation(speed=0.01)
    for point, half, hundredth in zip(
        plain.batch_curve, fast.batch_curve, slow.batch_curve, strict=True
    ):
        assert half.step_seconds == pytest.approx(2 * point.step_seconds)
        assert hundredth.step_seconds == pytest.approx(100 * point.step_seconds)
    for point in plain.batch_curve:
        assert point.load_seconds is not None
        assert point.virtual_node_seconds is not None
        assert 0 < point.load_seconds < point.step_seconds
        assert 0 < point.virtual_node_seconds < point.step_seconds
        assert point.pass_seconds >= 0
        assert point.step_seconds_error is not None
    assert plain.fixed_seconds is not None
    assert slow.fixed_seconds == plain.fixed_seconds
    assert plain.step_error is not None
    assert all(point.load_seconds is None for point in slow.batch_curve)
    assert slow.busy is None
    cores = len(os.sched_getaffinity(0))
    assert (plain.busy is not None) is (cores > 1)
    if plain.busy is not None:
        assert plain.busy.num_devices == 2
        assert [point.batch_size for point in plain.busy.batch_curve] == [256, 2048]
    assert plain.weight_bytes == (8 * 8 + 8) * 4
    assert plain.provenance is not None
    assert plain.sync is not None
    assert plain.sync == slow.sync
    assert plain.sync.num_devices == 2
    # All-reduces of a tiny model are short: noise may hide that they grow. Then that is said.
    of_messages = plain.provenance["sync"]["at_batch_1"]["messages"]
    assert (plain.sync.bytes_per_second is None) is ("no_ring" in of_messages)
    assert [message.num_bytes for message in plain.sync.messages] == [
        1 << p for p in range(10, 17, 2)
    ]
    assert plain.links is not None
    assert plain.links == slow.links
    assert slow.provenance is not None
    assert slow.provenance["emulation"]["emulated"] is True
    assert slow.provenance["emulation"]["worst_error"] is not None
    assert slow.provenance["loading"] == "measured"
    assert "in the loop" in slow.provenance["sync"]["method"]
    assert slow.provenance["curve_stopped"] == "all sizes asked for were measured"


def test_existing_output_is_refused_before_anything_runs(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    existing = tmp_path / "mine.tiny.cpu.json"
    existing.write_text("mine", encoding="utf-8")
    assert run(["profile", target, "-o", str(tmp_path)]) == 2
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "exists already" in answer.err
    assert "--force" in answer.err
    assert existing.read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "V100O"], "no such device"),
        (["--batch-sizes", "8,eight"], "not a whole number"),
        (["--optimizer", "adamm"], "must be one of sgd, sgd-momentum, adam, adamw"),
        (["--steps", "0"], "steps"),
        (["--quick", "--thorough"], "choose one"),
        (["--recompute", "--device", "cpu:slow=0.5"], "keeps the times of plain passes"),
        (["--offload", "--device", "cpu"], "activations are on the host already"),
        (["--recompute", "--device", "spec:T4", "--from-profile", "a"], "not carried"),
        (["--layers", "--microbatch-size", "4,0"], "must be whole numbers of at least 1"),
    ],
)
def test_bad_arguments_exit_2_with_one_line_and_no_file(
    target: str,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "profiles"
    assert run(["profile", target, "-o", str(out), *arguments]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) <= 2
    assert not out.exists() or not list(out.iterdir())
    assert not (tmp_path / "ran").exists()


def test_a_factory_that_raises_leaves_nothing_behind(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profiles"
    bad = target.replace(":tiny", ":raises")
    assert run(["profile", bad, "--quick", "--debug", "-o", str(out)]) == 2
    answer = capsys.readouterr()
    assert "mine.py:12: raises() raised ValueError: no data" in answer.err.splitlines()[-1]
    # --debug shows where in the measuring process it was raised.
    assert "In the measuring process:" in answer.err
    assert 'raise ValueError("no data")' in answer.err
    assert answer.out == ""
    assert not out.exists()


def test_an_interrupted_profile_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        assert (tmp_path / "a" / "b").is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr(hetflow, "profile", interrupted)
    asked = ["profile", "zoo:mlp", "--device", "cpu", "-o", str(tmp_path / "a" / "b")]
    assert run(asked) == 130
    assert capsys.readouterr().err == "hetflow: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_devices_names_the_cpu_and_calls_emulated_types_emulated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["devices", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["devices"][-1]["device_type"] == "cpu"
    assert told["devices"][-1]["num_devices"] >= 1
    assert all(device["emulated"] for device in told["emulated"])
    assert run(["devices"]) == 0
    text = capsys.readouterr().out
    assert "--gpus" in text
    assert "emulated" in text


def test_doctor_finds_this_installation_usable(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "gloo" in told["facts"]["backends"]
    assert all(finding["level"] != "error" for finding in told["findings"])
    assert run(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
