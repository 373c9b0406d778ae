"""``hetflow export``: a hetflow file in a foreign format, or what starts a plan elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ProblemError
from .common import ForceFlag, JsonFlag, emit, emit_json, note

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..exporters.registry import Exporter


def export(
    file: Annotated[
        Path, typer.Argument(help="A plan; for pipedream a profile with layers.", metavar="FILE")
    ],
    script: Annotated[
        list[str] | None,
        typer.Argument(help="After --: the training script and its arguments.", metavar="SCRIPT"),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            "--format",
            help="slurm, kubernetes, skypilot, torchrun, ray, hosts (hetflow's launcher by hand), "
            "pipedream (graph.txt), or a plug-in's.",
        ),
    ] = "pipedream",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here, else to stdout.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="The hosts, in order of ranks: 1x(2xV100),2x(4xP100) [default: the plan's "
            "servers, else one for each device type]."
        ),
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option(help="What the target calls a device type, V100=tesla_v100; may be repeated."),
    ] = None,
    job: Annotated[str | None, typer.Option(help="Name of the job [default: the model's].")] = None,
    directory: Annotated[
        str | None, typer.Option(help="Where to start [default: where the target starts jobs].")
    ] = None,
    setup: Annotated[
        list[str] | None,
        typer.Option(
            help="A line of shell before the launch, such as 'source venv/bin/activate'; may be "
            "repeated."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="As of `hetflow launch`.")] = 0,
    determinism: Annotated[str, typer.Option(help="As of `hetflow launch`.")] = "none",
    checkpoint: Annotated[
        str | None, typer.Option(help="Folder of checkpoints that all hosts see.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between checkpoints [0: at SIGTERM and the end].")
    ] = 0,
    cpus_per_device: Annotated[
        int, typer.Option(min=1, help="Processors to ask for beside each device.")
    ] = 1,
    image: Annotated[str | None, typer.Option(help="Kubernetes: the container image.")] = None,
    volume: Annotated[
        str | None,
        typer.Option(help="Kubernetes: a volume that all pods see, CLAIM:/PATH."),
    ] = None,
    directive: Annotated[
        list[str] | None,
        typer.Option(help="Slurm: an option of sbatch, --time=2:00:00; may be repeated."),
    ] = None,
    market: Annotated[
        list[Path] | None,
        typer.Option(
            help="skypilot, hosts: rent machines of this market, cheapest first; may be repeated."
        ),
    ] = None,
    at: Annotated[
        str | None, typer.Option(help="When, as 2020-03-07T00:00:00Z; else the last prices.")
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Write what starts a plan on a cluster, or a file in a foreign format.

    Without -o it is printed, and nothing is started or written.

    \b
    hetflow export plan.json --to slurm -- train.py --epochs 3
    hetflow export plan.json --to kubernetes --image me/train --name V100=Tesla-V100-SXM2-16GB -- train.py
    hetflow export v100.json -o graph.txt
    """  # noqa: E501
    from ..exporters.registry import EXPORTERS
    from ..schema import files
    from ..schema.deployment import Deployment

    if output is not None:
        files.check_writable(output, force=force)
    chosen = EXPORTERS.get(to)
    record: object
    if Deployment in chosen.takes:
        from ..api.export import deployment_of

        record = deployment_of(
            file,
            tuple(script or ()),
            hosts=hosts,
            names=_names(name or ()),
            job=job,
            directory=directory,
            setup=setup or (),
            seed=seed,
            determinism=determinism,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            cpus_per_device=cpus_per_device,
            image=image,
            volume=volume,
            directives=directive or (),
            market=market or None,
            at=at,
        )
    else:
        record = _record(file, chosen, script or ())
    text = chosen.render(record, str(file))
    if output is not None:
        files.write_text(output, text, force=force)
        note(f"{chosen.wrote(record)} written to {output}")
    if json:
        emit_json(chosen.document(record, text))
    elif output is None:
        emit(text)


def _record(file: Path, chosen: "Exporter", script: "Sequence[str]") -> object:
    """The file of a format that holds a record."""
    from ..schema import files

    if script:
        raise ProblemError(
            f"{chosen.name} starts no script, got {script[0]!r}",
            hint="add --to slurm, kubernetes, skypilot, torchrun, ray or hosts",
        )
    one = chosen.takes[0] if len(chosen.takes) == 1 else None
    record = files.read_any(file) if one is None else files.read(file, one)
    if not isinstance(record, chosen.takes):
        known = ", ".join(sorted(each.__name__ for each in chosen.takes))
        raise ProblemError(
            f"{file}: {chosen.name} is a format of {known}, not of a {type(record).__name__}"
        )
    return record


def _names(given: "Sequence[str]") -> dict[str, str]:
    """What the target calls device types, by ``TYPE=NAME``."""
    found = {}
    for text in given:
        device_type, equals, called = text.partition("=")
        if not device_type or not equals or not called:
            raise ProblemError(f"--name {text!r} is not TYPE=NAME", hint="write V100=tesla_v100")
        found[device_type] = called
    return found
