"""The efficiencies that ship are those that the committed script fits to the committed runs."""

import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from hetflow.planning.costs.efficiency import ESTIMATED_ERROR, FITTED, RATIO_ERROR

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "device_estimates.py"
RESULTS = json.loads((SCRIPT.parent / "results" / "device_estimates.json").read_text())


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_estimates", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["device_estimates"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_what_ships_is_what_is_fitted(benchmark: ModuleType) -> None:
    runs = benchmark.measured_runs()
    assert len(runs.runs) == 68 + 240 + 12 + 29 + 96
    fitted, shipped = asdict(runs.fit()), asdict(FITTED)
    assert fitted.pop("forms") == pytest.approx(shipped.pop("forms"), rel=1e-2)
    assert fitted == pytest.approx(shipped, rel=2e-3)


@pytest.mark.slow
def test_committed_counts_are_what_is_counted_now(benchmark: ModuleType) -> None:
    """One of 14: to count all takes two minutes."""
    measured = sys.modules["estimates_parts.measured"]
    key = measured.key_of("efficientnet_b0_channels_last", True)
    assert measured.count("efficientnet_b0_channels_last", True) == measured.committed_counts()[key]


@pytest.mark.parametrize("kind", ["products", "convolutions"])
def test_stated_errors_are_those_of_the_last_full_run(kind: str) -> None:
    stated = (getattr(ESTIMATED_ERROR, kind), getattr(RATIO_ERROR, kind))
    assert RESULTS["stated"][kind] == pytest.approx(stated, abs=5.1e-3)


@pytest.mark.parametrize(
    ("what", "mean"),
    [
        ("times of products", 0.15),
        ("times of convolutions", 0.25),
        ("memory", 0.1),
    ],
)
def test_targets_that_the_documentation_calls_met(what: str, mean: float) -> None:
    """Of models and of types of GPU that the fit has not seen."""
    unseen = (what, f"{what}, type of GPU left out", f"{what}, model left out")
    tables = [RESULTS[title] for title in unseen if title in RESULTS]
    assert len(tables) == (1 if what == "memory" else 2)
    assert all(table["all"]["mean"] < mean for table in tables)
