"""The optimizers' settings of each parameter group: learning rate, momentum and the rest.

They are compared in every step, by two numbers in the sums that the step needs anyway. So if
workers' schedules have diverged, that is found before any update uses the wrong rates.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

Value = bool | int | float | str | None | tuple[Any, ...]
Settings = list[dict[str, Value]]
"""[groups] name and value of each setting; the groups of several optimizers are concatenated."""

_BITS = 22  # float64 sums the squares of such numbers exactly over 500 workers
MOST = (1 << _BITS) - 1
"""The largest such number."""
_PLAIN = (bool, int, float, str, type(None))
# Entries that no update reads: the parameters, their names, and a scheduler's notes.
_LEFT_OUT = frozenset({"params", "param_names", "initial_lr"})


def settings_of(optimizers: Iterable[Any]) -> Settings:
    """All plain settings as they are now. Waits for the device if a setting is kept there."""
    return [
        {key: _plain(value) for key, value in group.items() if _counts(key, value)}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


def _counts(key: str, value: Any) -> bool:
    if key in _LEFT_OUT:
        return False
    if isinstance(value, tuple | list):
        return all(isinstance(entry, _PLAIN) or _is_number(entry) for entry in value)
    return isinstance(value, _PLAIN) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _plain(value: Any) -> Value:
    if isinstance(value, tuple | list):
        return tuple(_plain(entry) for entry in value)
    found: Value = value.item() if isinstance(value, Tensor) else value
    return found


class SettingsNumber:
    """A number of 22 bits that stands for the settings; it is recomputed only when they change.

    Settings that are tensors on a device are left out: to read them would wait for the device.

    Args:
        optimizers: The job's optimizers.

    Attributes:
        number: The number when the settings were last read.
        has_changed: Whether the settings had changed then since they were read before.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._seen: list[Any] = []
        self.number = 0
        self.has_changed = False

    def read(self) -> int:
        """Read the settings as they are now, and return their number."""
        now = [_cheap(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        self.has_changed = now != self._seen
        if self.has_changed:
            self._seen = now
            digest = blake2b(repr(now).encode(), digest_size=8).digest()
            self.number = int.from_bytes(digest, "little") >> (64 - _BITS)
        return self.number


def _cheap(group: Mapping[str, Any]) -> list[Any]:
    found: list[Any] = []
    for key, value in group.items():
        if key in _LEFT_OUT:
            continue
        if isinstance(value, _PLAIN):
            found.append(value)
        elif isinstance(value, tuple | list) and all(isinstance(v, _PLAIN) for v in value):
            found.append(tuple(value))
        elif isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:
            found.append(value.item())
    return found


def are_alike(workers: float, total: float, squares: float) -> bool:
    """Whether all workers had the same number: then its variance over the workers is 0.

    Args:
        workers: How many workers there were.
        total: The sum of their numbers.
        squares: The sum of the numbers' squares.
    """
    return int(total) ** 2 == int(workers) * int(squares)


def differing(settings: Sequence[Settings], *, relative: float = 0.0) -> tuple[int, str] | None:
    """Find the first setting that is not equal on all workers.

    Args:
        settings: [workers] each worker's settings.
        relative: Largest relative difference of floating-point values that counts as equal.

    Returns:
        Number of its group, from 0, and its name; None where all are equal.
    """
    most = max(len(groups) for groups in settings)
    for index in range(most):
        groups = [groups[index] if index < len(groups) else None for groups in settings]
        if any(group is None for group in groups):
            return index, "the group itself"
        held = [group for group in groups if group is not None]
        for name in dict.fromkeys(name for group in held for name in group):
            values = [group.get(name) for group in held]
            if any(not _same(values[0], value, relative) for value in values):
                return index, name
    return None


def _same(one: Any, other: Any, relative: float) -> bool:
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(
            _same(a, b, relative) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, float) and isinstance(other, float):
        both_nan = one != one and other != other
        return both_nan or abs(one - other) <= relative * max(abs(one), abs(other))
    return bool(one == other)
