"""A launch beside checkpoints that it cannot use, seen from outside."""

import re
from pathlib import Path

import pytest

from .elastic_runs import Launch

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_broken_checkpoints_are_refused_and_set_aside_on_demand(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saving = ("--checkpoint", str(saved), "--checkpoint-every", "3")
    whole = Launch(tmp_path / "a", [5, 3], *saving, epochs=2).digest()
    steps = sorted(path.name for path in saved.glob("[!.]*"))
    assert len(steps) == 2
    for name in steps:
        (saved / name / "tensors.bin").write_bytes(b"")
    code, said = Launch(tmp_path / "b", [5, 3], *saving, epochs=2).end()
    assert code == 2
    (line,) = [line for line in said.splitlines() if "none of the checkpoints" in line]
    assert re.match(r"hetflow: worker [01] \(cpu:fast\) failed with exit code 2: ", line)
    assert all(f"{name}: tensors.bin has 0 of " in line for name in steps)
    assert "--restart-from-scratch" in said
    assert "Traceback" not in said
    assert sorted(path.name for path in saved.glob("[!.]*")) == steps
    again = Launch(tmp_path / "c", [4, 4], *saving, "--restart-from-scratch", epochs=2)
    assert again.digest() == whole
    assert sorted(path.name for path in (saved / "before-1").iterdir()) == steps
    assert sorted(path.name for path in saved.glob("[!.]*")) == ["before-1", *steps]
