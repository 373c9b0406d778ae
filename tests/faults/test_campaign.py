"""Random faults (slow), and the campaign's own parts."""

import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest
import torch

from hetflow.runtime.checkpoints import checkpoint, parts
from hetflow.runtime.checkpoints.checkpoint import BrokenCheckpoint

from .campaign import campaign, table, undisturbed
from .faults import (
    HOSTS_KINDS,
    KINDS,
    LAST_KINDS,
    PIPELINE_KINDS,
    Fault,
    craft,
    flip,
    stories,
    tear,
)
from .processes import Processes, marked_commands
from .run import Violation, check_words, plan_of

pytestmark = pytest.mark.processes


def test_a_seed_tells_the_same_stories_with_every_kind_of_fault() -> None:
    found = stories(1, 1000)
    assert found == stories(1, 1000)
    assert found != stories(2, 1000)
    faults = [fault for story in found for fault in story.faults]
    assert len(faults) == 1000
    assert {fault.kind for fault in faults} == set(KINDS)


def test_some_of_the_faults_are_for_pipelines_and_some_for_two_hosts() -> None:
    found = stories(3, 50)
    (pipeline,) = [story for story in found if story.is_pipeline]
    (hosts,) = [story for story in found if story.is_on_hosts]
    assert (len(pipeline.faults), len(hosts.faults)) == (10, 2)
    kinds = [fault.kind for fault in pipeline.faults]
    assert set(kinds[:-1]) <= PIPELINE_KINDS.keys() <= KINDS.keys()
    assert kinds[-1] in LAST_KINDS
    assert {fault.kind for fault in hosts.faults} <= HOSTS_KINDS.keys() <= KINDS.keys()


def test_what_is_crafted_is_broken_in_every_place(tmp_path: Path) -> None:
    path, tensors = tmp_path / "step-000000001", list[torch.Tensor]()
    header = {
        "virtual_nodes": [4], "seed": 0, "parameters": {"a": "float32 [2]"}, "step": 1,
        "position": {"call": 0, "step": 1, "length": 4},
    }  # fmt: skip
    state = {"parameters": {"a": torch.ones(2)}, "optimizer": None, "registered": []}
    state |= {"buffers": {"base": {"b": torch.ones(1)}, "nodes": [{}]}, "last_weight": None}
    encoded = checkpoint.encode(state, tensors)
    for number in range(60):
        checkpoint.write(tmp_path, header, encoded, tensors)
        parts.reader()(path)
        craft(path, Fault("crafted", 1, 0.0, number / 60, (number * 7 % 60) / 60))
        with pytest.raises(BrokenCheckpoint):
            parts.reader()(path)


def test_mappings_share_the_virtual_nodes() -> None:
    plan = plan_of("2xcpu:fast,1xcpu:slow")
    held = [(group.device_type, group.virtual_nodes) for group in plan.groups]
    assert held == [("cpu:fast", 2), ("cpu:fast", 1), ("cpu:slow", 1)]


@pytest.mark.parametrize("first", [0.2, 0.9])
@pytest.mark.parametrize("second", [0.05, 0.5, 0.999])
def test_a_broken_checkpoint_is_another_one(tmp_path: Path, first: float, second: float) -> None:
    def content() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    for damage in (tear, flip):
        for name in ("tensors.bin", "manifest.json"):
            (tmp_path / name).write_bytes(bytes(range(100)))
        before = content()
        damage(tmp_path, Fault("", 1, 0.0, first, second))
        assert content() != before


def test_processes_are_found_by_their_mark_and_by_nothing_else() -> None:
    own, other = Processes(uuid.uuid4().hex), Processes(uuid.uuid4().hex)
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env=own.environment) as sleeper:
        try:
            while sleeper.pid not in own.alive():  # until it has its own environment
                pass
            assert own.wait_until_gone(0.1) == [sleeper.pid]
            assert other.alive() == {}
            own.end()
            assert own.wait_until_gone(10) == []
        finally:
            sleeper.kill()


def test_words_that_explain_nothing_are_a_violation() -> None:
    assert check_words("x\nhetflow: lost\n", 1, "launch", (1,)) == "lost"
    for said, code in (("", 1), ("hetflow: a\nTraceback\n", 1), ("hetflow: a", 9)):
        with pytest.raises(Violation, match="launch ended with exit code"):
            check_words(said, code, "launch", (1,))


def test_the_table_names_every_kind() -> None:
    found = table(Counter({"kill": 3, "launch ended: worker 12 died": 1, "launch ended: x": 2}))
    assert all(kind in found for kind in KINDS)
    assert "   1 launch ended: worker N died" in found


@pytest.mark.slow
def test_runs_with_faults_end_with_the_digest_of_an_undisturbed_one(tmp_path: Path) -> None:
    num_epochs = 16  # a run of few faults is soon through
    with marked_commands() as commands:
        expected = undisturbed(tmp_path / "undisturbed", commands, num_epochs)
        counts = campaign(tmp_path, 0, 10, expected, commands, num_epochs=num_epochs)
    assert sum(counts[kind] for kind in KINDS) == 10
