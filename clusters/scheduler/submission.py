"""What a user asks for: a script with its profiles or throughputs, as a TOML file or by options."""

import json
import os
import pwd
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ...planning.even_split import entry_with
from ...planning.inputs import model_of, profiles_of
from ...runtime.protocol.lower import check_pipeline_level
from ...schema.cluster import Cluster
from ...schema.errors import FileError, InfeasibleError, ProblemError
from ...schema.files import from_json, read, to_json, to_plain
from ...schema.jobs import Entity, Jobs, ModelThroughput, Throughputs
from ...schema.launch import Determinism
from ...schema.options import Strategy, option, options
from ...schema.records import Count, Index, Name, Positive, PositiveSeconds, record
from ...schema.spelling import did_you_mean
from ..engines.accounts import Account
from .store import ClusterStore
from .view import job_number

PATHS = ("script", "profiles", "directory")
# TOML knows 3 from 3.0.
_NUMBERS = ("steps", "priority_weight", "deadline_seconds", "time_limit_seconds")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
MOST_OF_ARRAY = 10_000
_OK = ":ok"
_FORMS = (
    ({"devices"}, {"devices_at_least", "devices_at_most"}, {"gpus"}),
    ({"profiles"}, {"throughputs"}),
)
"""Ways to say how many devices a job runs on, and how fast it is."""
TableReader = Callable[[Path], Throughputs]
"""Reads a table of throughputs; FileError where it is missing or none."""


def _read_table(path: Path) -> Throughputs:
    return read(path, Throughputs)


@record
class Submission:
    """One training job of a live cluster.

    ``script`` is run by ``hetflow launch`` with ``arguments``, from ``directory``, under a plan for
    the ``devices`` (all of one type) that it is given, made from ``profiles``. ``throughputs``
    instead are those of its model as its user knows them, with each number of devices: it holds
    these numbers alone, of one type at a time, and its plan is the even split. ``gpus`` instead of
    ``devices`` names types and numbers (``1xV100,2xP100``): it gets just these, all at once.
    ``devices_at_least`` and ``devices_at_most`` instead state a range, within which weighted fair
    sharing and EasyScale's schedulers change the number while it runs; ``devices`` is then the
    most. ``steps`` are those that it makes in all. ``virtual_nodes`` and ``determinism`` are those
    of ``hetflow solve`` and ``hetflow launch``: with ``elastic``, the default where virtual nodes
    are given, a job ends with the same parameters whatever devices it was moved to.
    ``checkpoint_every`` counts steps; a job also saves whenever it has to leave. ``entity`` is the
    node of the cluster's tree that it belongs to.

    ``environment`` are variables that its launch gets besides those of the scheduler. It may hold
    devices for ``time_limit_seconds``, over all its turns, and is held then. It begins ``after``
    jobs that are over (``"3"``), or done (``"3:ok"``); each is a number, or a name that only one
    job has. ``array_index`` is its place in the array that it was submitted with.

    ``strategy`` says what the plan is; ``auto`` takes on each turn the fastest of the three kinds.
    All but splits need ``microbatch_size``: a checkpoint can be loaded under the plan of other
    devices only if the microbatches are the same.
    """

    schema: Literal["hetflow.submission/1"] = "hetflow.submission/1"
    name: Name
    script: str
    arguments: tuple[str, ...] = ()
    directory: str
    profiles: str | None = None
    throughputs: tuple[ModelThroughput, ...] = ()
    model: Name | None = None
    batch_size: Count
    steps: Positive
    devices: Count = 1
    devices_at_least: Count | None = None
    devices_at_most: Count | None = None
    gpus: str | None = None
    strategy: Strategy = "split"
    virtual_nodes: Count | None = None
    microbatch_size: Count | None = None
    determinism: Determinism | None = None
    checkpoint_every: Index = 0
    priority_weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    deadline_seconds: PositiveSeconds | None = None
    entity: Name | None = None
    environment: dict[str, str] = field(default_factory=dict)
    time_limit_seconds: PositiveSeconds | None = None
    after: tuple[Name, ...] = ()
    array_index: Index | None = None

    def __post_init__(self) -> None:
        for name, value in self.environment.items():
            if not _VARIABLE.fullmatch(name):
                raise ProblemError(f"environment {name!r}: is no name of a variable")
            if name.startswith("HETFLOW_") or name.endswith("VISIBLE_DEVICES"):
                raise ProblemError(
                    f"environment {name}: hetflow sets it for each launch; leave it out"
                )
            if "\0" in value:
                raise ProblemError(f"environment {name}: its value holds a zero byte")
        if (self.profiles is None) == (not self.throughputs):
            given = "neither profiles nor" if self.profiles is None else "both profiles and"
            raise ProblemError(f"{given} throughputs are given: give one of them")
        self._check_range()
        if self.gpus is None:
            return
        pool = Cluster.parse(self.gpus)
        if pool.num_servers > 1:
            raise ProblemError(
                f"gpus {self.gpus}: give types and numbers without servers, such as 1xV100,2xP100"
            )
        if sum(pool.num_devices.values()) != self.devices:
            raise ProblemError(
                f"gpus {self.gpus} are not {self.devices} devices: leave devices out"
            )

    def _check_range(self) -> None:
        least, most = self.devices_at_least, self.devices_at_most
        if most is None:
            if least is not None:
                raise ProblemError(f"devices_at_least {least}: say devices_at_most too")
            return
        if self.gpus is not None:
            raise ProblemError(
                f"gpus {self.gpus} are just these devices: leave devices_at_most out"
            )
        if self.fewest_devices > most:
            raise ProblemError(
                f"devices_at_least {least} is more than devices_at_most {most}: exchange them"
            )
        if self.devices != most:
            raise ProblemError(
                f"devices {self.devices} and devices_at_most {most}: leave devices out"
            )

    @property
    def fewest_devices(self) -> int:
        """The least that it runs on; a range without one begins at 1."""
        return self.devices if self.devices_at_most is None else self.devices_at_least or 1

    @property
    def numbers(self) -> range:
        """The numbers of devices that it asks for."""
        return range(self.fewest_devices, self.devices + 1)

    @property
    def level(self) -> Determinism:
        """The level of determinism that the launch is asked for."""
        return self.determinism or ("none" if self.virtual_nodes is None else "elastic")


def read_submission(
    path: Path, given: Mapping[str, Any], *, read_table: TableReader = _read_table
) -> Submission:
    """Read a job's TOML file; its paths are relative to the file.

    Args:
        path: The file.
        given: Values that count instead of the file's; one way to say how many devices replaces
            another, and so do profiles and throughputs.
        read_table: As for ``submission``.

    Raises:
        FileError: It is missing, not TOML, or has faults; all of them are named at once.
    """
    values = _read_toml(path)
    for key in (*PATHS, "throughputs"):
        if isinstance(values.get(key), str):
            values[key] = str(path.parent / values[key])
    for forms in _FORMS:
        if any(form & given.keys() for form in forms):
            values = {
                key: value
                for key, value in values.items()
                if not any(key in form and not form & given.keys() for form in forms)
            }
    return submission({**values, **given}, base=path.parent, name=str(path), read_table=read_table)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None


def _as_json(values: dict[str, Any], name: str) -> str:
    try:
        return json.dumps(values)
    except (TypeError, ValueError):  # a date, or nan
        raise FileError(f"{name}: dates and nan mean nothing here; write a number") from None


def submission(
    values: dict[str, Any], *, base: Path, name: str, read_table: TableReader = _read_table
) -> Submission:
    """A job from its values; what is not given gets its default.

    Args:
        values: As in a TOML file; ``throughputs`` is the file of a table.
        base: The folder that the job runs in where none is given.
        name: What to call them in errors.
        read_table: How to read that file; without it only hetflow's own format is read.

    Raises:
        FileError: Values that make no sense, or no table of throughputs.
        ProblemError: The script or the profiles are not there, the table lacks the model, or no
            plan can be what is asked for.
    """
    values = {"schema": "hetflow.submission/1", "directory": str(base), **values}
    if "throughputs" in values:
        values |= _from_table(values, name, read_table)
    if isinstance(values.get("script"), str):
        stem = Path(values["script"]).stem
        values.setdefault("name", _CONTROL.sub(" ", stem))  # it stands in lines of text
    if isinstance(values.get("gpus"), str):
        values.setdefault("devices", sum(Cluster.parse(values["gpus"]).num_devices.values()))
    if "devices_at_most" in values:
        values.setdefault("devices", values["devices_at_most"])
    for key in _NUMBERS:
        if type(values.get(key)) is int:
            values[key] = float(values[key])
    for key in PATHS:
        if isinstance(values.get(key), str):
            values[key] = str(Path(values[key]).absolute())
    asked = from_json(_as_json(values, name), Submission, name=name)
    if not Path(asked.script).is_file():
        raise ProblemError(f"{name}: script {asked.script}: no such file")
    if asked.profiles is not None and not Path(asked.profiles).exists():
        raise ProblemError(
            f"{name}: profiles {asked.profiles}: no such folder", hint="run `hetflow profile` first"
        )
    if not Path(asked.directory).is_dir():
        raise ProblemError(f"{name}: directory {asked.directory}: no such folder")
    check_asked(asked, name)
    return asked


def check_asked(asked: Submission, name: str) -> None:
    """Refuse what no plan can be, as far as it can be known without devices.

    Raises:
        HetflowError: It can be none; or the profiles are not there.
    """
    _check_strategy(asked, name)
    if asked.throughputs:
        _check_numbers(asked, name)


def _from_table(values: Mapping[str, Any], name: str, read_table: TableReader) -> dict[str, Any]:
    """The model, and its throughputs on devices of one type, as a record has them."""
    path, model = values["throughputs"], values.get("model")
    if not isinstance(path, str):
        raise FileError(f"{name}: throughputs must be the name of a file")
    table = read_table(Path(path))
    try:
        chosen = model_of(table, model if isinstance(model, str) else None)
    except ProblemError as error:
        raise ProblemError(
            f"{name}: throughputs {path}: {error.message}", hint=error.hint
        ) from None
    alone = [
        replace(entry, unconsolidated_steps_per_second=None)  # all devices are on one server
        for entry in table.models
        if entry.model == chosen and any(entry.steps_per_second.values())
    ]
    if not alone:
        raise ProblemError(
            f"{name}: throughputs {path}: none of {chosen!r} is on devices of one type",
            hint="add an entry to models, or give profiles",
        )
    alone.sort(key=lambda entry: entry.scale_factor)
    return {"model": chosen if model is None else model, "throughputs": to_plain(tuple(alone))}


def _check_numbers(asked: Submission, name: str) -> None:
    """Refuse what a table of throughputs says nothing of."""
    if asked.strategy != "split":
        raise ProblemError(
            f"{name}: strategy {asked.strategy} needs profiles: throughputs know no layers",
            hint="give profiles, or take strategy split",
        )
    if asked.gpus is not None and len(Cluster.parse(asked.gpus).num_devices) > 1:
        raise ProblemError(
            f"{name}: gpus {asked.gpus}: several types at once need profiles, not throughputs",
            hint="give profiles, or devices of one type",
        )
    there = [entry.scale_factor for entry in asked.throughputs]
    obstacle = None
    for number in [n for n in there if n in asked.numbers] or [asked.devices]:
        try:
            entry_with(
                asked.throughputs, number,
                batch_size=asked.batch_size, virtual_nodes=asked.virtual_nodes,
            )  # fmt: skip
        except InfeasibleError as error:
            obstacle = error
        else:
            return
    assert obstacle is not None
    raise ProblemError(f"{name}: {obstacle.message}")


def _check_strategy(asked: Submission, name: str) -> None:
    """Refuse what no plan can be, as far as it can be known without devices."""
    if asked.strategy == "split":
        if asked.microbatch_size is not None:
            raise ProblemError(
                f"{name}: microbatch_size is for pipelines and parallel plans",
                hint="give virtual_nodes, or strategy pipeline, parallel or auto",
            )
        if asked.virtual_nodes is not None:
            _check_divides(asked, name, "virtual_nodes", asked.virtual_nodes)
        return
    kind = "a pipeline" if asked.strategy == "pipeline" else f"strategy {asked.strategy}"
    if asked.virtual_nodes is not None:
        raise ProblemError(
            f"{name}: virtual_nodes are for splits", hint=f"give microbatch_size for {kind}"
        )
    if asked.microbatch_size is None:
        raise ProblemError(
            f"{name}: {kind} needs microbatch_size",
            hint="its checkpoint can be loaded on other devices only if microbatches are the same",
        )
    _check_divides(asked, name, "microbatch_size", asked.microbatch_size)
    check_pipeline_level(asked.level)
    _check_profiles(asked, name, asked.microbatch_size)


def _check_divides(asked: Submission, name: str, key: str, value: int) -> None:
    if asked.batch_size % value:
        raise ProblemError(
            f"{name}: batch_size {asked.batch_size} is not a multiple of {key} {value}"
        )


def _check_profiles(asked: Submission, name: str, microbatch_size: int) -> None:
    """Refuse a model whose profiles cannot give what the strategy needs on any device type."""
    if asked.profiles is None:
        return
    found = profiles_of(Path(asked.profiles), asked.model)
    tables = [table for profile in found for table in profile.layer_tables]
    sizes = {table.microbatch_size for table in tables}
    if asked.strategy != "pipeline":
        sizes |= {t.layers.microbatch_size for profile in found for t in profile.tensor_layers}
    if asked.strategy == "auto":  # a split needs no layers
        sizes |= {point.batch_size for profile in found for point in profile.batch_curve}
    elif not tables:
        raise ProblemError(
            f"{name}: strategy {asked.strategy} needs layers, which no profile of "
            f"{found[0].model} in {asked.profiles} has",
            hint=f"profile with {option('layers', True)}, or take strategy split",
        )
    if microbatch_size not in sizes:
        raise ProblemError(
            f"{name}: microbatch_size {microbatch_size} was not profiled, only "
            f"{', '.join(map(str, sorted(sizes)))}",
            hint="take one of these, or profile with "
            f"{options(layers=True, microbatch_size=microbatch_size)}",
        )
    obstacles = [None if table.trace is None else table.trace.obstacle for table in tables]
    if asked.strategy == "pipeline" and all(obstacles):
        raise ProblemError(
            f"{name}: {found[0].model} cannot be cut into stages: its layers were {obstacles[0]}",
            hint="keep control flow on tensor values inside submodules and profile again, or take "
            "strategy split",
        )


def read_entities(path: Path) -> tuple[Entity, ...]:
    """Read a cluster's tree of entities: a TOML file with a table ``[[entities]]`` for each.

    Raises:
        FileError: It is missing, not TOML, or has faults.
        ProblemError: The tree makes no sense.
    """
    values = _read_toml(path)
    if set(values) != {"entities"}:
        raise FileError(f"{path}: holds no entities", hint="write a table [[entities]] for each")
    for one in values["entities"] if isinstance(values["entities"], list) else ():
        if isinstance(one, dict) and type(one.get("weight")) is int:
            one["weight"] = float(one["weight"])
    text = _as_json({"schema": "hetflow.jobs/1", "jobs": [], **values}, str(path))
    return from_json(text, Jobs, name=str(path)).entities


def array_indices(text: str) -> tuple[int, ...]:
    """The indices of an array of jobs, such as ``0-9`` or ``1,3,5-7``; each once, in order.

    Raises:
        ProblemError: It names none, or too many.
    """
    found = set[int]()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if last < first:
            raise ProblemError(f"array {text!r}: write indices, such as 0-9 or 1,3,5-7")
        if last - first >= MOST_OF_ARRAY or len(found) + last - first >= MOST_OF_ARRAY:
            raise ProblemError(f"array {text!r}: has more than {MOST_OF_ARRAY} jobs")
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def submit(store: ClusterStore, asked: Submission, member: Account | None = None) -> int:
    """Add a job to the queue; its number.

    Args:
        store: The state.
        asked: The job.
        member: Whose it is, and who it runs as; None: of the user who runs this, and it runs as the
            scheduler's.

    Raises:
        ProblemError: The cluster was started with entities, and the job's is none of them, or none
            of the member's; or it comes after a job that is not there.
    """
    return _add(store, [asked], member)[0]


def submit_array(
    store: ClusterStore, asked: Submission, indices: Sequence[int], member: Account | None = None
) -> list[int]:
    """Add a job for each index of an array, all or none; their numbers.

    Raises:
        ProblemError: As ``submit``.
    """
    jobs = [replace(asked, name=f"{asked.name}[{i}]", array_index=i) for i in indices]
    return _add(store, jobs, member)


def _add(store: ClusterStore, jobs: Sequence[Submission], member: Account | None) -> list[int]:
    user, uid = (user_name(), None) if member is None else (member.name, member.uid)
    known = (store.get("started_with") or {}).get("entities") or ()
    is_entity = any(one["name"] == user for one in known)
    entity = user if is_entity and jobs[0].entity is None else jobs[0].entity
    after = tuple(_numbered(store, one) for one in jobs[0].after)
    _check_entity(store, jobs[0], member)
    with store.transaction():
        return [
            store.run(
                "INSERT INTO jobs (submission, submitted, user, uid) VALUES (?, ?, ?, ?)",
                to_json(replace(asked, after=after, entity=entity)), time.time(), user, uid,
            )
            for asked in jobs
        ]  # fmt: skip


def user_name(uid: int | None = None) -> str:
    """A user's name, of who runs this process if none is named; the number where it has none."""
    uid = os.getuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _numbered(store: ClusterStore, after: str) -> str:
    number = job_number(store, after.removesuffix(_OK))
    return f"{number}{_OK if after.endswith(_OK) else ''}"


def prospect(
    store: ClusterStore, asked: Submission
) -> tuple[Literal["now", "later", "never"], str]:
    """Whether the jobs that one comes after let it begin, and why not."""
    for one in asked.after:
        number, is_ok = int(one.removesuffix(_OK)), one.endswith(_OK)
        rows = store.rows("SELECT state FROM jobs WHERE number = ?", number)
        state = rows[0]["state"] if rows else "cancelled"
        if state == "cancelled" and is_ok:
            return "never", f"job {number} was cancelled, and it was to begin when that is done"
        if state not in ("done", "cancelled"):
            held = ", which is held" if state == "held" else ""
            return "later", f"it begins after job {number}{held}"
    return "now", ""


def _check_entity(store: ClusterStore, asked: Submission, member: Account | None) -> None:
    if member is not None and asked.entity is not None:
        own = {member.name} | member.group_names()
        if asked.entity not in own:
            raise ProblemError(
                f"entity {asked.entity!r}: is neither {member.name} nor a group of that user's",
                hint="name one of these, or none",
            )
    known = (store.get("started_with") or {}).get("entities")
    if asked.entity is not None and known is not None:
        names = [one["name"] for one in known]
        if asked.entity not in names:
            has = f"it has {', '.join(names)[:200]}"
            raise ProblemError(
                f"entity {asked.entity!r}: the cluster has none of that name",
                hint=did_you_mean(asked.entity, names, has)
                if names
                else f"start it with {option('entities', 'FILE')}",
            )
