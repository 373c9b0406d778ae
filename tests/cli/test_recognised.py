"""Commands take market data as clouds and SkyPilot give them."""

import json
from pathlib import Path

import pytest

from hetflow.tests.importers.test_recognise import write_all


def test_commands_take_files_as_clouds_give_them(hetflow, tmp_path: Path) -> None:
    write_all(tmp_path)
    asked = ("--rate", "V100=1", "--work-hours", 3, "--restart-seconds", 0, "--json")
    answer = hetflow("rent", tmp_path / "prices.json", tmp_path / "aws" / "vms.csv", *asked)
    assert answer.code == 0, answer.stderr
    found = json.loads(answer.stdout)["outcomes"]["multi_cloud"]
    assert found["dollars"] == pytest.approx(3 * 0.9)
    assert hetflow("import", tmp_path / "google.json", "-o", tmp_path / "m.json").code == 0
    shown = hetflow("show", tmp_path / "m.json").stdout
    assert "A100-80GB" in shown
    refused = hetflow("rent", tmp_path / "none.csv", *asked)
    assert refused.code == 2
