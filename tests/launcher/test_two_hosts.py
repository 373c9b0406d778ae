"""Signals and deaths in launches over two hosts."""

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.errors import ProblemError, TargetError
from hetflow.schema.launch import Rendezvous

from .elastic_runs import Launch, plan_of
from .two_hosts import Hosts

pytestmark = pytest.mark.processes

LONG = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Launch(tmp_path_factory.mktemp("whole") / "run", [8], epochs=LONG).digest()


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, 1])
def test_a_notice_to_one_host_saves_and_ends_all(
    tmp_path: Path, node: int, undisturbed: str
) -> None:
    saving = ("--checkpoint", str(tmp_path / "saved"))
    hosts = Hosts(tmp_path / "a", 0, [5, 3], *saving, seconds=0.4, epochs=LONG)
    hosts.wait_for_step(4)
    hosts.processes[node].terminate()
    assert hosts.end() == [143, 143]
    for said in hosts.said():
        assert "hetflow: interrupted by SIGTERM; all workers are stopped\n" in said
    last = max(step for step, _, _ in hosts.steps())
    saved = [int(path.name[5:]) for path in (tmp_path / "saved").glob("step-*")]
    assert saved == [last]
    if node == 1:  # the other is the harder case: the store's host, and not the one that saves
        return
    again = Hosts(tmp_path / "a", 1, [5, 3], *saving, epochs=LONG)
    assert again.end() == [0, 0], again.said()
    assert (tmp_path / "a" / "digest").read_text() == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "number", "said"),
    [
        (0, signal.SIGKILL, "worker 0 (cpu:fast) was killed by SIGKILL"),
        (1, signal.SIGSTOP, "worker 1 (cpu:slow) gave no sign of life for "),
    ],
)
def test_a_death_on_one_host_starts_all_again_from_the_last_checkpoint(
    tmp_path: Path, undisturbed: str, rank: int, number: int, said: str
) -> None:
    saving = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "3"]
    options = (*saving, "--heartbeat", "5")
    hosts = Hosts(tmp_path / "a", 0, [5, 3], *options, seconds=0.1, epochs=LONG)
    hosts.wait_for_step(4)
    os.kill(hosts.pid_of(rank), number)
    assert hosts.end() == [0, 0], hosts.said()
    assert (tmp_path / "a" / "digest").read_text() == undisturbed
    record = json.loads((hosts.runs[0] / "run.json").read_text())
    assert [g["kind"] for g in record["generations"]] == ["start", "restart"]
    assert record["generations"][1]["detail"].startswith(said)
    assert record["generations"][1]["joined"] == ["2", "3"]
    assert [device["rank"] for device in record["devices"]] == [0, 1]
    assert all("starting again from the last checkpoint" in text for text in hosts.said())


@pytest.mark.slow
def test_a_death_without_a_checkpoint_ends_all_hosts(tmp_path: Path) -> None:
    hosts = Hosts(tmp_path / "a", 0, [5, 3], seconds=0.2, epochs=LONG)
    hosts.wait_for_step(2)
    os.kill(hosts.pid_of(0), signal.SIGKILL)
    assert hosts.end() == [137, 137]
    assert all("worker 0 (cpu:fast) was killed by SIGKILL\n" in text for text in hosts.said())


def test_what_several_hosts_cannot_do_is_refused(tmp_path: Path) -> None:
    place = Rendezvous.parse(2, 0, "127.0.0.1:29400", None)
    plan = plan_of([4, 4])
    asked = LaunchRequest(
        plan=plan, config=lower(plan), script="t.py", folder=tmp_path, rendezvous=place
    )
    assert asked.policy == "stop"
    assert replace(asked, checkpoint=tmp_path).policy == "replace"
    with pytest.raises(TargetError, match="several hosts cannot go on without a worker that dies"):
        replace(asked, on_failure="shrink", checkpoint=tmp_path)
    with pytest.raises(ProblemError, match="devices='2x': cannot read"):
        Rendezvous.parse(2, 0, "127.0.0.1:29400", "2x")
    with pytest.raises(TargetError, match="several hosts starts again from a checkpoint, and has"):
        replace(asked, on_failure="replace")


def lose(hosts: Hosts, node: int, number: int) -> None:
    """End a host without a word: its launcher first, then its worker."""
    worker = hosts.pid_of(1 - node)  # host 0 has the slow device, which is rank 1
    hosts.processes[node].send_signal(number)
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, number)


LOSSES = [
    (0, signal.SIGKILL, False, "its launcher is gone, and the store with it"),
    (1, signal.SIGKILL, True, r"its launcher gave no sign of life for \d+ s"),
    # A frozen host is to the others what one is behind a network that is gone.
    (0, signal.SIGSTOP, True, "its launcher did not answer for 15 s"),
    (1, signal.SIGSTOP, False, r"its launcher gave no sign of life for \d+ s"),
]


@pytest.fixture(scope="module")
def with_a_lost_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Hosts]]:
    """A launch for each loss, which has happened; the survivors notice it in the same seconds."""
    launched: list[Hosts] = []
    try:
        for lost, number, saves, _ in LOSSES:
            folder = tmp_path_factory.mktemp("lost")
            every = ("--checkpoint", str(folder / "saved"), "--checkpoint-every", "3")
            options = every if saves else ()
            launched.append(Hosts(folder / "a", 0, [5, 3], *options, seconds=0.1, epochs=400))
            launched[-1].wait_for_step(2)
            lose(launched[-1], lost, number)
        yield launched
    finally:
        for process in (process for hosts in launched for process in hosts.processes):
            process.kill()  # and with it the workers
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(LOSSES)))
def test_who_is_left_says_which_host_was_lost(case: int, with_a_lost_host: list[Hosts]) -> None:
    hosts, (lost, _, _, how) = with_a_lost_host[case], LOSSES[case]
    left = 1 - lost
    assert hosts.processes[left].wait(timeout=60) == 1
    last = [line for line in hosts.said()[left].splitlines() if line.startswith("hetflow: ")][-1]
    assert re.fullmatch(rf"hetflow: host {lost} \({socket.gethostname()}\) was lost: {how}", last)
    if left == 0:
        record = json.loads((hosts.runs[0] / "run.json").read_text())
        assert (record["status"], record["exit_code"]) == ("failed", 1)
        assert record["events"][0]["detail"] == last.removeprefix("hetflow: ")
