"""Run: what happened in one launch, predicted beside measured."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from .frames import frame_of
from .parallel import ParallelPlan
from .pipeline import PipelinePlan
from .plan import SplitPlan
from .records import Bytes, Count, Index, Name, Seconds, record, register_keys

if TYPE_CHECKING:
    from pandas import DataFrame


@record
class MeasuredTerm:
    """A part of a step: its median over full steps after the warm-up.

    ``interval_seconds`` is half the width of the median's 95 % confidence interval; None where
    the steps were too few to tell.
    """

    seconds: Seconds
    interval_seconds: Seconds | None = None


@record
class StepTerms:
    """The terms that a worker's prediction is made of, as measured.

    ``virtual_node`` is what one more virtual node adds to the step, the wait for its samples
    included (``step_seconds`` of a profile's ``batch_curve``); ``load`` is that wait. ``fixed`` is
    the rest: ``step = virtual nodes * virtual_node + fixed + sync + update``. These three are None
    where a step has one virtual node, which cannot be told from the fixed cost, and for pipelines.
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
    """A pipeline's stage on one worker: its passes of one microbatch, loading included."""

    stage: Index
    forward: MeasuredTerm
    backward: MeasuredTerm


@record
class DeviceRun:
    """One worker's measurements. Medians over steps; the first steps are dropped as warm-up.

    ``pass_seconds`` is one forward + backward pass of a full virtual node;
    ``compute_seconds`` all passes of a step, ``sync_seconds`` the exposed wait for the others,
    ``update_seconds`` the time from the gradient to the next batch. ``terms`` and, for pipelines,
    ``stages`` are what a prediction is made of; ``num_host_devices`` is how many workers its host
    had. Older files have none of the three.
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
    terms: StepTerms | None = None
    stages: tuple[StageRun, ...] = ()


@record
class TermComparison:
    """A term of the step, as predicted and as measured.

    Args:
        term: What it is, such as ``virtual nodes`` or ``sync``.
        device_type: Whose; None for what the whole step has once.
        predicted_seconds: None where the plan does not tell it apart.
        times: How often a step has it, one after another: a stage's pass once a microbatch.
        is_off: Whether the two differ by more than 5 % of the measured step.
    """

    term: str
    device_type: Name | None = None
    predicted_seconds: Seconds | None = None
    measured_seconds: Seconds
    times: Count = 1
    is_off: bool = False


@record
class RunEvent:
    """A resize or a failure, with its time since the start."""

    kind: Literal["resize", "failure", "stop"]
    at_seconds: Seconds
    detail: str


GenerationKind = Literal["start", "resize", "failure", "replace", "restart"]


@record
class GenerationWorker:
    """A worker of one generation, and the virtual nodes it runs."""

    name: Name
    device_type: Name
    virtual_nodes: tuple[Index, ...]


@record
class Generation:
    """A mapping of the virtual nodes, and how it came about.

    ``pause_seconds`` is how long training stood still: for a resize from the end of a step until
    all workers have met again; for a failure from its detection until then.
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
class RunRecord:
    """The plan, what was predicted, what was measured, and proof of the result.

    ``parameters_digest`` is the SHA-256 of the final parameters and buffers, by name.
    ``step_seconds_error`` is (predicted - measured) / measured. ``terms`` puts what the prediction
    is made of beside what was measured; empty in older files and where workers changed.
    """

    schema: Literal["hetflow.run/1"] = "hetflow.run/1"
    plan: SplitPlan | PipelinePlan | ParallelPlan
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

    def to_frame(self) -> "DataFrame":
        """One row for each device, by rank: the keys of a device's run, without terms and stages.

        Raises:
            HetflowError: pandas is not installed.
        """
        columns = [f.name for f in fields(DeviceRun) if f.name not in ("terms", "stages")]
        rows = ({name: getattr(device, name) for name in columns} for device in self.devices)
        return frame_of(rows, columns)


register_keys(
    MeasuredTerm,
    StepTerms,
    StageRun,
    DeviceRun,
    TermComparison,
    RunEvent,
    GenerationWorker,
    Generation,
    RunRecord,
)
