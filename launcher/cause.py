"""Which failure of this host's workers the others followed from, given a moment to be seen."""

import time
from collections.abc import Mapping
from dataclasses import replace

from ..schema.launch import LaunchConfig
from .failures import Failure, first_cause, silence
from .workers import Workers

# How long a worker that only lost its peers waits for the one that failed first to be seen.
CAUSE_SECONDS = 2.0
POLL_SECONDS = 0.02


def cause_among(workers: Workers, config: LaunchConfig, ranks: Mapping[str, int]) -> Failure | None:
    """The first cause among the failures of this host's workers; None where none has failed.

    Args:
        workers: The workers.
        config: What they run.
        ranks: The rank of each worker by name.
    """
    deadline = time.monotonic() + CAUSE_SECONDS
    if not workers.failures():
        return None
    cause = first_cause(workers.failures())
    while cause.is_echo and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        cause = first_cause(workers.failures())
    early = workers.left_early() if cause.is_echo else None
    cause = _staged(early or cause, config, ranks)
    silent = workers.running() if cause.timed_out else []
    if silent:
        return silence(cause, [_staged(worker, config, ranks) for worker in silent])
    return cause


def _staged(failure: Failure, config: LaunchConfig, ranks: Mapping[str, int]) -> Failure:
    """With the stages of the worker, under a pipeline."""
    if config.pipeline is None or failure.rank is None:
        return failure
    rank = ranks.get(str(failure.rank), -1)
    return replace(failure, stages=tuple(config.pipeline.stages_of_rank.get(rank, ())))
