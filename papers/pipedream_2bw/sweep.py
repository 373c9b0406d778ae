"""PipeDream-2BW's planner for repetitive models (thesis 3.3, algorithm 1).

Every stage holds the same number of blocks and is replicated alike, so a configuration is four
numbers and a switch: data-parallel size d, pipeline stages p, microbatch size b, recomputation,
and the gradient accumulation m = B / (d b) that follows. All are tried. What a configuration
costs comes as data: the closed forms of 3.3.3, or measurements of whole configurations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ...schema.errors import InfeasibleError, ProblemError


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One way to run: d pipelines of p stages, microbatches of b samples."""

    data_parallel_size: int
    pipeline_parallel_size: int
    microbatch_size: int
    recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepEstimate:
    """Seconds per microbatch of a pipeline, and bytes of the fullest device."""

    microbatch_seconds: float
    memory_bytes: float


class CostModel(Protocol):
    """THROUGHPUT(.) and MEMORY(.) of algorithm 1 in one; None where it knows nothing."""

    def estimate(self, configuration: Configuration, num_microbatches: int) -> SweepEstimate | None:
        """Time and memory of a configuration that accumulates m microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedForm:
    """The closed forms of 3.3.3, from one block's measurements.

    Args:
        num_blocks: Equal blocks in the model.
        weight_bytes: |W| of the whole model.
        block_seconds: Forward + backward of one block at each microbatch size.
        activation_bytes_per_sample: |A_total| of the whole model.
        input_bytes_per_sample: |A_input|, what flows between two stages.
        devices_per_server: Where the fast links end.
        fast_bytes_per_second: B_high, inside a server.
        slow_bytes_per_second: B_low, between servers.
        recompute_factor: c_extra; 4/3 where backward takes twice as long as forward.
    """

    num_blocks: int
    weight_bytes: float
    block_seconds: Mapping[int, float]
    activation_bytes_per_sample: float
    input_bytes_per_sample: float
    devices_per_server: int
    fast_bytes_per_second: float
    slow_bytes_per_second: float
    recompute_factor: float = 4 / 3

    def estimate(self, configuration: Configuration, num_microbatches: int) -> SweepEstimate | None:
        """Time and memory; None where p does not divide the blocks or b was not measured."""
        unmeasured = configuration.microbatch_size not in self.block_seconds
        if unmeasured or self.num_blocks % configuration.pipeline_parallel_size:
            return None
        return SweepEstimate(
            microbatch_seconds=self._seconds(configuration, num_microbatches),
            memory_bytes=self._bytes(configuration),
        )

    def _seconds(self, configuration: Configuration, num_microbatches: int) -> float:
        """T = max(c T_comp + T_act, T_sync / m)."""
        stages, replicas = configuration.pipeline_parallel_size, configuration.data_parallel_size
        compute = self.block_seconds[configuration.microbatch_size] * self.num_blocks / stages
        if configuration.recompute:
            compute *= self.recompute_factor
        sent = 2 * self.input_bytes_per_sample * configuration.microbatch_size
        is_inside = stages <= self.devices_per_server
        transfer = sent / self._bandwidth(is_inside) if stages > 1 else 0.0
        ring = 2 * (replicas - 1) / replicas * self.weight_bytes / stages
        # The text's rule for the all-reduce: inside a server only if d < its devices.
        sync = ring / self._bandwidth(replicas < self.devices_per_server)
        return max(compute + transfer, sync / num_microbatches)

    def _bandwidth(self, is_inside: bool) -> float:
        return self.fast_bytes_per_second if is_inside else self.slow_bytes_per_second

    def _bytes(self, configuration: Configuration) -> float:
        """2 |W| / p + p |A_total| / p + p |A_input|; one stash, not p, with recomputation.

        A single stage keeps one version and receives nothing.
        """
        stages, size = configuration.pipeline_parallel_size, configuration.microbatch_size
        versions = 1 if stages == 1 else 2
        stashes = 1 if configuration.recompute else stages
        return (
            versions * self.weight_bytes / stages
            + stashes * self.activation_bytes_per_sample * size / stages
            + (stages if stages > 1 else 0) * self.input_bytes_per_sample * size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweptRuns:
    """Configurations that were run for a while: what the thesis's own experiments used."""

    estimates: Mapping[Configuration, SweepEstimate]

    def estimate(self, configuration: Configuration, num_microbatches: int) -> SweepEstimate | None:
        """The measurement, or None where the configuration was not run."""
        return self.estimates.get(configuration)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPipelineProblem:
    """What algorithm 1 is asked.

    Args:
        num_devices: N; every one is used, d p = N.
        global_batch_size: B, the largest that is safe for convergence.
        memory_bytes: M of one device, all that it has.
        microbatch_sizes: b to try.
        cost_model: THROUGHPUT(.) and MEMORY(.).
        device_type: What the devices are, for messages.
    """

    num_devices: int
    global_batch_size: int
    memory_bytes: float
    microbatch_sizes: tuple[int, ...]
    cost_model: CostModel
    device_type: str = "device"

    def __post_init__(self) -> None:
        counts = (self.num_devices, self.global_batch_size, *self.microbatch_sizes)
        if min(counts) < 1 or not self.microbatch_sizes:
            raise ProblemError("devices, batch and microbatch sizes must all be at least 1")
        if not self.memory_bytes > 0:
            raise ProblemError(f"memory_bytes must be > 0, got {self.memory_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A configuration with its accumulation m, time, throughput and memory."""

    configuration: Configuration
    num_microbatches: int
    microbatch_seconds: float
    samples_per_second: float
    memory_bytes: float
    fits: bool


def sweep(problem: ParallelPipelineProblem) -> tuple[Row, ...]:
    """Every configuration that the cost model knows, in order of (p, b, recompute).

    m = B / (d b) must be whole, and at least p as two weight versions need (3.2.1).
    """
    found = []
    for stages in range(1, problem.num_devices + 1):
        if problem.num_devices % stages:
            continue
        for size in problem.microbatch_sizes:
            for recompute in (False, True):
                configuration = Configuration(
                    data_parallel_size=problem.num_devices // stages,
                    pipeline_parallel_size=stages,
                    microbatch_size=size,
                    recompute=recompute,
                )
                row = _row(problem, configuration)
                if row is not None:
                    found.append(row)
    return tuple(found)


def _row(problem: ParallelPipelineProblem, configuration: Configuration) -> Row | None:
    samples = configuration.data_parallel_size * configuration.microbatch_size
    count, rest = divmod(problem.global_batch_size, samples)
    if rest or count < configuration.pipeline_parallel_size:
        return None
    estimate = problem.cost_model.estimate(configuration, count)
    if estimate is None:
        return None
    return Row(
        configuration=configuration,
        num_microbatches=count,
        microbatch_seconds=estimate.microbatch_seconds,
        samples_per_second=samples / estimate.microbatch_seconds,
        memory_bytes=estimate.memory_bytes,
        fits=estimate.memory_bytes <= problem.memory_bytes,
    )


def solve(problem: ParallelPipelineProblem) -> Row:
    """Pick the configuration of highest throughput that fits the memory.

    Exhaustive. Of equals the first: fewest stages, then the smallest microbatch, then without
    recomputation.

    Raises:
        InfeasibleError: Nothing divides, or nothing fits; says by how many bytes.
    """
    rows = sweep(problem)
    if not rows:
        raise InfeasibleError(
            f"no d x p = {problem.num_devices} and microbatch size divide a global batch of "
            f"{problem.global_batch_size} into m >= p microbatches that the cost model knows",
            hint="use another batch, fewer devices, or smaller microbatches",
        )
    fitting = [row for row in rows if row.fits]
    if not fitting:
        least = min(rows, key=lambda row: row.memory_bytes)
        raise InfeasibleError(
            f"no configuration fits the memory: the smallest needs {least.memory_bytes:.0f} bytes "
            f"on a {problem.device_type} of {problem.memory_bytes:.0f}, "
            f"{least.memory_bytes - problem.memory_bytes:.0f} bytes too many",
            hint="use more devices, smaller microbatches, or devices with more memory",
        )
    return max(fitting, key=lambda row: row.samples_per_second)
