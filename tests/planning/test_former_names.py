"""Profiles written when unlike GPUs still had one name."""

import logging

import pytest

import hetflow
from hetflow.schema.profile import BatchPoint, Profile


def profile(device_type: str, driver_name: str | None = None) -> Profile:
    return Profile(
        model="m",
        device_type=device_type,
        device_memory_bytes=48 << 30,
        weight_bytes=4,
        update_seconds=0.0,
        batch_curve=(BatchPoint(batch_size=8, step_seconds=0.1, peak_memory_bytes=1 << 30),),
        provenance={"device": driver_name} if driver_name else None,
    )


@pytest.mark.parametrize("driver_name", [None, "NVIDIA RTX 6000 Ada Generation"])
def test_an_old_profile_plans_for_the_type_of_today_and_a_warning_says_so(
    driver_name: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    old = profile("RTX6000", driver_name)
    with caplog.at_level(logging.WARNING, logger="hetflow"):
        plan = hetflow.solve([old], "2xRTX6000Ada", batch_size=16)
    assert [group.device_type for group in plan.groups] == ["RTX6000Ada"]
    assert "the profile of RTX6000 is taken for RTX6000Ada" in caplog.text
    assert hetflow.check(plan, profiles=[old], pool="2xRTX6000Ada") == []


def test_a_profile_of_the_other_gpu_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    quadro = profile("RTX6000", "Quadro RTX 6000")
    with pytest.raises(hetflow.ProblemError, match="RTX6000Ada"):
        hetflow.solve([quadro], "2xRTX6000Ada", batch_size=16)
    hetflow.solve([quadro], "2xRTX6000", batch_size=16)
    assert "is taken for" not in caplog.text


def test_case_and_doubles_are_as_before(caplog: pytest.LogCaptureFixture) -> None:
    plan = hetflow.solve([profile("V100")], "2xv100", batch_size=16)
    assert [group.device_type for group in plan.groups] == ["V100"]
    assert "is taken for" not in caplog.text
    with pytest.raises(hetflow.ProblemError, match="two profiles of m on V100"):
        hetflow.solve([profile("V100"), profile("V100")], "2xV100", batch_size=16)
