"""The levels of determinism (EasyScale 3.3): what each fixes; random streams by name, seeded.

- static: the same devices give the same bits (EasyScale's D0).
- elastic: every mapping of the same virtual nodes onto devices of one type gives the same bits
  (D0 + D1).
- heterogeneous: so do different types, if no operator chooses its kernel by the device (D2).

An operator that cannot hold a level is refused by name: by a scan of the model before training
starts, or by torch in the first pass.
"""

import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from ..devices.backend import DEVICES, initialized
from ..devices.cpu import DEVICE_TYPE, base_type
from ..schema.errors import TargetError
from ..schema.launch import Determinism
from ..schema.options import command, option
from .group import Place
from .protocol.environment import pins

# On no device: where several indices are equal, any of their values may win.
_NEVER_DETERMINISTIC = (nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d)
# Elementwise or copying operators: one rounding per element on every device.
_SAME_ANYWHERE = (
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.Hardtanh,
    nn.Embedding,
    nn.ZeroPad2d,
    nn.ConstantPad1d,
    nn.ConstantPad2d,
    nn.PixelShuffle,
)
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Obstacle:
    """An operator that prevents a level; ``reason`` says why."""

    name: str
    kind: str
    reason: str


def is_invariant(level: Determinism) -> bool:
    """Whether sums must not depend on the mapping of virtual nodes."""
    return level in ("elastic", "heterogeneous")


def scan(model: nn.Module, level: Determinism, types: Collection[str]) -> list[Obstacle]:
    """Find the model's operators that prevent a level on these device types.

    Like EasyScale's, the scan looks at modules, and finds only those that fail with any input.
    Whether a CUDA kernel has a deterministic form also depends on sizes and types
    (AdaptiveAvgPool2d to one value is a mean; NLLLoss differs between classes and pictures). For
    these, torch refuses in the first pass, before any weight has changed (``refusal_of``).
    """
    if level == "none":
        return []
    reason = "has no deterministic form"
    found = [
        Obstacle(name, type(module).__name__, reason)
        for name, module in model.named_modules()
        if isinstance(module, _NEVER_DETERMINISTIC)
    ]
    if level == "heterogeneous" and len(set(types)) > 1:
        reason = "runs kernels that torch chooses by device type"
        found += [
            Obstacle(name, type(module).__name__, reason)
            for name, module in model.named_modules()
            if next(module.children(), None) is None and not isinstance(module, _SAME_ANYWHERE)
        ]
    return found


def check_level(model: nn.Module, level: Determinism, place: Place) -> None:
    """Refuse a level that this model cannot hold on these devices, or that was not set up."""
    if level == "none":
        return
    config = place.start.config
    # The real types of a launch: an emulated type counts as the type it runs on.
    workers = config.workers if config is not None else ()
    types = {base_type(slot.device_type, config) for slot in workers} or {place.device.type}
    obstacles = scan(model, level, types)
    if obstacles:
        raise _refusal(level, types, obstacles)
    # Another launcher may have started this process.
    absent = {name: v for name, v in pins(level).items() if os.environ.get(name) != v}
    if absent:
        settings = " ".join(f"{name}={value}" for name, value in absent.items())
        raise TargetError(
            f"determinism {level} needs settings that were not there when this process started",
            hint=f"start with {command('launch', determinism=level)}, or export {settings}",
        )
    if level == "heterogeneous" and DEVICE_TYPE in types:
        found = torch.backends.cpu.get_cpu_capability()
        if found != "AVX2":
            raise TargetError(
                f"determinism heterogeneous needs AVX2 kernels on every CPU, here torch has "
                f"{found}",
                hint=f"use x86 CPUs from 2013 on, or {option('determinism', 'elastic')} on one "
                "CPU type",
            )


def _refusal(level: Determinism, types: Collection[str], obstacles: list[Obstacle]) -> TargetError:
    first = obstacles[0]
    alike = [o for o in obstacles if o.reason == first.reason]
    names = ", ".join(f"{o.name or 'the model'} ({o.kind})" for o in alike[:_SHOWN])
    more = f" and {len(alike) - _SHOWN} more" if len(alike) > _SHOWN else ""
    on = " and ".join(sorted(types))
    across = len(set(types)) > 1 and level == "heterogeneous"
    mend = f"use devices of one type with {option('determinism', 'elastic')}"
    return TargetError(
        f"determinism {level} cannot hold on {on}: {names}{more}: {first.reason}",
        hint=mend if across else f"replace the operator, or use {option('determinism', 'none')}",
    )


def refusal_of(error: RuntimeError, level: Determinism) -> TargetError | None:
    """Turn torch's refusal of an operator, in ``forward`` or backward, into a one-line error.

    Returns:
        The error to raise; None if ``error`` is no such refusal.
    """
    operator, found, _ = str(error).partition(" does not have a deterministic implementation")
    if not found:
        return None
    return TargetError(
        f"determinism {level} cannot hold: {operator.split()[-1]} has no deterministic form",
        hint=f"replace the operator, or use {option('determinism', 'none')}",
    )


def apply_level(level: Determinism) -> None:
    """Choose torch's deterministic algorithms for this process; level ``none`` changes nothing."""
    if level == "none":
        return
    torch.use_deterministic_algorithms(True)
    # By default torch then fills all new memory, for code that reads what it never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    for backend in DEVICES.registered:
        backend.fix_kernels(level)
    if level != "heterogeneous":
        return
    # oneDNN splits its sums by cache sizes; the native kernels do not.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


# Random streams keyed by name: draws depend on the work, never on the device that does it.
#
# Before each piece of work Python's, numpy's and torch's global streams are seeded from a key, say
# (seed, step, virtual node). So the same work draws the same numbers on any device.


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


_STEPS_AHEAD = 64
_ahead: dict[tuple[int | str, ...], tuple[int, list[int]]] = {}  # a first step, keys from it on


def seed_streams_in_step(seed: int, work: str, step: int, *rest: int | str) -> None:
    """Seed as ``seed_streams(seed, work, step, *rest)`` does; for work that every step does.

    Keys of the next steps are made together. Between two passes Python's code is not in the caches,
    where one key takes as long as ten that follow each other.
    """
    first, keys = _ahead.get((seed, work, *rest), (step, []))
    if not first <= step < first + len(keys):
        first = step
        keys = [key_of(seed, work, step + later, *rest) for later in range(_STEPS_AHEAD)]
        _ahead[seed, work, *rest] = first, keys
    seed_streams_by(keys[step - first])


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
