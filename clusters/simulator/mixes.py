"""Throughputs on one device type and on mixes of types, from the batch split solver.

VirtualFlow 6.5.2: a job keeps its global batch whatever devices it holds. On a mix of types the
solver of 5.1.2 shares the batch out, which gives the steps per second of the mix.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...schema.errors import InfeasibleError
from ...schema.jobs import MixThroughput, ModelThroughput
from ...schema.problem import DeviceOption, SplitProblem
from ...solvers.split.solve import solve


def split_throughput(
    model: str, global_batch_size: int, devices: Iterable[DeviceOption], scale_factor: int
) -> tuple[ModelThroughput, tuple[MixThroughput, ...]]:
    """Steps per second of a job of one global batch, on each device type and on mixes of types.

    Alone on a type it holds ``scale_factor`` devices. A mix is such devices (or all of a type
    that has fewer) and 1, 2, 4, ... or all devices of other types beside them. Kept are the
    mixes of which the solver uses every device, and which are faster than each smaller choice.

    Args:
        model: Name of the job's model.
        global_batch_size: Samples of a step.
        devices: The pool's types with their batch curves; ``num_devices`` is the most there is.
        scale_factor: Devices that the job asks for.

    Raises:
        ProblemError: A batch curve makes no sense.
    """
    options = {option.device_type: option for option in devices}
    steps = _Steps(model, global_batch_size, options)
    alone = {
        name: steps.rate({name: scale_factor})
        for name, option in options.items()
        if option.num_devices >= scale_factor
    }
    mixes: dict[tuple[tuple[str, int], ...], float] = {}
    for counts in _candidates(options, scale_factor):
        rate = steps.rate(counts)
        parts = [
            steps.rate({n: c for n, c in counts.items() if n != left}) for left in counts
        ]  # fmt: skip
        if rate > max(parts) * (1 + 1e-9) and steps.uses_all(counts):
            mixes[tuple(counts.items())] = rate
    kept = [
        key
        for key, rate in mixes.items()
        if not any(_within(other, key) and mixes[other] >= rate for other in mixes if other != key)
    ]
    return (
        ModelThroughput(model=model, scale_factor=scale_factor, steps_per_second=alone),
        tuple(
            MixThroughput(
                model=model,
                scale_factor=scale_factor,
                devices=dict(key),
                steps_per_second=mixes[key],
            )
            for key in kept
        ),
    )


def _candidates(options: Mapping[str, DeviceOption], scale: int) -> list[dict[str, int]]:
    """Mixes of at least two types, of which one has what the job asks for, in a fixed order."""
    steps = {}
    for name, option in options.items():
        powers = {2**i for i in range(option.num_devices.bit_length())}
        wanted = powers | {option.num_devices, min(scale, option.num_devices)}
        steps[name] = [0, *sorted(wanted)]
    found = []
    for numbers in itertools.product(*steps.values()):
        counts = {n: c for n, c in zip(options, numbers, strict=True) if c}
        whole = any(c == min(scale, options[n].num_devices) for n, c in counts.items())
        if len(counts) > 1 and whole:
            found.append(counts)
    return found


def _within(small: tuple[tuple[str, int], ...], large: tuple[tuple[str, int], ...]) -> bool:
    most = dict(large)
    return all(number <= most.get(name, 0) for name, number in small)


class _Steps:
    """Steps per second on devices by type, solved once each; 0 where the batch does not fit."""

    def __init__(self, model: str, batch: int, options: Mapping[str, DeviceOption]) -> None:
        self.model, self.batch, self.options = model, batch, options
        self.known: dict[tuple[tuple[str, int], ...], tuple[float, bool]] = {}

    def rate(self, counts: Mapping[str, int]) -> float:
        return self._solved(counts)[0]

    def uses_all(self, counts: Mapping[str, int]) -> bool:
        return self._solved(counts)[1]

    def _solved(self, counts: Mapping[str, int]) -> tuple[float, bool]:
        key = tuple(counts.items())
        if key not in self.known:
            devices = tuple(replace(self.options[n], num_devices=c) for n, c in key)
            problem = SplitProblem(
                model=self.model, global_batch_size=self.batch, devices=devices
            )  # fmt: skip
            try:
                plan = solve(problem, fastest=True)
            except InfeasibleError:
                self.known[key] = (0.0, False)
            else:
                used = sum(group.num_devices for group in plan.groups)
                whole = used == sum(counts.values())
                self.known[key] = (1.0 / plan.predicted.step_seconds, whole)
        return self.known[key]
