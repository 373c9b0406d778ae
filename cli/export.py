"""``hetflow export``: a hetflow file in a foreign format, or what starts a plan elsewhere."""

from ..schema.errors import ProblemError
from ..schema.requests.export import ExportRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit, emit_json, note


@asks(ExportRequest, optional=("target", "script"))
def export(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Write what starts a plan on a cluster, or a file in a foreign format.

    Without -o it is printed, and nothing is started or written.

    \b
    hetflow export plan.json --to slurm -- train.py --epochs 3
    hetflow export plan.json --to kubernetes --image me/train --name V100=Tesla-V100-SXM2-16GB -- train.py
    hetflow export v100.json -o graph.txt
    """  # noqa: E501
    from ..formats.exporters.registry import EXPORTERS
    from ..schema import files
    from ..schema.deployment import Deployment

    file, script = asked["plan"], asked.get("script")
    files.check_outputs(output, force=force)
    chosen = EXPORTERS.get(asked.setdefault("target", "pipedream"))
    record: object
    if Deployment in chosen.takes:
        from ..api.export import deployment_of

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
