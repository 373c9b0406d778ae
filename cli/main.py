"""The command line: one app, one place that maps errors to exit codes.

Exit codes: 0 done; 1 a bug; 2 bad usage or input; 3 no feasible plan, or none in the time limit;
4 a usable plan that is not proved optimal; ``launch`` passes on the failing worker's code; 130 and
143 interrupted.
"""

import os
import re
import sys
import traceback
from functools import cache
from typing import Annotated, Any

import typer

from .. import __version__
from ..schema.errors import HetflowError
from ..schema.options import spelled_by
from ..schema.plugins import loaded_plug_ins, plug_in_of
from ..schema.spelling import nearest
from .asking import flag_of
from .common import ENVIRONMENT_PREFIX, Settings, library_speaks, one_line, say
from .listing import Listed, ListedGroup, config_values

_AS_SOLVE = {"auto_envvar_prefix": f"{ENVIRONMENT_PREFIX}_SOLVE"}
INTERRUPTED = 130
_NOT_ONE = re.compile(r"'([^']*)' is not one of ('[^']*'(?:, '[^']*')*)$")
_RULES = {
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "bool_parsing": "must be true or false",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "greater_than": "must be above {gt:g}",
    "less_than": "must be below {lt:g}",
}
_PASSED_ON = {"allow_interspersed_args": False}  # what follows PLAN is the script's

GROUPS = {
    "Plan and train": {
        "demo": Listed("machine.demo", "Run the main job end to end on this machine."),
        "devices": Listed("machine.devices", "List the local device types."),
        "doctor": Listed("machine.doctor", "Check this installation, and say what is missing."),
        "profile": Listed("machine.profile", "Measure a model on each device type."),
        "solve": Listed("solve.solve", "Find the best plan, with proof."),
        "solve split": Listed("solve.solve_split", "Find the best split of a batch.", _AS_SOLVE),
        "solve pipeline": Listed("solve.solve_pipeline", "Find the best pipeline.", _AS_SOLVE),
        "solve parallel": Listed(
            "solve.solve_parallel",
            "Find the best pipeline, tensor and data parallel plan.",
            _AS_SOLVE,
        ),
        "check": Listed("solve.check", "Verify a plan independently."),
        "launch": Listed("launch.launch", "Train under a plan.", _PASSED_ON),
        "resize": Listed("launch.resize", "Change the devices of a running launch."),
    },
    "Share a cluster": {
        "throughputs": Listed("simulate.throughputs", "Turn profiles into throughputs of jobs."),
        "allocate": Listed("simulate.allocate", "Share a pool of devices among jobs."),
        "simulate": Listed("simulate.simulate", "Simulate weeks of a cluster in seconds."),
        "cluster start": Listed("cluster.start", "Start a scheduler for a queue of jobs."),
        "cluster drain": Listed("cluster.drain", "Move jobs away from devices."),
        "cluster usage": Listed("cluster.usage", "Print who used which devices when, as CSV."),
        "cluster recover": Listed("cluster.recover", "Go on from the last good copy of a state."),
        "cluster correct": Listed("cluster.correct", "Turn what jobs measured into profiles."),
        "cluster replay": Listed("cluster.replay", "Simulate a live cluster's jobs."),
        "cluster stop": Listed("cluster.stop", "Let jobs save, then stop the scheduler."),
        "submit": Listed("cluster.submit", "Add a job to the queue.", _PASSED_ON),
        "queue": Listed("cluster.queue", "List running, waiting and finished jobs."),
        "logs": Listed("cluster.logs", "Print a job's output."),
        "cancel": Listed("cluster.cancel", "Take a job out of the queue."),
        "hold": Listed("cluster.hold", "Keep a job from running."),
        "release": Listed("cluster.release", "Let a held job run again."),
        "dashboard": Listed("cluster.dashboard", "Show a live cluster in a web page."),
    },
    "Rent machines": {
        "rent": Listed("rent.rent", "Choose machines: spot or on demand, where, when to move."),
        "rent run": Listed(
            "rent.rent_run", "Train on rented machines as a policy says.", _PASSED_ON
        ),
        "rent fleet": Listed(
            "rent.rent_fleet", "Old name of rent --machines N --restart-seconds S."
        ),
        "rent zones": Listed("rent.rent_zones", "Old name of rent --between-zones."),
        "rent prices": Listed("rent.rent_prices", "Old name of rent --rate TYPE=SPEED."),
        "rent machines": Listed("rent.rent_machines", "Old name of rent --steps N."),
        "rent odds": Listed("rent.rent_odds", "Estimate how long spot machines last."),
    },
    "Files": {
        "show": Listed("files.show", "Show any hetflow file as a table or a picture."),
        "import": Listed("files.import_", "Read layers or prices in a foreign format."),
        "export": Listed("files.export", "Write what starts a plan elsewhere."),
    },
}
COMMANDS = {name: listed for group in GROUPS.values() for name, listed in group.items()}


class _Hetflow(ListedGroup):
    listed = COMMANDS
    groups = {title: tuple(group) for title, group in GROUPS.items()}


app = typer.Typer(
    name="hetflow",
    cls=_Hetflow,
    rich_markup_mode=None,
    add_completion=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hetflow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    print_version: Annotated[  # not "version": a HETFLOW_VERSION in somebody's CI must not set it
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Plan and run PyTorch training on the devices you really have.

    \b
    hetflow demo                                  the whole chain on this machine
    hetflow profile zoo:resnet18 -o profiles      measure a model on each device type
    hetflow solve --profiles profiles --gpus 2xV100,8xP100 --batch-size 8192 -o plan.json
    hetflow launch plan.json train.py             train under the plan
    """


def main() -> None:
    """Run the command line and exit with a stable code."""
    if getattr(sys, "stderr", None) is None:  # started with `2>&-`
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
    sys.exit(run(sys.argv[1:]))


@cache
def _command() -> Any:
    """The commands with all their options; whoever runs several builds them once."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors become one line on stderr."""
    Settings.debug = False
    command = _command()
    try:
        with library_speaks(), spelled_by(flag_of):
            answer = command.main(
                arguments,
                prog_name="hetflow",
                standalone_mode=False,
                auto_envvar_prefix=ENVIRONMENT_PREFIX,
                default_map=config_values(command.commands),
            )
    except HetflowError as error:
        return _report(error.message, error.hint, error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _report("interrupted", None, INTERRUPTED)
    except SystemExit:
        if type(sys.stdout).__name__ != "PacifyFlushWrapper":
            raise
        return 0  # as below; typer saw it first
    except BrokenPipeError:
        # The reader of the pipe has gone; leave quietly, as other tools do.
        sys.stderr.close()
        return 0
    except Exception as error:
        return _report_unexpected(error)
    if answer == INTERRUPTED:  # typer saw it first
        return _report("interrupted", None, INTERRUPTED)
    return answer if isinstance(answer, int) else 0


def _report_unexpected(error: Exception) -> int:
    if hasattr(error, "format_message"):  # the parser's own errors: bad usage
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            return 2
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "hetflow"
        return _report(plain_message(error), f"see `{path} --help`", 2)
    plug_in = plug_in_of(error)
    if plug_in is not None:
        message = f"the plug-in of {plug_in} failed: {type(error).__name__}: {error}"
        return _report(message, "--debug shows the traceback", 2)
    if isinstance(error, OSError) and error.filename is not None:
        # Files are checked where they are read; this is what no check foresees, such as a path
        # longer than the system allows. Without a path it is no fault of the input.
        return _report(f"{error.filename}: {error.strerror}", None, 2)
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return _report("this needs torch, which is not installed", "pip install torch", 2)
    traceback.print_exc()
    used = ", ".join(loaded_plug_ins())
    whose = f", of hetflow or of what a plug-in returned ({used})" if used else ""
    return _report(f"this is a bug{whose}; please report it with the traceback above", None, 1)


def plain_message(error: Exception) -> str:
    """One line for an error of the parser, with the name that may have been meant.

    typer checks values with pydantic, whose words are for programmers.
    """
    message = str(error.format_message()).replace("\n", " ").rstrip(".")  # type: ignore[attr-defined]
    for fault in _faults(error)[:1]:
        rule = _RULES.get(fault["type"])
        if rule is not None:
            plain = f"{rule.format(**fault.get('ctx', {}))}, got {str(fault['input'])!r}"
            message = message.replace(fault["msg"], plain)
    message = message.replace(": Value error, ", ": ")
    found = _NOT_ONE.search(message)
    guess = found and nearest(found[1], re.findall(r"'([^']*)'", found[2]))
    return f"{message}; did you mean {guess!r}?" if guess else message


def _faults(error: Exception) -> list[dict[str, Any]]:
    """What pydantic found, where it is the cause; none with another release of typer."""
    listed = getattr(error.__cause__ or error.__context__, "errors", None)
    return listed() if callable(listed) else []


def _report(message: str, hint: str | None, code: int) -> int:
    if Settings.debug:
        traceback.print_exc()
    say(f"hetflow: {one_line(message)}" + (f"\nhint: {one_line(hint)}" if hint else ""))
    return code


if __name__ == "__main__":
    main()
