"""Generated scripts as they are equal one process, or are refused; by hand there are more."""

from pathlib import Path

import pytest

from hetflow.tests.runtime.script_campaign import LIBRARIES, LOSSES, RIGHT, judge, scripts

# (library, number, plans) of scripts that the campaign has found at fault.
FOUND = [("ddp", 4, ("three", "whole")), ("ddp", 19, ("two",)), ("by hand", 19, ("two",))]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("library", "number", "plans"), FOUND)
def test_a_generated_script_equals_one_process_or_is_refused(
    library: str, number: int, plans: tuple[str, ...], tmp_path: Path
) -> None:
    script = scripts(number + 1, 0, [library])[-1]
    end, faults, _ = judge(script, tmp_path, plans)
    assert not faults
    assert end in ("equal", "refused")


def test_all_losses_and_libraries_come() -> None:
    drawn = scripts(200, seed=0)
    assert {script.loss for script in drawn} == set(LOSSES)
    assert {script.library for script in drawn} == set(LIBRARIES)
    assert 0 < len(RIGHT) < len(LOSSES)
