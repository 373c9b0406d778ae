"""``hetflow rent odds``: estimates from windows and histories."""

import json
from pathlib import Path

from hetflow.schema import files
from hetflow.schema.market import Availability, Market


def test_windows_of_a_folder_are_one_zone(hetflow, tmp_path: Path) -> None:
    folder = tmp_path / "zone-a"
    folder.mkdir()
    for name, data in (("1", [1, 0, 0, 0, 1]), ("2", [1, 0, 0, 1, 0])):  # 1 is gone
        document = {"original_trace": "a", "metadata": {"gap_seconds": 600}, "data": data}
        (folder / f"{name}.json").write_text(json.dumps(document))
    target = tmp_path / "odds.json"
    answer = hetflow("rent", "odds", folder, "--checkpoint-seconds", "30", "-o", target)
    assert answer.code == 0, answer.stderr
    report = json.loads(target.read_text())
    (zone,) = report["zones"]
    assert (zone["zone"], zone["num_windows"]) == ("zone-a", 2)
    assert zone["rate"]["mean_seconds"] == 1800.0  # 6 ticks, 2 preemptions
    assert zone["num_lifetimes"] == 3
    assert "zone-a" in answer.stdout
    assert "checkpoint every min" in answer.stdout
    assert hetflow("rent", "odds", folder, "--json").code == 0


def test_nothing_to_estimate_from(hetflow, tmp_path: Path) -> None:
    gone = Availability(zone="a", tick_seconds=60.0, available=(0, 0))
    files.write(tmp_path / "market.json", Market(availability=(gone,)))
    answer = hetflow("rent", "odds", tmp_path / "market.json")
    assert answer.code == 2
    assert answer.stderr.startswith("hetflow: there is nothing to estimate from")


def test_a_file_nested_too_deep_ends_in_a_line(hetflow, tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    answer = hetflow("rent", "odds", tmp_path / "deep.json")
    assert answer.code == 2
    assert "deep.json: not JSON" in answer.stderr
