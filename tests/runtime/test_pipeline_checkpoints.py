"""Pipelines go on from their parts: same bits under the same plan, same training under another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict

from hetflow import runtime as hf
from hetflow.cli import main
from hetflow.schema import files
from hetflow.schema.plan import Plan

from . import pipeline_restarts as restarts
from . import test_pipeline as plans
from .gloo_workers import run_workers
from .pipeline_cases import build

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HERE = Path(__file__).parent
CHAIN2, CHAIN3 = plans.CHAIN2, plans.CHAIN3
MOVED2 = (("0",), ("1", "2", "3", "4", "5", "6"))
# name: (model and optimizer, schedule, stages, replicas)
TWO = {
    "flush": ("chain:adam", "1f1b", CHAIN2, (1, 1)),
    "tied": ("branches:momentum", "1f1b", plans.BRANCH2, (1, 1)),
    "normed": ("normed:momentum", "gpipe", plans.NORM2, (1, 1)),
    "chunks": ("chain:momentum", "interleaved", plans.CHAIN4, (1, 1)),
    "stash": ("chain:adam", "pipedream", CHAIN2, (1, 1)),
    "2bw": ("chain:momentum", "2bw", CHAIN2, (1, 1)),
}
STALE = ("stash", "2bw")
EVERY, STOP_AT = 2, 7


class World:
    """Runs in one set of worker processes, in order."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.names: list[str] = []

    def plan(self, name: str, *shape: object) -> None:
        files.write(self.folder / f"plan-{name}.json", plans.make_plan(*shape))

    def add(self, name: str, plan: str, case: str, saved: str | None, **options: object) -> None:
        told = {"plan": f"plan-{plan}.json", "case": case, "saved": saved, "every": EVERY}
        told |= {"damage": options.pop("damage", None), "apart": options.pop("apart", False)}
        told |= {"options": options}
        (self.folder / f"{name}.json").write_text(json.dumps(told))
        self.names.append(name)

    def run(self) -> list[dict]:
        script = HERE / "pipeline_restarts.py"
        self.said = run_workers(script, self.size, self.folder, *self.names, seconds=150)
        found = [self.folder / f"rank{r}-{self.names[0]}.pt" for r in range(self.size)]
        return [torch.load(path) for path in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict]:
    """Each case undisturbed, stopped, and gone on; and what else two workers can show."""
    world = World(folder, 2)
    for name, (case, schedule, stages, replicas) in TWO.items():
        world.plan(name, schedule, stages, replicas, 6)
        world.add(f"whole-{name}", name, case, f"{name}-whole")
        world.add(f"stopped-{name}", name, case, f"{name}-saved", stop_at=STOP_AT)
        if name in ("flush", "normed"):
            world.add(f"kept-{name}", name, case, f"{name}-kept", stop_at=STOP_AT)
        world.add(f"again-{name}", name, case, f"{name}-saved")
    for damage in ("absent", "torn", "foreign"):
        world.add(f"stopped-{damage}", "flush", "chain:adam", damage, stop_at=STOP_AT)
        world.add(f"again-{damage}", "flush", "chain:adam", damage, damage=damage)
    world.plan("moved", "1f1b", MOVED2, (1, 1), 6)
    world.add("stopped-moved", "flush", "chain:adam", "moved", stop_at=STOP_AT)
    world.add("again-moved", "moved", "chain:adam", "moved")
    world.plan("moved-norm", "1f1b", (("0",), ("1", "2", "3", "4", "5")), (1, 1), 6)
    world.add("stopped-moved-norm", "normed", "normed:momentum", "moved-norm", stop_at=STOP_AT)
    world.add("again-moved-norm", "moved-norm", "normed:momentum", "moved-norm")
    world.add("term-flush", "flush", "chain:adam", "term", sigterm_at=3)
    world.add("again-term", "flush", "chain:adam", "term")
    world.add("term-stash", "stash", "chain:adam", "term-stash", sigterm_at=2)
    world.add("asked-stash", "stash", "chain:adam", "asked", asked=(3,))
    world.add("stopped-asked", "stash", "chain:adam", "asked-2", asked=(3,), stop_at=3)
    world.add("again-asked", "stash", "chain:adam", "asked-2", asked=(3,))
    world.add("apart", "flush", "chain:adam", "apart", apart=True)
    world.add("other-model", "tied", "branches:momentum", "flush-whole")
    return world.run()


def same(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found["state"], expected["state"], rtol=0, atol=0)
    assert found["lr"] == expected["lr"]
    for step, loss in found["losses"].items():
        assert loss == expected["losses"][step]


@pytest.mark.parametrize("name", TWO)
def test_a_restart_under_the_same_plan_has_the_same_bits(name: str, two: list[dict]) -> None:
    for answer in two:
        again = answer[f"again-{name}"]
        assert "error" not in again, again
        assert sorted(again["losses"]) == [7, 8, 9, 10]
        same(again, answer[f"whole-{name}"])


@pytest.mark.parametrize("name", STALE)
def test_a_drain_is_where_stale_weights_end(name: str, two: list[dict]) -> None:
    """The equations, restarted every two steps: what is drained is not what runs through."""
    state = two[0][f"whole-{name}"]["state"]
    assert not torch.equal(state["0.weight"], two[0]["whole-flush"]["state"]["0.weight"])


@pytest.mark.parametrize("damage", ["absent", "torn", "foreign"])
def test_an_incomplete_checkpoint_gives_way_to_the_one_before(damage: str, two: list[dict]) -> None:
    for answer in two:
        again = answer[f"again-{damage}"]
        assert sorted(again["losses"]) == [5, 6, 7, 8, 9, 10]
        same(again, answer["whole-flush"])


def test_a_stop_is_saved_at_a_step_and_gone_on_from(two: list[dict], folder: Path) -> None:
    for answer in two:
        assert answer["term-flush"]["code"] == 143
        assert len(answer["term-flush"]["losses"]) == 4
        assert sorted(answer["again-term"]["losses"]) == list(range(5, 11))
        same(answer["again-term"], answer["whole-flush"])
        assert answer["term-stash"]["code"] == 143
    assert {path.name for path in (folder / "term-stash").iterdir()} == {
        "step-000000002", "step-000000004",
    }  # fmt: skip


def test_a_checkpoint_that_the_script_asks_for_drains_there_in_every_run(two: list[dict]) -> None:
    for answer in two:
        again = answer["again-asked"]
        assert sorted(again["losses"]) == list(range(4, 11))
        same(again, answer["asked-stash"])
        drained = answer["asked-stash"]["state"]["0.weight"]
        assert not torch.equal(drained, answer["whole-stash"]["state"]["0.weight"])


def test_each_worker_writes_its_own_stages_only_and_two_are_kept(
    two: list[dict], folder: Path
) -> None:
    kept = sorted((folder / "flush-whole").iterdir())
    assert [path.name for path in kept] == ["step-000000008", "step-000000010"]
    parts = sorted(kept[1].glob("part-*"))
    assert [part.name for part in parts] == ["part-0-of-2", "part-1-of-2"]
    assert {path.name for path in kept[1].iterdir()} - {p.name for p in parts} == {"complete"}
    held = [set(restarts.saving.checkpoint.read(part).state["parameters"]) for part in parts]
    assert held == [{"0.weight", "0.bias", "2.weight", "2.bias"}, {"4.weight", "4.bias", "6.weight",
        "6.bias"}]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["flush", "tied", "normed", "chunks"])
def test_the_parts_fill_a_plain_model(
    name: str, two: list[dict], folder: Path, tmp_path: Path
) -> None:
    (kind, how), lr = TWO[name][0].split(":"), two[0][f"whole-{name}"]["lr"]
    model, saved = build(kind), folder / f"{name}-whole"
    assert hf.load_weights(model, saved) == 10
    found, expected = model.state_dict(), two[0][f"whole-{name}"]["state"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert main.run(["export", str(saved), "--to", "dcp", "-o", str(tmp_path / "dcp")]) == 0
    model = build(kind)
    weights, states = get_state_dict(model, restarts.OPTIMIZERS[how](model.parameters()))
    state = {"model": weights, "optim": states}
    # A parameter without a gradient has no state there, and one in what torch asks for.
    planner = DefaultLoadPlanner(allow_partial_load=name == "tied")
    dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=planner, no_dist=True)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    assert states["state"].keys() == dict(model.named_parameters()).keys()
    for name, held in states["state"].items():
        moments = [value for value in held.values() if value.dim()]
        assert len(moments) == (2 if how == "adam" else 1)
        assert all(map(torch.any, moments)), name
    assert [group["lr"] for group in states["param_groups"]] == [lr]


def close(found: dict, expected: dict) -> None:
    torch.testing.assert_close(found["state"], expected["state"], rtol=1e-10, atol=1e-12)
    assert found["lr"] == expected["lr"]


def test_another_cut_of_the_same_model_goes_on(two: list[dict]) -> None:
    for answer in two:
        assert sorted(answer["again-moved"]["losses"]) == [7, 8, 9, 10]
        close(answer["again-moved"], answer["whole-flush"])
        # A norm's statistics move to the other worker with its layer.
        assert sorted(answer["again-moved-norm"]["losses"]) == [7, 8, 9, 10]
        close(answer["again-moved-norm"], answer["whole-normed"])


def test_hosts_that_share_no_disk_are_an_error_at_the_end(two: list[dict]) -> None:
    error = two[0]["apart"]["error"]
    assert "step-000000010: only some of its 2 parts are there" in error
    assert sorted(two[1]["apart"]["losses"]) == list(range(1, 11))


def test_another_model_is_refused(two: list[dict]) -> None:
    assert "is of another model: first.weight is absent there" in two[0]["other-model"]["error"]


def test_three_workers_go_on_from_two_and_one_from_three(
    two: list[dict],
    folder: Path,
    plan_of: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pipelines of two, three (one stage twice) and a split plan, each from the other's parts."""
    monkeypatch.setenv("HETFLOW_CHECKPOINT_EVERY", str(EVERY))
    files.write(folder / "plan-split.json", plan_of([(6, 4)]))

    def on_one(case: str, saved: str, **options: object) -> dict:
        told = {"plan": "plan-split.json", "case": case, "saved": saved, "every": EVERY}
        (folder / "one.json").write_text(json.dumps({**told, "damage": None, "options": options}))
        return restarts.run(folder, "one")

    on_one("normed:momentum", "from-split", stop_at=5)
    world = World(folder, 3)
    world.plan("three", "1f1b", CHAIN3, (1, 1, 1), 6)
    world.plan("2-1", "1f1b", plans.NORM2, (2, 1), 6)
    for name in ("flush", "normed"):
        shutil.copytree(folder / f"{name}-kept", folder / f"{name}-three")
    world.add("three-flush", "three", "chain:adam", "flush-three", stop_at=9)
    world.add("three-normed", "2-1", "normed:momentum", "normed-three", stop_at=9)
    world.add("three-split", "2-1", "normed:momentum", "from-split")
    for answer in world.run():
        assert sorted(answer["three-flush"]["losses"]) == [7, 8, 9]
        assert sorted(answer["three-split"]["losses"]) == [5, 6, 7, 8, 9, 10]
        close(answer["three-split"], two[0]["whole-normed"])
    for name, case in (("flush", "chain:adam"), ("normed", "normed:momentum")):
        found = on_one(case, f"{name}-three")
        assert sorted(found["losses"]) == [9, 10]
        close(found, two[0][f"whole-{name}"])
