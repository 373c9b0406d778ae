"""Test training scripts for GPUs where there are none: a CUDA device in software, with a clock.

    from hetflow import testing

    gpus = testing.gpus("V100,A100", tmp_path)
    gpus.run(["torchrun", "--nproc-per-node=2", "train.py"])
    timeline = gpus.timeline()
    assert timeline.hidden_share > 0.8

docs/gpus.md says what it shows, and what it cannot.
"""

from .machine import Gpus, gpus
from .timeline import DeadlockError, Rates, Timeline

__all__ = ["DeadlockError", "Gpus", "Rates", "Timeline", "gpus"]
