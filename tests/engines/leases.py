"""What tests of every engine do with leases."""

import time
from collections.abc import Callable
from pathlib import Path

from hetflow.clusters.engines.protocol import OUTPUT, Engine, Work


def work(engine: Engine, folder: Path, *command: str, device: int = 0, number: int = 1) -> Work:
    """What a lease runs, on some of the engine's devices from one on; its folder is made."""
    folder.mkdir(exist_ok=True)
    devices = engine.devices()[device : device + number]
    return Work(folder=folder, command=command, directory=folder, devices=devices)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def output(folder: Path) -> str:
    """What a lease's launch has written so far."""
    path = folder / OUTPUT
    return path.read_text() if path.exists() else ""
