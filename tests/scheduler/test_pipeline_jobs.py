"""Jobs that train under pipelines and parallel plans: what is asked, and the plans they get."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.clusters.mechanisms.round_state import RoundRules
from hetflow.clusters.scheduler.leases import PLAN
from hetflow.clusters.scheduler.loop import Scheduler
from hetflow.clusters.scheduler.plans import kind_of, plan_on, throughput_of
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.clusters.scheduler.submission import Submission, read_submission, submission, submit
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import HetflowError, InfeasibleError, ProblemError
from hetflow.schema.plan import Plan

from .conftest import FakeEngine, profile

Asked = Callable[..., Submission]
ROUND = 10.0
PIPELINE = 'strategy = "pipeline"\nmicrobatch_size = 4'


def layers(seconds: float, microbatch_size: int, way: str) -> dict[str, object]:
    """A chain of four equal layers."""
    node = {
        "op": "Linear", "forward_seconds": seconds / 12, "backward_seconds": seconds / 6,
        "activation_bytes": 1000, "weight_bytes": 250,
    }  # fmt: skip
    return {
        "microbatch_size": microbatch_size, "nodes": [{"id": f"l{i}", **node} for i in range(4)],
        "edges": [[f"l{i}", f"l{i + 1}"] for i in range(3)], "trace": {"way": way},
    }  # fmt: skip


def write(folder: Path, way: str = "fx", **more: dict[str, object]) -> Path:
    """Write profiles with layers and links of a fast and a slow type; ``more`` by type's name."""
    folder.mkdir()
    for name, seconds, speed in (("cpu:fast", 0.02, 0.1), ("cpu:slow", 0.04, 0.05)):
        document = (
            profile(name, seconds, speed)
            | {
                "layers": layers(seconds, 4, way),
                "links": {"latency_seconds": 1e-4, "bytes_per_second": 1e9, "points": []},
                "optimizer": {"name": "adam", "state_bytes_per_weight_byte": 2.0},
            }
            | more.get(name.removeprefix("cpu:"), {})
        )
        (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(document))
    return folder


@pytest.fixture
def layered(tmp_path: Path) -> Path:
    return write(tmp_path / "layered")


def pipeline(asked: Asked, name: str, layered: Path, **given: object) -> Submission:
    values = {"strategy": "pipeline", "microbatch_size": 4, "virtual_nodes": None, "devices": 2}
    return asked(name, profiles=str(layered), **{**values, **given})


@pytest.mark.parametrize("strategy", ["pipeline", "parallel"])
def test_a_job_that_is_moved_is_cut_anew_with_the_same_microbatches(
    tmp_path: Path, asked: Asked, layered: Path, strategy: str
) -> None:
    store, engine = ClusterStore.create(tmp_path / "state"), FakeEngine(number=2)
    rules = RoundRules(round_seconds=ROUND, reset_seconds=0.0)
    scheduler = Scheduler(
        store, engine, ClusterSettings(policy="las", rules=rules, grace_seconds=5)
    )
    submit(store, pipeline(asked, "a", layered, strategy=strategy))
    plans: dict[str, Plan] = {}
    downs: tuple[set[str], ...] = (set(), {"cpu:fast:0"})
    for turn, down in enumerate(downs):
        engine.down = down
        scheduler.tick(1000.0 + turn * 2 * ROUND)  # asks it to leave where it cannot stay
        scheduler.tick(1000.0 + turn * 2 * ROUND + 1.0)
        [(lease, work)] = engine.running.items()
        [kind] = {device.device_type for device in work.devices}
        plans[kind] = files.read_plan(lease / PLAN)
        assert "--checkpoint" in work.command
        assert work.command[work.command.index("--determinism") + 1] == "none"
    assert plans.keys() == {"cpu:fast", "cpu:slow"}
    for kind, plan in plans.items():
        assert plan.kind == strategy
        assert microbatches(plan) == [4] * 4
        assert [worker.device_type for worker in lower(plan).workers] == [kind] * 2
    engine.end(engine.jobs()[1], 0)
    scheduler.tick(2000.0)
    assert [row["state"] for row in store.rows("SELECT state FROM jobs")] == ["done"]


def microbatches(plan: Plan) -> list[int]:
    """Samples of each virtual node, by which checkpoints of one plan fit another."""
    nodes = [node for worker in lower(plan).workers for node in worker.virtual_nodes]
    by_index = {node.index: node.batch_size for node in nodes}
    assert sorted(by_index) == list(range(len(by_index)))
    return list(by_index.values())


def test_auto_takes_the_fastest_kind_on_each_type_and_cuts_batches_alike(
    tmp_path: Path, asked: Asked
) -> None:
    """A split's exchange of gradients is free on the fast type, and slow on the other."""
    fast, slow = ({"sync": {"num_devices": 2, "sync_seconds": seconds}} for seconds in (0.0, 0.5))
    folder = write(tmp_path / "layered", fast=fast, slow=slow)
    job = pipeline(asked, "a", folder, strategy="auto")
    kinds = {}
    for name in ("cpu:fast", "cpu:slow"):
        plan = plan_on(job, {name: 2})
        kinds[name] = plan.kind
        assert microbatches(plan) == [4] * 4
        one_kind = [replace(job, strategy=kind) for kind in ("split", "pipeline")]
        others = [plan_on(other, {name: 2}).predicted.step_seconds for other in one_kind]
        assert plan.predicted.step_seconds == pytest.approx(min(others))
        assert max(others) > min(others)
    assert kinds == {"cpu:fast": "split", "cpu:slow": "pipeline"}


def test_auto_without_layers_is_a_split_of_that_many_virtual_nodes(
    asked: Asked, profiles: Path
) -> None:
    plan = plan_on(pipeline(asked, "a", profiles, strategy="auto"), {"cpu:fast": 2})
    assert (plan.kind, microbatches(plan)) == ("split", [4] * 4)


def test_a_job_runs_only_on_types_where_its_microbatches_were_profiled(
    tmp_path: Path, asked: Asked
) -> None:
    """Others would be planned with other microbatches, and could not load its checkpoint."""
    slow = {"more_layers": [layers(0.08, 8, "fx")]}
    job = pipeline(asked, "a", write(tmp_path / "layered", slow=slow), microbatch_size=8)
    for strategy in ("pipeline", "parallel"):
        found = throughput_of(replace(job, strategy=strategy), {"cpu:fast": 2, "cpu:slow": 2})
        assert found.steps_per_second.keys() == {"cpu:slow"}
    with pytest.raises(InfeasibleError, match="cpu:fast: .*layers are profiled at 4"):
        throughput_of(job, {"cpu:fast": 2})


def test_layers_that_cannot_be_launched_are_no_plan(tmp_path: Path, asked: Asked) -> None:
    job = pipeline(asked, "a", write(tmp_path / "hooked", way="hooks"))
    with pytest.raises(InfeasibleError, match="cannot be cut into stages"):
        throughput_of(job, {"cpu:fast": 2})
    auto = replace(job, strategy="auto")
    assert plan_on(auto, {"cpu:fast": 2}).kind == "split"
    values = {"script": job.script, "profiles": job.profiles, "batch_size": 16, "steps": 10}
    with pytest.raises(ProblemError, match="cannot be cut into stages"):
        submission(
            {**values, "strategy": "pipeline", "microbatch_size": 4}, base=tmp_path, name="job"
        )


def test_a_pipeline_without_layers_in_its_profile_is_held_with_the_reason(
    tmp_path: Path, asked: Asked, profiles: Path
) -> None:
    store, engine = ClusterStore.create(tmp_path / "state"), FakeEngine()
    submit(store, pipeline(asked, "flat", profiles))
    Scheduler(store, engine, ClusterSettings()).tick(1000.0)
    [row] = store.rows("SELECT state, reason FROM jobs")
    assert row["state"] == "held"
    assert "layers" in row["reason"]


def test_jobs_that_differ_in_their_microbatches_reach_other_throughputs(
    asked: Asked, layered: Path
) -> None:
    one = pipeline(asked, "one", layered)
    assert kind_of(one) == kind_of(replace(one, name="two"))
    others = [replace(one, microbatch_size=8), replace(one, strategy="parallel")]
    assert len({kind_of(job) for job in (one, *others)}) == 3


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("microbatch_size = 4", "microbatch_size is for pipelines"),
        ('strategy = "pipeline"', "a pipeline needs microbatch_size"),
        (f"{PIPELINE}\nvirtual_nodes = 4", "virtual_nodes are for splits"),
        ('strategy = "pipeline"\nmicrobatch_size = 5', "batch_size 16 is not a multiple of"),
        (f'{PIPELINE}\ndeterminism = "elastic"', "is for split plans"),
        ('strategy = "parallel"', "strategy parallel needs microbatch_size"),
        ('strategy = "auto"', "strategy auto needs microbatch_size"),
        ('strategy = "auto"\nmicrobatch_size = 2', "was not profiled, only 4, 8, 16"),
        ('strategy = "parallel"\nmicrobatch_size = 4', "strategy parallel needs layers"),
        (PIPELINE, "strategy pipeline needs layers"),
        (f'{PIPELINE}\nmodel = "huge"', "no profile of 'huge'"),
        ("virtual_nodes = 5", "batch_size 16 is not a multiple of virtual_nodes 5"),
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
    said_by = (str(job), "determinism", str(profiles))
    assert any(name in refused.value.message for name in said_by)
