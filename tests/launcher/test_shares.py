"""Launches whose workers share states: they join, leave and are lost, and the bits stay."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.options import Shard
from hetflow.schema.plan import Plan
from hetflow.tests.runtime.sharded_plans import shared

from .elastic_runs import Launch, plan_of

pytestmark = pytest.mark.processes


def shares_of(
    nodes: Sequence[int], shares: Sequence[int], shard: Shard, device_type: str = "cpu:fast"
) -> Plan:
    return shared(plan_of(nodes, [device_type] * len(nodes)), shard, shares)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    launch = Launch(tmp_path_factory.mktemp("whole") / "run", [8])
    launch.digest()
    found: str = launch.record()["parameters_digest"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["all", "optimizer"])
def test_shares_move_and_are_restored_with_the_same_digest(
    tmp_path: Path, undisturbed: str, shard: Shard
) -> None:
    """Some workers join; all are replaced by others of another type; one of these is killed."""
    kept = ("--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "3")
    plan = shares_of([4, 4], (1, 3), shard)
    launch = Launch(tmp_path / "run", [], *kept, holds=[4, 7, 10], plan=plan)
    for step, plan, joined, left in (
        (4, shares_of([2, 2, 2, 2], (5, 1, 1, 0), shard), 2, 0),
        (7, shares_of([4, 4], (1, 2), shard, "cpu:slow"), 2, 4),
    ):
        launch.wait_for_step(step, workers=2)
        files.write(tmp_path / f"{step}.json", plan)
        asked = launch.resize_later("--plan", str(tmp_path / f"{step}.json"), "--json")
        launch.wait_for_newcomers(4 if step == 4 else 6)
        launch.go(step)
        out, err = asked.communicate(timeout=60)
        assert asked.returncode == 0, err
        answer = json.loads(out)
        assert answer["status"] == "done"
        assert [len(answer.get(key, [])) for key in ("joined", "left")] == [joined, left]
    launch.wait_for_step(10, workers=2)
    launch.kill(1)
    launch.go(10)
    assert launch.digest()
    record = launch.record()
    assert record["parameters_digest"] == undisturbed
    kinds = [generation["kind"] for generation in record["generations"]]
    assert kinds == ["start", "resize", "resize", "restart"]


@pytest.mark.slow
def test_the_others_go_on_without_lost_workers_where_shares_are_kept_twice(
    tmp_path: Path, undisturbed: str
) -> None:
    """First the middle one of a row is lost, which keeps all; then one of the pair that is left."""
    plan = shares_of([3, 3, 2], (1, 2, 1), "optimizer")
    launch = Launch(tmp_path / "run", [], "--redundancy", "1", holds=[2, 5], plan=plan)
    for step, number in ((2, 3), (5, 2)):
        launch.wait_for_step(step, workers=number)
        launch.kill(1)
        launch.go(step)
    assert launch.digest()
    record = launch.record()
    assert record["parameters_digest"] == undisturbed
    assert [len(generation["workers"]) for generation in record["generations"]] == [3, 2, 1]


@pytest.mark.slow
def test_a_loop_over_parts_says_why_the_others_do_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IN_PARTS", "1")
    plan = shares_of([3, 3, 2], (1, 2, 1), "optimizer")
    launch = Launch(tmp_path / "run", [], "--redundancy", "1", holds=[2], plan=plan)
    launch.wait_for_step(2, workers=3)
    launch.kill(1)
    said = launch.process.communicate(timeout=120)[1]
    assert "was killed by SIGKILL; the others cannot go on without it: passes of a loop" in said
    assert "hint: with --checkpoint" in said
