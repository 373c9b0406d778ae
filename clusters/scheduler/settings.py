"""How a live cluster is run, as its user says it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...schema.jobs import Entity
from ..mechanisms.rounds.rules import RoundRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """How a live cluster is run. ``grace_seconds`` is what a job has to save in.

    ``policy`` is one of allocation, ``elastic``, or one of ``easyscale.VARIANTS``. ``entities`` are
    the tree that jobs may name a node of, and ``dollars_per_hour`` the price of a device by type.
    ``on_change`` is who is told of changes of jobs' states (``notices``); it may hold a secret, so
    it is in no file. ``group`` is the one whose users may use the cluster.
    """

    policy: str = "las"
    rules: RoundRules = field(default_factory=RoundRules)
    grace_seconds: int = 30
    entities: tuple[Entity, ...] = ()
    dollars_per_hour: Mapping[str, float] = field(default_factory=dict)
    on_change: str | None = None
    group: str | None = None
