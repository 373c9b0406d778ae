"""Malformed input to every command, from a seed; each case must end as the CLI contract says.

python -m tests.fuzz.campaign --seed 1 --cases 10000

A case is a copy of good files (corpus.py) with one to three of them damaged (mutations.py), or
with a hostile option, and one command run on it in a forked process. It must end within
``LIMIT_CPU_SECONDS`` with exit code 0, 2, 3 or 4; without a traceback; with one line that says what
is wrong; with no file half written, none beside the output, and none left by a hostile string.
What a case has imported is imported here before the next, which would else spend its time on that.
"""

import argparse
import fcntl
import gc
import importlib
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetflow.cli.main import run
from hetflow.schema import files
from hetflow.schema.errors import HetflowError

from . import corpus, mutations

LIMIT_CPU_SECONDS = 10  # of a case: what others do on the machine is not its fault
LIMIT_SECONDS = 60  # by the wall clock, for what waits for ever
MEMORY_BYTES = 8 << 30
WRITTEN = {
    corpus.OUTPUT,
    "out.txt",
    "run",
    "corrected",
    "timeline.html",
    "trace.json",
    "curves.svg",
}
_LEFT_BY_FONTS = {".cache", ".config"}


@dataclass(frozen=True)
class Case:
    """One command on damaged input."""

    number: int
    seed: int
    command: corpus.Command
    arguments: tuple[str, ...]
    damaged: tuple[str, ...]

    def __str__(self) -> str:
        return f"--seed {self.seed} --first {self.number} --cases 1: {self.command.name}"


@dataclass(frozen=True)
class Outcome:
    """How a case ended; ``faults`` is empty where the contract held."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    faults: tuple[str, ...] = ()


def _picked(seed: int, number: int) -> tuple[random.Random, corpus.Command]:
    draw = random.Random(f"{seed}:{number}")
    return draw, corpus.pick(draw)


def prepare(folder: Path, good: Path, seed: int, number: int) -> Case:
    """Copy the good files to ``folder`` and damage what the case damages."""
    draw, command = _picked(seed, number)
    _copy(good, folder, command)
    arguments = list(command.arguments)
    if command.options and draw.random() < 0.3:
        name = draw.choice(command.options)
        arguments[arguments.index(name) + 1] = mutations.option(draw)
        return Case(number, seed, command, tuple(arguments), (name,))
    names = draw.sample(command.reads, k=min(len(command.reads), draw.choice((1, 1, 2))))
    for name in names:
        path = folder / name
        path.write_bytes(mutations.damage(path.read_bytes(), draw))
    return Case(number, seed, command, tuple(arguments), tuple(names))


def undamaged(folder: Path, good: Path, number: int) -> Case:
    """Copy the good files to ``folder`` for the command of that number."""
    command = corpus.COMMANDS[number]
    _copy(good, folder, command)
    return Case(number, 0, command, command.arguments, ())


def _copy(good: Path, folder: Path, command: corpus.Command) -> None:
    shutil.copytree(good, folder)
    if corpus.CONFIG not in command.reads:
        (folder / corpus.CONFIG).unlink()


def perform(case: Case, folder: Path) -> Outcome:
    """Run the case in a forked process, so that its hang or death is its own."""
    before = contents(folder)
    said, told = folder.parent / "stdout", folder.parent / "stderr"
    imported = folder.parent / "imported"
    imported.unlink(missing_ok=True)
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        _in_child(case, folder, said, told, imported)
    status = _wait(child)
    _import(imported)
    seconds = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    stdout = said.read_text(encoding="utf-8", errors="replace")
    stderr = told.read_text(encoding="utf-8", errors="replace")
    faults = (
        *faults_of(code, stdout, stderr, case),
        *faults_of_files(before, folder, code),
    )
    return Outcome(code, stdout, stderr, seconds, faults)


def _in_child(case: Case, folder: Path, said: Path, told: Path, imported: Path) -> None:
    """Run the command with files for stdout and stderr; never returns."""
    code, inherited = 99, set(sys.modules)
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_CPU_SECONDS, LIMIT_CPU_SECONDS + 1))
        os.chdir(folder)
        held = open(corpus.HELD)  # noqa: SIM115 (held until the process ends)
        fcntl.flock(held, fcntl.LOCK_EX)
        for descriptor, path in ((1, said), (2, told)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        code = run(list(case.arguments))
    except BaseException:
        # A fault that passed the command line's own net is the finding, whatever its class.
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
            own = [name for name, module in sys.modules.items() if name not in inherited
                   and getattr(module, "__spec__", None) is not None]  # fmt: skip
            imported.write_text(json.dumps(own))
        finally:
            os._exit(code)


def _import(imported: Path) -> None:
    """Import what a case has imported; one that was killed has not said what that is."""
    names = json.loads(imported.read_text()) if imported.exists() else []
    for name in names:
        with suppress(ImportError):  # a library's own inventions
            importlib.import_module(name)
    if names:
        gc.freeze()  # else a collection in each child copies every page


def _wait(child: int) -> int:
    """Wait for the child; after the limit kill its whole session."""
    number = os.pidfd_open(child)
    if not select.select([number], [], [], LIMIT_SECONDS)[0]:
        os.killpg(child, signal.SIGKILL)
    os.close(number)
    return os.waitpid(child, 0)[1]


def faults_of(code: int, stdout: str, stderr: str, case: Case) -> list[str]:
    """What in the exit code and the words breaks the contract."""
    faults = []
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return [f"hung for {LIMIT_CPU_SECONDS} s of CPU time, or {LIMIT_SECONDS} s"]
    if code not in (0, 2, 3, 4):
        faults.append(f"exit code {code}")
    if "Traceback" in stderr or "Traceback" in stdout:
        faults.append("a traceback: " + stderr.strip().splitlines()[-2][:150])
    lines = [line for line in stderr.splitlines() if not line.startswith("hetflow: warning: ")]
    said = [line for line in lines if line.startswith("hetflow: ")]
    if code in (2, 3) and (len(said) != 1 or len(lines) > 2):
        faults.append(f"{len(said)} error lines of {len(lines)} lines")
    if code == 0 and lines:
        faults.append(f"words on stderr in a pipe: {lines[0][:100]}")
    if any(not char.isprintable() and char not in "\n\t" for char in stderr):
        faults.append("control characters on stderr")
    if max((len(line) for line in stderr.splitlines()), default=0) > 4000:
        faults.append("a line of over 4,000 characters")
    if code == 0 and "--json" in case.arguments:
        faults += _faults_of_json(stdout)
    if code in (2, 3) and stdout.strip() and "--json" not in case.arguments:
        faults.append("a result on stdout beside an error")
    return faults


def _faults_of_json(text: str) -> list[str]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError as error:
        return [f"stdout is not one JSON document: {error}"]
    return []


def _files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*") if p.is_file() and p.parts[len(folder.parts)] not in
            _LEFT_BY_FONTS]  # fmt: skip


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file of a case's folder with its content."""
    return {path: path.read_bytes() for path in _files(folder)}


def faults_of_files(before: dict[Path, bytes], folder: Path, code: int) -> list[str]:
    """Input untouched, output whole or absent, nothing beside it."""
    faults = []
    after = set(_files(folder))
    for path, content in before.items():
        if path not in after:
            faults.append(f"{path.name} is gone")
        elif path.read_bytes() != content:
            is_state = path.relative_to(folder).parts[0] == corpus.STATE
            if code or not is_state:
                faults.append(f"{path.name} was changed")
    for path in sorted(after - before.keys()):
        name = path.relative_to(folder).parts[0]
        if name == "pwned":
            faults.append("a hostile string was run")
        elif name.startswith("."):
            faults.append(f"a temporary file is left: {name[:60]}")
        elif code in (2, 3) and name in WRITTEN:
            faults.append(f"an error, and {name} was written")
        elif name == corpus.OUTPUT:
            faults += _faults_of_output(path)
    return faults


def _faults_of_output(path: Path) -> list[str]:
    try:
        files.read_any(path)
    except HetflowError as error:
        return [f"an output that cannot be read back: {error.message[:200]}"]
    return []


def signature(fault: str) -> str:
    """A fault without what differs from case to case, for counting."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "_", fault)[:110]


def campaign(
    folder: Path, seed: int, first: int, cases: int, *, with_undamaged: bool = False
) -> "list[tuple[Case, Outcome]]":
    """Run cases ``first`` to ``first + cases - 1`` of a seed.

    Args:
        folder: Where the good files are made, as ``good``, and the cases run.
        seed: What decides what is damaged.
        first: The number of the first case.
        cases: How many.
        with_undamaged: Run every command on the good files first.

    Returns:
        Every case with its outcome, those whose contract broke among them.
    """
    good, own = folder / "good", folder / "case"
    good.mkdir()
    corpus.make(good)
    for name in corpus.LIBRARIES:
        importlib.import_module(name)
    gc.freeze()
    asked = [(corpus.COMMANDS[n], partial(undamaged, own, good, n))
             for n in range(len(corpus.COMMANDS) if with_undamaged else 0)]  # fmt: skip
    asked += [(_picked(seed, n)[1], partial(prepare, own, good, seed, n))
              for n in range(first, first + cases)]  # fmt: skip
    done = {}
    # Those with torch last: a process that has imported it takes twice as long to fork.
    for index in sorted(range(len(asked)), key=lambda i: asked[i][0].name in corpus.WITH_TORCH):
        if asked[index][0].name in corpus.WITH_TORCH:
            importlib.import_module("torch")
        case = asked[index][1]()
        done[index] = (case, perform(case, own))
        shutil.rmtree(own)
    return [outcome for _, outcome in sorted(done.items())]


def report(done: "list[tuple[Case, Outcome]]") -> str:
    """What broke, most frequent first, with one case of each to run again."""
    found: dict[str, list[tuple[Case, Outcome]]] = {}
    for case, outcome in done:
        for fault in outcome.faults:
            found.setdefault(signature(fault), []).append((case, outcome))
    codes = Counter(outcome.code for _, outcome in done)
    case, slowest = max(done, key=lambda entry: entry[1].seconds)
    lines = [
        f"{len(done)} cases; exit codes {dict(sorted(codes.items()))}; "
        f"slowest {slowest.seconds:.1f} s ({case})"
    ]
    for fault, broken in sorted(found.items(), key=lambda entry: -len(entry[1])):
        lines += [f"{len(broken):6} {fault}", *(f"       {case}" for case, _ in broken[:8])]
        lines.append(f"       {broken[0][1].stderr.strip()[-700:]}")
    return "\n".join(lines)


def main() -> int:
    """Run a campaign; exit code 1 where a case broke the contract."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--with-undamaged", action="store_true", help="every command once, first")
    parser.add_argument("--folder", type=Path, help="keep the good files and outcomes.pickle here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        folder = asked.folder or Path(own)
        done = campaign(
            folder, asked.seed, asked.first, asked.cases, with_undamaged=asked.with_undamaged
        )
        (folder / "outcomes.pickle").write_bytes(pickle.dumps(done))
    sys.stdout.write(report(done) + "\n")
    return 1 if any(outcome.faults for _, outcome in done) else 0


if __name__ == "__main__":
    from hetflow.tests.fuzz import campaign as named  # by this name outcomes can be read back

    sys.exit(named.main())
