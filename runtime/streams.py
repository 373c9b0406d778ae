"""Random streams keyed by name: draws depend on the work, never on the device that does it.

Before each piece of work Python's, numpy's and torch's global streams are seeded from a key, say
(seed, step, virtual node). So the same work draws the same numbers on any device.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from ..devices.backend import initialized

# The object behind Python's global functions. Its class's ``seed`` only looks at the key's type.
_OF_PYTHON: Any = random.seed.__self__  # type: ignore[attr-defined]
_seed_of_python = super(random.Random, _OF_PYTHON).seed


def key_of(*parts: int | str) -> int:
    """A 63-bit number that stands for a key; different keys give unrelated numbers."""
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_streams(*parts: int | str) -> None:
    """Seed Python's, numpy's and torch's global streams (all devices) from a key."""
    seed_streams_by(key_of(*parts))


def seed_streams_by(key: int) -> None:
    """Seed as ``seed_streams`` does, with the number that ``key_of`` gives for the key."""
    _seed_host(key)
    # torch.manual_seed takes 0.2 ms a call; these are the parts of it that matter here.
    for backend in initialized():
        backend.seed(key)


def seed_host_streams(*parts: int | str) -> None:
    """Seed the host's streams only, which is cheap enough to do for every sample."""
    _seed_host(key_of(*parts))


def generator_of(*parts: int | str) -> torch.Generator:
    """A separate torch generator, seeded from a key."""
    generator = torch.Generator()
    generator.manual_seed(key_of(*parts))
    return generator


@contextmanager
def streams_kept() -> Iterator[None]:
    """Restore the global random streams of the host and of the devices in use afterwards.

    It keeps those of Python, numpy and torch.
    """
    host, numbers, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    devices = [(backend, backend.random_states()) for backend in initialized()]
    try:
        yield
    finally:
        random.setstate(host)
        np.random.set_state(numbers)  # noqa: NPY002
        torch.set_rng_state(torchs)
        for backend, states in devices:
            backend.restore_random_states(states)


def _seed_host(key: int) -> None:
    _seed_of_python(key)  # with the next line, as ``random.seed`` of a number
    _OF_PYTHON.gauss_next = None
    # Transforms that people write usually draw from this legacy global stream.
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
    torch.default_generator.manual_seed(key)
