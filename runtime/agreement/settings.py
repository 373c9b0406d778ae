"""The optimizer's settings of each group of parameters: learning rate, momentum and the rest.

They are compared in every step, by two numbers in the sums that the step needs anyhow. So workers
whose schedules have diverged are found in the step that would use other rates, before it does.
"""

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

Value = bool | int | float | str | None | tuple[Any, ...]
Settings = list[dict[str, Value]]
"""[groups] name and value; the groups of several optimizers in a row."""

_BITS = 22  # squares of such numbers, added over 500 workers, are exact in float64
_PLAIN = (bool, int, float, str, type(None))
# What no update reads: the parameters themselves, their names, and what a scheduler notes.
_LEFT_OUT = frozenset({"params", "param_names", "initial_lr"})


def settings_of(optimizers: Iterable[Any]) -> Settings:
    """All plain settings as they are now. Waits for the device where a setting is kept there."""
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
    """A number of 22 bits for the settings, made anew only where they have changed.

    Settings that are tensors on a device are left out: to read them costs a wait.

    Args:
        optimizers: The job's.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers = optimizers
        self._seen: list[Any] = []
        self._number = 0
        self.has_changed = False

    def read(self) -> int:
        """The number now; ``has_changed`` says whether it is another one than before."""
        now = [_cheap(group) for optimizer in self._optimizers for group in optimizer.param_groups]
        self.has_changed = now != self._seen
        if self.has_changed:
            self._seen = now
            digest = blake2b(repr(now).encode(), digest_size=8).digest()
            self._number = int.from_bytes(digest, "little") >> (64 - _BITS)
        return self._number


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
    """Whether all workers had one number.

    Args:
        workers: How many there were.
        total: The sum of their numbers.
        squares: The sum of their squares.
    """
    return int(total) ** 2 == int(workers) * int(squares)


def differing(settings: Sequence[Settings], *, relative: float = 0.0) -> tuple[int, str] | None:
    """The first setting that is not the same everywhere: number of its group, and its name.

    Args:
        settings: Of each worker.
        relative: How far floating-point values may be apart.
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
