"""A script's workers as a launcher would start them, meeting over gloo on this host."""

import os
import subprocess
import sys
from pathlib import Path

from hetflow.tests import programs


def run_workers(
    script: Path,
    size: int,
    *arguments: str | Path,
    seconds: float,
    with_transformers: bool = False,
) -> list[str]:
    """Run a script in several workers, and require that all end well.

    Args:
        script: What each of them runs.
        size: How many workers.
        arguments: The script's, the same for all.
        seconds: How long each may take.
        with_transformers: Whether they have models of transformers, which is imported once for all.

    Returns:
        What each worker wrote to stderr.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **os.environ, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HETFLOW_TIMEOUT": "60", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    if with_transformers:
        shared[programs.VARIABLE] = programs.preloaded(*programs.TRANSFORMERS)
    workers = [
        programs.start(
            [sys.executable, script, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "HETFLOW_SLOT": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in range(size)
    ]
    try:
        said = [worker.communicate(timeout=seconds)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            if worker.stderr is not None:
                worker.stderr.close()
    assert [worker.returncode for worker in workers] == [0] * size, said
    return said
