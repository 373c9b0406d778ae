"""The example of a live spot market: its decisions in virtual time, and its short form for real."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import hetflow.examples
from hetflow.schema import files
from hetflow.schema.profile import BatchPoint, Profile
from hetflow.tests import programs

SCRIPT = Path(hetflow.examples.__file__).parent / "spot_market_live" / "run.py"


@pytest.fixture(scope="module")
def run() -> ModuleType:
    specification = importlib.util.spec_from_file_location("spot_market_live_run", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[module.__name__] = module
    specification.loader.exec_module(module)
    return module


def test_events_of_a_market_come_with_notice(run: ModuleType) -> None:
    scene = run.Scene(
        there={"cpu:fast": ((0, 4), (7, 9))},
        last_minute=9,
        fast_minutes=1,
        deadline_minutes=9,
    )
    events = [(event.at_seconds / 60, event.kind) for event in run.events_of(run.market_of(scene))]
    assert events == [(0, "comes"), (2, "notice"), (4, "gone"), (7, "comes")]


def test_a_forecast_pays_for_what_it_holds(run: ModuleType, tmp_path: Path) -> None:
    for name, speed in (("cpu:fast", 1.0), ("cpu:slow", 2.0)):
        point = BatchPoint(batch_size=16, step_seconds=speed * 0.125, peak_memory_bytes=1)
        profile = Profile(
            model="m", device_type=name, device_memory_bytes=2, weight_bytes=1,
            update_seconds=0.0, batch_curve=(point,),
        )  # fmt: skip
        files.write(tmp_path / f"{name[4:]}.json", profile)
    planner = run.Planner(tmp_path, 60.0)  # a second is a market minute
    scene = run.Scene(
        there={"cpu:fast": ((0, 4), (7, 20)), "cpu:slow": ((0, 7),)},
        last_minute=20,
        fast_minutes=5,
        deadline_minutes=20,
    )
    # A step is a second on the fast machine: 8 virtual nodes of 16 samples, 0.125 s each.
    ledger = run.predict(scene, planner, steps=5, launch_seconds=0.0)
    held = [(round(at / 60, 6), what) for at, what, _ in ledger.rows]
    # Two steps; then slow for the three minutes to its own notice: 1.5; the rest takes 1.5.
    assert held == [
        (0, "1xcpu:fast"), (2, "1xcpu:slow"), (5, "nothing"), (7, "1xcpu:fast"), (8.5, "nothing")
    ]  # fmt: skip
    dollars = run.DOLLARS_PER_HOUR
    paid = (3.5 * dollars["cpu:fast"] + 3 * dollars["cpu:slow"]) / 60
    assert ledger.dollars == pytest.approx(paid)


@pytest.mark.slow
@pytest.mark.measures
def test_a_training_moves_with_the_market_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--short", "--scale", "30", "-o", str(tmp_path / "made"),
         "--json", str(told)],
        env={**os.environ, programs.VARIABLE: programs.preloaded()},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(told.read_text())
    assert result["digest"] == result["alone"]
    assert result["num_launches"] == 2
    held = [what for _, what, _ in result["actual"]["rows"]]
    assert held == ["1xcpu:fast", "1xcpu:slow", "nothing", "1xcpu:fast", "nothing"]
    assert 0 < result["actual"]["dollars"] < 1
