"""The papers' cluster figures as examples: what must hold whatever the withheld inputs are."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(folder, EXAMPLES / folder / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[folder] = module
    spec.loader.exec_module(module)
    return module


def test_elasticity_saves_gpu_time_only_where_scaling_is_sublinear() -> None:
    figures = load("virtualflow_6_4")
    for scaling, saves in ((1.0, False), (0.4, True)):
        static, elastic = (
            figures.summarise(run) for run in figures.both(figures.twenty(0, 30.0), 16, scaling)
        )
        used = [run.utilisation * run.makespan_seconds for run in (static, elastic)]
        if saves:
            assert used[1] < 0.95 * used[0]
        else:
            assert used[1] == pytest.approx(used[0], rel=1e-6)
        assert elastic.median_jct_seconds < static.median_jct_seconds


def test_a_required_type_is_what_makes_yarn_slow() -> None:
    figures = load("easyscale_5_2")
    bound, free = figures.Choice(), figures.Choice(required="any", keeps=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "NUMBER", 60)
        required = figures.ratios(figures.draw(0, 20.0, bound), bound)
        unbound = figures.ratios(figures.draw(0, 20.0, free), free)
    assert required[0] > unbound[0]
    assert required[2] > unbound[2]
    assert required[4] < unbound[4]


def test_mixes_gain_while_devices_are_idle() -> None:
    figures = load("virtualflow_6_5_2")
    speeds, demands = figures.SPEEDS["V100 4x a P100"], (2,)
    plain, mixed = figures.tables(demands, speeds)
    jobs = figures.draw(0, 2.0, demands, (0.5, 2.0), plain, number=12)
    averages = []
    for table in (plain, mixed):
        case = figures.Case(
            throughputs=table, num_devices=figures.POOL, optimum="centre", selection="joint"
        )
        run = figures.report(case, figures.run_case(case, jobs), "drawn")
        averages.append(run.metrics.average_jct_seconds)
    assert averages[1] < 0.9 * averages[0]
