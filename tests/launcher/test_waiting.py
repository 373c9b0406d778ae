"""Hosts that wait for others: said, limited, and ended by the first signal."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.runtime.launcher import hosts
from hetflow.runtime.launcher.hosts import SeveralHosts, expected_slots
from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import LaunchError
from hetflow.schema.launch import Rendezvous
from hetflow.tests import programs

from .test_hosts import free_port, plan_of

pytestmark = pytest.mark.processes

PLAN = plan_of(("cpu:fast", 1, 8), ("cpu:slow", 1, 4))


def place(rank: int, port: int, **other: object) -> Rendezvous:
    found = Rendezvous(
        num_nodes=2, node_rank=rank, host="127.0.0.1", port=port, devices={"cpu:slow": 1}
    )
    return replace(found, **other)  # type: ignore[arg-type]


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., SeveralHosts]:
    (tmp_path / "script.py").touch()

    def make(at: Rendezvous, seconds: float) -> SeveralHosts:
        request = LaunchRequest(
            plan=PLAN,
            config=lower(PLAN),
            script=tmp_path / "script.py",
            folder=tmp_path / "run",
            rendezvous=at,
            timeout_seconds=seconds,
        )
        return SeveralHosts(request, at)

    return make


def test_a_lone_host_says_for_whom_it_waits_and_keeps_the_limit(
    host: Callable[..., SeveralHosts],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosts, "TOLD_AFTER_SECONDS", 0.05)
    monkeypatch.setattr(hosts, "FAREWELL_SECONDS", 1e9)  # nobody came to whom to say it
    for rank, said in ((0, "host 1 of 2 did not come within 0.3 s"), (1, "host 0 did not come")):
        port, began = free_port(), time.monotonic()
        alone = host(place(rank, port), 0.3)
        with pytest.raises(LaunchError, match=said):
            alone.join(lambda: None)
        alone.leave()
        assert time.monotonic() - began < 20  # once 300 s
        assert f"waiting for host {1 - rank} of 2" in caplog.text


def test_a_port_of_another_program_is_no_host_0(host: Callable[..., SeveralHosts]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = place(1, other.getsockname()[1])
        with pytest.raises(LaunchError, match="within 0.5 s: what answers .* is no rendezvous"):
            host(at, 0.5).join(lambda: None)


def test_a_host_0_that_goes_before_it_answers_has_gone(
    host: Callable[..., SeveralHosts],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its port was open. Torch went on asking for all of the time limit."""
    monkeypatch.setattr(hosts, "JOIN_SECONDS", 0.2)
    before = socket.create_server(("127.0.0.1", 0))
    asked = []

    def watch() -> None:
        asked.append(time.monotonic())
        if before.fileno() >= 0 and asked[-1] - asked[0] > 0.5:
            before.close()

    at = place(1, before.getsockname()[1])
    with pytest.raises(LaunchError, match="within 2 s: nothing listens on"):
        host(at, 2.0).join(watch)


def test_a_name_without_an_address_is_refused_at_once(
    host: Callable[..., SeveralHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(LaunchError, match="names no-such-host, which has no address: Name or"):
        host(place(1, 1, host="no-such-host"), 600.0).join(lambda: None)


def test_a_second_host_of_one_rank_is_told_so(
    host: Callable[..., SeveralHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of the rank and host 0 meet as if it had not been there."""
    port = free_port()
    offered = ({"cpu:fast": 1}, {"cpu:slow": 1})
    zero, one = (host(place(rank, port, devices=offered[rank]), 60.0) for rank in range(2))
    again = host(place(1, port), 60.0)
    with ThreadPoolExecutor(2) as pool:
        meetings = [pool.submit(each.join, lambda: None) for each in (zero, one)]
        assert [len(meeting.result(timeout=60)[0]) for meeting in meetings] == [1, 1]
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(LaunchError, match="node_rank=1 is taken by .*, process [0-9]+; this is"):
        again.join(lambda: None)
    again.leave()
    one.leave()
    zero.leave()


def test_the_end_of_a_launch_does_not_wait_for_a_host_that_has_gone(
    host: Callable[..., SeveralHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that was killed cannot say that it has saved or left; nor does it show life."""
    monkeypatch.setattr(hosts, "BEAT_SECONDS", 1e9)  # after its first beat a host is silent
    monkeypatch.setattr(hosts, "SILENCE_AT_THE_END_SECONDS", 0.2)
    monkeypatch.setattr(hosts, "SILENCE_AFTER_A_LOSS_SECONDS", 60.0)
    monkeypatch.setattr(hosts, "FAREWELL_SECONDS", 60.0)
    port, limit = free_port(), time.monotonic() + 60.0
    offered = ({"cpu:fast": 1}, {"cpu:slow": 1})
    zero, one = (host(place(rank, port, devices=offered[rank]), 60.0) for rank in range(2))
    with ThreadPoolExecutor(2) as pool:
        for meeting in [pool.submit(each.join, lambda: None) for each in (zero, one)]:
            meeting.result(timeout=60)
    zero.wait_until_saved(lambda: time.monotonic() < limit, limit)
    zero.leave()
    assert time.monotonic() < limit
    one.leave()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_host_that_waits_stops_at_the_first_signal(tmp_path: Path, number: int) -> None:
    files.write(tmp_path / "plan.json", PLAN)
    (tmp_path / "script.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        command = [sys.executable, "-m", "hetflow.cli.main", "launch", "--nnodes", "2"]
        command += ["--node-rank", "1", "--rdzv-endpoint", endpoint, "--devices", "1xcpu:slow"]
        with programs.start(
            [*command, "plan.json", "script.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            other.settimeout(60)
            other.accept()[0].close()
            held, _ = other.accept()  # torch's own connection, which waits for an answer
            process.send_signal(number)
            _, said = process.communicate(timeout=20)
            held.close()
    assert process.returncode == 128 + number, said
    assert f"hetflow: interrupted by {signal.Signals(number).name}" in said


def test_a_dry_run_shows_what_the_devices_of_this_host_would_run() -> None:
    config = lower(plan_of(("cpu:fast", 1, 8), ("cpu:slow", 2, 4)))
    at = Rendezvous(num_nodes=2, node_rank=0, host="h", port=1, devices={"cpu:slow": 2})
    assert [slot.rank for slot in expected_slots(config, at)] == [1, 2]
    last = replace(at, node_rank=1, devices={"cpu:fast": 1, "cpu:slow": 1})
    assert [slot.rank for slot in expected_slots(config, last)] == [0, 2]
    with pytest.raises(LaunchError, match="no work for the devices of this host: 2xV100"):
        expected_slots(config, replace(at, devices={"V100": 2}))
