"""``hetflow solve``: from profiles and a pool to a proved plan."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from ..schema.schedule_traits import DEFAULT_SCHEDULE, is_planned, planned_schedules
from . import completing
from .common import (
    ForceFlag,
    JsonFlag,
    asked_pool,
    asked_reserve,
    emit_file,
    if_given,
    note,
    price_text,
    shows_progress,
)
from .names import one_of

Method = Literal["exact", "cbc", "highs"]
SPLIT = "Options of splits"
PIPELINE = "Options of pipelines"
PARALLEL = "Options of pipeline, tensor and data parallelism together"
REPETITIVE = "Options of pipelines whose layers repeat"


def solve(
    profiles: Annotated[Path, typer.Option(help="Folder of profiles (hetflow profile -o).")],
    batch_size: Annotated[int, typer.Option(min=1, help="Global batch size B.")],
    gpus: Annotated[
        str | None,
        typer.Option(
            autocompletion=completing.pools,
            help="The pool: 2xV100,8xP100, V100:2:16GB, 4x(4xV100).",
        ),
    ] = None,
    cluster: Annotated[Path | None, typer.Option(help="A file, or `nvidia-smi -L`.")] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles hold several.")
    ] = None,
    strategy: Annotated[
        Literal["auto", "split", "pipeline", "parallel"],
        typer.Option(
            help="Kind of plan; auto takes the fastest of the three where profiles hold layers."
        ),
    ] = "auto",
    objective: Annotated[
        Literal["step_seconds", "waste", "bottleneck"],
        typer.Option(
            help="step_seconds: the predicted time of a whole step; waste: the device speed that a "
            "split leaves unused (EasyScale 3.4); bottleneck: a pipeline's slowest stage (thesis "
            "2.4.1), which schedules without flushes always take."
        ),
    ] = "step_seconds",
    virtual_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Use N equal virtual nodes of B/N samples (maxP for waste).",
            rich_help_panel=SPLIT,
        ),
    ] = None,
    top: Annotated[
        int,
        typer.Option(
            min=1,
            help="With --objective waste: keep the K best configurations; with --strategy "
            "parallel: show up to K points of time against devices and memory.",
            rich_help_panel=SPLIT,
        ),
    ] = 1,
    interpolate: Annotated[
        bool,
        typer.Option(
            "--interpolate",
            help="Allow sizes between profiled ones; marked as such.",
            rich_help_panel=SPLIT,
        ),
    ] = False,
    method: Annotated[
        Method,
        typer.Option(
            help="The fast exact method, or the MILP through CBC or HiGHS.", rich_help_panel=SPLIT
        ),
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
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    schedule: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            autocompletion=completing.schedules,
            callback=one_of(
                lambda: ("auto", *planned_schedules()),
                lambda name: name == "auto" or is_planned(name),
            ),
            help="gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v, pipedream, "
            "pipedream-vertical-sync, 2bw or a plug-in's; auto takes the fastest of those that "
            "flush.",
            rich_help_panel=PIPELINE,
        ),
    ] = DEFAULT_SCHEDULE,
    chunks_per_device: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Stages of each device, for interleaved [2 to 4]; parallel plans also try 1 "
            "(1F1B).",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    repetitive: Annotated[
        bool,
        typer.Option(
            "--repetitive",
            help="With --schedule 2bw: equal stages of a model whose layers repeat; chooses "
            "degrees, microbatch and recomputation (thesis 3.3).",
            rich_help_panel=REPETITIVE,
        ),
    ] = False,
    cost_model: Annotated[
        Literal["profiled", "closed-form", "measured"],
        typer.Option(
            help="With --repetitive: every layer's profile, the closed forms of thesis 3.3.3, or "
            "measured runs (--runs).",
            rich_help_panel=REPETITIVE,
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
        typer.Option(help="How a stage is priced (docs/pipeline.md).", rich_help_panel=PIPELINE),
    ] = "ring",
    num_stages: Annotated[
        int | None, typer.Option(min=1, help="Exactly so many stages.", rich_help_panel=PIPELINE)
    ] = None,
    replication: Annotated[
        bool, typer.Option(help="Whether stages may have replicas.", rich_help_panel=PIPELINE)
    ] = True,
    microbatch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples of a microbatch [default: the fastest profiled].",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    link_bytes_per_second: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Bandwidth of links that the pool does not state.",
            rich_help_panel=PIPELINE,
        ),
    ] = None,
    recompute: Annotated[
        bool,
        typer.Option(
            help="Whether stages may recompute activations to save memory: those of attention's "
            "cores, or all.",
            rich_help_panel=PARALLEL,
        ),
    ] = True,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            help="Whether the devices of a tensor-parallel group compute and keep norms and "
            "residuals for a part of the tokens each [default: only if no plan fits otherwise].",
            rich_help_panel=PARALLEL,
            show_default=False,
        ),
    ] = None,
    shard_optimizer: Annotated[
        bool,
        typer.Option(
            "--shard-optimizer",
            help="Each replica of a stage keeps and updates only a share of the optimizer's state "
            "(ZeRO-1): less memory, and the updated parameters are sent once more.",
            rich_help_panel=PARALLEL,
        ),
    ] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="The optimizer that will train: sgd, sgd-momentum, adam, adamw, ... "
            "[default: the profiles']."
        ),
    ] = None,
    state_bytes_per_weight_byte: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Instead: bytes that it keeps for each byte of weights; Adam: 2."
        ),
    ] = None,
    memory_reserve: Annotated[
        str | None,
        typer.Option(
            help="Memory of each device that the plan leaves free, such as 2GiB, besides what the "
            "profiles measured beside tensors. The plan keeps it, and check takes it from there."
        ),
    ] = None,
    market: Annotated[
        list[Path] | None,
        typer.Option(
            help="Prices of the pool's devices (hetflow.market/1, may be repeated): the plan says "
            "its dollars; the time is what is minimised all the same."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="When, as 2020-03-07T00:00:00Z; else the market's last prices."),
    ] = None,
    spot: Annotated[
        bool | None,
        typer.Option(
            "--spot/--no-spot",
            help="Count only spot prices, or only those on demand [default: the cheapest].",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Split a global batch, or cut a model into stages, over unlike devices, with proof.

    The plan goes to stdout as JSON, or to -o FILE; a person at a terminal sees a table too.
    Kinds of plans are compared where profiles hold layers; `hetflow solve split` and `hetflow solve
    pipeline` take one kind, and only its options.

    \b
    hetflow solve --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """
    from .. import solve as find
    from ..planning.limits import Limits
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
        optimizer=asked_optimizer(optimizer, state_bytes_per_weight_byte),
        memory_reserve_bytes=asked_reserve(memory_reserve) or 0,
        fastest=fastest,
        time_limit_seconds=time_limit,
        gap=gap,
        runs=runs,
        virtual_nodes=virtual_nodes,
        interpolate=interpolate,
        microbatch_size=microbatch_size,
        num_stages=num_stages,
        num_model_chunks=chunks_per_device,
        link_bytes_per_second=link_bytes_per_second,
        repetitive=repetitive,
        sequence_parallel=sequence_parallel,
        shard_optimizer=shard_optimizer,
        market=market or None,
        at=at,
        spot=spot,
        **if_given(
            objective=objective,
            method=method,
            top=top,
            schedule=schedule,
            replication=replication,
            stage_cost=stage_cost,
            cost_model=cost_model,
            recompute=recompute,
        ),
    )
    emit_file(plan, output, force=force, json=json)
    if shows_progress():
        from ..reports.tables import table_of

        note(table_of(plan))
        for name, price in (plan.provenance or {}).get("prices", {}).items():
            note(f"{name}: {price_text(price['dollars_per_hour'], price['machine'])}")
    if output is not None:
        note(f"plan written to {output}; next: hetflow launch {output} SCRIPT")
    if Limits(time_limit, gap).is_missed(plan):
        raise typer.Exit(4)


def _of_kind(
    kind: str, words: str, others: set[str], objectives: object, shared: tuple[str, ...] = ()
) -> Callable[..., None]:
    """``solve`` for one kind of plan: the same options without those of ``others``.

    Options named in ``shared`` stay, whose they may be; without ``objectives`` there is no choice.
    """

    def command(**values: Any) -> None:
        solve(strategy=kind, **values)  # type: ignore[arg-type]

    kept = []
    for parameter in inspect.signature(solve).parameters.values():
        panels = [getattr(o, "rich_help_panel", None) for o in parameter.annotation.__metadata__]
        if parameter.name == "strategy" or (others & set(panels) and parameter.name not in shared):
            continue
        if parameter.name == "objective":
            if objectives is None:
                continue
            parameter = parameter.replace(annotation=objectives)
        kept.append(parameter)
    command.__name__ = f"solve_{kind}"
    command.__doc__ = words
    command.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
    return command


solve_split = _of_kind(
    "split",
    """Split a global batch over unlike devices, with proof.

    Each device takes so many virtual nodes of one profiled size (VirtualFlow 5.1).

    \b
    hetflow solve split --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    """,
    {PIPELINE, REPETITIVE, PARALLEL},
    Annotated[
        Literal["step_seconds", "waste"],
        typer.Option(help="The step (VirtualFlow 5.1), or the waste (EasyScale 3.4)."),
    ],
)
solve_pipeline = _of_kind(
    "pipeline",
    """Cut a model into stages over unlike devices, with proof.

    Profiles must hold layers (hetflow profile --layers).

    \b
    hetflow solve pipeline --profiles profiles --gpus 4xV100 --batch-size 256 --schedule auto
    """,
    {SPLIT, PARALLEL},
    Annotated[
        Literal["step_seconds", "bottleneck"],
        typer.Option(
            help="A flushing pipeline's step as its timer has it, or the slowest stage (thesis "
            "2.4.1), which schedules without flushes always take."
        ),
    ],
)
solve_parallel = _of_kind(
    "parallel",
    """Plan pipeline, tensor and data parallelism together over unlike devices, with proof.

    Each stage has its layers, tensor-parallel degree, recomputation and replicas, which may be of
    two device types. Profiles must hold layers; degrees above 1 need tensor_layers.

    \b
    hetflow solve parallel --profiles profiles --gpus 4xA100,8xV100 --batch-size 256
    """,
    {SPLIT, PIPELINE, REPETITIVE},
    None,
    ("top", "gap", "link_bytes_per_second", "microbatch_size", "chunks_per_device"),
)
