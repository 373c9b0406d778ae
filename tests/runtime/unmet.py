"""Meetings in gloo with workers that are gone when they have said where they listen.

A script for a test. It writes the seconds of each meeting, until one has waited for the other.
"""

import os
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from hetflow.runtime.elastic.control import Connections

TRIES, LIMIT = 10, timedelta(seconds=60)


class Dying(dist.Store):
    """A store for a worker that tells its own address, and is gone when it asks for another's."""

    def __init__(self, told):
        super().__init__()
        self._told = told

    def set(self, key, value):
        self._told.set(key, value)

    def wait(self, *_):
        os._exit(0)

    get = wait


def meet(store):
    """How long a worker waits for the other, whose connection is never made."""
    connections = Connections()
    cut = threading.Timer(0.5, connections.cut)
    cut.start()
    began = time.monotonic()
    with suppress(RuntimeError), connections.opening(2):
        dist.ProcessGroupGloo(store, 0, 2, LIMIT)
    seconds = time.monotonic() - began
    cut.join()
    return seconds


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        stores = [f"{folder}/{number}" for number in range(TRIES)]
        for path in stores:
            child = os.fork()
            if child == 0:
                dist.ProcessGroupGloo(Dying(dist.FileStore(path, 2)), 1, 2, LIMIT)
            os.waitpid(child, 0)
        # Which of the two connects, and which one listens, hangs on their ports.
        for path in stores:
            waited = meet(dist.FileStore(path, 2))
            sys.stdout.write(f"{waited}\n")
            if waited >= 0.5:
                break
