"""``hetflow launch`` and ``resize``: train under a plan, and change devices meanwhile."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..schema.requests.launch import LaunchCommandRequest, ResizingRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, Settings, emit, emit_either, emit_json, say

if TYPE_CHECKING:
    from ..schema.run import RunRecord


@asks(
    LaunchCommandRequest,
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
    from ..schema.launch import Rendezvous

    found = plan_of(asked["plan"])
    shows = asked.pop("dry_run", False)
    hosts = [asked.pop(name, None) for name in ("nnodes", "node_rank", "rdzv_endpoint", "devices")]
    asked |= {"plan": found, "force": force, "stdout_to_stderr": json}
    asked["rendezvous"] = Rendezvous.parse(hosts[0] or 1, *hosts[1:])
    if shows:
        folder = asked["folder"] = output or default_folder(found.model)
        commands = show(**asked)
        document = {"folder": str(folder), "workers": [asdict(one) for one in commands]}
        emit_either(json, document, "\n".join(one.shell() for one in commands))
        return
    with run_folder(output, found.model) as folder:
        _report(folder, run(**{**asked, "folder": folder}), json)


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


@asks(ResizingRequest)
def resize(asked: Asked, json: JsonFlag = False) -> None:
    """Change the devices of a running launch; it trains on, with the same result.

    New workers start beside the running ones. When they are ready, all go over between two steps:
    those who stay keep their process, and joining workers get the state directly from one of
    them. A pipeline's workers all change: they hand over through checkpoint parts.

    \b
    hetflow resize hetflow-runs/m-20250101-120000 --gpus 4xV100
    hetflow resize runs/a --plan smaller.json
    """
    from .. import resize as change
    from ..schema.errors import LaunchError
    from ..schema.files import to_plain

    answer = change(**asked)
    if answer is None:
        emit_either(json, {"status": "asked"}, "asked; run.json lists it when it is done")
        return
    if answer.status != "done":
        sentence = answer.detail if answer.status == "refused" else f"not resized: {answer.detail}"
        code = 2 if answer.status == "refused" else 1
        if json:
            emit_json(to_plain(answer))
        raise LaunchError(sentence, hint=answer.hint, exit_code=code)
    pause = f"; training paused {answer.pause_seconds or 0.0:.3f} s"
    emit_either(json, to_plain(answer), f"{answer.detail}{pause}")
