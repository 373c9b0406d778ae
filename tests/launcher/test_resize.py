"""Resizes and failures of running launches, seen from outside; and the pure parts of them."""

import json
import os
import random
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetflow.runtime.launcher.mapping import nodes_of, renumbered, seated, spread, without
from hetflow.runtime.launcher.request import check_idle
from hetflow.runtime.launcher.supervisor import Inbox
from hetflow.runtime.protocol import control
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import (
    FileError,
    HetflowError,
    InfeasibleError,
    ProblemError,
    TargetError,
)
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot

from .elastic_runs import STEPS_AN_EPOCH, Launch, around_script, plan_of, wait_until

pytestmark = pytest.mark.processes


def config_of(*workers: tuple[str, tuple[int, ...]]) -> LaunchConfig:
    """Workers with the sizes of their virtual nodes, numbered in order."""
    slots, index = [], 0
    for rank, (kind, sizes) in enumerate(workers):
        nodes = tuple(VirtualNode(index=index + n, batch_size=s) for n, s in enumerate(sizes))
        slots.append(WorkerSlot(rank=rank, device_type=kind, virtual_nodes=nodes))
        index += len(sizes)
    total = sum(sum(sizes) for _, sizes in workers)
    return LaunchConfig(model="m", global_batch_size=total, workers=tuple(slots))


configs = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.lists(st.integers(1, 9), min_size=1, max_size=6)),
    min_size=1,
    max_size=5,
).map(lambda workers: config_of(*((kind, tuple(sizes)) for kind, sizes in workers)))


@given(configs, st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=6))
def test_a_spread_keeps_every_virtual_node_and_the_slowest_device_is_fast(
    config: LaunchConfig, types: list[str]
) -> None:
    nodes, costs = nodes_of(config), {"a": 1.0, "b": 2.0, "c": 5.0}
    if len(types) > len(nodes):
        with pytest.raises(InfeasibleError, match="virtual nodes"):
            spread(config, types, costs)
        return
    found = spread(config, types, costs)
    assert nodes_of(found) == nodes
    assert [slot.device_type for slot in found.workers] == types

    def slowest(cuts: list[int]) -> float:
        ends = [sum(cuts[: n + 1]) for n in range(len(cuts))]
        runs = [nodes[end - cut : end] for end, cut in zip(ends, cuts, strict=True)]
        return max(
            costs[kind] * sum(node.batch_size for node in run)
            for kind, run in zip(types, runs, strict=True)
        )

    def all_cuts(number: int, parts: int) -> list[list[int]]:
        if parts == 1:
            return [[number]]
        return [
            [first, *rest]
            for first in range(1, number - parts + 2)
            for rest in all_cuts(number - first, parts - 1)
        ]

    if len(nodes) <= 8:
        own = slowest([len(slot.virtual_nodes) for slot in found.workers])
        best = min(slowest(cuts) for cuts in all_cuts(len(nodes), len(types)))
        assert own == pytest.approx(best)


def test_a_mapping_fills_what_those_who_ran_its_virtual_nodes_fill() -> None:
    plain = config_of(("a", (8, 8)), ("b", (4,)))
    filled = zip(plain.workers, (80, 40), strict=True)
    config = replace(
        plain, workers=tuple(replace(slot, memory_bytes=size) for slot, size in filled)
    )
    found = [slot.memory_bytes for slot in spread(config, ["c", "c", "c"]).workers]
    assert found == [80, 80, 40]
    assert [slot.memory_bytes for slot in without(config, [0]).workers] == [80]
    assert [slot.memory_bytes for slot in spread(plain, ["c"]).workers] == [None]


@given(configs, st.data())
def test_the_others_keep_their_own_and_take_what_the_lost_had(
    config: LaunchConfig, data: st.DataObject
) -> None:
    size = config.world_size
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    found = without(config, lost)
    assert nodes_of(found) == nodes_of(config)
    left = [slot for slot in config.workers if slot.rank not in lost]
    for before, after in zip(left, found.workers, strict=True):
        assert set(before.virtual_nodes) <= set(after.virtual_nodes)
        indices = [node.index for node in after.virtual_nodes]
        assert indices == sorted(indices)


def test_those_who_are_there_keep_the_first_ranks() -> None:
    config = config_of(("b", (1,)), ("a", (2,)), ("b", (3,)))
    found, ranks = seated(config, {"7": "a", "9": "b"}, iter(["12", "13"]))
    assert ranks == {"7": 0, "9": 1, "12": 2}
    assert [slot.device_type for slot in found.workers] == ["a", "b", "b"]


def test_a_plan_of_other_virtual_nodes_is_refused() -> None:
    config = lower(plan_of([8]))
    other = replace(plan_of([4, 4]), model="x")
    assert len(renumbered(config, lower(other)).workers) == 2
    with pytest.raises(ProblemError, match="has virtual nodes of 2 x 8 samples, the job has 8 x 2"):
        renumbered(config, config_of(("a", (8, 8))))


def test_a_run_that_is_not_there_or_over(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such run"):
        control.current(tmp_path / "absent")
    with pytest.raises(TargetError, match="is not running"):
        control.current(tmp_path)
    (tmp_path / "run.json").touch()
    with pytest.raises(TargetError, match="has ended"):
        control.current(tmp_path)


def test_requests_are_answered_and_nothing_stays(tmp_path: Path) -> None:
    box = Inbox(tmp_path)
    config = lower(plan_of([4, 4]))
    box.show(config)
    assert control.is_running(tmp_path)
    with pytest.raises(FileError, match="a launch runs there"):
        check_idle(tmp_path)
    assert control.current(tmp_path) == config
    (tmp_path / "control" / "request-0.json").write_text("{}")
    asked = control.ask(tmp_path, config)
    found = box.next()
    assert found is not None
    assert found[0] == asked
    assert box.next() is None
    quiet = control.ask(tmp_path, config, wants_answer=False)
    assert box.next()[1].config == config
    assert not quiet.exists()
    answer = control.wait_for(tmp_path, tmp_path / "control" / "request-0.json", 1)
    assert answer.status == "refused"
    assert "$.schema: missing" in answer.detail
    late = control.ask(tmp_path, config)
    box.close()
    assert control.wait_for(tmp_path, late, 1).detail == "the run has ended"
    with pytest.raises(HetflowError, match="the run ended before it was resized"):
        control.wait_for(tmp_path, asked, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Launch(tmp_path_factory.mktemp("whole") / "run", [8]).digest()


def test_a_job_grows_inside_an_epoch_and_loses_a_worker_with_the_same_digest(
    tmp_path: Path, undisturbed: str
) -> None:
    launch = Launch(tmp_path / "run", [4, 4], holds=[2, 4])
    launch.wait_for_step(2, workers=2)
    refused = launch.resize("--gpus", "9xcpu:fast")
    assert (refused.returncode, refused.stdout) == (3, "")
    assert refused.stderr.startswith("hetflow: 9 devices cannot share 8 virtual nodes\nhint: ")
    asked = launch.resize_later("--gpus", "1xcpu:fast,2xcpu:slow", "--json")
    launch.wait_for_newcomers(4)
    second = launch.resize("--gpus", "1xcpu:fast")
    assert second.returncode == 2
    assert second.stderr.startswith("hetflow: a resize is in progress already\n")
    launch.go(2)
    out, err = asked.communicate(timeout=60)
    assert asked.returncode == 0, err
    answer = json.loads(out)
    assert (answer["status"], answer["joined"], answer["left"]) == ("done", ["2", "3"], ["1"])
    launch.wait_for_step(4, workers=3)
    launch.kill(1)
    launch.go(4)
    assert launch.digest() == undisturbed
    generations = launch.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "resize", "failure"]
    assert [len(g["workers"]) for g in generations] == [2, 3, 2]
    assert generations[2]["detail"] == "worker 2 (cpu:slow) was killed by SIGKILL"
    assert all(0 < g["pause_seconds"] < 30 for g in generations[1:])
    steps = launch.steps()
    assert {size for _, step, _, size, _ in steps if step == 4} == {3}
    assert max(step for _, step, _, _, _ in steps) == 4 * STEPS_AN_EPOCH
    assert not (launch.run / "control").exists()


def test_stop_is_what_a_launch_did_before(tmp_path: Path) -> None:
    launch = Launch(tmp_path / "run", [4, 4], "--on-failure", "stop", holds=[1])
    launch.wait_for_step(1, workers=2)
    launch.kill(1)
    code, err = launch.end()
    assert code == 137
    assert "hetflow: worker 1 (cpu:fast) was killed by SIGKILL\n" in err


MAPPINGS = ["4xcpu:fast", "2xcpu:fast", "1xcpu:fast,2xcpu:slow", "1xcpu:slow", "3xcpu:fast"]


@pytest.mark.slow
def test_resizes_at_random_steps_end_with_one_digest(tmp_path: Path, undisturbed_long: str) -> None:
    draw = random.Random(0)
    launch = Launch(tmp_path / "run", [2, 2, 2, 2], epochs=LONG, seconds=0.4)
    launch.wait_for_step(draw.randint(1, 4), workers=4)
    asked = ["2xcpu:fast", "1xcpu:fast", "1xcpu:fast,2xcpu:slow", draw.choice(MAPPINGS)]
    for gpus in asked:
        done = launch.resize("--gpus", gpus)
        assert done.returncode == 0, done.stderr
    assert launch.digest() == undisturbed_long
    kinds = [g["kind"] for g in launch.record()["generations"]]
    assert kinds[:4] == ["start", "resize", "resize", "resize"]


LONG = 40


@pytest.fixture(scope="module")
def undisturbed_long(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Launch(tmp_path_factory.mktemp("long") / "run", [8], epochs=LONG).digest()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "policy"), [(0, "shrink"), (2, "replace")])
def test_kills_at_random_moments_end_with_one_digest(
    tmp_path: Path, seed: int, policy: str, undisturbed_long: str
) -> None:
    import time

    draw, how = random.Random(seed), ["--on-failure", policy]
    launch = Launch(tmp_path / "run", [2, 3, 1, 2], *how, epochs=LONG, seconds=0.1)
    launch.wait_for_step(1, workers=4)
    for left in (4, 3, 2):
        time.sleep(draw.uniform(0.0, 1.5))
        launch.kill(draw.randrange(left))
        step = launch.steps()[-1][1]
        launch.wait_for_step(step + 2, workers=left - 1)
    assert launch.digest() == undisturbed_long
    kinds = [g["kind"] for g in launch.record()["generations"]]
    assert kinds.count("failure") == 3


@pytest.mark.slow
def test_scripts_that_make_a_change_awkward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWKWARD", "1")
    whole = Launch(tmp_path / "whole", [8], epochs=6).digest()
    launch = Launch(tmp_path / "run", [3, 5], epochs=6, holds=[1, 4, 7, 11])
    launch.wait_for_step(1, workers=2)
    launch.kill(1)  # with gradients of step 1 kept
    launch.go(1)
    launch.wait_for_step(4)
    asked = launch.resize_later("--gpus", "2xcpu:slow,1xcpu:fast")
    launch.wait_for_newcomers(4)
    launch.go(4)
    asked.communicate(timeout=60)
    assert asked.returncode == 0
    launch.wait_for_step(7, workers=3)
    launch.kill(2)
    launch.go(7)
    launch.wait_for_step(11, workers=2)
    asked = launch.resize_later("--gpus", "2xcpu:new")  # nobody stays
    launch.wait_for_newcomers(6)
    launch.go(11)
    asked.communicate(timeout=60)
    assert asked.returncode == 0
    assert launch.digest() == whole
    kinds = [g["kind"] for g in launch.record()["generations"]]
    assert kinds == ["start", "failure", "resize", "failure", "resize"]


HANGS = """
import os, sys, time
import torch
here = os.path.dirname(sys.argv[1])
class Stuck(torch.optim.AdamW):
    def step(self, *arguments, **named):
        while os.environ["HETFLOW_WORKER"] == "1" and os.path.exists(os.path.join(here, "hang")):
            time.sleep(0.1)
        return super().step(*arguments, **named)
torch.optim.AdamW = Stuck
"""


@pytest.mark.slow
def test_a_worker_that_hangs_in_its_own_code_is_killed(
    tmp_path: Path, undisturbed_long: str
) -> None:
    script = around_script(tmp_path / "hangs.py", HANGS)
    options = ["--timeout", "6"]
    launch = Launch(tmp_path / "run", [4, 4], *options, epochs=LONG, seconds=0.04, script=script)
    launch.wait_for_step(3, workers=2)
    (tmp_path / "run" / "hang").touch()
    assert launch.digest() == undisturbed_long
    failure = launch.record()["generations"][1]
    assert failure["detail"] == "worker 1 (cpu:fast) got no further for 6 s and was killed"


@pytest.mark.slow
def test_the_last_worker_starts_again_from_the_last_checkpoint(
    tmp_path: Path, undisturbed_long: str
) -> None:
    saving = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "4"]
    launch = Launch(tmp_path / "run", [8], *saving, epochs=LONG, seconds=0.04)
    launch.wait_for_step(10)
    launch.kill(0)
    assert launch.digest() == undisturbed_long
    kinds = [g["kind"] for g in launch.record()["generations"]]
    assert kinds == ["start", "restart"]


@pytest.mark.slow
def test_a_stopped_worker_is_killed_and_the_others_go_on(
    tmp_path: Path, undisturbed_long: str
) -> None:
    launch = Launch(tmp_path / "run", [4, 4], "--heartbeat", "3", epochs=LONG, seconds=0.04)
    launch.wait_for_step(2, workers=2)
    launch.kill(1, signal.SIGSTOP)
    assert launch.digest() == undisturbed_long
    failure = launch.record()["generations"][1]
    assert "worker 1 (cpu:fast) gave no sign of life for 3" in failure["detail"]


@pytest.mark.slow
def test_a_newcomer_that_freezes_does_not_hold_the_resize_up(
    tmp_path: Path, undisturbed: str
) -> None:
    launch = Launch(tmp_path / "run", [4, 4], "--heartbeat", "6", holds=[2])
    launch.wait_for_step(2, workers=2)
    asked = launch.resize_later("--gpus", "3xcpu:fast")
    launch.wait_for_newcomers(3)
    newcomer = int(next((launch.run / "logs").glob("rank2.out")).read_text().split()[1])
    os.kill(newcomer, signal.SIGSTOP)
    _, err = asked.communicate(timeout=100)
    assert asked.returncode == 1
    assert re.search("worker 2 .*(gave no sign of life|was stopped) for 6", err)
    launch.go(2)
    assert launch.digest() == undisturbed


STOPS_ITSELF = """
import os, signal
if "HETFLOW_JOINS" in os.environ:
    os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_newcomer_that_is_stopped_before_it_prepares_is_given_up(
    tmp_path: Path, undisturbed: str
) -> None:
    script = around_script(tmp_path / "stops.py", STOPS_ITSELF)
    launch = Launch(tmp_path / "run", [4, 4], "--heartbeat", "3", holds=[2], script=script)
    launch.wait_for_step(2, workers=2)
    done = launch.resize("--gpus", "3xcpu:fast")
    assert done.returncode == 1
    said = "not resized: a joining worker failed: worker 2 (cpu:fast) was stopped for 3."
    assert said in done.stderr
    launch.go(2)
    assert launch.digest() == undisturbed
    assert "generations" not in launch.record()  # nothing changed


STOPS_WHEN_IT_LEAVES = """
import atexit, os, signal
if os.environ["HETFLOW_WORKER"] == "1":
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
"""


@pytest.mark.slow
def test_a_worker_that_is_stopped_on_its_way_out_does_not_hold_the_launch_up(
    tmp_path: Path, undisturbed_long: str
) -> None:
    script = around_script(tmp_path / "leaves.py", STOPS_WHEN_IT_LEAVES)
    options = ("--heartbeat", "2")
    launch = Launch(tmp_path / "run", [4, 4], *options, epochs=LONG, seconds=0.04, script=script)
    launch.wait_for_step(2, workers=2)
    done = launch.resize("--gpus", "1xcpu:fast")
    assert done.returncode == 0, done.stderr
    assert launch.digest() == undisturbed_long


CUTS = """
import os, socket, sys, threading, time
def cut():
    while not os.path.exists(os.path.join(os.path.dirname(sys.argv[1]), "cut")):
        time.sleep(0.02)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as own:
                if own.family == socket.AF_INET6 or own.family == socket.AF_INET:
                    own.getpeername()
                    own.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
    os.unlink(os.path.join(os.path.dirname(sys.argv[1]), "cut"))
if os.environ["HETFLOW_WORKER"] == "1":
    threading.Thread(target=cut, daemon=True).start()
"""


@pytest.mark.slow
def test_closed_sockets_are_opened_again(tmp_path: Path, undisturbed_long: str) -> None:
    script = around_script(tmp_path / "cuts.py", CUTS)
    launch = Launch(tmp_path / "run", [4, 4], epochs=LONG, seconds=0.04, script=script)
    launch.wait_for_step(3, workers=2)
    asked = tmp_path / "run" / "cut"
    asked.touch()
    wait_until(lambda: not asked.exists())
    assert launch.digest() == undisturbed_long
    failure = launch.record()["generations"][1]
    assert failure["detail"] == "connections were lost"
    assert len(failure["workers"]) == 2


def test_a_launch_that_cannot_be_resized_says_what_can(tmp_path: Path) -> None:
    box = Inbox(tmp_path)
    with pytest.raises(TargetError, match="only launches on one host") as caught:
        control.current(tmp_path)
    assert "checkpoint" in caught.value.hint
    box.close()
    assert list(tmp_path.iterdir()) == []
