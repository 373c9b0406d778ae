"""``hetflow show``, ``import`` and ``export``: any hetflow file, and files in foreign formats."""

from pathlib import Path
from typing import Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.options import option
from ..schema.requests.files import ExportRequest, ImportRequest, ShowRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit, emit_file, emit_json, note


@asks(ShowRequest, source=None)
def show(
    asked: Asked,
    file: Annotated[
        Path, typer.Argument(help="Any hetflow file, or the folder of profiles or of a run.")
    ],
    json: JsonFlag = False,
) -> None:
    """Show a profile, pool, plan, allocation or run as a table; some also as pictures.

    \b
    hetflow show plan.json
    hetflow show plan.json --explain
    hetflow show market.json --plot prices.svg
    hetflow show profiles --plot curves.svg
    hetflow show hetflow-runs/a
    hetflow show hetflow-runs/a/run.json --csv devices.csv
    hetflow show pipeline.json --timeline --html timeline.html --trace trace.json
    """
    from .. import show as text_of
    from ..api.show import document_of

    asked["source"] = file
    if json:
        emit_json(document_of(ShowRequest(**asked)))
    else:
        emit(text_of(**asked))


@asks(ImportRequest)
def import_(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Turn layers into a profile, prices or traces into a market, or Slurm's log into jobs.

    \b
    hetflow import graph.txt --device-type V100 --device-memory 16GB -o v100.json
    hetflow import bert32.json --format piper --device-type V100 --device-memory 8GB -o v100.json
    hetflow import aws/ --format aws-spot-prices --instance-types machines.csv -o market.json
    hetflow import machines.csv --format instance-types -o market.json
    hetflow import log.txt --format sacct --throughputs rates.json -o jobs.json
    hetflow import counts.csv --format bamboo-trace --time-unit hours -o market.json
    """
    from ..api.formats import SACCT, imported
    from ..formats.importers.sacct import read_sacct
    from ..schema.files import check_outputs

    request = ImportRequest(**asked)
    check_outputs(output, force=force)
    if request.source != SACCT:
        found = imported(request, states_source="source" in asked)
        emit_file(found.record, output, force=force, json=json)
        if output is not None:
            note(f"{found.contents} written to {output}; next: {found.next_command}")
        return
    throughputs = request.throughputs  # which a simulation of the log's jobs needs
    check_outputs(throughputs, force=force)
    log = read_sacct(request.file)
    jobs, table = log.as_jobs(request.rates or {})
    emit_file(jobs, output, force=force, json=json)
    if throughputs is not None:
        emit_file(table, throughputs, force=force)
    pool = ",".join(f"{number}x{name}" for name, number in log.num_devices.items())
    note(
        f"{len(log.jobs)} jobs, {log.num_left_out} left out (no GPU, or not over); at most {pool} "
        "at once; next: hetflow simulate"
    )


@asks(ExportRequest, optional=("target", "script"))
def export(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Write what starts a plan on a cluster, or a file in a foreign format.

    Without -o it is printed, and nothing is started or written. A checkpoint needs -o.

    \b
    hetflow export plan.json --to slurm -- train.py --epochs 3
    hetflow export plan.json --to kubernetes --image me/train --name V100=Tesla-V100-SXM2-16GB -- train.py
    hetflow export v100.json -o graph.txt
    hetflow export ckpt --to dcp -o dcp
    """  # noqa: E501
    from ..formats.exporters.registry import EXPORTERS, CheckpointExporter
    from ..schema import files
    from ..schema.deployment import Deployment

    file, script = asked["plan"], asked.get("script")
    files.check_outputs(output, force=force)
    chosen = EXPORTERS.get(asked.setdefault("target", "pipedream"))
    record: object
    if isinstance(chosen, CheckpointExporter):
        if output is None or script:
            raise ProblemError(
                f"{chosen.name} starts no script, got {script!r}"
                if script
                else f"{chosen.name} is no text that can be printed",
                hint=f"give {option('output', 'NAME')} alone",
            )
        contents = chosen.write(Path(file), output)
        note(f"{contents} written to {output}")
        if json:
            emit_json({"format": chosen.name, "output": str(output), "contents": contents})
        return
    if Path(file).is_dir():
        targets = f"{option('target', 'dcp')} or {option('target', 'safetensors')}"
        raise ProblemError(f"{file} is a folder", hint=f"if it holds checkpoints, give {targets}")
    if Deployment in chosen.takes:
        from ..api.formats import deployment_of

        record = deployment_of(**{"script": "", **asked})
    elif script:
        raise ProblemError(
            f"{chosen.name} starts no script, got {script!r}",
            hint="add --to slurm, kubernetes, skypilot, torchrun, ray or hosts",
        )
    else:
        one = chosen.takes[0] if len(chosen.takes) == 1 else None
        record = files.read_any(file) if one is None else files.read(file, one)
        if not isinstance(record, chosen.takes):
            known = ", ".join(sorted(each.__name__ for each in chosen.takes))
            raise ProblemError(
                f"{file}: {chosen.name} is a format of {known}, not of a {type(record).__name__}"
            )
    text = chosen.render(record, str(file))
    if output is not None:
        files.write_text(output, text, force=force)
        note(f"{chosen.wrote(record)} written to {output}")
    if json:
        emit_json(chosen.document(record, text))
    elif output is None:
        emit(text)
