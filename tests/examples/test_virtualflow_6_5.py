"""VirtualFlow 6.5 from its stated facts: H1, H3, figure 7 and table 4."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import hetflow.examples
from hetflow.planning.checks.batch_split import check
from hetflow.planning.costs.split import predict
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.files import read_profiles
from hetflow.schema.plan import Plan
from hetflow.schema.problem import Problem
from hetflow.schema.profile import Profile
from hetflow.solvers.split.solve import solve
from hetflow.tests.plan_parts import whole_group

pytestmark = pytest.mark.measures

FOLDER = Path(hetflow.examples.__file__).parent / "virtualflow_6_5"
BATCH = 8192


def recommended(pool: str, profiles: tuple[Profile, ...] | None = None) -> Plan:
    problem = split_problem(Problem(profiles or read_profiles(FOLDER), Cluster.parse(pool), BATCH))
    plan = solve(problem)
    assert check(plan, problem) == []
    return plan


def shares(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [
        (g.device_type, g.num_devices, g.device_batch_size, g.virtual_node_batch_size)
        for g in plan.groups
    ]


def test_h1_falls_back_to_v100_only() -> None:
    assert shares(recommended("2xV100,2xP100")) == [("V100", 2, 4096, 256)]


def test_h3_is_split_as_in_the_paper_and_gains_as_much() -> None:
    plan = recommended("2xV100,8xP100")
    assert shares(plan) == [("V100", 2, 2048, 256), ("P100", 8, 512, 256)]
    alone = recommended("2xV100")
    gain = 100 * (alone.predicted.step_seconds / plan.predicted.step_seconds - 1)
    assert gain == pytest.approx(42.3, abs=2.0)


def test_figure_7_uneven_is_44_percent_shorter() -> None:
    problem = split_problem(Problem(read_profiles(FOLDER), Cluster.parse("2xV100,2xP100"), BATCH))

    def seconds(v100: int, p100: int) -> float:
        groups = [
            whole_group(
                device_type=name,
                num_devices=2,
                device_batch_size=samples,
                virtual_nodes=samples // 256,
                virtual_node_batch_size=256,
            )
            for name, samples in (("V100", v100), ("P100", p100))
        ]
        return predict(problem, groups).step_seconds

    saved = 100 * (1 - seconds(3072, 1024) / seconds(2048, 2048))
    assert saved == pytest.approx(44, abs=0.5)


def test_table_4_is_ranked_as_the_text_says() -> None:
    step = runpy.run_path(str(FOLDER / "compare.py"))["table_4_seconds"]()
    order = ["H3", "H2a", "V100 only", "H1b", "H1a"]
    assert sorted(order, key=step.__getitem__) == order
    assert len({round(step[name], 6) for name in order}) == 5
    assert step["H2a"] <= min(step["H2b"], step["H2c"], step["H2d"]) * (1 + 1e-9)
    assert step["H1b"] <= step["H1c"] * (1 + 1e-9)


def test_the_shipped_profiles_are_what_build_writes() -> None:
    build = runpy.run_path(str(FOLDER / "build.py"))
    for profile in read_profiles(FOLDER):
        assert build["profile"](profile.device_type) == profile


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_the_recommendations_do_not_hang_on_the_chosen_fixed_share(share: float) -> None:
    def reshaped(profile: Profile) -> Profile:
        full = profile.batch_curve[-1]
        return replace(
            profile,
            batch_curve=tuple(
                replace(
                    point,
                    step_seconds=full.step_seconds
                    * (share + (1 - share) * point.batch_size / full.batch_size),
                )
                for point in profile.batch_curve
            ),
        )

    profiles = tuple(reshaped(profile) for profile in read_profiles(FOLDER))
    assert shares(recommended("2xV100,2xP100", profiles)) == [("V100", 2, 4096, 256)]
    assert [entry[2] for entry in shares(recommended("2xV100,8xP100", profiles))] == [2048, 512]


def test_compare_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "compare.py")], capture_output=True, text=True, check=True
    )
    assert "H3 2xV100,8xP100: 2 V100 x 2048 (8 x 256), 8 P100 x 512 (2 x 256)" in done.stdout
    assert done.stdout.count("checked") == 3
