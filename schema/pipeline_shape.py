"""The shape of a requested schedule: degrees and counts, validated once for all generators."""

from dataclasses import dataclass

from .errors import ProblemError

Placement = tuple[tuple[int, ...], ...]
"""Ranks of each stage or position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineShape:
    """The degrees and counts for which a generator makes a schedule.

    Attributes:
        pipeline_parallel_size: p, the number of positions; each is one rank or several replicas.
        num_microbatches: Microbatches in the whole schedule over all replicas: m of one batch if
            the schedule flushes, else those of the whole run.
        num_model_chunks: v, stages per rank; 1 if the schedule does not interleave.
        replicas: [positions] number of ranks that share a position. Microbatch k goes to replica
            k mod replicas (1F1B-RR, thesis 2.4.2).
        microbatches_per_update: m of PipeDream-2BW; None for other schedules.

    Raises:
        ProblemError: A degree or a count is invalid.
    """

    pipeline_parallel_size: int
    num_microbatches: int
    num_model_chunks: int = 1
    replicas: tuple[int, ...] = ()
    microbatches_per_update: int | None = None

    def __post_init__(self) -> None:
        for name in ("pipeline_parallel_size", "num_microbatches", "num_model_chunks"):
            _at_least_one(name, getattr(self, name))
        if self.microbatches_per_update is not None:
            _at_least_one("microbatches_per_update", self.microbatches_per_update)
        if not self.replicas:
            object.__setattr__(self, "replicas", (1,) * self.pipeline_parallel_size)
        for count in self.replicas:
            _at_least_one("replicas of a stage", count)
        if len(self.replicas) != self.pipeline_parallel_size:
            raise ProblemError(
                f"{len(self.replicas)} replica counts for {self.pipeline_parallel_size} stages; "
                f"give one for each stage"
            )

    @property
    def ranks_of_position(self) -> Placement:
        """[positions] ranks of each position, numbered along the pipeline."""
        ranks, first = [], 0
        for count in self.replicas:
            ranks.append(tuple(range(first, first + count)))
            first += count
        return tuple(ranks)

    def microbatches_of(self, position: int, replica: int) -> range:
        """Return the microbatches that one replica of a position runs."""
        return range(replica, self.num_microbatches, self.replicas[position])

    def parallel_pipelines(self, schedule: str) -> int:
        """Return the number of replicas, for a schedule that needs the same number everywhere.

        Raises:
            ProblemError: Positions have different numbers of replicas.
        """
        if len(set(self.replicas)) > 1:
            raise ProblemError(
                f"{schedule} needs as many replicas of every stage, got "
                f"{'-'.join(map(str, self.replicas))}",
                hint="use gpipe, 1f1b, pipedream or 2bw, or replicate every stage alike",
            )
        return self.replicas[0]

    def one_chunk(self, schedule: str) -> None:
        """Refuse model chunks for a schedule that does not support them.

        Raises:
            ProblemError: The shape has several model chunks.
        """
        if self.num_model_chunks != 1:
            raise ProblemError(
                f"{schedule} runs one chunk on a device, got num_model_chunks "
                f"{self.num_model_chunks}",
                hint="use interleaved for several chunks",
            )


def _at_least_one(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ProblemError(f"{name} must be a whole number of at least 1, got {value!r}")
