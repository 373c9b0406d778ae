"""Jobs that train under pipelines: what is asked, and the plans of their leases."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.mechanisms.rounds.rules import RoundRules
from hetflow.scheduler.leases import PLAN
from hetflow.scheduler.loop import Scheduler, Settings
from hetflow.scheduler.plans import kind_of
from hetflow.scheduler.store import Store
from hetflow.scheduler.submission import Submission, read_submission, submit
from hetflow.schema import files
from hetflow.schema.errors import HetflowError
from hetflow.schema.pipeline import PipelinePlan

from .conftest import FakeEngine, profile

Asked = Callable[..., Submission]
ROUND = 10.0
PIPELINE = 'strategy = "pipeline"\nmicrobatch_size = 4'


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    """Profiles with layers and links, on a fast and a slow type."""
    folder = tmp_path / "layered"
    folder.mkdir()
    for name, seconds, speed in (("cpu:fast", 0.02, 0.1), ("cpu:slow", 0.04, 0.05)):
        nodes = [
            {
                "id": f"layer{number}", "op": "Linear", "forward_seconds": seconds / 12,
                "backward_seconds": seconds / 6, "activation_bytes": 1000, "weight_bytes": 250,
            }
            for number in range(4)
        ]  # fmt: skip
        edges = [[f"layer{number}", f"layer{number + 1}"] for number in range(3)]
        document = profile(name, seconds, speed) | {
            "layers": {"microbatch_size": 4, "nodes": nodes, "edges": edges},
            "links": {"latency_seconds": 1e-4, "bytes_per_second": 1e9, "points": []},
            "optimizer": {"name": "adam", "state_bytes_per_weight_byte": 2.0},
        }
        (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(document))
    return folder


def pipeline(asked: Asked, name: str, layered: Path, **given: object) -> Submission:
    values = {"strategy": "pipeline", "microbatch_size": 4, "virtual_nodes": None, "devices": 2}
    return asked(name, profiles=str(layered), **{**values, **given})


def test_a_pipeline_that_is_moved_is_cut_anew_with_the_same_microbatches(
    tmp_path: Path, asked: Asked, layered: Path
) -> None:
    store, engine = Store.create(tmp_path / "state"), FakeEngine(number=2)
    rules = RoundRules(round_seconds=ROUND, reset_seconds=0.0)
    scheduler = Scheduler(store, engine, Settings(policy="las", rules=rules, grace_seconds=5))
    submit(store, pipeline(asked, "a", layered))
    plans = {}
    downs: tuple[set[str], ...] = (set(), {"cpu:fast:0"})
    for turn, down in enumerate(downs):
        engine.down = down
        scheduler.tick(1000.0 + turn * 2 * ROUND)  # asks it to leave where it cannot stay
        scheduler.tick(1000.0 + turn * 2 * ROUND + 1.0)
        [(lease, work)] = engine.running.items()
        [kind] = {device.device_type for device in work.devices}
        plans[kind] = files.read(lease / PLAN, PipelinePlan)
        assert "--checkpoint" in work.command
        assert work.command[work.command.index("--determinism") + 1] == "none"
    assert plans.keys() == {"cpu:fast", "cpu:slow"}
    for plan in plans.values():
        assert (plan.microbatch_size, plan.microbatches) == (4, 4)
        assert sum(len(stage.held) for stage in plan.stages) == 2
    engine.end(engine.jobs()[1], 0)
    scheduler.tick(2000.0)
    assert [row["state"] for row in store.rows("SELECT state FROM jobs")] == ["done"]


def test_a_pipeline_without_layers_in_its_profile_is_held_with_the_reason(
    tmp_path: Path, asked: Asked, profiles: Path
) -> None:
    store, engine = Store.create(tmp_path / "state"), FakeEngine()
    submit(store, pipeline(asked, "flat", profiles))
    Scheduler(store, engine, Settings()).tick(1000.0)
    [row] = store.rows("SELECT state, reason FROM jobs")
    assert row["state"] == "held"
    assert "layers" in row["reason"]


def test_jobs_that_differ_in_their_microbatches_reach_other_throughputs(
    asked: Asked, layered: Path
) -> None:
    one = pipeline(asked, "one", layered)
    assert kind_of(one) == kind_of(replace(one, name="two"))
    assert kind_of(one) != kind_of(replace(one, microbatch_size=8))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("microbatch_size = 4", "microbatch_size is for pipelines"),
        ('strategy = "pipeline"', "a pipeline needs microbatch_size"),
        (f"{PIPELINE}\nvirtual_nodes = 4", "virtual_nodes are for splits"),
        ('strategy = "pipeline"\nmicrobatch_size = 5', "batch_size 16 is not a multiple of"),
        (f'{PIPELINE}\ndeterminism = "elastic"', "is for split plans"),
        ('strategy = "piepline"', "strategy"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, profiles: Path, keys: str, said: str
) -> None:
    (tmp_path / "train.py").write_text("")
    job = tmp_path / "job.toml"
    job.write_text(
        f'script = "train.py"\nprofiles = "profiles"\nbatch_size = 16\nsteps = 100\n{keys}\n'
    )
    with pytest.raises(HetflowError, match=said) as refused:
        read_submission(job, {})
    assert str(job) in refused.value.message or "determinism" in refused.value.message
