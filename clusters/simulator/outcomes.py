"""The result of a simulation: outcomes of jobs, and totals of the pool."""

from dataclasses import dataclass, field

from ...schema.simulation import JobOutcome, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The outcome of every job in order of completion, and what the pool did.

    ``busy_seconds`` are device-seconds of work by type, from 0 to ``end_seconds``. ``left_out``
    says of each job that fits nowhere in the pool why.
    """

    jobs: tuple[JobOutcome, ...]
    num_devices: dict[str, int]
    busy_seconds: dict[str, float]
    end_seconds: float
    num_rounds: int = 0
    num_allocations: int = 0
    num_failures: int = 0
    num_server_failures: int = 0
    left_out: dict[str, str] = field(default_factory=dict)
    spans: tuple[Span, ...] = field(default=())
