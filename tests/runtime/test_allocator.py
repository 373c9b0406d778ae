"""Freed memory stays in a worker's process, so that passes do not depend on what came before."""

import subprocess
import sys

import pytest

from hetflow.runtime.setup import keep_freed_memory

PROGRAM = """
import resource, sys
from hetflow.runtime.setup import keep_freed_memory
print(keep_freed_memory())
for _ in range(2):
    held = bytearray(20 << 20)
    del held
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    held = bytearray(20 << 20)
    del held
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def answers(**environment: str) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept == "True", int(faults)


def test_freed_blocks_are_used_again_without_page_faults() -> None:
    kept, faults = answers()
    assert kept
    assert faults < 100  # 20 MB are 5,000 pages, twenty times


def test_what_the_environment_states_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, faults = answers(MALLOC_TRIM_THRESHOLD_="131072")
    assert not kept
    assert faults > 10_000
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=1")
    assert not keep_freed_memory()
