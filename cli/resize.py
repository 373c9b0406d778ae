"""``hetflow resize``: change the devices of a running launch."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import JsonFlag, emit, emit_json, note

if TYPE_CHECKING:
    from ..schema.launch import LaunchConfig
    from ..schema.pipeline import PipelinePlan
    from ..schema.plan import SplitPlan


def resize(
    run: Annotated[Path, typer.Argument(help="The folder of a running launch, or its name.")],
    gpus: Annotated[
        str | None, typer.Option(help="All devices from now on: 2xV100,8xP100.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan of the same virtual nodes or microbatches, instead of --gpus."),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder of profiles: solve for the best mapping on --gpus."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is done, and say what happened.")
    ] = True,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for the answer.")] = 600,
    json: JsonFlag = False,
) -> None:
    """Change a running job's devices; it trains on, with the same result.

    New workers start beside the running job. When they are ready, all go over between two steps:
    those who stay keep their process, and joining workers get the state directly from one of
    them. A pipeline's workers all change: they hand over through checkpoint parts.

    \b
    hetflow resize hetflow-runs/m-20250101-120000 --gpus 4xV100
    hetflow resize runs/a --plan smaller.json
    """
    from ..launcher import inbox
    from ..launcher.request import RUNS_FOLDER
    from ..schema.files import to_plain

    if not run.is_dir() and (Path(RUNS_FOLDER) / run).is_dir():
        run = Path(RUNS_FOLDER) / run
    config = _mapping(run, gpus, plan, profiles)
    request = inbox.ask(run, config, wants_answer=wait)
    if not wait:
        _say({"status": "asked"}, "asked; run.json lists it when it is done", json)
        return
    note("waiting for the joining workers and the end of a step")
    answer = inbox.wait_for(run, request, timeout)
    if answer.status != "done":
        from ..schema.errors import LaunchError

        sentence = answer.detail if answer.status == "refused" else f"not resized: {answer.detail}"
        code = 2 if answer.status == "refused" else 1
        if json:
            emit_json(to_plain(answer))
        raise LaunchError(sentence, hint=answer.hint, exit_code=code)
    pause = f"; training paused {answer.pause_seconds or 0.0:.3f} s"
    _say(to_plain(answer), f"{answer.detail}{pause}", json)


def _say(document: object, sentence: str, json: bool) -> None:
    if json:
        emit_json(document)
    else:
        emit(sentence)


def _mapping(
    run: Path, gpus: str | None, plan: Path | None, profiles: Path | None
) -> "LaunchConfig":
    """The launch's own virtual nodes on the devices asked for."""
    from ..launcher.inbox import current
    from ..launcher.mapping import renumbered, spread
    from ..runtime.lower import lower
    from ..schema import files
    from ..schema.errors import ProblemError
    from ..schema.plan import SplitPlan

    if (gpus is None) == (plan is None):
        raise ProblemError("give either --gpus or --plan", hint="for example --gpus 2xV100")
    now = current(run)
    if now.pipeline is not None:
        return _recut(run, now, gpus, plan, profiles)
    if plan is not None:
        return renumbered(now, lower(files.read(plan, SplitPlan), now.seed, now.determinism))
    from ..planning.judging import read_pool

    pool = read_pool(gpus, None)
    if profiles is not None:
        return renumbered(now, lower(_solved(now, profiles, gpus or ""), now.seed))
    types = [name for name, number in pool.num_devices.items() for _ in range(number)]
    return spread(now, types, _seconds_a_sample(now, run))


def _recut(
    run: Path, now: "LaunchConfig", gpus: str | None, plan: Path | None, profiles: Path | None
) -> "LaunchConfig":
    """Another pipeline plan of the same microbatches, given or solved for the devices."""
    from ..launcher.repartition import check_same_job
    from ..runtime.lower import lower
    from ..schema import files
    from ..schema.errors import ProblemError
    from ..schema.pipeline import PipelinePlan
    from ..schema.plan import SplitPlan

    found: SplitPlan | PipelinePlan
    if plan is not None:
        found = files.read(plan, PipelinePlan)
    elif profiles is None:
        raise ProblemError(
            "a pipeline is cut anew from the profiles of its layers",
            hint="add --profiles DIR, or give --plan FILE",
        )
    else:
        found = _cut_again(now, files.read(run / "plan.json", PipelinePlan), profiles, gpus or "")
    config = lower(found, now.seed, now.determinism)
    check_same_job(now, config)
    return config


def _cut_again(
    now: "LaunchConfig", before: "PipelinePlan", profiles: Path, gpus: str
) -> "SplitPlan | PipelinePlan":
    """The best cut for the same schedule, microbatches, links and optimizer, by the profiles."""
    from typing import get_args

    from ..launcher.mapping import nodes_of
    from ..planning.judging import read_model_profiles, read_pool
    from ..planning.request import PipelineFlags, Question, SplitFlags
    from ..planning.solve import answer
    from ..schema.errors import ProblemError
    from ..schema.pipeline import PlannedSchedule

    assert now.pipeline is not None
    schedule = next((s for s in get_args(PlannedSchedule) if s == now.pipeline.schedule), None)
    if schedule is None:
        raise ProblemError(
            f"{now.pipeline.schedule} is no schedule that `hetflow solve` plans",
            hint="give --plan FILE",
        )
    question = Question(
        profiles=read_model_profiles(profiles, now.model),
        pool=read_pool(gpus, None),
        pool_name=gpus,
        batch_size=now.global_batch_size,
        split=SplitFlags(),
        pipeline=PipelineFlags(
            schedule=schedule,
            microbatch_size=nodes_of(now)[0].batch_size,
            link_bytes_per_second=before.link_bytes_per_second,
        ),
        optimizer=before.optimizer,
    )
    return answer(question, "pipeline")


def _solved(now: "LaunchConfig", profiles: Path, gpus: str) -> "SplitPlan | PipelinePlan":
    """The best mapping of equal virtual nodes, by the profiles."""
    from ..launcher.mapping import nodes_of
    from ..planning.judging import read_model_profiles, read_pool
    from ..planning.request import PipelineFlags, Question, SplitFlags
    from ..planning.solve import answer
    from ..schema.errors import ProblemError

    nodes = nodes_of(now)
    if len({node.batch_size for node in nodes}) > 1:
        raise ProblemError(
            "the job's virtual nodes differ in size, so a new plan would change them",
            hint="leave --profiles out: they are spread in proportion",
        )
    question = Question(
        profiles=read_model_profiles(profiles, now.model),
        pool=read_pool(gpus, None),
        pool_name=gpus,
        batch_size=now.global_batch_size,
        split=SplitFlags(virtual_nodes=len(nodes), interpolate=True),
        pipeline=PipelineFlags(),
        optimizer=now.optimizer,
    )
    return answer(question, "split")


def _seconds_a_sample(now: "LaunchConfig", run: Path) -> dict[str, float]:
    """What the run's plan knows of the speed of each type."""
    from ..schema import files
    from ..schema.plan import SplitPlan

    found: dict[str, float] = {}
    sizes = Counter(node.batch_size for slot in now.workers for node in slot.virtual_nodes)
    for device in now.emulated:
        nearest = min(device.passes, key=lambda p: abs(p.batch_size - max(sizes)))
        found[device.device_type] = nearest.step_seconds / nearest.batch_size
    plan = files.read(run / "plan.json", SplitPlan)
    for group in plan.groups:
        if group.pass_seconds:
            found[group.device_type] = group.pass_seconds / group.virtual_node_batch_size
    return found
