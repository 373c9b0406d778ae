"""The command line: one app, one place that maps errors to exit codes.

Exit codes: 0 done; 1 a bug; 2 bad usage or input; 3 no feasible plan; 4 a usable plan that is
not proved optimal; ``launch`` passes on the failing worker's code; 130 and 143 interrupted.
"""

import sys
import traceback
from contextlib import suppress
from functools import cache
from typing import Annotated, Any

import typer

from .. import __version__
from ..schema.errors import HetflowError
from . import (
    allocate,
    check,
    cluster,
    dashboard,
    demo,
    devices,
    doctor,
    export,
    import_,
    launch,
    profile,
    queue,
    rent,
    rent_fleet,
    rent_machines,
    rent_odds,
    rent_prices,
    replay,
    resize,
    show,
    simulate,
    solve,
    submit,
    throughputs,
)
from .common import (
    ENVIRONMENT_PREFIX,
    KindsGroup,
    Settings,
    config_values,
    library_speaks,
    one_line,
    register,
)
from .usage import plain_message

app = typer.Typer(
    name="hetflow",
    cls=KindsGroup,
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


_AS_SOLVE = {"auto_envvar_prefix": f"{ENVIRONMENT_PREFIX}_SOLVE"}
_PASSED_ON = {"allow_interspersed_args": False, "ignore_unknown_options": True}

register(app, demo.demo, short_help="Run the main job end to end on this machine.")
register(app, devices.devices, short_help="List the local device types.")
register(app, doctor.doctor, short_help="Check this installation, and say what is missing.")
register(app, profile.profile, short_help="Measure a model on each device type.")
register(app, solve.solve, short_help="Find the best plan, with proof.")
register(app, solve.solve_split, name="solve split", short_help="Find the best split of a batch.",
         context_settings=_AS_SOLVE)  # fmt: skip
register(app, solve.solve_pipeline, name="solve pipeline", short_help="Find the best pipeline.",
         context_settings=_AS_SOLVE)  # fmt: skip
register(app, solve.solve_parallel, name="solve parallel", context_settings=_AS_SOLVE,
         short_help="Find the best pipeline, tensor and data parallel plan.")  # fmt: skip
register(app, check.check, short_help="Verify a plan independently.")
register(app, launch.launch, short_help="Train under a plan.", context_settings=_PASSED_ON)
register(app, resize.resize, short_help="Change a running job's devices.")
register(app, throughputs.throughputs, short_help="Turn profiles into throughputs of jobs.")
register(app, allocate.allocate, short_help="Share a pool of devices among jobs.")
register(app, simulate.simulate, short_help="Simulate weeks of a cluster in seconds.")
register(
    app, cluster.start, name="cluster start", short_help="Start a scheduler for a queue of jobs."
)
register(app, cluster.drain, name="cluster drain", short_help="Move jobs away from devices.")
register(app, replay.replay, name="cluster replay",
         short_help="Simulate a live cluster's jobs.")  # fmt: skip
register(
    app, cluster.stop, name="cluster stop", short_help="Let jobs save, then stop the scheduler."
)
register(app, submit.submit, short_help="Add a job to the queue.", context_settings=_PASSED_ON)
register(app, queue.queue, short_help="List running, waiting and finished jobs.")
register(app, dashboard.dashboard, short_help="Show a live cluster in a web page.")
register(app, queue.logs, short_help="Print a job's output.")
register(app, queue.cancel, short_help="Take a job out of the queue.")
register(app, queue.hold, short_help="Keep a job from running.")
register(app, queue.release, short_help="Let a held job run again.")
register(app, rent.rent, short_help="Choose spot or on-demand machines under a deadline.")
register(app, rent_fleet.rent_fleet, name="rent fleet",
         short_help="Choose machines for an elastic job under a deadline.")  # fmt: skip
register(app, rent_prices.rent_prices, name="rent prices",
         short_help="Choose machines at changing prices.")  # fmt: skip
register(app, rent_machines.rent_machines, name="rent machines",
         short_help="Choose machines that train for the fewest dollars.")  # fmt: skip
register(app, rent_odds.rent_odds, name="rent odds",
         short_help="Estimate how long spot machines last.")  # fmt: skip
register(app, show.show, short_help="Show any hetflow file as a table or a picture.")
register(
    app, import_.import_, name="import", short_help="Read layers or prices in a foreign format."
)
register(app, export.export, short_help="Write what starts a plan elsewhere.")


def main() -> None:
    """Run the command line and exit with a stable code."""
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
        with library_speaks():
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
        return _report("interrupted", None, 130)
    except BrokenPipeError:
        # The reader of the pipe has gone; leave quietly, as other tools do.
        sys.stderr.close()
        return 0
    except OSError as error:
        # Files are checked where they are read; this is what no check foresees, such as a path
        # longer than the system allows. Without a path it is no fault of the input.
        if error.filename is None:
            return _report_bug()
        return _report(f"{error.filename}: {error.strerror}", None, 2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            return _report_bug()
        return _report("this needs torch, which is not installed", "pip install torch", 2)
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own errors: bad usage
            return _report_usage(error)
        return _report_bug()
    return answer if isinstance(answer, int) else 0


def _report_bug() -> int:
    traceback.print_exc()
    return _report("this is a bug; please report it with the traceback above", None, 1)


def _report_usage(error: Exception) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message(), err=True)  # type: ignore[attr-defined]
        return 2
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "hetflow"
    return _report(plain_message(error), f"see `{path} --help`", 2)


def _report(message: str, hint: str | None, code: int) -> int:
    if Settings.debug:
        traceback.print_exc()
    lines = [f"hetflow: {one_line(message)}\n"]
    if hint:
        lines.append(f"hint: {one_line(hint)}\n")
    with suppress(BrokenPipeError):  # whoever read has seen enough; the code stays the error's
        sys.stderr.write("".join(lines))
    return code


if __name__ == "__main__":
    main()
