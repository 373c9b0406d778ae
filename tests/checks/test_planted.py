"""Faults planted into schedules, costs and solvers make no wrong plan valid."""

import pytest
from tests.checks import planted, tampered

from hetflow.costs.pipeline import thesis_seconds

SPLITS = [name for name in tampered.QUESTIONS if "split" in name or "virtual nodes" in name]


def test_a_fault_changes_what_runs_and_is_taken_out_again() -> None:
    run = planted.lines_run(lambda: thesis_seconds(1.0, 100.0, 2, 10.0))
    (site,) = [one for one in planted.sites(run) if one.kind == "return"]
    whole = thesis_seconds(1.0, 100.0, 2, 10.0)
    with planted.planted(site) as changed:
        assert changed
        assert thesis_seconds(1.0, 100.0, 2, 10.0) == pytest.approx(0.9 * whole)
    assert thesis_seconds(1.0, 100.0, 2, 10.0) == whole


@pytest.mark.slow
def test_faults_are_caught() -> None:
    number = 60
    found = [*planted.campaign(number, seed=number, questions=SPLITS)]
    assert [f"{name}: {site}" for site, name, how in found if how == "missed"] == []
    assert sum(how == "refused" for _, _, how in found) > number / 4
