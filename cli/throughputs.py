"""``hetflow throughputs``: what jobs reach on each device type, from profiles."""

from ..schema.requests.throughputs import ThroughputsRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit_file, note


@asks(ThroughputsRequest)
def throughputs(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Turn profiles into the throughputs that allocate and simulate need.

    A job keeps its batch whatever it runs on: a rate is one over the step that `hetflow solve`
    predicts for that batch on so many devices of the type.

    \b
    hetflow throughputs profiles --batch-size 256 --scale-factors 1,2,4 -o throughputs.json
    """
    from .. import throughputs as rates_of
    from ..schema import files

    files.check_outputs(output, force=force)
    table = rates_of(**asked)
    emit_file(table, output, force=force, json=json)
    if output is not None:
        rows = len(table.models)
        note(f"{rows} rows written to {output}; next: hetflow allocate JOBS --throughputs")
