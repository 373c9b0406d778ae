"""Run records: predicted and measured times of one launch, its events and its result."""

from typing import Any, Literal

from .frames import Rows, Shown, fields_table
from .plan import Plan
from .records import Bytes, Count, Index, Name, Seconds, record


@record
class MeasuredTerm:
    """The measured time of a part of a step: the median over full steps after the warm-up.

    ``interval_seconds`` is half the width of the median's 95 % confidence interval; None if there
    were too few steps.
    """

    seconds: Seconds
    interval_seconds: Seconds | None = None


@record
class MeasuredTerms:
    """The measured values of the terms of a worker's predicted step.

    ``virtual_node`` is the time that one more virtual node adds to the step, including the wait for
    its samples (``step_seconds`` of a profile's ``batch_curve``). ``load`` is that wait. ``fixed``
    is the rest: ``step = virtual nodes * virtual_node + fixed + sync + update``. These three are
    None for pipelines, and for steps with one virtual node, whose time cannot be separated from the
    fixed cost.
    """

    num_steps: Count
    step: MeasuredTerm
    sync: MeasuredTerm
    update: MeasuredTerm
    virtual_node: MeasuredTerm | None = None
    load: MeasuredTerm | None = None
    fixed: MeasuredTerm | None = None


@record
class StageRun:
    """A pipeline's stage on one worker: the times of one microbatch's passes, loading included."""

    stage: Index
    forward: MeasuredTerm
    backward: MeasuredTerm


@record
class DeviceRun:
    """One worker's measurements. Medians over steps; the first steps are dropped as warm-up.

    ``pass_seconds`` is one forward + backward pass of a full virtual node, and ``compute_seconds``
    all passes of a step. ``sync_seconds`` is the exposed wait for other workers,
    ``update_seconds`` the time from the gradient to the next batch. ``terms`` and, for pipelines,
    ``stages`` are the measured terms of the prediction. ``num_host_devices`` is the number of
    workers on its host, ``reference_seconds`` a fixed product of matrices after the last step, as
    in the profile. Older files have none of these four.
    """

    rank: Index
    device_type: Name
    host: str
    emulated: bool = False
    num_samples: Index
    num_steps: Index
    predicted_compute_seconds: Seconds | None
    pass_seconds: Seconds | None
    compute_seconds: Seconds | None
    sync_seconds: Seconds | None
    update_seconds: Seconds | None
    step_seconds: Seconds | None
    step_seconds_spread: Seconds | None
    peak_memory_bytes: Bytes | None
    num_host_devices: Count | None = None
    terms: MeasuredTerms | None = None
    stages: tuple[StageRun, ...] = ()
    reference_seconds: Seconds | None = None


@record
class TermComparison:
    """A term of the step, predicted and measured.

    Args:
        term: Name of the term, such as ``virtual nodes`` or ``sync``.
        device_type: The type whose term it is; None for a term of the whole step.
        predicted_seconds: The plan's value; None if the plan does not state the term.
        times: How often a step has the term in sequence: a stage's pass once per microbatch.
        is_off: Whether prediction and measurement differ by more than 5 % of the measured step.
    """

    term: str
    device_type: Name | None = None
    predicted_seconds: Seconds | None = None
    measured_seconds: Seconds
    times: Count = 1
    is_off: bool = False


@record
class RunEvent:
    """A resize or a failure, with its seconds since the start."""

    kind: Literal["resize", "failure", "stop"]
    at_seconds: Seconds
    detail: str


GenerationKind = Literal["start", "resize", "failure", "replace", "restart"]


@record
class GenerationWorker:
    """A worker of one generation, and the virtual nodes that it runs."""

    name: Name
    device_type: Name
    virtual_nodes: tuple[Index, ...]


@record
class Generation:
    """A mapping of virtual nodes to workers, and what caused it.

    ``pause_seconds`` is how long training paused until all workers had connected again: for a
    resize since the end of a step, for a failure since its detection.
    """

    number: Index
    kind: GenerationKind
    at_seconds: Seconds
    detail: str
    workers: tuple[GenerationWorker, ...]
    joined: tuple[Name, ...] = ()
    left: tuple[Name, ...] = ()
    pause_seconds: Seconds | None = None


@record
class RunRecord(Shown):
    """The record of a launch: its plan, predicted and measured times, and a digest of its result.

    ``parameters_digest`` is the SHA-256 of the final parameters and buffers, by name.
    ``step_seconds_error`` is (predicted - measured) / measured. ``terms`` compares the terms of the
    prediction with measurements; empty in older files, and if workers changed during the run.

    Example:
        >>> import hetflow
        >>> record = hetflow.launch("plan.json", "train.py")
        >>> record.status, record.exit_code
        ('done', 0)
    """

    schema: Literal["hetflow.run/1"] = "hetflow.run/1"
    plan: Plan
    status: Literal["done", "failed", "interrupted"]
    exit_code: int
    world_size: Count
    wall_seconds: Seconds
    num_steps: Index
    predicted_step_seconds: Seconds | None
    measured_step_seconds: Seconds | None
    step_seconds_error: float | None
    final_loss: float | None
    parameters_digest: str | None
    devices: tuple[DeviceRun, ...]
    events: tuple[RunEvent, ...] = ()
    generations: tuple[Generation, ...] = ()
    terms: tuple[TermComparison, ...] = ()
    provenance: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        """The model, how the run ended, and how long a step took."""
        took = self.measured_step_seconds
        measured = "" if took is None else f", {took:.4g} s a step"
        return f"{self.plan.model}: {self.status}, {self.num_steps} steps{measured}"

    def table(self) -> tuple[list[str], Rows]:
        """Return a table with a row for each device, by rank, without terms and stages."""
        return fields_table(self.devices, DeviceRun, but=["terms", "stages"])
