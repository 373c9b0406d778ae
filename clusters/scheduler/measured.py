"""How fast jobs really were: what leases measured corrects the throughputs that policies see.

Gavel starts from estimates and goes on with what jobs reach (thesis 5.3.3, 5.6). Here a profile
makes the first estimate. The ratio of measured to predicted speed is kept for each kind of job (see
``plans.kind_of``) on each set of device types, and is applied to every number of these devices.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...schema.jobs import MixThroughput
from .plans import Rate
from .store import Store

MOST_RATIOS = 5
"""The last ones of a kind of job on a type count, by their median: one disturbed turn is none."""
Ratios = dict[str, float]
"""Measured over predicted steps per second of one kind of job, by device types."""


def note(
    store: Store, kind: str, types: Iterable[str], predicted: float | None, measured: float | None
) -> bool:
    """Record what a lease measured; whether it says anything.

    Args:
        store: The state, in a transaction.
        kind: The job's kind.
        types: The lease's device types.
        predicted: Steps per second by its plan.
        measured: As they were.
    """
    if not predicted or not measured or not math.isfinite(measured / predicted):
        return False
    name = _name(types)
    rows = store.rows("SELECT ratios FROM measured WHERE kind = ? AND types = ?", kind, name)
    before = json.loads(rows[0]["ratios"]) if rows else []
    store.run(
        "INSERT OR REPLACE INTO measured (kind, types, ratios) VALUES (?, ?, ?)",
        kind, name, json.dumps([*before, measured / predicted][-MOST_RATIOS:]),
    )  # fmt: skip
    return True


def ratios_of(store: Store, kind: str) -> Ratios:
    """What is known of a kind of job; empty where nothing was measured."""
    return {
        row["types"]: statistics.median(json.loads(row["ratios"]))
        for row in store.rows("SELECT types, ratios FROM measured WHERE kind = ?", kind)
    }


def ratio_on(ratios: Ratios, types: Iterable[str]) -> float:
    """Measured over predicted speed on some types; 1 where nothing is known.

    A type that was not measured gets the median of those that were: a type is judged better than
    another than by the profile only when both were measured. On types that were not measured
    together the slowest one counts: a step ends with it.
    """
    names = sorted(set(types))
    known = ratios.get(_name(names))
    if known is not None or not ratios:
        return 1.0 if known is None else known
    alone = [ratio for name, ratio in ratios.items() if "," not in name]
    usual = statistics.median(alone or [*ratios.values()])
    return min(ratios.get(name, usual) for name in names)


def corrected(rate: Rate, ratios: Ratios) -> Rate:
    """A predicted rate as it was measured to be."""
    if not ratios:
        return rate
    if isinstance(rate, MixThroughput):
        return replace(
            rate, steps_per_second=rate.steps_per_second * ratio_on(ratios, rate.devices)
        )
    known: Mapping[str, float] = rate.steps_per_second
    return replace(
        rate,
        steps_per_second={name: one * ratio_on(ratios, [name]) for name, one in known.items()},
    )


def _name(types: Iterable[str]) -> str:
    return ",".join(sorted(set(types)))
