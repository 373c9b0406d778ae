"""PipeDream-2BW plans of models whose layers repeat: thesis 3.3 from a layer profile.

The blocks are found in the profile: the longest run of layers whose bytes repeat with some period.
What lies before goes with the first stage, what lies behind with the last. Algorithm 1
(``sweep``) then tries every data-parallel and pipeline degree, every profiled microbatch and
recomputation; the plan is the fastest configuration whose stages fit the memory.

Every stage holds the same number of blocks and is replicated alike, so a configuration is four
numbers and a switch: data-parallel size d, pipeline stages p, microbatch size b, recomputation,
and the gradient accumulation m = B / (d b) that follows. What it costs comes as data: the closed
forms of 3.3.3, or measurements of whole configurations.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

from ..planning.costs.pipeline import shared_level, slowest_links
from ..planning.schedules.registry import generate
from ..schema import files
from ..schema.errors import InfeasibleError, ProblemError
from ..schema.options import option, told
from ..schema.pipeline import PipelineLayer, PipelineProblem
from ..schema.plan import Plan
from ..schema.run import RunRecord
from ..solvers.methods import METHODS
from ..solvers.pipeline.assemble import ORDERED, finish
from ..solvers.pipeline.cuts import cuts_of
from ..solvers.pipeline.placements import bandwidths_of
from ..solvers.pipeline.prediction import predicted
from ..solvers.pipeline.stage_costs import StageCosts
from ..solvers.pipeline.uniform import (
    Cut,
    PipelineLayout,
    PipelinePlace,
    ScheduledLayout,
    ShapeOption,
)


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


def fastest(problem: ParallelPipelineProblem) -> Row:
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


@dataclass(frozen=True, slots=True)
class Repetition:
    """``num_blocks`` blocks of ``period`` layers, behind the first ``start`` layers."""

    start: int
    period: int
    num_blocks: int

    def ends(self, num_stages: int, num_layers: int) -> tuple[int, ...]:
        """How many layers lie before each cut, stages of equally many blocks."""
        each = self.num_blocks // num_stages * self.period
        inner = (self.start + stage * each for stage in range(1, num_stages))
        return (0, *inner, num_layers)


def repetition(layers: tuple[PipelineLayer, ...]) -> Repetition:
    """The run of repeated layers that covers most of a model; of equals the shortest period.

    Layers are alike when their activations and weights take as many bytes. O(layers^2).

    Raises:
        ProblemError: Nothing repeats.
    """
    kinds = [(layer.activation_bytes, layer.weight_bytes) for layer in layers]
    best = Repetition(0, len(layers), 1)
    covered = 0
    for period in range(1, len(layers) // 2 + 1):
        run = 0
        for end in range(period, len(layers)):
            run = run + 1 if kinds[end] == kinds[end - period] else 0
            blocks = run // period + 1
            if blocks > 1 and blocks * period > covered:
                covered = blocks * period
                best = Repetition(end + 1 - run - period, period, blocks)
    if best.num_blocks < 2:
        raise ProblemError(
            "the model's layers do not repeat",
            hint=f"leave {option('repetitive')} out: the partition solver takes any layers",
        )
    return best


class Repetitive:
    """One model at several microbatch sizes, its blocks, and its configurations as plans.

    Args:
        problems: By microbatch size: a double-buffered schedule, one device type, flat ring costs.

    Raises:
        ProblemError: Another schedule, several device types, or layers that do not repeat.
    """

    def __init__(self, problems: Mapping[int, PipelineProblem]) -> None:
        self.problems = dict(problems)
        self.any = next(iter(self.problems.values()))
        if not self.any.traits.is_double_buffered:
            raise ProblemError(
                f"the planner of repetitive models is for schedule 2bw, not {self.any.schedule}",
                hint=told("add {schedule=2bw}"),
            )
        if len(self.any.pools) > 1:
            raise ProblemError(
                "the planner of repetitive models takes one device type",
                hint=f"leave {option('repetitive')} out: the partition solver takes several",
            )
        self.repetition = repetition(self.any.layers)
        self._options: dict[Configuration, ShapeOption] = {}

    @cached_property
    def _costs(self) -> dict[tuple[int, bool], StageCosts]:
        return {
            (size, recompute): StageCosts(
                problem, cuts_of(problem, every=True), bandwidths_of(problem), recompute=recompute
            )
            for size, problem in self.problems.items()
            for recompute in (False, True)
        }

    def option(self, configuration: Configuration) -> tuple[ShapeOption, Cut] | None:
        """A configuration's stages; None where p does not divide the blocks."""
        stages, size = configuration.pipeline_parallel_size, configuration.microbatch_size
        if self.repetition.num_blocks % stages:
            return None
        problem = self.problems[size]
        costs = self._costs[size, configuration.recompute]
        if configuration not in self._options:
            replicas = configuration.data_parallel_size
            places = tuple(
                PipelinePlace.run(0, stage * replicas, replicas) for stage in range(stages)
            )
            held = tuple(
                costs.stashed(replicas, (stages - stage) * replicas) for stage in range(stages)
            )
            schedule = generate(
                problem.schedule, pipeline_parallel_size=stages, num_microbatches=stages * replicas,
                replicas=[replicas] * stages,
            )  # fmt: skip
            layout = PipelineLayout(replicas, places)
            shape = ScheduledLayout(layout, 1, schedule, tuple(range(stages)), held)
            self._options[configuration] = ShapeOption(problem, costs, shape)
        number = {inside: index for index, inside in enumerate(costs.cuts.layer_sets)}
        ends = self.repetition.ends(stages, len(problem.layers))
        return self._options[configuration], tuple(number[(1 << end) - 1] for end in ends)

    def closed_form(self) -> ClosedForm:
        """The closed forms of 3.3.3, blocks being equal shares of the whole model."""
        levels = self.any.pools[0].levels
        blocks, size = self.repetition.num_blocks, self.any.microbatch_size
        cuts = self._costs[size, False].cuts
        first = self.repetition.ends(blocks, len(self.any.layers))[1]
        number = cuts.layer_sets.index((1 << first) - 1)
        return ClosedForm(
            num_blocks=blocks,
            weight_bytes=sum(layer.weight_bytes for layer in self.any.layers),
            block_seconds={
                size: (
                    sum(problem.pools[0].forward_seconds) + sum(problem.pools[0].backward_seconds)
                )
                / blocks
                for size, problem in self.problems.items()
            },
            activation_bytes_per_sample=sum(layer.kept_bytes for layer in self.any.layers) / size,
            input_bytes_per_sample=float(cuts.crossing_bytes[number]) / size,
            devices_per_server=levels[0].num_components,
            fast_bytes_per_second=levels[0].bytes_per_second,
            slow_bytes_per_second=levels[-1].bytes_per_second,
        )

    def question(self, cost_model: CostModel | None = None) -> ParallelPipelineProblem:
        """Algorithm 1's problem; by default with the profiled layers' own costs."""
        memory = self.any.pools[0].memory_bytes
        return ParallelPipelineProblem(
            num_devices=self.any.num_devices,
            global_batch_size=self.any.global_batch_size,
            memory_bytes=float("inf") if memory is None else float(memory),
            microbatch_sizes=tuple(sorted(self.problems)),
            cost_model=cost_model or Profiled(self),
            device_type=self.any.pools[0].device_type,
        )


@dataclass(frozen=True, slots=True)
class Profiled:
    """THROUGHPUT(.) and MEMORY(.) from every layer's own times and bytes, at ring costs.

    What the partition solver minimises and ``check`` recounts: uneven first and last stages,
    optimizer state and the weights of every layer are in it.
    """

    model: Repetitive

    def estimate(self, configuration: Configuration, num_microbatches: int) -> SweepEstimate | None:
        """Time and memory; None where p does not divide the blocks."""
        found = self.model.option(configuration)
        if found is None:
            return None
        option, cut = found
        per_input, pool = option.slowest(cut), option.problem.pools[0]
        return SweepEstimate(
            microbatch_seconds=per_input * configuration.data_parallel_size,
            memory_bytes=max(stage.memory_bytes or 0 for stage in option.stages(cut))
            + (pool.workspace_bytes if pool.base_memory_bytes is None else 0),
        )


def solve(model: Repetitive, cost_model: CostModel | None = None) -> tuple[Plan, list[Row]]:
    """The fastest configuration that fits, as a plan; and all rows, fastest first.

    Exhaustive over configurations: every device is used, every stage has as many blocks. With
    the profiled layers' own costs the plan is the best of those; with another cost model it is
    the one that this model ranks first.

    Raises:
        InfeasibleError: Nothing divides, or nothing fits; says by how many bytes.
    """
    question = model.question(cost_model)
    rows = sorted(sweep(question), key=lambda row: -row.samples_per_second)
    for row in rows:
        found = model.option(row.configuration)
        if found is not None and row.fits and found[0].fits(found[1]):
            bound = None if cost_model is not None else _least_per_sample(model, rows)
            return _plan(*found, least_per_sample=bound, num_rows=len(rows)), rows
    fastest(question)  # says how much is lacking
    raise InfeasibleError(
        "no configuration that the cost model accepts fits the memory once optimizer state is "
        "counted",
        hint=f"use more devices, smaller microbatches, or {option('cost_model')} profiled",
    )


def _least_per_sample(model: Repetitive, rows: list[Row]) -> float:
    """A lower bound on seconds per sample of all configurations, wherever their stages are."""
    least = float("inf")
    for row in rows:
        found = model.option(row.configuration)
        if found is not None and row.fits and found[0].fits(found[1]):
            seconds = _least_slowest(*found)
            least = min(least, seconds / row.configuration.microbatch_size)
    return least


def _least_slowest(option: ShapeOption, cut: Cut) -> float:
    """A bound of ``ShapeOption.slowest`` on any devices: links as fast as so many can have."""
    spans, links, replicas = option.spans, option.links, option.shape.layout.num_replicas
    levels = option.problem.pools[0].levels

    def fastest(num_devices: int) -> float:
        """Bytes per second among so many devices in the smallest component that holds them."""
        level = shared_level(levels, 0, num_devices - 1)
        return slowest_links(levels)[level - 1] if level else float("inf")

    option.spans = [fastest(replicas)] * len(spans)
    option.links = [fastest(2 * replicas)] * len(links)
    found = option.slowest(cut)
    option.spans, option.links = spans, links
    return found


def _plan(option: ShapeOption, cut: Cut, *, least_per_sample: float | None, num_rows: int) -> Plan:
    """A configuration as a plan; ``least_per_sample`` bounds all, None where nothing does."""
    seconds, is_own = option.slowest(cut), least_per_sample is not None
    bound = seconds
    if least_per_sample is not None:
        bound = min(seconds, least_per_sample * option.problem.microbatch_size)
    is_open = bound < seconds * (1 - 1e-9)
    plan = finish(
        option.problem,
        option.stages(cut),
        recompute=option.costs.recompute,
        objective=seconds,
        bound=bound,
        step=seconds * option.problem.num_microbatches,
        method=f"algorithm 1 of thesis 3.3 over {num_rows} configurations, "
        + ("ring prices of the profiled layers" if is_own else "ranked by the cost model given")
        + (ORDERED if is_open else ""),
    )
    plan = predicted(option.problem, plan)
    if is_own:
        return plan
    # Another model's choice is no optimum of these costs, and has no bound in them.
    proof = replace(plan.proof, termination="feasible", lower_bound=None, gap=None)
    return replace(plan, proof=proof)


def planned(
    problems: Mapping[int, PipelineProblem], *, cost_model: str, runs: Path | None = None
) -> Plan:
    """Return the plan of a cost model by name; its provenance lists all configurations.

    Raises:
        ProblemError: As of ``Repetitive``, or there are no runs to learn from.
        InfeasibleError: No configuration fits.
    """
    model = Repetitive(problems)
    chosen: CostModel | None = None
    if cost_model == "closed-form":
        chosen = model.closed_form()
    elif cost_model == "measured":
        chosen = _measured(runs, model.any.model)
    plan, rows = solve(model, chosen)
    configurations = [
        {
            **asdict(row.configuration),
            "accumulation": row.num_microbatches,
            "samples_per_second": row.samples_per_second,
            "memory_bytes": row.memory_bytes,
            "fits": row.fits,
        }
        for row in rows
    ]
    return replace(plan, provenance={"cost_model": cost_model, "configurations": configurations})


def _measured(folder: Path | None, model: str) -> SweptRuns:
    """Read the configurations that ran under 2BW plans of this model from their run records."""
    if folder is None:
        raise ProblemError(
            f"{option('cost_model', 'measured')} needs runs to learn from",
            hint=f"add {option('runs', 'DIR')}",
        )
    estimates: dict[Configuration, SweepEstimate] = {}
    paths = sorted(folder.rglob("run.json")) if folder.is_dir() else [folder]
    for path in paths:
        record = files.read_any(path)
        if isinstance(record, RunRecord) and record.plan.stage_cost is not None:
            found = _configuration(record, model)
            if found is not None:
                estimates[found[0]] = found[1]
    if not estimates:
        raise ProblemError(
            f"{folder} holds no finished run of {model} under a 2bw plan with equal stages",
            hint="launch some configurations first, or use another cost model",
        )
    return SweptRuns(estimates=estimates)


def _configuration(record: RunRecord, model: str) -> tuple[Configuration, SweepEstimate] | None:
    plan = record.plan
    replicas = {stage.num_replicas for stage in plan.stages}
    seconds = record.measured_step_seconds
    is_alike = plan.traits.is_double_buffered and plan.model == model and len(replicas) == 1
    if not is_alike or seconds is None or record.status != "done":
        return None
    size = replicas.pop()
    configuration = Configuration(
        data_parallel_size=size,
        pipeline_parallel_size=len(plan.stages),
        microbatch_size=plan.microbatch_size,
        recompute=plan.recomputes,
    )
    peaks = [device.peak_memory_bytes or 0 for device in record.devices]
    return configuration, SweepEstimate(
        microbatch_seconds=seconds / (plan.num_microbatches // size),
        memory_bytes=float(max(peaks, default=0)),
    )


METHODS.add("pipedream-2bw-repetitive", planned, __name__)
