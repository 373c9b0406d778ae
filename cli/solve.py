"""``hetflow solve``: from profiles and a pool to a proved plan."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from ..schema.schedule_traits import DEFAULT_SCHEDULE, is_planned, planned_schedules
from .common import ForceFlag, JsonFlag, asked_pool, emit_file, note
from .names import one_of

Method = Literal["exact", "cbc", "highs"]


def solve(
    profiles: Annotated[Path, typer.Option(help="Folder of profiles (hetflow profile -o).")],
    batch_size: Annotated[int, typer.Option(min=1, help="Global batch size B.")],
    gpus: Annotated[
        str | None, typer.Option(help="The pool: 2xV100,8xP100, V100:2:16GB, 4x(4xV100).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="A cluster file instead of --gpus.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles hold several.")
    ] = None,
    strategy: Annotated[
        Literal["auto", "split", "pipeline"],
        typer.Option(help="Kind of plan; auto takes the faster where profiles hold layers."),
    ] = "auto",
    objective: Annotated[
        Literal["step_seconds", "waste", "bottleneck"],
        typer.Option(
            help="step_seconds: a split's step (VirtualFlow 5.1), a flushing pipeline's as its "
            "timer has it; waste: splits (EasyScale 3.4); bottleneck: a pipeline's slowest stage "
            "(thesis 2.4.1), which schedules without flushes always take."
        ),
    ] = "step_seconds",
    virtual_nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Use N equal virtual nodes of B/N samples (maxP for waste)."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="With --objective waste: keep the K best configurations.")
    ] = 1,
    interpolate: Annotated[
        bool,
        typer.Option("--interpolate", help="Allow sizes between profiled ones; marked as such."),
    ] = False,
    method: Annotated[
        Method, typer.Option(help="The fast exact method, or the MILP through CBC or HiGHS.")
    ] = "exact",
    fastest: Annotated[
        bool,
        typer.Option(
            "--fastest",
            help="Take the fastest plan on paper, also where the measurements cannot tell a "
            "simpler one from it.",
        ),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Wall seconds for a pipeline's searches or the MILP (--method); exit 4 if they "
            "end with a plan that is not proved within --gap.",
        ),
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Stop at a pipeline proved within this fraction of the best; exit 4 if none is "
            "[default: 0 with --time-limit].",
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            callback=one_of(
                lambda: ("auto", *planned_schedules()),
                lambda name: name == "auto" or is_planned(name),
            ),
            help="Pipeline: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, pipedream, "
            "pipedream-vertical-sync, 2bw or a plug-in's; auto takes the fastest of those that "
            "flush.",
        ),
    ] = DEFAULT_SCHEDULE,
    chunks_per_device: Annotated[
        int | None,
        typer.Option(min=2, help="Pipeline: stages a device with interleaved; else 2 to 4."),
    ] = None,
    repetitive: Annotated[
        bool,
        typer.Option(
            "--repetitive",
            help="Pipeline, --schedule 2bw: equal stages of a model whose layers repeat; chooses "
            "degrees, microbatch and recomputation (thesis 3.3).",
        ),
    ] = False,
    cost_model: Annotated[
        Literal["profiled", "closed-form", "measured"],
        typer.Option(
            help="With --repetitive: every layer's profile, the closed forms of thesis 3.3.3, or "
            "measured runs (--runs)."
        ),
    ] = "profiled",
    runs: Annotated[
        Path | None,
        typer.Option(
            help="Folder of runs (launch -o): those of the model correct the profiles before "
            "solving; with --cost-model measured, they are the costs."
        ),
    ] = None,
    stage_cost: Annotated[
        Literal["ring", "thesis", "published"],
        typer.Option(help="Pipeline: how a stage is priced (docs/pipeline.md)."),
    ] = "ring",
    num_stages: Annotated[
        int | None, typer.Option(min=1, help="Pipeline: exactly so many stages.")
    ] = None,
    replication: Annotated[
        bool, typer.Option(help="Pipeline: whether stages may have replicas.")
    ] = True,
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Pipeline: samples of a microbatch [default: the fastest profiled]."
        ),
    ] = None,
    link_bytes_per_second: Annotated[
        float | None, typer.Option(min=1.0, help="Pipeline: links that the pool does not state.")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="The optimizer that will train: sgd, sgd-momentum, adam, adamw, ... "
            "[default: the profiles']."
        ),
    ] = None,
    state_bytes_per_weight_byte: Annotated[
        float | None,
        typer.Option(min=0.0, help="Instead: what it keeps for each byte of weights; Adam's is 2."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Split a global batch, or cut a model into stages, over unlike devices, with proof.

    The plan goes to stdout as JSON, or to -o FILE; a person at a terminal sees a table too.

    \b
    hetflow solve --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """
    from .. import solve as find
    from ..planning.limits import Limits
    from ..reports.tables import table_of
    from ..schema.files import check_writable
    from ..schema.optimizer import asked_optimizer

    if output is not None:
        check_writable(output, force=force)
    plan = find(
        profiles,
        asked_pool(gpus, cluster),
        batch_size=batch_size,
        model=model,
        strategy=strategy,
        objective=objective,
        optimizer=asked_optimizer(optimizer, state_bytes_per_weight_byte),
        fastest=fastest,
        time_limit_seconds=time_limit,
        gap=gap,
        runs=runs,
        virtual_nodes=virtual_nodes,
        interpolate=interpolate,
        method=method,
        top=top,
        schedule=schedule,
        microbatch_size=microbatch_size,
        num_stages=num_stages,
        replication=replication,
        num_model_chunks=chunks_per_device,
        link_bytes_per_second=link_bytes_per_second,
        stage_cost=stage_cost,
        repetitive=repetitive,
        cost_model=cost_model,
    )
    emit_file(plan, output, force=force, json=json)
    note(table_of(plan))
    if output is not None:
        note(f"plan written to {output}; next: hetflow launch {output} SCRIPT")
    if Limits(time_limit, gap).is_missed(plan):
        raise typer.Exit(4)
