"""The house rules: import directions and circles, shipped packages, documented commands."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import hetflow
from hetflow.cli.main import COMMANDS
from hetflow.schema.files import RECORDS
from hetflow.schema.schedule import DEFAULT_SCHEDULE, SCHEDULES, traits

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT = {
    "schema": set(),
    "devices": {"schema"},
    "costs": {"schema"},
    "schedules": {"schema"},
    "checks": {"schema"},  # what it judges is made by everybody else
    "solvers": {"schema", "costs", "schedules"},
    "importers": {"schema"},
    "exporters": {"schema", "runtime"},  # of checkpoints
    "planning": {"schema", "costs", "schedules", "solvers", "checks", "devices"},
    "protocol": {"schema", "schedules", "devices"},
    "preload": {"schema", "devices", "protocol"},
    "runtime": {"schema", "schedules", "devices", "protocol"},
    # Terms are fitted to their own sum.
    "profilers": {"schema", "costs", "schedules", "devices", "protocol", "preload", "runtime"},
    "launcher": {"schema", "devices", "protocol", "preload", "runtime"},
    "reports": {"schema", "schedules"},
    "mechanisms": {"schema", "solvers"},
    "simulator": {"schema", "costs", "schedules", "solvers", "mechanisms"},
    "engines": {"schema", "devices"},  # they run `hetflow launch` as a user would
    "scheduler": {"schema", "protocol", "planning", "mechanisms", "engines"},
    "dashboard": {"schema", "scheduler"},
    "examples": {
        "schema", "schedules", "costs", "checks", "solvers", "planning", "devices", "protocol",
        "runtime", "profilers", "mechanisms", "simulator", "importers", "exporters", "plugins",
        "papers",
    },
    "plugins": {
        "schema", "schedules", "solvers", "checks", "devices", "importers", "exporters", "engines",
    },
    "testing": {"schema", "costs", "profilers"},  # nobody imports it
    "papers": {  # nobody imports it
        "schema", "costs", "schedules", "checks", "solvers", "importers", "mechanisms",
        "simulator",
    },
    "api": {
        "schema", "planning", "solvers", "importers", "profilers", "devices", "protocol", "runtime",
        "launcher", "mechanisms", "simulator", "checks", "exporters", "reports", "schedules",
        "scheduler",
    },
    "cli": {
        "schema", "costs", "schedules", "checks", "solvers", "planning", "devices", "protocol",
        "runtime", "profilers", "launcher", "reports", "mechanisms", "simulator", "examples",
        "importers",
        "exporters", "api",
        "engines", "scheduler", "dashboard",
    },
}  # fmt: skip
# Rooms that belong together stand in one folder; the rooms of a wing have rules of their own.
WINGS = {
    "clusters": ("mechanisms", "simulator", "scheduler", "engines", "dashboard"),
    "formats": ("importers", "exporters", "reports"),
    "planning": ("costs", "schedules", "checks"),
    "runtime": ("launcher", "preload", "protocol"),
}
WING_OF = {room: wing for wing, rooms in WINGS.items() for room in rooms}
PUBLIC_OF = {"cli": {f"hetflow.{name}" for name in hetflow.__all__}}  # commands call the public API
TORCH_AT_IMPORT = {"runtime", "examples"}
TORCH_WHEN_ASKED = {"devices", "exporters", "profilers", "launcher", "testing"}
MODELS = ROOT / "profilers" / "zoo"  # model classes; loaded by name only
LIBRARIES_OF_FEW_FILES = {
    "pulp": {"solvers/lp.py"},
    "scipy": {"solvers/lp.py", "solvers/market/odds.py"},  # the latter: its statistics
    "highspy": {"solvers/lp.py"},
    "numba": {"solvers/compiling.py"},
}


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree; several tests read all of them."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's tree."""
    return list(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Millions of nodes: walked by no garbage collection meanwhile, and gone with the last test."""
    gc.disable()
    yield
    nodes.cache_clear()
    parsed.cache_clear()
    gc.enable()


def place(room: str) -> Path:
    """Its folder, or its file."""
    folder = ROOT / WING_OF.get(room, "") / room
    return folder if folder.is_dir() else folder.with_suffix(".py")


def modules(room: str) -> list[Path]:
    """Its files, without those of other rooms in the wing that has its name."""
    own = place(room)
    others = {own / other for other in WINGS.get(room, ())}
    found = own.rglob("*.py") if own.is_dir() else [own]
    return sorted(path for path in found if not others & set(path.parents))


def room_of(parts: list[str]) -> str:
    """The room of a module, given by its path below the root."""
    return parts[1] if len(parts) > 1 and parts[1] in WINGS.get(parts[0], ()) else parts[0]


def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported room of ours or library, whether at module level) of one file."""
    package = path.relative_to(ROOT).parts[:-1]
    found = []
    at_import = {id(node) for node in parsed(path).body}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            target = node.module.split(".") if node.module else []
            if node.level:
                target = ["hetflow", *package[: len(package) - node.level + 1], *target]
            names = {target[0]}
            if target[0] == "hetflow" and (node.level or len(target) > 1):
                rooms = {room_of([*target[1:], alias.name]) for alias in node.names}
                names = {f"hetflow.{room}" for room in rooms}
            found += [(name, id(node) in at_import) for name in sorted(names)]
        elif isinstance(node, ast.Import):
            found += [(alias.name.split(".")[0], id(node) in at_import) for alias in node.names]
    return found


def dependencies() -> dict[str, set[str]]:
    """Which modules each module that ships names in its imports.

    Imports inside functions count, and so do those that are for types alone: whoever reads one
    module has to know the other. The public names at the root are loaded by name, so they are none.
    """
    rooms = {path.parent for path in ROOT.glob("*/__init__.py")} - {ROOT / "tests"}
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for room in rooms
        for path in room.rglob("*.py")
    }
    return {name: _named(path, paths) - {name} for name, path in paths.items()}


def _named(path: Path, modules_of_ours: Collection[str]) -> set[str]:
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in nodes(path):
        if not isinstance(node, ast.ImportFrom):
            continue
        parts = node.module.split(".") if node.module else []
        if node.level:
            parts = [*package[: len(package) - node.level + 1], *parts]
        elif parts[:1] == ["hetflow"]:
            parts = parts[1:]
        else:
            continue
        for alias in node.names:
            whole = ".".join([*parts, alias.name])
            found.add(whole if whole in modules_of_ours else ".".join(parts))
    return found & set(modules_of_ours)


def in_circles(graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that are left when those that import none of the others go, again and again."""
    left = dict(graph)
    while leaves := {name for name, asked in left.items() if not asked & left.keys()}:
        left = {name: asked for name, asked in left.items() if name not in leaves}
    return set(left)


def test_no_import_goes_in_a_circle() -> None:
    graph = dependencies()
    assert "runtime.launcher.request" in graph["cli.launch"]  # inside a function
    assert "schema.run" in graph["cli.launch"]  # for types alone
    # Loaded by name: commands when they are used, records when a file holds one.
    graph["cli.main"] |= {f"cli.{listed.where.split('.')[0]}" for listed in COMMANDS.values()}
    graph["schema.files"] |= {f"schema.{module}" for module, _ in RECORDS.values()}
    assert {"cli.solve", "schema.run"} <= graph["cli.main"] | graph["schema.files"]
    assert graph["cli.main"] | graph["schema.files"] <= graph.keys()
    assert in_circles(graph) == set()


# What torch and named tuples call so, and some class of ours too.
OTHERS_PRIVATE = {"_base", "_buffers", "_parameters", "_version", "_replace", "_make"}


def private_names(path: Path) -> set[str]:
    """What a module keeps to itself: ``self._name``, ``def _name``, and fields ``_name: type``."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in {"self", "cls"}:
                found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_nobody_reaches_into_another_modules_objects() -> None:
    rooms = [path.parent for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"]
    own = {path: private_names(path) for room in rooms for path in room.rglob("*.py")}
    ours = set().union(*own.values()) - OTHERS_PRIVATE
    foreign = {path: ours - names for path, names in own.items()}
    reached = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in own
        for node in nodes(path)
        if isinstance(node, ast.Attribute) and node.attr in foreign[path]
    ]
    assert reached == []


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_imports_point_one_way(package: str) -> None:
    allowed = {f"hetflow.{name}" for name in MAY_IMPORT[package] | {package}}
    allowed |= {"hetflow.__version__"} | PUBLIC_OF.get(package, set())
    for path in modules(package):
        for name, at_import in imports(path):
            where = path.relative_to(ROOT)
            if name.startswith("hetflow."):
                assert name in allowed, f"{where} imports {name}"
            if name == "torch" and at_import:
                late = package not in TORCH_AT_IMPORT and MODELS not in path.parents
                assert not late, f"{where} imports torch at module level"
            if name == "torch":
                assert package in TORCH_AT_IMPORT | TORCH_WHEN_ASKED, f"{where}: torch"
            if name in LIBRARIES_OF_FEW_FILES:
                assert str(where) in LIBRARIES_OF_FEW_FILES[name], f"{where} imports {name}"


def test_judges_of_papers_share_nothing_with_what_they_judge() -> None:
    judges = [*(ROOT / "papers").glob("*/judge.py")]
    assert judges
    for path in judges:
        ours = {name for name, _ in imports(path) if name.startswith("hetflow.")}
        assert ours <= {"hetflow.schema", "hetflow.checks"}, path


def test_oracles_have_their_own_arithmetic() -> None:
    """What brute force is held against must not be what it calls: an error would pass both."""
    for path in [*modules("tests/solvers"), *modules("tests/simulator"), *modules("tests/cli")]:
        names = {name for name, _ in imports(path)}
        assert "hetflow.costs" not in names, f"{path.relative_to(ROOT)} imports costs"


# Files outside devices/ that may name a kind of device, and why.
NAMES_A_KIND = {
    "schema/profile.py",  # the base of an emulated type, in files written before it was stated
}
_KIND = re.compile(r"cuda|nccl|gloo|^cpu$|\bcpu:", re.IGNORECASE)
_KIND_ATTRIBUTE = re.compile(r"^(is_|on_|uses_)?(cuda|nccl|gloo)$|^is_(cuda|nccl|gloo)_available$")


def kinds_named(path: Path) -> list[str]:
    """Where code names a kind of device; prose (comments, docstrings, help) may.

    A comparison with a colon is one: that is how emulated types are spelled.
    """
    prose = {
        id(part)
        for node in nodes(path)
        if isinstance(node, ast.Expr) or _is_help(node)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant)
        if isinstance(node, ast.keyword) or node.value is part
    }
    found = []
    for node in nodes(path):
        text = None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value if _KIND.search(node.value) else None
        elif isinstance(node, ast.Attribute) and _KIND_ATTRIBUTE.match(node.attr):
            text = node.attr
        elif isinstance(node, ast.Compare) and _asks_for_colon(node):
            text = ast.unparse(node)
        if text is not None:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    return found


def _is_help(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "help"


def _asks_for_colon(node: ast.Compare) -> bool:
    colon = isinstance(node.left, ast.Constant) and node.left.value == ":"
    return colon and "type" in ast.unparse(node.comparators[0])


def test_one_room_names_kinds_of_devices() -> None:
    rooms = set(MAY_IMPORT) - {"devices", "examples", "testing"}
    named = [
        where
        for room in sorted(rooms)
        for path in modules(room)
        if str(path.relative_to(ROOT)) not in NAMES_A_KIND
        for where in kinds_named(path)
    ]
    assert named == []
    assert len(kinds_named(ROOT / "devices" / "cuda.py")) > 5
    assert kinds_named(ROOT / "devices" / "cpu.py")


# Files outside schedules/ that may name one, and why.
NAMES_A_SCHEDULE = {
    "schema/schedule.py",  # the one that is planned unless another is asked for
    "planning/checks/schedule_lists.py",  # the judge's own definition of each
}
PIPEDREAM_FILES = {  # a format of layers has the name of a schedule
    "cli/files.py", "formats/exporters/pipedream.py", "formats/exporters/registry.py",
    "formats/importers/pipedream.py",
    "schema/requests/files.py",
}  # fmt: skip


def schedules_named(path: Path, names: Collection[str]) -> list[str]:
    """Where code names a schedule; prose may, and what messages say is prose too."""
    where = str(path.relative_to(ROOT))
    meant = set(names) - ({"pipedream"} if where in PIPEDREAM_FILES else set())
    return [
        f"{where}:{node.lineno}: {node.value}"
        for node in nodes(path)
        if isinstance(node, ast.Constant) and node.value in meant
    ]


def test_no_code_but_their_own_names_schedules() -> None:
    names = [entry.name for entry in SCHEDULES.registered]
    assert len(names) > 8
    named = [
        where
        for room in sorted(set(MAY_IMPORT) - {"schedules", "papers", "examples"})
        for path in modules(room)
        if str(path.relative_to(ROOT)) not in NAMES_A_SCHEDULE
        for where in schedules_named(path, names)
    ]
    assert named == []
    default = traits(DEFAULT_SCHEDULE)
    assert (default.order, default.flushes) == ("alternating", True)  # the parallel planner's
    assert schedules_named(place("schedules") / "one_f_one_b.py", names)


def test_every_package_ships() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(declared["tool"]["setuptools"]["packages"])
    folders = {
        "hetflow" + "".join(f".{part}" for part in path.parent.relative_to(ROOT).parts)
        for path in ROOT.rglob("__init__.py")
        if not path.relative_to(ROOT).parts[0].startswith((".", "tests", "build"))
    }
    assert shipped == folders


def test_the_root_is_seen_at_one_glance() -> None:
    names = sorted(path.name for path in ROOT.glob("*.py"))
    assert names == ["__init__.py", "__main__.py", "plugins.py"]  # the second: python -m hetflow
    assert len([*ROOT.glob("[a-z]*/__init__.py"), ROOT / "benchmarks", ROOT / "docs"]) <= 16


def test_wings_import_nothing_themselves() -> None:
    """Whoever imports one of their rooms loads the others' for nothing."""
    for wing in WINGS:
        named = [name for name, now in imports(ROOT / wing / "__init__.py") if now]
        assert set(named) <= {"typing"}, wing


def test_every_exchange_of_the_runtime_goes_through_peers() -> None:
    """There the loss of a worker gets its type; an exchange elsewhere would fail untyped."""
    exchanges = {
        "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
        "all_reduce", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
        "broadcast", "broadcast_object_list", "gather", "init_process_group", "irecv", "isend",
        "new_group", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter", "send",
    }  # fmt: skip
    stray = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules("runtime")
        if path.name not in ("peers.py", "unplanned.py")  # the latter passes on a script's own call
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr in exchanges
        and isinstance(node.value, ast.Name)
        and node.value.id == "dist"
    ]
    assert stray == []


_WRITES = re.compile(r"sys\.(stdout|stderr)\.(buffer\.)?write$|traceback\.print_|print$")


def test_only_programs_write_to_the_terminal() -> None:
    """What the library says goes to the logger ``hetflow``; see docs/decisions.md."""
    programs = {
        "runtime/worker.py", "runtime/log.py",  # a worker, and the handler that it may have
        "runtime/job.py",  # what the script prints with ``job.print``
        "runtime/preload/__main__.py", "runtime/preload/server.py",
    }  # fmt: skip
    written = {
        str(path.relative_to(ROOT))
        for room in set(MAY_IMPORT) - {"cli", "examples"}
        for path in modules(room)
        for node in nodes(path)
        if isinstance(node, ast.Call) and _WRITES.match(ast.unparse(node.func))
    }
    assert written == programs


_FLAG = re.compile(r"(?<![\w./-])--[a-z][a-z0-9-]*")
WRITES_COMMANDS = {  # for other programs, or for hetflow's own on another host
    "devices/doctor.py", "clusters/engines/local.py", "clusters/engines/ray.py",
    "clusters/engines/skypilot.py", "clusters/engines/slurm.py", "formats/exporters/ray.py",
    "formats/exporters/hosts.py", "formats/exporters/slurm.py", "formats/importers/sacct.py",
    "runtime/preload/client.py", "runtime/preload/server.py",
    "clusters/scheduler/leases.py", "clusters/scheduler/renting.py", "schema/options.py",
}  # fmt: skip


def test_only_the_command_line_speaks_of_flags() -> None:
    """Others name the field of a request, by ``option``; each door spells it."""
    found = []
    for package in MAY_IMPORT.keys() - {"cli", "examples", "papers"}:
        for path in modules(package):
            name = str(path.relative_to(ROOT))
            if name in WRITES_COMMANDS or name.startswith("schema/requests/"):
                continue
            words = {
                id(node.value)
                for node in nodes(path)
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            }
            found += [
                f"{name}:{node.lineno}: {node.value}"
                for node in nodes(path)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                and id(node) not in words and _FLAG.search(node.value)
            ]  # fmt: skip
    assert found == []


def test_a_class_name_means_one_thing() -> None:
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    names: dict[str, set[str]] = {}
    for room in rooms:
        if room.name not in {"tests", "examples"}:
            for path in room.rglob("*.py"):
                for node in nodes(path):
                    if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                        names.setdefault(node.name, set()).add(f"{path.relative_to(ROOT)}")
    several = {name: paths for name, paths in names.items() if len(paths) > 1}
    # A training job of a cluster, and what a script gets from hf.prepare: both are promised names.
    assert several == {"Job": {"schema/jobs.py", "runtime/job.py"}}


_FIRST_WORDS = re.compile(r"(Those|These|As|They|It)\b|The same\b")


def test_first_sentences_stand_alone() -> None:
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {docstring.splitlines()[0]}"
        for room in {path.parent for path in ROOT.glob("*/__init__.py")}
        if room.name != "tests"
        for path in room.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, documented) and (docstring := ast.get_docstring(node))
        if _FIRST_WORDS.match(docstring)
    ]
    assert found == []


_NO_PROSE = re.compile(r">>>|^ *\||^==|\A {4}", re.MULTILINE)  # examples, tables, formulas


def long_sentences(docstring: str) -> list[str]:
    """Those of more than 28 words; a colon or a semicolon ends one too."""
    return [
        " ".join(words)
        for paragraph in re.split(r"\n\s*\n", docstring)
        if not _NO_PROSE.search(paragraph)
        for words in map(str.split, re.split(r"(?<=[.:;!?])\s+", paragraph))
        if len(words) > 28
    ]


def test_no_docstring_has_a_long_sentence() -> None:
    rooms = [path.parent for path in ROOT.glob("*/__init__.py")]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.relative_to(ROOT)}:{node.body[0].lineno}: {sentence}"
        for room in rooms
        if room.name not in {"cli", "tests"}  # commands list examples
        for path in room.rglob("*.py")
        for node in nodes(path)
        if isinstance(node, documented)
        for sentence in long_sentences(ast.get_docstring(node) or "")
    ]
    assert found == []
    assert not long_sentences("word " * 28 + "\n\n    " + "formula " * 29)
    assert long_sentences("Short.\n\nArgs:\n    name: It is" + " very" * 27 + ".")


def test_nothing_names_this_machine_or_a_registry() -> None:
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    pattern = re.compile(
        "/ro" + "ot/|/ho" + "me/[a-z]+/|/wo" + "rk/|pypi\\.(org|python)|index-" + "url"
    )
    for name in tracked:
        path = ROOT / name
        if path.is_file() and path.suffix in {".py", ".toml", ".md", ".txt", ".json", ""}:
            match = pattern.search(path.read_text(encoding="utf-8", errors="replace"))
            assert match is None, f"{name}: {match.group() if match else ''}"


@pytest.mark.parametrize(
    "module",
    ["hetflow.cli.main", "hetflow.solvers.split.solve", "hetflow.planning.checks.batch_split"],
)
def test_planning_starts_without_torch(module: str) -> None:
    heavy: tuple[str, ...] = ("torch", "scipy", "pandas", "pulp")
    if module == "hetflow.cli.main":
        heavy += ("pydantic", "numpy")  # records are checked when a command reads some
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


def test_the_house_map_names_every_folder() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for room in MAY_IMPORT:
        where = place(room)
        ending = "/" if where.is_dir() else ""
        assert f"`{where.relative_to(ROOT)}{ending}`" in text


def test_light_requirements_are_the_dependencies_without_torch_and_pandas() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        needed = tomllib.load(stream)["project"]["dependencies"]
    lines = (ROOT / "requirements-light.txt").read_text(encoding="utf-8").splitlines()
    light = [line for line in lines if line and not line.startswith("#")]
    assert light == [name for name in needed if not name.startswith(("torch", "pandas"))]


def test_all_that_development_installs_is_pinned() -> None:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        project = tomllib.load(stream)["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    named = {re.split(r"[<>=\[]", requirement)[0] for requirement in asked}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in pinned)
    assert named <= {line.split("==")[0] for line in pinned}
