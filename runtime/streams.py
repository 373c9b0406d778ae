"""Random streams by name: what is drawn depends on what is done, never on where.

Python's, numpy's and torch's global streams are seeded from a key such as (seed, step, virtual
node) before each piece of work, so the same work draws the same numbers on any device.
"""

import random
from hashlib import blake2b

import numpy as np
import torch

from ..devices.backend import initialized


def key_of(*parts: int | str) -> int:
    """A 63-bit number that stands for a key; unlike keys give unrelated numbers."""
    text = "/".join(map(str, parts))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_streams(*parts: int | str) -> None:
    """Seed Python's, numpy's and torch's global streams (all devices) from a key."""
    seed_host_streams(*parts)
    # torch.manual_seed costs 0.2 ms a call; these are the parts of it that matter here.
    for backend in initialized():
        backend.seed(key_of(*parts))


def seed_host_streams(*parts: int | str) -> None:
    """Seed the host's streams only: cheap enough to be done once a sample."""
    key = key_of(*parts)
    _seed_host(key)
    torch.default_generator.manual_seed(key)


def generator_of(*parts: int | str) -> torch.Generator:
    """A torch generator of its own, seeded from a key."""
    generator = torch.Generator()
    generator.manual_seed(key_of(*parts))
    return generator


def _seed_host(key: int) -> None:
    random.seed(key)
    # The legacy global stream is the one that people's transforms draw from.
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002
