"""The registry of formats that hetflow writes, by name; plug-ins add theirs."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...schema.plugins import Registry

Render = Callable[[Any, str], str]
"""Writes a record as the text of a foreign file; also takes the record's name for errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A foreign format that hetflow writes.

    Attributes:
        name: The format's name for ``hetflow export --format``.
        takes: The record classes that it can write.
        render: Writes a record as text.
        wrote: Describes a written record for people, such as "12 layers".
        document: Makes the output of ``--json`` from a record and its text.
    """

    name: str
    takes: tuple[type, ...]
    render: Render
    wrote: Callable[[Any], str]
    document: Callable[[Any, str], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointExporter:
    """A foreign format of checkpoints.

    Attributes:
        name: The format's name for ``hetflow export --to``.
        write: Reads a checkpoint's folder and writes a new folder or file, atomically. Returns what
            it wrote, for people.
    """

    name: str
    write: Callable[[Path, Path], str]


EXPORTERS: Registry[Exporter | CheckpointExporter] = Registry(
    "export format",
    group="hetflow.exporters",
    own=tuple(
        f"hetflow.formats.exporters.{name}"
        for name in ("pipedream", "slurm", "kubernetes", "skypilot", "ray", "hosts", "checkpoints")
    ),
)


def exporter(
    name: str,
    *,
    takes: tuple[type, ...],
    wrote: Callable[[Any], str] | None = None,
    document: Callable[[Any, str], dict[str, Any]] | None = None,
) -> Callable[[Render], Render]:
    """Register a function as a format.

    Args:
        name: The format's name for ``hetflow export --format``.
        takes: The record classes that it can write (``hetflow.schema``).
        wrote: As ``Exporter.wrote``; by default the format's name.
        document: As ``Exporter.document``; by default the format and the text.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        ProblemError: The name is taken.
    """

    def register(render: Render) -> Render:
        made = Exporter(
            name=name,
            takes=takes,
            render=render,
            wrote=wrote or (lambda record: name),
            document=document or (lambda record, text: {"format": name, "text": text}),
        )
        EXPORTERS.add(name, made, render.__module__)
        return render

    return register
