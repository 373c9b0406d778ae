"""The command-line reference: one section a command, read from the typer application."""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import typer

from hetflow.cli.main import app

HEAD = """# Command line

This page is generated from the commands themselves; `hetflow COMMAND --help` prints the same.
Every option can also be set by an environment variable named for its command and flag, such as
`HETFLOW_SOLVE_GPUS`, or in `hetflow.toml` in the current folder (another file: `HETFLOW_CONFIG`),
with a table for each command:

    [solve]
    gpus = "2xV100,8xP100"
    batch-size = 8192

    [rent]
    cloud = "azure"

A flag counts before the environment, and the environment before the file; `--show-config` prints
each value and where it comes from, a variable by its name. `[solve]` counts for `solve split`,
`solve pipeline` and `solve parallel` too.

Exit codes: 0 done; 1 a bug; 2 bad usage or input; 3 no feasible plan, or none in the time limit;
4 a usable plan that is not proved within the `--gap` or by the `--time-limit` asked for; `launch`
passes on the failing worker's code; 130 and 143 interrupted.
"""
EXAMPLE = "\b\n"  # how a docstring marks a paragraph that must keep its lines
UNSHOWN = {"help", "show_config"}
ENVIRONMENT = re.compile(r" *\[env var: \w+;?([^\]]*)\]$")


def cli_page() -> str:
    """The page as Markdown."""
    root = typer.main.get_command(app)
    sections = [section(path, command) for path, command in commands(root, ["hetflow"])]
    return "\n".join([HEAD, *sections])


def commands(command: Any, path: list[str]) -> Iterator[tuple[list[str], Any]]:
    """All commands below a group, with their paths; groups that are more than a list too."""
    children = getattr(command, "commands", None)
    if children is None or (len(path) > 1 and command.params):
        yield path, command
    for name, child in (children or {}).items():
        yield from commands(child, [*path, name])


def section(path: list[str], command: Any) -> str:
    """One command: what it does, its arguments and its options by panel."""
    name = " ".join(path)
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    lines = [f"## `{name}`", "", *paragraphs(command.help or ""), f"```text\n{usage}\n```", ""]
    panels: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or parameter.name in UNSHOWN:
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panels[getattr(parameter, "rich_help_panel", None) or kind].append(record)
    for panel, records in panels.items():
        lines += table(panel, records)
    return "\n".join(lines)


def paragraphs(text: str) -> Iterator[str]:
    """The help text, its examples as code."""
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.startswith(EXAMPLE):
            yield f"```text\n{paragraph.removeprefix(EXAMPLE).strip()}\n```\n"
        else:
            yield escaped(paragraph) + "\n"


def table(title: str, records: list[tuple[str, str]]) -> list[str]:
    """Parameters as a Markdown table, from what ``--help`` prints of each."""
    lines = [f"**{title}**", "", "| | meaning |", "|---|---|"]
    for name, text in records:
        meaning = ENVIRONMENT.sub(_without_variable, " ".join(text.split()))
        lines.append(f"| `{name.replace('|', ', ')}` | {escaped(meaning)} |")
    return [*lines, ""]


def _without_variable(found: re.Match[str]) -> str:
    rest = found.group(1).strip()
    return f" [{rest}]" if rest else ""


def escaped(text: str) -> str:
    """Text for a Markdown table: `<` and `|` would be read as markup."""
    return text.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*")
