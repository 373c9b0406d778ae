"""The workers of one host, as their controller holds them."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hetflow.runtime.launcher import workers as held
from hetflow.runtime.launcher.request import Fence
from hetflow.runtime.launcher.spawn import WorkerCommand
from hetflow.runtime.launcher.workers import Signals, Workers
from hetflow.runtime.preload.client import Preload
from hetflow.runtime.protocol.messages import (
    Beat,
    FromWorker,
    Joined,
    Report,
    Reported,
    Unreadable,
    encode,
)

SAYS = """
import os, socket, time
line = socket.socket(fileno=int(os.environ["HETFLOW_CONTROL"]))
line.sendall(%r)
time.sleep(60)
"""


def started(folder: Path, preload: Preload, *scripts: str) -> Workers:
    (folder / "logs").mkdir()
    workers = Workers(
        folder,
        stdout_to_stderr=False,
        channel="heartbeats",
        inherited=os.environ,
        preload=preload,
        fence=Fence(None),
    )
    workers.start(
        [
            WorkerCommand(
                rank=rank,
                name=str(rank),
                device_type="cpu",
                arguments=(sys.executable, "-c", script),
                environment={},
            )
            for rank, script in enumerate(scripts)
        ]
    )
    return workers


def test_the_control_channels_are_closed_with_the_workers(tmp_path: Path) -> None:
    """A program that calls ``hetflow.launch`` again and again keeps no sockets."""
    with Preload("off") as preload:
        workers = started(tmp_path, preload, "pass", "pass")
        lines = list(workers.lines().values())
        assert len(lines) == 2
        workers.stop()
        assert [line.fileno() for line in lines] == [-1, -1]


def test_a_stopped_worker_ends_by_the_signal_that_ends_the_others(tmp_path: Path) -> None:
    """Not by SIGKILL after the grace."""
    with Preload("off") as preload:
        workers = started(tmp_path, preload, "import time; time.sleep(60)")
        workers.signal("0", signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while not workers.is_stopped("0"):
            assert time.monotonic() < deadline
        workers.stop()
        assert [failure.exit_code for failure in workers.failures()] == [128 + signal.SIGTERM]


def test_a_worker_of_another_installation_is_ended_with_the_reason(tmp_path: Path) -> None:
    known = encode(Joined(generation=0)) + encode(Beat(prepared=True, operation=2, waiting=False))
    unknown = b'{"kind": "joined", "generation": 0, "zz9": 1}\n'
    refused = encode(Unreadable(why="$.abort.zz9: unknown key; remove it"))
    says = [SAYS % data for data in (known, unknown, refused)]
    with Preload("off") as preload:
        workers = started(tmp_path, preload, *says)
        heard: list[tuple[str, FromWorker]] = []
        deadline = time.monotonic() + 60
        while len(workers.failures()) < 2 or not heard:
            assert time.monotonic() < deadline
            heard += workers.hear()
            time.sleep(0.01)
        assert ("0", Joined(generation=0)) in heard
        line = workers.lines()["0"]
        assert (line.is_prepared, line.operation, line.is_waiting) == (True, 2, False)
        sentences = [failure.sentence() for failure in workers.failures()]
        workers.stop()
    ended = "(was hetflow changed while the launch ran?) and was killed"
    key = "unknown key; remove it"
    assert sentences == [
        f"worker 1 (cpu) sent its launcher what that cannot read: $.joined.zz9: {key} {ended}",
        f"worker 2 (cpu) cannot read what its launcher sends: $.abort.zz9: {key} {ended}",
    ]


ANSWERS = """
import os, pathlib, socket, time
line = socket.socket(fileno=int(os.environ["HETFLOW_CONTROL"]))
line.sendall(%r)
asked = line.recv(1 << 16)
pathlib.Path(%r).write_bytes(asked)
line.sendall(%r)
time.sleep(60)
"""


def test_workers_that_train_are_asked_what_they_measured_and_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = encode(Beat(prepared=True, operation=2, waiting=False))
    prepares = encode(Beat(prepared=False, operation=0, waiting=False))
    asked = [str(tmp_path / f"asked{rank}") for rank in range(3)]
    says = [
        ANSWERS % (trains, asked[0], encode(Reported())),
        ANSWERS % (trains, asked[1], b""),  # and is silent
        ANSWERS % (prepares, asked[2], b""),
    ]
    with Preload("off") as preload, Signals() as signals:
        workers = started(tmp_path, preload, *says)
        deadline = time.monotonic() + 60
        while any(line.heard_at is None for line in workers.lines().values()):
            assert time.monotonic() < deadline
            workers.hear()
            time.sleep(0.01)
        monkeypatch.setattr(held, "REPORT_SECONDS", 0.3)
        workers.let_report(signals)
        workers.stop(signals)
    assert [Path(path).exists() for path in asked] == [True, True, False]
    assert Path(asked[0]).read_bytes() == encode(Report())
