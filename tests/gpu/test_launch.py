"""Launches of split plans on GPUs, at every level of determinism."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetflow.schema import files
from hetflow.tests.fakecuda.hosts import GpuHost, Host
from hetflow.tests.launcher.elastic_runs import plan_of

SCRIPT = Path(__file__).with_name("training.py")


def launch(
    host: Host,
    name: str,
    workers: Sequence[tuple[str, int]],
    *options: str,
    epochs: int = 2,
    how: str = "",
) -> "subprocess.CompletedProcess[str]":
    """Run the script on these (device type, virtual nodes)."""
    folder = host.folder / name
    folder.mkdir(exist_ok=True)
    types, nodes = zip(*workers, strict=True)
    files.write(folder / "plan.json", plan_of(nodes, types), force=True)
    words = ["launch", *options, "-o", folder / "run", folder / "plan.json", SCRIPT]
    return host.run(*words, folder, str(epochs), "0", how)


def told(host: Host, name: str, *rest: Any, **more: Any) -> dict[str, Any]:
    """What the script of a launch that succeeds tells."""
    found = launch(host, name, *rest, **more)
    assert found.returncode == 0, found.stderr
    result: dict[str, Any] = json.loads((host.folder / name / "told.json").read_text())
    return result


def test_two_types_train_over_nccl(gpus: GpuHost) -> None:
    host = gpus(2, 1)
    first, second = host.types
    found = told(host, "a", [(first, 3), (first, 3), (second, 2)])
    assert (found["backend"], found["device"]) == ("nccl", "cuda:0")
    alone = told(host, "b", [(first, 8)])
    assert alone["backend"] is None
    assert found["losses"] == pytest.approx(alone["losses"], rel=2e-3)
