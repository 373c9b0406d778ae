"""Efficiencies fitted to measured runs, and how far whole passes are off by a fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import numpy as np
from scipy.optimize import least_squares

from hetflow.planning.costs.roofline import UNITS, Efficiency, powered, unit_of

from .measured import Measured

_SHARES = (*UNITS, *(f"convolution_{unit}" for unit in UNITS))
_MEMORIES = ("memory", "convolution_memory", "channels_last_memory")
# Of these, of a launch in ten microseconds, and of e to the exponent of power. What no run tells
# stays here.
_PRIOR = (0.9, 0.75, 0.8, 0.8, 0.35, 0.5, 0.77, 0.4, 0.6, 2.5, 1.0)
_PRIOR_WEIGHT = 0.3
_FORM_WEIGHT = 2.0  # of one form being as good as others: a figure moves it by a third
# A Winograd convolution of 3 x 3 takes fewer products than are counted. An exponent of power above
# 0.15 fits these figures' ratios better, and an H200 worse, which none is of (docs/gpus.md).
_MOST = (1.0,) * 3 + (1.5,) * 3 + (1.0, 1.2, 1.2, 10.0, exp(0.15))
# Whole steps tell more than parts of a pass; vTrain's 240 are alike.
_WEIGHTS = {"Sailor": 1.0, "vTrain": 0.25, "Gavel": 1.0, "NVIDIA": 3.0, "lambdal": 2.0}
NOT_FITTED = ("K80",)  # half as efficient at convolutions as all later types, so judged alone


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole pass or step: ``off`` is the logarithm of estimated over measured seconds."""

    source: str
    model: str
    config: str
    form: str
    off: float
    seconds: float

    @property
    def is_convolutional(self) -> bool:
        """Whether most of its work is convolutions."""
        return not self.model.startswith(("GPT", "OPT", "BERT"))


@dataclass(slots=True)
class Runs:
    """Measured runs as flat arrays over their operators, run after run.

    Args:
        runs: What was measured.
        link: What share of a link's bandwidth a sum reaches.
    """

    runs: Sequence[Measured]
    link: float
    _calls: np.ndarray = field(init=False)
    _computing: np.ndarray = field(init=False)
    _moving: np.ndarray = field(init=False)
    _shares: np.ndarray = field(init=False)
    _memories: np.ndarray = field(init=False)
    _powers: np.ndarray = field(init=False)
    _owners: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rows = []
        for owner, run in enumerate(self.runs):
            for times, operators in run.operators:
                for one in operators:
                    unit, peak = unit_of(one, run.spec, "tf32")
                    share = UNITS.index(unit) + 3 * one.is_convolution
                    memory = one.is_convolution * (1 + one.channels_last)
                    rate = run.spec.memory_bytes_per_second
                    row = (times * one.count, one.flops / peak, one.num_bytes / rate)
                    rows.append((*row, powered(run.spec, peak), share, memory, owner))
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        self._calls, self._computing, self._moving, self._powers = columns[:4]
        self._shares, self._memories, self._owners = columns[4:]

    def seconds(self, efficiency: Efficiency) -> np.ndarray:
        """[runs] estimated."""
        of = np.array([getattr(efficiency, name) for name in _SHARES])
        memory = np.array([getattr(efficiency, name) for name in _MEMORIES])
        forms = np.array([efficiency.forms.get(run.spec.name, 1.0) for run in self.runs])
        share = of[self._shares] * forms[self._owners] * self._powers**efficiency.power
        share = np.where(self._shares < len(UNITS), np.minimum(share, 1.0), share)
        moving = self._moving / memory[self._memories]
        each = self._calls * (
            efficiency.launch_seconds + np.maximum(self._computing / share, moving)
        )
        moved = [run.moved_bytes / run.spec.memory_bytes_per_second for run in self.runs]
        sent = [run.sent_bytes / run.spec.link_bytes_per_second for run in self.runs]
        found: np.ndarray = np.bincount(self._owners, each, len(self.runs))
        return found + np.array(moved) / memory[0] + np.array(sent) / efficiency.link

    def fit(self) -> Efficiency:
        """Least squares of the logarithm of estimated over measured."""
        fitted = Runs([run for run in self.runs if run.spec.name[:3] not in NOT_FITTED], self.link)
        forms = sorted({run.spec.name for run in fitted.runs})
        weights = np.array([_WEIGHTS[run.source] for run in fitted.runs])
        measured = np.log([run.seconds for run in fitted.runs])

        def efficiency(values: np.ndarray) -> Efficiency:
            *shares, launch = np.exp(values[: len(_PRIOR) - 1]).tolist()
            own = np.exp(values[len(_PRIOR) :]).tolist()
            return Efficiency(
                **dict(zip(_SHARES + _MEMORIES, shares, strict=True)),
                link=self.link,
                launch_seconds=launch * 1e-5,
                power=float(values[len(_PRIOR) - 1]),
                forms=dict(zip(forms, own, strict=True)),
            )

        def apart(values: np.ndarray) -> np.ndarray:
            off = weights * (np.log(fitted.seconds(efficiency(values))) - measured)
            prior = _PRIOR_WEIGHT * (values[: len(_PRIOR)] - np.log(_PRIOR))
            return np.concatenate([off, prior, _FORM_WEIGHT * values[len(_PRIOR) :]])

        most = np.append(np.log(_MOST), np.full(len(forms), 1.5))
        start = np.append(np.log(_PRIOR), np.zeros(len(forms)))
        return efficiency(least_squares(apart, start, bounds=(start - 3.0, most)).x)

    def wholes(self, efficiency: Efficiency) -> list[Whole]:
        """Each pass or step, a pass's parts added up."""
        sums: dict[tuple[str, ...], list[float]] = {}
        for run, estimated in zip(self.runs, self.seconds(efficiency).tolist(), strict=True):
            key = (run.source, run.model, run.config.partition(",")[0], run.spec.name)
            found = sums.setdefault(key, [0.0, 0.0])
            found[0] += run.weight * estimated / run.samples
            found[1] += run.weight * run.seconds / run.samples
        return [
            Whole(*key, off=float(np.log(estimated / seconds)), seconds=seconds)
            for key, (estimated, seconds) in sums.items()
        ]
