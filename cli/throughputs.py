"""``hetflow throughputs``: what jobs reach on each device type, from profiles."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import InfeasibleError, ProblemError
from ..schema.spelling import whole_number
from .common import ForceFlag, JsonFlag, asked_reserve, emit_file, note, warn

if TYPE_CHECKING:
    from ..schema.jobs import MixThroughput, ModelThroughput
    from ..schema.profile import Profile


def throughputs(
    profiles: Annotated[Path, typer.Argument(help="Folder of profiles (hetflow profile -o).")],
    batch_size: Annotated[
        str,
        typer.Option(help="Samples of a job's step: one number, or resnet50=256,gpt=64 by model."),
    ],
    scale_factors: Annotated[
        str, typer.Option(help="Numbers of devices that jobs ask for, such as 1,2,4.")
    ] = "1",
    mixes: Annotated[
        bool, typer.Option("--mixes", help="Add jobs that hold several device types at once.")
    ] = False,
    memory_reserve: Annotated[
        str | None,
        typer.Option(help="Memory of each device to leave free, such as 2GiB, as for solve."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write them here, else to stdout.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Turn profiles into the throughputs that allocate and simulate need.

    A job keeps its batch whatever it runs on: a rate is one over the step that `hetflow solve`
    predicts for that batch on so many devices of the type.

    \b
    hetflow throughputs profiles --batch-size 256 --scale-factors 1,2,4 -o throughputs.json
    """
    from ..schema import files
    from ..schema.jobs import Throughputs

    if output is not None:
        files.check_writable(output, force=force)
    measured = files.read_profiles(profiles)
    models = sorted({profile.model for profile in measured})
    batches = _batches(batch_size, models)
    scales = _scales(scale_factors)
    reserve = asked_reserve(memory_reserve) or 0
    rates: list[ModelThroughput] = []
    mixed: list[MixThroughput] = []
    for model in models:
        own = [profile for profile in measured if profile.model == model]
        for scale in scales:
            alone, together = _rates(own, batches[model], scale, max(scales), reserve)
            rates.append(alone)
            mixed += together if mixes else ()
    table = Throughputs(
        models=tuple(rates),
        mixes=tuple(mixed),
        provenance={"batch_sizes": batches, "profiles": str(profiles)}
        | ({"memory_reserve_bytes": reserve} if reserve else {}),
    )
    emit_file(table, output, force=force, json=json)
    if output is not None:
        note(f"{len(rates)} rows written to {output}; next: hetflow allocate JOBS --throughputs")


def _rates(
    profiles: "Sequence[Profile]", batch_size: int, scale: int, most: int, reserve: int
) -> "tuple[ModelThroughput, tuple[MixThroughput, ...]]":
    """The rates of one model and scale factor; types that cannot run it are left out.

    Raises:
        InfeasibleError: The batch fits no profiled type.
    """
    from dataclasses import replace

    from ..planning.split_problem import split_problem
    from ..schema.cluster import Cluster
    from ..simulator.mixes import split_throughput

    model = profiles[0].model
    pool = Cluster.parse(",".join(f"{most}x{profile.device_type}" for profile in profiles))
    problem = split_problem(profiles, pool, batch_size, memory_reserve_bytes=reserve)
    alone, together = split_throughput(model, batch_size, problem.devices, scale)
    rates = {name: rate for name, rate in alone.steps_per_second.items() if rate > 0}
    if not rates:
        raise InfeasibleError(
            f"{model}: no {scale} device(s) of one type can run a batch of {batch_size}",
            hint="give a batch that profiled sizes add up to (--batch-size)",
        )
    for profile in profiles:
        if profile.device_type not in rates:
            warn(f"{model} x{scale}: no rate on {profile.device_type}, a batch of {batch_size} "
                 "does not fit it")  # fmt: skip
    if scale > 1 and any(profile.sync is None for profile in profiles):
        warn(f"{model} x{scale}: the profiles hold no synchronisation, so it counts as nothing")
    return replace(alone, steps_per_second=rates), together


def _batches(text: str, models: list[str]) -> dict[str, int]:
    """The batch of each model.

    Raises:
        ProblemError: Not a number, a model without profiles, or one without a batch.
    """
    from ..schema.records import nearest

    if "=" not in text:
        return dict.fromkeys(models, _positive(text, "--batch-size"))
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name.strip() not in models:
            guess = nearest(name, models)
            raise ProblemError(
                f"--batch-size {part!r}: no profile of model {name!r}"
                + (f"; did you mean {guess!r}?" if guess else ""),
                hint=f"profiled models: {', '.join(models)}",
            )
        found[name.strip()] = _positive(number, "--batch-size")
    missing = [model for model in models if model not in found]
    if missing:
        raise ProblemError(f"--batch-size: says nothing of {', '.join(missing)}")
    return found


def _scales(text: str) -> list[int]:
    scales = [_positive(part, "--scale-factors") for part in text.split(",")]
    if len(set(scales)) < len(scales):
        raise ProblemError(f"--scale-factors {text}: a number appears twice")
    return scales


def _positive(text: str, option: str) -> int:
    number = whole_number(text.strip())
    if number is None or not 0 < number <= 10**9:
        raise ProblemError(f"{option}: must be a whole number of at least 1, got {text[:60]!r}")
    return number
