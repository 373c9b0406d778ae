"""Explain in one sentence, from all workers' statements, what differs, since when, and why."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...schema.errors import TargetError
from ..determinism import generator_of
from ..nested_tensors import byte_view

# Fingerprints of tensors: equal bits give equal numbers.
#
# The bytes are read as 64-bit words, multiplied by fixed odd weights and summed modulo 2^64, on the
# tensor's device. Any single changed word changes the number. Several changes cancel with a
# probability of about 2^-60. On the host this is one pass of a matrix-vector product, in a quarter
# of the CPU time of SHA-256.

_ROW = 1 << 14  # words; a row of weights stays in the cache
_SMALL_BYTES = 1 << 16  # below this, calls cost more than bytes: such tensors are concatenated
_BLOCK_ROWS = 256  # rows that are converted to int64 at once
_NUM_PROJECTIONS = 4


def fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """The fingerprint of the bits of all these tensors, in this order. Waits for nothing.

    Returns:
        [] int64, on that device.
    """
    small, numbers = [], []
    for tensor in tensors:
        flat = byte_view(tensor)
        if len(flat) < _SMALL_BYTES:
            small += [flat, flat.new_zeros(-len(flat) % 8)] if len(flat) % 8 else [flat]
        else:
            numbers.append(_number(_words_of(flat)))
    if small:
        numbers.append(_number(_words_of(torch.cat(small))))
    if not numbers:
        return torch.zeros((), dtype=torch.int64)
    return _number(torch.stack(numbers))


def _words_of(flat: Tensor) -> Tensor:
    """The bytes as 64-bit words; the last word is padded with zeros."""
    if len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(-len(flat) % 8)])
    elif flat.storage_offset() % 8:
        flat = flat.clone()
    return flat.view(torch.int64)


def _number(words: Tensor) -> Tensor:
    """The weighted sum of words: each row repeats the same weights and has a weight of its own."""
    weights = _weights(words.device)
    whole = len(words) // _ROW
    rest = words[whole * _ROW :]
    total = (rest * weights[: len(rest)]).sum()
    if whole:
        rows = words[: whole * _ROW].view(whole, _ROW)
        of_rows = torch.arange(whole, device=words.device) * 2 + 3
        total = total + (_row_sums(rows, weights) * of_rows).sum()
    return total


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.is_cpu:
        return torch.mv(rows, weights)
    # CUDA has no matrix product of integers; blocks limit the memory of this one.
    return torch.cat([(block * weights).sum(1) for block in torch.split(rows, _BLOCK_ROWS)])


@lru_cache(maxsize=8)
def _weights(device: torch.device) -> Tensor:
    drawn = torch.randint(-(2**62), 2**62, (_ROW,), generator=generator_of("fingerprint"))
    # Odd: modulo 2^64 a product with an odd number tells all words apart.
    return (drawn | 1).to(device)


@dataclass(frozen=True, slots=True)
class Shadow:
    """A few numbers that tell how far two tensors of one shape are apart.

    Attributes:
        norm: The 2-norm.
        projections: Sums of the elements with fixed signs, one for each row of signs.
        digits: Relative rounding error of the dtype; 0 where values are exact.
    """

    norm: float
    projections: tuple[float, ...]
    digits: float

    def is_near(self, other: "Shadow") -> bool:
        """Whether two tensors differ by no more than the rounding of a whole training.

        Rounding errors of updates add up, so half of the dtype's digits must agree.
        """
        if not self.digits:
            return False
        pairs = list(zip(self.projections, other.projections, strict=True))
        if any(a != a or b != b for a, b in pairs):
            return all((a != a) == (b != b) for a, b in pairs)
        # With random signs the square of a difference's projection is on average its squared norm.
        squares = sum((a - b) ** 2 for a, b in pairs) / len(pairs)
        limit: float = self.digits**0.5 * max(self.norm, other.norm)
        return bool(squares**0.5 <= limit)


def shadow_of(tensor: Tensor) -> Shadow:
    """The shadow of a tensor, read in blocks as float64. Waits for the device."""
    flat = tensor.detach().contiguous().reshape(-1)
    if not (flat.is_floating_point() or flat.is_complex()):
        return Shadow(0.0, (0.0,) * _NUM_PROJECTIONS, 0.0)
    digits = torch.finfo(flat.dtype).eps
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    signs = _signs(flat.device)
    square = torch.zeros((), dtype=torch.float64, device=flat.device)
    sums = torch.zeros(_NUM_PROJECTIONS, dtype=torch.float64, device=flat.device)
    whole = len(flat) // _ROW * _ROW
    for number, block in enumerate(torch.split(flat[:whole].view(-1, _ROW), _BLOCK_ROWS)):
        wide = block.double()
        square += wide.square().sum()
        # Rows have signs too, different in each block, so that equal changes do not cancel.
        of_rows = signs.roll(number + 1, dims=1)[:, : len(wide)]
        sums += ((signs @ wide.T) * of_rows).sum(1)
    rest = flat[whole:].double()
    square += rest.square().sum()
    sums += signs[:, : len(rest)] @ rest
    return Shadow(float(square.sqrt()), tuple(sums.tolist()), digits)


@lru_cache(maxsize=8)
def _signs(device: torch.device) -> Tensor:
    drawn = torch.randint(2, (_NUM_PROJECTIONS, _ROW), generator=generator_of("signs"))
    return (drawn * 2 - 1).double().to(device)


Value = bool | int | float | str | None | tuple[Any, ...]
Settings = list[dict[str, Value]]
"""[groups] name and value of each setting; the groups of several optimizers are concatenated."""


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


_NEARLY = 1e-4  # relative difference of settings that an optimizer computes on unlike devices
_MOST_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """The facts that one worker reports when workers do not agree.

    Attributes:
        arithmetic: What its results may depend on: kind of device, threads, version of torch.
        joined_step: The step before which it joined; 0 from the start.
        agreed_step: How many steps were done when all last agreed, as far as it knows.
        settings: [groups] settings of its optimizers' groups.
        groups: [groups] name of the first parameter of each group.
        frozen: Names of the parameters that require no gradient.
        unheld: Names of the parameters that none of its optimizers holds.
        numbers: The fingerprint of each tensor that it shares with others, by name.
        shadows: The shadow of each of these tensors, by name.
    """

    arithmetic: str
    joined_step: int
    agreed_step: int
    settings: Settings
    groups: list[str]
    frozen: list[str]
    unheld: list[str]
    numbers: dict[str, int]
    shadows: dict[str, Shadow]

    def as_json(self) -> dict[str, Any]:
        """The statement as plain data."""
        return asdict(self)

    @classmethod
    def of_json(cls, plain: dict[str, Any]) -> "Statement":
        """Read a statement back from plain data."""
        shadows = {
            name: Shadow(s["norm"], tuple(s["projections"]), s["digits"])
            for name, s in plain["shadows"].items()
        }
        return cls(**{**plain, "shadows": shadows})


def find_fault(workers: Sequence[Statement], step: int) -> TargetError | None:
    """Find the reason why workers do not agree.

    Returns:
        The reason; None where values differ by rounding only, between kinds of devices.
    """
    alike = len({worker.arithmetic for worker in workers}) == 1
    parted = _parted_tensors(workers, alike=alike)
    since = _since(workers, step)
    names = dict.fromkeys(name for worker in workers for name in worker.frozen)
    frozen = next((n for n in names if not all(n in worker.frozen for worker in workers)), None)
    if frozen is not None:
        usual, others = _split(workers, lambda worker: frozen in worker.frozen)
        state = "frozen" if frozen in workers[others[0]].frozen else "trained"
        return TargetError(
            f"{frozen} is {state} on {_named(others)} and not on {_named(usual)}: the "
            f"workers have diverged{since}",
            hint="freeze and unfreeze on every worker at the same step; give job.register what "
            "decides",
        )
    setting = differing([worker.settings for worker in workers], relative=0.0 if alike else _NEARLY)
    if setting is not None:
        return _of_settings(workers, setting, parted, since)
    if parted:
        return _of_parameters(workers, parted, since)
    return None


def _parted_tensors(workers: Sequence[Statement], *, alike: bool) -> list[str]:
    """Names of the tensors that differ between their holders, in the model's order."""
    names = dict.fromkeys(name for worker in workers for name in worker.numbers)
    found = []
    for name in names:
        holders = [worker for worker in workers if name in worker.numbers]
        if len({worker.numbers[name] for worker in holders}) == 1:
            continue
        shadows = [worker.shadows[name] for worker in holders if name in worker.shadows]
        near = not alike and len(shadows) == len(holders)
        if not (near and all(shadows[0].is_near(shadow) for shadow in shadows[1:])):
            found.append(name)
    return found


def _since(workers: Sequence[Statement], step: int) -> str:
    agreed = min(worker.agreed_step for worker in workers)
    return f" (steps {agreed + 1} to {step})" if agreed + 1 < step else f" (step {step})"


def _of_settings(
    workers: Sequence[Statement], setting: tuple[int, str], parted: list[str], since: str
) -> TargetError:
    group, name = setting

    def value_of(worker: Statement) -> Hashable:
        groups = worker.settings
        return repr(groups[group].get(name)) if group < len(groups) else "absent"

    usual, others = _split(workers, value_of)
    firsts = max((worker.groups for worker in workers), key=len)
    first = firsts[group] if group < len(firsts) else "no parameter"
    values = f"{value_of(workers[others[0]])} on {_named(others)}"
    what = (
        f"{parted[0]}{_more(parted)} has diverged{since}"
        if parted
        else f"{first} and all of its group would diverge{since}"
    )
    return TargetError(
        f"{what}: {name} of the optimizer's group {group} ({first}) is {values}, "
        f"{value_of(workers[usual[0]])} on {_named(usual)}",
        hint="set it alike on every worker; give the scheduler, or whatever sets it, to "
        "job.register(...), so that a worker that joins gets its state",
    )


def _of_parameters(workers: Sequence[Statement], parted: list[str], since: str) -> TargetError:
    first = parted[0]
    usual, others = _split(workers, lambda worker: worker.numbers.get(first), holds=first)
    message = (
        f"{first}{_more(parted)} on {_named(others)} is not what it is on {_named(usual)}: "
        f"the workers have diverged{since}"
    )
    agreed = min(worker.agreed_step for worker in workers)
    late = [rank for rank in others if workers[rank].joined_step >= max(agreed, 1)]
    if late:
        return TargetError(
            message,
            hint=f"{_named(late)} joined before step {workers[late[0]].joined_step + 1}: give "
            "job.register(...) all that the script counts, schedules or keeps between steps",
        )
    if first in workers[others[0]].unheld:
        return TargetError(
            message,
            hint="no optimizer of hf.prepare holds it, so the script changes it by itself: do that "
            "alike on every worker",
        )
    return TargetError(
        message,
        hint="look for code that depends on job.rank or job.is_main, or draws random numbers "
        "outside job.batches; where there is none, the memory of that device may be faulty",
    )


def _split(
    workers: Sequence[Statement],
    value_of: Callable[[Statement], Hashable],
    *,
    holds: str | None = None,
) -> tuple[list[int], list[int]]:
    """The ranks with the most frequent value (ties: the lowest rank's value), and the others."""
    ranks = [r for r, worker in enumerate(workers) if holds is None or holds in worker.numbers]
    by_value: dict[Hashable, list[int]] = {}
    for rank in ranks:
        by_value.setdefault(value_of(workers[rank]), []).append(rank)
    usual = max(by_value.values(), key=len)
    return usual, [rank for rank in ranks if rank not in usual]


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:_MOST_NAMED])
    rest = f" and {len(ranks) - _MOST_NAMED} more" if len(ranks) > _MOST_NAMED else ""
    return f"worker{'s' if len(ranks) > 1 else ''} {shown}{rest}"


def _more(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
