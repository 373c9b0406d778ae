"""Sums and small equations, compiled, to the digits of ``np.add.reduce`` and of ``method``."""

from typing import Any

import numpy as np

from ...compiling import compiled
from .method import eliminate as eliminate_plain

eliminate = compiled(eliminate_plain)


@compiled
def block_sum(values: Any, first: Any, number: Any) -> Any:
    """Of at most 128 values, eight sums at a time."""
    if number < 8:
        total = 0.0
        for i in range(first, first + number):
            total += values[i]
        return total
    a, b, c, d = values[first], values[first + 1], values[first + 2], values[first + 3]
    e, f, g, h = values[first + 4], values[first + 5], values[first + 6], values[first + 7]
    whole = number - number % 8
    for i in range(first + 8, first + whole, 8):
        a += values[i]
        b += values[i + 1]
        c += values[i + 2]
        d += values[i + 3]
        e += values[i + 4]
        f += values[i + 5]
        g += values[i + 6]
        h += values[i + 7]
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(first + whole, first + number):
        total += values[i]
    return total


@compiled
def summed(values: Any, number: Any) -> Any:
    """Add as ``np.add.reduce`` does: halves of more than 128 values apart.

    With a stack, as numba's cache does not keep functions that call themselves.
    """
    if number <= 128:
        return block_sum(values, 0, number)
    firsts, numbers = np.empty(128, np.int64), np.empty(128, np.int64)
    sums = np.empty(128)
    firsts[0], numbers[0] = 0, number
    waiting, known = 1, 0
    while waiting:
        waiting -= 1
        first, size = firsts[waiting], numbers[waiting]
        if size == 0:  # both halves are known
            known -= 1
            sums[known - 1] += sums[known]
        elif size <= 128:
            sums[known] = block_sum(values, first, size)
            known += 1
        else:
            half = size // 2
            half -= half % 8
            numbers[waiting] = 0
            firsts[waiting + 1], numbers[waiting + 1] = first + half, size - half
            firsts[waiting + 2], numbers[waiting + 2] = first, half
            waiting += 3
    return sums[0]
