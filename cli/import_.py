"""``hetflow import``: foreign layer profiles, price histories and traces become hetflow files."""

from ..schema.requests.import_ import ImportRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit_file, note


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
    from ..api.import_ import SACCT, imported
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
