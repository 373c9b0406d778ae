"""``hetflow rent machines``: which machines to rent for a training that stays on them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import ForceFlag, JsonFlag, check_outputs, emit, emit_json, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planning.static_choice import StaticChoice


def rent_machines(
    markets: Annotated[list[Path], typer.Argument(help="Markets with prices: hetflow.market/1.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training.")],
    profiles: Annotated[Path | None, typer.Option(help="Profiles of the model, a folder.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="The global batch; with throughputs only for $/million samples."),
    ] = None,
    throughputs: Annotated[
        Path | None,
        typer.Option(
            help="Instead of profiles: throughputs (hetflow.throughputs/1, .csv, or Gavel's "
            "table), with the numbers of devices that they list."
        ),
    ] = None,
    most_devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices of each type at most [default: 8; with throughputs all that they list].",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model, where profiles or throughputs hold several.")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="When, as 2020-03-07T00:00:00Z; else the market's last prices."),
    ] = None,
    deadline_hours: Annotated[
        float | None, typer.Option(help="Take the cheapest that ends by then.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(help="Take the fastest for so many dollars.")
    ] = None,
    top: Annotated[
        int,
        typer.Option(min=0, help="Show so many of the cheapest, beside the Pareto front."),
    ] = 0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the choice's plan here, for `hetflow export`."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw the choices by hours and dollars into this .png or .svg."),
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Say which machines train a model for the fewest dollars, and what faster ones would cost.

    The table has every choice that no other one beats in both time and dollars.

    \b
    hetflow rent machines aws.json azure.json --profiles profiles --batch-size 1024 --steps 90000 -o plan.json
    hetflow rent machines aws.json --throughputs throughputs.json --model resnet50 --steps 90000
    hetflow export plan.json --to skypilot --market aws.json -- train.py
    """  # noqa: E501
    from dataclasses import asdict

    from ..api.rent_machines import rent_machines as choices_of
    from ..planning.inputs import profiles_of
    from ..planning.market_prices import markets_of
    from ..planning.static_choice import chosen, plan_of_choice
    from ..schema.errors import HetflowError, ProblemError
    from ..schema.files import write

    if output is not None and throughputs is not None:
        raise ProblemError(
            "throughputs make no plan to write",
            hint="leave --output out, or give --profiles DIR instead of --throughputs",
        )
    if plot is not None:
        if plot.suffix.lower() not in (".png", ".svg"):
            raise HetflowError(f"--plot {plot}: must end in .png or .svg", hint="rename the output")
    check_outputs(output, plot, force=force)
    found = choices_of(
        markets,
        profiles,
        steps=steps,
        batch_size=batch_size,
        throughputs=throughputs,
        most_devices=most_devices,
        model=model,
        at=at,
    )
    best = chosen(found, deadline_hours=deadline_hours, budget_dollars=budget)
    if output is not None and profiles is not None and batch_size is not None:
        plan = plan_of_choice(
            best, profiles_of(profiles, model), markets_of(markets), batch_size=batch_size, at=at
        )
        write(output, plan, force=force)
    shown = [one for place, one in enumerate(found) if one.is_pareto or place < top]
    if plot is not None:
        samples = "" if batch_size is None else f" of {batch_size} samples"
        _draw(found, plot, f"{steps} steps{samples}", force=force)
    if json:
        emit_json({"choice": asdict(best), "choices": [asdict(one) for one in shown]})
        return
    emit(_table(shown))
    note(f"take {_machines(best)}: {best.dollars:.2f} $, {best.hours:.4g} h")
    if output is not None:
        note(f"plan written to {output}; next: hetflow export {output} --to skypilot --market ...")


def _machines(one: "StaticChoice") -> str:
    return ", ".join(f"{number} x {title}" for title, number in one.machines.items())


def _draw(found: "Sequence[StaticChoice]", target: Path, title: str, *, force: bool) -> None:
    from ..reports.market_plots import choices_image
    from ..schema.files import write_bytes

    choices = [
        (one.hours, one.dollars, _devices(one) + ("" if one.is_spot else " on demand"),
         one.is_pareto)
        for one in found
    ]  # fmt: skip
    image = choices_image(choices, target.suffix.lower().lstrip("."), title=title)
    write_bytes(target, image, force=force)
    note(f"{target} written")


def _devices(one: "StaticChoice") -> str:
    return ", ".join(f"{number}x{name}" for name, number in one.devices.items())


def _table(shown: "list[StaticChoice]") -> str:
    from ..reports.grid import grid

    heads = ("$", "hours", "$/million samples", "devices", "rent", "")
    rows = [
        (
            f"{one.dollars:.2f}",
            f"{one.hours:.4g}",
            "-"
            if one.dollars_per_million_samples is None
            else f"{one.dollars_per_million_samples:.4g}",
            _devices(one),
            _machines(one),
            "" if one.is_pareto else "dearer or slower",
        )
        for one in shown
    ]
    return grid(heads, rows)
