"""The proof of water filling: for each stage, the rows that had to stop, and the prices."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..engine import LevelProof, MergedProgram
from ..program import Bools, Floats, Program
from .bottlenecks import Cut

# A proof leaves a row room for at most this part of its throughput (twice it of its best) ...
ROOM = 1e-5
# ... or of the pool's worth (or twice the gap).
SLACK = 2e-9
# Levels that differ by less than this part are one.
SAME_LEVEL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Prices ``proof`` that bind at ``level`` [rows], of whom ``active`` [rows] still rose."""

    proof: Cut
    level: Floats
    active: Bools


def unproved(
    small: Program,
    best: Floats,
    stages: Sequence[Stage],
    level: Floats,
    reached: Floats,
    gap: float,
) -> Bools:
    """Rows for which no stage proves that they could not rise further [rows].

    Args:
        small: The program over rows.
        best: The level of each row on its fastest column, alone or in a pair [rows].
        stages: Lowest first.
        level: Where each row stopped [rows].
        reached: The levels of the time fractions found [rows].
        gap: By what part these may fall short.
    """
    alone = small.rate.max(axis=1) / small.level
    loose: Bools = reached < best * (1.0 - ROOM)
    more = np.maximum(reached * (1.0 + ROOM), 2.0 * ROOM * alone)
    for stage in stages:
        pays, wanted = stage.proof.pays(reached), stage.proof.pays(more)
        done = level <= stage.level * (1.0 + SAME_LEVEL)
        others = float((small.count * pays)[done].sum()) - np.where(done, pays, 0.0)
        ends = stage.active & (level >= stage.level * (1.0 - SAME_LEVEL))
        stopped = (wanted > pays) & (others + wanted >= 1.0 - max(SLACK, 2.0 * gap))
        loose &= ~(ends & stopped)
    return loose


def level_proofs(merged: MergedProgram, stages: Sequence[Stage]) -> tuple[LevelProof, ...]:
    """Each stage's prices by job; without space sharing those of resources are enough."""
    proofs: list[LevelProof] = []
    for stage in stages:
        job, price, time = stage.proof.priced(stage.level)
        if merged.pairing is None:
            proofs.append(LevelProof(resource_prices=price))
        else:
            proofs.append(
                LevelProof(
                    resource_prices=price,
                    job_prices=job[merged.row_of],
                    time_prices=time[merged.row_of],
                )
            )
    return tuple(proofs)
