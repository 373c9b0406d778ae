"""A sample of the campaign of small scripts; the whole of it: see loss_campaign.py."""

from pathlib import Path

import pytest

from hetflow.tests.runtime import loss_campaign


@pytest.mark.slow
@pytest.mark.processes
def test_scripts_equal_one_process_or_are_refused(tmp_path: Path) -> None:
    assert loss_campaign.campaign(12, 3, tmp_path, "even nodes") == []


def test_scripts_are_drawn_from_all_losses() -> None:
    drawn = loss_campaign.scripts(200, 0)
    assert len(set(drawn)) == 200
    kinds = {script.loss for script in drawn}
    assert kinds >= {*loss_campaign.RIGHT, *loss_campaign.WRONG, *loss_campaign.OVER_BATCH}
