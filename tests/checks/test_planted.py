"""Faults planted into schedules, costs and solvers make no wrong plan valid."""

import pytest
from tests.checks import planted, tampered

from hetflow.planning.costs.pipeline import updates

SPLITS = [name for name in tampered.QUESTIONS if "split" in name or "virtual nodes" in name]


def test_a_fault_changes_what_runs_and_is_taken_out_again() -> None:
    run = planted.lines_run(lambda: updates("gpipe", 2, 8))
    (site,) = [
        one for one in planted.sites(run) if (one.function, one.kind) == ("updates", "return")
    ]
    whole = updates("gpipe", 2, 8)
    with planted.planted(site) as changed:
        assert changed
        assert updates("gpipe", 2, 8) == pytest.approx(0.9 * whole)
    assert updates("gpipe", 2, 8) == whole


@pytest.mark.slow
def test_faults_are_caught() -> None:
    number = 40
    found = [*planted.campaign(number, seed=60, questions=SPLITS)]
    assert [f"{name}: {site}" for site, name, how in found if how == "missed"] == []
    assert sum(how == "refused" for _, _, how in found) > number / 4
