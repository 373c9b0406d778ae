"""``hetflow launch``: train under a plan."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.errors import ProblemError
from ..schema.requests.launch import LaunchingRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, Settings, emit, emit_json, say

if TYPE_CHECKING:
    from ..runtime.launcher.spawn import WorkerCommand
    from ..schema.launch import Rendezvous
    from ..schema.run import RunRecord


@asks(
    LaunchingRequest,
    folder=None,
    force=False,
    rendezvous=None,
    stdout_to_stderr=False,
    ends_process=True,
)
def launch(
    asked: Asked,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the run [default: hetflow-runs/<model>-<time>]."
        ),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="Number of hosts in the launch.")] = 1,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Rank of this host, 0 to nnodes - 1. Host 0 runs the rendezvous store."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None, typer.Option(help="HOST:PORT on node 0 where the hosts meet.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Several hosts: what this one gives, e.g. 2xV100 [default: its CUDA devices]."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run on this host; run nothing.")
    ] = False,
    force: ForceFlag = False,
    json: JsonFlag = False,
) -> None:
    """Train under a plan, with one worker for each device, to the result of one device.

    hetflow's own options stand before PLAN. The script runs in every worker; the first one's
    output is shown. The run's folder gets the record (run.json), the plan and all logs.

    \b
    hetflow launch plan.json train.py --epochs 3
    hetflow launch --dry-run plan.json train.py
    hetflow launch --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29400 plan.json train.py
    """
    from .. import dry_run as show
    from .. import launch as run
    from ..api.files import plan_of
    from ..runtime.launcher.request import default_folder, run_folder

    found = plan_of(asked["plan"])
    asked |= {"plan": found, "force": force, "stdout_to_stderr": json}
    asked["rendezvous"] = _rendezvous(nnodes, node_rank, rdzv_endpoint, devices)
    if dry_run:
        folder = asked["folder"] = output or default_folder(found.model)
        _show_commands(folder, show(**asked), json)
        return
    with run_folder(output, found.model) as folder:
        _report(folder, run(**{**asked, "folder": folder}), json)


def _rendezvous(
    nnodes: int, node_rank: int | None, endpoint: str | None, devices: str | None
) -> "Rendezvous | None":
    """Where the hosts meet; None for a launch on one host, which has all devices of the plan."""
    from ..schema.launch import Rendezvous

    if nnodes > 1 or node_rank is not None or endpoint is not None:
        return Rendezvous.parse(nnodes, node_rank, endpoint, devices)
    if devices is not None:
        raise ProblemError(
            f"--devices {devices!r} is what this host gives to a launch over several hosts; "
            "a launch on one host takes the devices of its plan",
            hint="leave --devices out, or add --nnodes, --node-rank and --rdzv-endpoint",
        )
    return None


def _show_commands(folder: Path, commands: "list[WorkerCommand]", json: bool) -> None:
    from dataclasses import asdict

    if json:
        emit_json({"folder": str(folder), "workers": [asdict(c) for c in commands]})
        return
    for command in commands:
        emit(command.shell())


def _report(folder: Path, record: "RunRecord | None", json: bool) -> None:
    """What was measured beside what was predicted, and how to correct the prediction by it."""
    from ..formats.reports.tables import run_summary, terms_table
    from ..schema import files

    if record is None:
        return
    if json:
        emit(files.to_json(record))
    if Settings.quiet:
        return
    say(f"{run_summary(record)}; record: {folder / 'run.json'}")
    if not record.terms:
        return
    say(terms_table(record))
    if any(entry.is_off for entry in record.terms):
        quoted = shlex.quote(str(folder))
        command = f"hetflow profile --from-run {quoted} --profiles PROFILES -o NEW"
        say(f"to correct the profiles by this run: {command}")
