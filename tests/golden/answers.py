"""The golden answers: computed from today's code, and kept in ``tests/data/golden``.

An answer is text: JSON with sorted keys and an indent of 1, in which a float stands as Python's
``repr`` writes it (the shortest decimal that reads back as the same double; so equal text means
equal bits). An entry above ``LARGE`` characters, such as who held which devices, is kept as its
SHA-256. Sentences for people (``PROSE``, what went to stderr) may be reworded and are left out.
To write the file anew, after a change of behaviour that is meant:

    python -m tests.golden.answers
"""

import hashlib
import json
import lzma
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hetflow.cli.main import run
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files

from . import cases, trainings
from .inputs import write_inputs

FILE = Path(__file__).resolve().parents[1] / "data" / "golden" / "answers.json.xz"
LARGE = 6000
PROSE = ("method", "assumptions")


COMMANDS = {command.name: command for command in cases.commands()}
TRAININGS = tuple(f"train-{name}" for name in trainings.TRAININGS)


def of_command(name: str, folder: Path) -> str:
    """Today's answer of one command, run in ``folder``, which holds the inputs."""
    command = COMMANDS[name]
    out = folder / cases.OUT
    out.unlink(missing_ok=True)
    printed, errors = StringIO(), StringIO()
    with _working_in(folder), _environment(), redirect_stdout(printed), redirect_stderr(errors):
        code = run(list(command.arguments))
    text = out.read_text(encoding="utf-8") if out.exists() else printed.getvalue()
    if code != 0:
        raise AssertionError(f"{name}: exit code {code}: {errors.getvalue()}")
    answer = {"answer": _document(text)}
    if command.lowers:
        answer["launch"] = files.to_plain(lower(files.read_any(out), seed=3))
    return _text(answer)


def of_trainings(folder: Path) -> dict[str, str]:
    """Today's answers of all trainings."""
    found = trainings.all_in_a_child(folder)
    return {f"train-{name}": _text(answer) for name, answer in found.items()}


def _document(text: str) -> Any:
    """A JSON document; another format, such as PipeDream's graphs, is the text itself."""
    return json.loads(text) if text.startswith("{") else text


def _text(answer: dict[str, Any]) -> str:
    return json.dumps(_shortened(answer), indent=1, sort_keys=True, allow_nan=False)


def _shortened(value: dict[str, Any]) -> dict[str, Any]:
    """Large entries of the documents as digests, so that the file stays small; no prose."""
    return {key: _entry(entry) for key, entry in value.items() if key not in PROSE}


def _entry(entry: Any) -> Any:
    if isinstance(entry, dict):
        return _shortened(entry)
    text = json.dumps(entry, sort_keys=True, allow_nan=False)
    if len(text) <= LARGE:
        return entry
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "characters": len(text)}


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _environment() -> Iterator[None]:
    """The process's environment without a user's settings (``HETFLOW_SOLVE_...``)."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HETFLOW_")}
    with mock.patch.dict(os.environ, kept, clear=True):
        yield


def machine() -> dict[str, str]:
    """What bits depend on: libraries that round, and the processor's instructions."""
    return {
        **{name: version(name) for name in ("numpy", "scipy", "torch", "highspy")},
        "machine": platform.machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": _processor(),
    }


def _processor() -> str:
    """Vendor, family and model: linear algebra libraries have kernels for each."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    fields = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    return " ".join(fields.get(key, "") for key in ("vendor_id", "cpu family", "model"))


def read() -> tuple[dict[str, str], dict[str, str]]:
    """Where the golden answers were computed, and the answers by name."""
    document = json.loads(lzma.decompress(FILE.read_bytes()))
    return document["machine"], document["answers"]


def write(answers: Mapping[str, str]) -> None:
    """Keep these answers."""
    document = {"machine": machine(), "answers": answers}
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_bytes(lzma.compress(json.dumps(document, indent=1).encode(), preset=9))


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_inputs(folder)
        write({name: of_command(name, folder) for name in COMMANDS} | of_trainings(folder))


if __name__ == "__main__":
    main()
