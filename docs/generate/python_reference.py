"""The Python reference: every public name with its signature and docstring.

Public are the names in ``hetflow.__all__`` and in ``hetflow.runtime.__all__``; a name that is added
there appears on the page.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, Unpack, get_args, get_origin

import hetflow
from hetflow import runtime

HEAD = """# Python

This page is generated from the docstrings of the public names. Other modules are private: they may
change in any release.
"""
SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Attributes|Example|Examples|Note):$")
ITEM = re.compile(r"^(\*{0,2}\w+(?: \([^)]*\))?): (.*)$")


def python_page() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    parts += module(hetflow, "hetflow", "Planning, checking, launching and reading files.")
    parts += module(
        runtime,
        "hetflow.runtime",
        "What a training script imports. [Training under a plan](../training.md) explains the use.",
    )
    return "\n".join(parts)


def module(source: ModuleType, name: str, purpose: str) -> Iterator[str]:
    """A section a public name, functions first; nothing where a module declares none."""
    public = [public for public in getattr(source, "__all__", ()) if not public.startswith("__")]
    if not public:
        return
    yield f"## `{name}`\n\n{purpose}\n"
    for each in sorted(public, key=lambda each: (_kind(getattr(source, each)), each)):
        yield entry(f"{name}.{each}", getattr(source, each))


def _kind(value: Any) -> int:
    if not inspect.isclass(value):
        return 0
    return 2 if issubclass(value, Exception) else 1


def entry(name: str, value: Any) -> str:
    """One name: signature, docstring, and a class's public methods and fields."""
    if isinstance(value, ModuleType) or not (inspect.isclass(value) or callable(value)):
        return f"### `{name}`\n\n{summary(value)}\n"
    lines = [f"### `{name}`", "", f"```text\n{signature(name, value)}\n```", "", *docstring(value)]
    lines += options(value)
    if inspect.isclass(value):
        for method, function in vars(value).items():
            if method.startswith("_") or not is_method(function):
                continue
            target = getattr(function, "__func__", getattr(function, "fget", function))
            shown = method if isinstance(function, property) else signature(method, target)
            lines += [f"```text\n{shown}\n```", "", *docstring(target)]
    return "\n".join(lines)


def is_method(member: Any) -> bool:
    """Whether a class's member is something that its users call or read."""
    return inspect.isfunction(member) or isinstance(member, property | classmethod | staticmethod)


def summary(value: Any) -> str:
    """The docstring of a module; a plain value has its type's, which says nothing of it."""
    return inspect.getdoc(value) or "" if isinstance(value, ModuleType) else f"`{value!r}`"


def signature(name: str, value: Any) -> str:
    """The call as Python shows it, a parameter a line where it is long."""
    if is_dataclass(value) and isinstance(value, type):
        # Types and units of the fields are in docs/formats.md, which the records follow.
        return call(name, [field.name for field in fields(value) if field.init], "")
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parts = []
    starred = False
    for each in found.parameters.values():
        if each.name == "self":
            continue
        if each.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            parts.append("*")
            starred = True
        starred = starred or each.kind is inspect.Parameter.VAR_POSITIONAL
        parts.append(parameter(each))
    answer = found.return_annotation
    shown = "" if answer is found.empty else f" -> {annotation(answer)}"
    return call(name, parts, shown)


def call(name: str, parts: list[str], answer: str) -> str:
    """A call on one line where it fits, else a parameter a line."""
    short = f"{name}({', '.join(parts)}){answer}"
    return short if len(short) <= 90 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){answer}"


def parameter(value: inspect.Parameter) -> str:
    """One parameter with its type and default."""
    stars = {value.VAR_POSITIONAL: "*", value.VAR_KEYWORD: "**"}.get(value.kind, "")
    kind = "" if value.annotation is value.empty else f": {annotation(value.annotation)}"
    default = "" if value.default is value.empty else f" = {value.default!r}"
    return f"{stars}{value.name}{kind}{default}"


def annotation(value: Any) -> str:
    """A type by its own name: the modules that types live in are private."""
    if get_origin(value) is Unpack:
        value = get_args(value)[0]
    text = value if isinstance(value, str) else inspect.formatannotation(value)
    text = re.sub(r"\bOptional\[(.*)\]$", r"\1 | None", text.replace("typing.", ""))
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+([A-Z]\w*)", r"\1", text)


def options(value: Any) -> Iterator[str]:
    """The keywords that a function takes by ``**options: Unpack[...]``, as its class says."""
    if inspect.isclass(value):
        return
    for each in inspect.signature(value).parameters.values():
        if get_origin(each.annotation) is Unpack:
            yield f"**`{each.name}`**\n"
            yield from docstring(get_args(each.annotation)[0])


def docstring(value: Any) -> Iterator[str]:
    """A Google docstring as Markdown: sections become lists, examples stay code."""
    text = inspect.getdoc(value) or ""
    code = False
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith(">>>") and not code:
            code = True
            yield "```pycon"
        elif code and not stripped:
            code = False
            yield "```"
        if code:
            yield stripped
        elif SECTION.match(stripped):
            yield f"**{stripped}**\n"
        elif found := ITEM.match(stripped) if line.startswith("    ") else None:
            yield f"- `{found.group(1)}`: {found.group(2).replace('``', '`')}"
        else:
            yield ("  " if line.startswith("        ") else "") + stripped.replace("``", "`")
    if code:
        yield "```"
    yield ""
