"""Global random streams draw what a plain seed of each library would let them draw."""

import random

import numpy as np
import torch

from hetflow.runtime.determinism import key_of, seed_streams


def draws() -> list[object]:
    numbers = np.random  # noqa: NPY002
    found = [random.random(), random.gauss(0, 1), numbers.rand(), numbers.normal()]
    return [*found, torch.rand(3).tolist(), torch.randn(3).tolist()]


def test_a_key_seeds_as_the_libraries_own_functions_do() -> None:
    keys = [(0, "pass", 3, 1), (7, "between", 0)]
    found = []
    for key in keys:
        random.gauss(0, 1)  # keeps half of a pair of draws for the next call
        np.random.normal()  # noqa: NPY002
        seed_streams(*key)
        found.append(draws())
    for key, mine in zip(keys, found, strict=True):
        number = key_of(*key)
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002
        torch.manual_seed(number)
        assert draws() == mine
    assert found[0] != found[1]
