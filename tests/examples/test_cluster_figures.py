"""The papers' cluster figures as examples: what must hold whatever the withheld inputs are."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hetflow.clusters.mechanisms.pool import Active, ClusterPool
from hetflow.schema.jobs import Job, ModelThroughput, Throughputs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(folder: str, file: str = "compare.py") -> ModuleType:
    spec = importlib.util.spec_from_file_location(folder, EXAMPLES / folder / file)
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


@pytest.mark.slow
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


def test_gavels_fifo_has_gavels_faults() -> None:
    baselines = load("gavel_figures", "gavel.py")
    models = tuple(
        ModelThroughput(model="m", scale_factor=scale, steps_per_second={"k80": 1.0, "v100": 3.0})
        for scale in (1, 2)
    )
    table = Throughputs(models=models)
    both = ClusterPool(throughputs=table, num_devices={"k80": 2, "v100": 2})
    v100 = ClusterPool(throughputs=table, num_devices={"v100": 2})

    def held(pool: ClusterPool, rule: Any, *jobs: tuple[str, int]) -> dict[str, str]:
        active = Active(pool)
        active.add(
            [Job(id=id_, model="m", scale_factor=scale, steps=1.0) for id_, scale in jobs], 0.0
        )
        share = rule.allocate(active, 0.0).x
        return {
            job.id: pool.types[kind]
            for number, job in enumerate(active.jobs)
            for kind in range(len(pool.types))
            if share[kind, number]
        }

    # What is drawn is not what is used, but for the mended one.
    used = [
        {kind for seed in range(8) for kind in held(both, rule(seed), ("1", 1), ("2", 1)).values()}
        for rule in (
            lambda seed: baselines.GavelFifo(both, seed),
            lambda seed: baselines.GavelFifo(both, seed, mended=True),
        )
    ]
    assert used == [{"v100"}, {"k80", "v100"}]
    for ended, then in (("1", {"2", "3"}), ("2", {"1", "4"})):
        rule = baselines.GavelFifo(v100, mended=True)
        assert held(v100, rule, ("1", 1), ("2", 1)) == {"1": "v100", "2": "v100"}
        stays = "2" if ended == "1" else "1"
        # Job 3 wants both. Where 1 has ended, 2 is not counted yet: three devices of two are
        # promised. Where 2 has ended, 1 is, and job 4 goes ahead.
        assert held(v100, rule, (stays, 1), ("3", 2), ("4", 1)).keys() == then
