"""The workers of one host, as their controller holds them."""

import os
import sys
from pathlib import Path

from hetflow.launcher.spawn import WorkerCommand
from hetflow.launcher.workers import Workers
from hetflow.preload.client import Preload


def test_the_control_channels_are_closed_with_the_workers(tmp_path: Path) -> None:
    """A program that calls ``hetflow.launch`` again and again keeps no sockets."""
    (tmp_path / "logs").mkdir()
    commands = [
        WorkerCommand(
            rank=rank,
            name=str(rank),
            device_type="cpu",
            arguments=(sys.executable, "-c", "pass"),
            environment={},
        )
        for rank in range(2)
    ]
    with Preload("off") as preload:
        workers = Workers(
            tmp_path,
            stdout_to_stderr=False,
            channel="heartbeats",
            inherited=os.environ,
            preload=preload,
        )
        workers.start(commands)
        lines = list(workers.lines().values())
        assert len(lines) == 2
        workers.stop()
        assert [line.fileno() for line in lines] == [-1, -1]
