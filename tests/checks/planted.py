"""Faults planted into what makes plans, one at a time: each must be caught by the judge.

``python -m tests.checks.planted`` plants 200 faults that change a plan into ``schedules``,
``costs`` and ``solvers``, drawn by a seed, and prints a table of what became of them. A fault is a
changed operator, comparison, constant, returned number, or a min that becomes a max, in code that
the question runs.
"""

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from tests.checks import tampered

import hetflow
from hetflow.schema.errors import BackendError
from hetflow.schema.plan import Plan

ROOT = Path(hetflow.__file__).parent
CAMPAIGN = 200
ROOMS = ("planning/schedules", "planning/costs", "solvers")
MOST_SECONDS = 1
"""CPU seconds that a solver with a fault may take; one that does not end gives no plan."""

_SWAPS: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Site:
    """One fault: a node of a function, and what is put there."""

    path: Path
    function: str
    line: int
    column: int
    kind: str

    @property
    def room(self) -> str:
        """The folder of ours that the fault is in."""
        return next(room for room in ROOMS if ROOT / room in self.path.parents)

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} {self.function}: {self.kind}"


def _variants(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield (name, change) of every fault that can be planted at a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        yield "operator", lambda n: setattr(n, "op", _SWAPS[type(n.op)]())
    if isinstance(node, ast.BoolOp):
        yield "and or", lambda n: setattr(n, "op", _SWAPS[type(n.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPS:
        yield "comparison", lambda n: n.ops.__setitem__(0, _SWAPS[type(n.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "constant", lambda n: setattr(n, "value", n.value + 1)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        if node.func.id in ("min", "max"):
            other = {"min": "max", "max": "min"}[node.func.id]
            yield "min max", lambda n: setattr(n.func, "id", other)
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return", _scaled


def _scaled(node: ast.Return) -> None:
    """Return 10 % less of a number, and anything else as it is."""
    less = ast.parse("(lambda v: v * 0.9 if isinstance(v, float) else v)(0)", mode="eval").body
    assert isinstance(less, ast.Call)
    assert node.value is not None
    less.args = [node.value]
    node.value = less


@cache
def _parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


@cache
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    """Qualified name -> definition of every function and method at the top of a module."""
    found = {}
    for node in _parsed(path):
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def sites(lines: dict[str, set[int]]) -> list[Site]:
    """Every fault at a line that was run.

    Args:
        lines: File -> its lines that were run.
    """
    found = []
    for name, ran in sorted(lines.items()):
        path = Path(name)
        for function, definition in _functions(path).items():
            for node in (each for part in definition.body for each in ast.walk(part)):
                if getattr(node, "lineno", None) in ran:
                    found += [
                        Site(path, function, node.lineno, node.col_offset, kind)  # type: ignore[attr-defined]
                        for kind, _ in _variants(node)
                    ]
    return found


def lines_run(work: Callable[[], object], paths: tuple[str, ...] = ROOMS) -> dict[str, set[int]]:
    """Run something; return file -> lines of these folders and files that were run."""
    ran: dict[str, set[int]] = {}
    rooms = tuple(str(ROOT / path) for path in paths)

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(rooms):
            return None
        ran.setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        work()
    finally:
        sys.settrace(before)
    return ran


def _live(site: Site) -> FunctionType | None:
    """Find the function of a fault, under its decorators."""
    parts = site.path.relative_to(ROOT).with_suffix("").parts
    found: Any = importlib.import_module(".".join(("hetflow", *parts)))
    for name in site.function.split("."):
        found = vars(found).get(name) if isinstance(found, type) else getattr(found, name, None)
    for inside in ("fget", "func", "__func__", "__wrapped__"):
        found = getattr(found, inside, None) or found
    return found if isinstance(found, FunctionType) else None


def _changed(site: Site, live: FunctionType) -> CodeType | None:
    """Compile the function with the fault in it, or the class around it: no more of the module."""
    whole = next(part for part in _parsed(site.path) if site.line <= (part.end_lineno or 0))
    part = copy.deepcopy(whole)
    for node in ast.walk(part):
        here = (getattr(node, "lineno", None), getattr(node, "col_offset", None))
        if here == (site.line, site.column):
            for kind, change in _variants(node):
                if kind == site.kind:
                    change(node)
                    tree = ast.fix_missing_locations(ast.Module([part], []))
                    return _code_of(compile(tree, str(site.path), "exec"), live.__code__)
    return None


def _code_of(module: CodeType, of: CodeType) -> CodeType | None:
    for constant in module.co_consts:
        if isinstance(constant, CodeType):
            if (constant.co_qualname, constant.co_firstlineno) == (
                of.co_qualname, of.co_firstlineno
            ):  # fmt: skip
                return constant
            if (inner := _code_of(constant, of)) is not None:
                return inner
    return None


def forget() -> None:
    """Empty hetflow's caches: what was counted before a fault is not asked after it.

    Not those of the schema, which counts nothing: to build the records' validators takes a second.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("hetflow."):
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    if not value.__module__.startswith(("hetflow.schema.", "pydantic.")):
                        value.cache_clear()
    tampered.answer.cache_clear()


@contextlib.contextmanager
def planted(site: Site) -> Iterator[bool]:
    """Plant a fault for a while; yields whether there is anything to change."""
    live = _live(site)
    code = None if live is None else _changed(site, live)
    if live is None or code is None or code == live.__code__:
        yield False
        return
    before, live.__code__ = live.__code__, code
    forget()
    try:
        yield True
    finally:
        live.__code__ = before
        forget()


class TooLong(Exception):
    """A solver with a fault does not end."""


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def outcome(site: Site, question: str, true: Plan) -> str:
    """Solve a question with a fault planted, and say what became of it.

    Returns:
        ``refused`` by the judge; ``no plan``; ``same`` plan; ``as good``: another plan that claims
        nothing false; ``unproved``: a slower plan that does not claim to be the best, or that the
        judge calls unproved; ``missed``: a bound that the best plan beats, and it says neither.
    """
    with planted(site) as changed, _limit(MOST_SECONDS):
        if not changed:
            return "same"
        try:
            plan = tampered.answer(question).plan
        except BackendError:
            return "refused"
        except (Exception, TooLong):
            return "no plan"
    if _bare(plan) == _bare(true):
        return "same"
    least = true.proof.lower_bound
    assert least is not None
    if (plan.proof.lower_bound or 0.0) > least * (1 + 1e-9):
        asked = tampered.answer(question)
        verdict = hetflow.check(plan, asked.profiles, asked.pool)
        return "unproved" if verdict.bound == "stated" else "missed"
    return "as good" if plan.proof.objective <= true.proof.objective * (1 + 1e-9) else "unproved"


def _bare(plan: Plan) -> Plan:
    return replace(plan, provenance=None, proof=replace(plan.proof, method=""))


def campaign(number: int, seed: int, questions: list[str]) -> Iterator[tuple[Site, str, str]]:
    """Plant faults until ``number`` of them have changed a plan; yield (fault, question, outcome).

    Questions and rooms take turns; of each, faults are drawn.
    """
    draw, left = random.Random(seed), number
    true = {}
    for name in questions:
        forget()
        true[name] = tampered.answer(name).plan
    known: dict[str, dict[str, list[Site]]] = {}
    for name in questions:
        forget()
        by_room: dict[str, list[Site]] = {}
        for site in sites(lines_run(functools.partial(tampered.answer, name))):
            by_room.setdefault(site.room, []).append(site)
        known[name] = by_room
    forget()
    while left:
        for name in questions:
            room = draw.choice([room for room in ROOMS if known[name].get(room)])
            site = draw.choice(known[name][room])
            found = outcome(site, name, true[name])
            if found != "same" and left:
                left -= 1
                yield site, name, found


def main() -> int:
    """Run the campaign, print its table, and end with 1 if a fault was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=CAMPAIGN)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    table: Counter[tuple[str, str]] = Counter()
    missed = 0
    for site, name, found in campaign(asked.number, asked.seed, list(tampered.QUESTIONS)):
        table[site.room, found] += 1
        missed += found == "missed"
        if found == "missed":
            sys.stdout.write(f"missed: {name}: {site}\n")
            sys.stdout.flush()
    for (room, found), count in sorted(table.items()):
        sys.stdout.write(f"{room:10} {found:10} {count:4}\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
