"""What a user asks for: a training script with its profiles, as a TOML file or by options."""

import json
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..protocol.lower import check_pipeline_level
from ..schema.errors import FileError, ProblemError
from ..schema.files import from_json, to_json
from ..schema.launch import Determinism
from ..schema.records import Count, Index, Name, Positive, PositiveSeconds, record, register_keys
from .store import Store

PATHS = ("script", "profiles", "directory")


@record
class Submission:
    """One training job of a live cluster.

    ``script`` is run by ``hetflow launch`` with ``arguments``, from ``directory``, under a plan for
    the ``devices`` (all of one type) that it is given, made from ``profiles``. ``steps`` are those
    that it makes in all. ``virtual_nodes`` and ``determinism`` are those of ``hetflow solve`` and
    ``hetflow launch``: with ``elastic``, the default where virtual nodes are given, a job ends with
    the same parameters whatever devices it was moved to. ``checkpoint_every`` counts steps; a job
    also saves whenever it has to leave.

    ``strategy`` says what the plan is. A pipeline needs ``microbatch_size``: its checkpoint can be
    loaded under the plan of other devices only if the microbatches are the same.
    """

    schema: Literal["hetflow.submission/1"] = "hetflow.submission/1"
    name: Name
    script: str
    arguments: tuple[str, ...] = ()
    directory: str
    profiles: str
    model: Name | None = None
    batch_size: Count
    steps: Positive
    devices: Count = 1
    strategy: Literal["split", "pipeline"] = "split"
    virtual_nodes: Count | None = None
    microbatch_size: Count | None = None
    determinism: Determinism | None = None
    checkpoint_every: Index = 0
    priority_weight: Annotated[float, Field(gt=0, le=1e12)] = 1.0
    deadline_seconds: PositiveSeconds | None = None

    @property
    def level(self) -> Determinism:
        """The level of determinism that the launch is asked for."""
        return self.determinism or ("none" if self.virtual_nodes is None else "elastic")


register_keys(Submission)


def read_submission(path: Path, given: Mapping[str, Any]) -> Submission:
    """Read a job's TOML file; its paths are relative to the file.

    Args:
        path: The file.
        given: Values that count instead of the file's.

    Raises:
        FileError: It is missing, not TOML, or has faults; all of them are named at once.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None
    for key in PATHS:
        if isinstance(values.get(key), str):
            values[key] = str(path.parent / values[key])
    return submission({**values, **given}, base=path.parent, name=str(path))


def submission(values: dict[str, Any], *, base: Path, name: str) -> Submission:
    """A job from its values; what is not given gets its default.

    Args:
        values: As in a TOML file.
        base: The folder that the job runs in where none is given.
        name: What to call them in errors.

    Raises:
        FileError: Values that make no sense.
        ProblemError: The script or the profiles are not there.
    """
    values = {"schema": "hetflow.submission/1", "directory": str(base), **values}
    if isinstance(values.get("script"), str):
        values.setdefault("name", Path(values["script"]).stem)
    for key in ("steps", "priority_weight", "deadline_seconds"):  # TOML knows 3 from 3.0
        if type(values.get(key)) is int:
            values[key] = float(values[key])
    for key in PATHS:
        if isinstance(values.get(key), str):
            values[key] = str(Path(values[key]).absolute())
    try:
        text = json.dumps(values)
    except (TypeError, ValueError):  # a date, or nan
        raise FileError(f"{name}: dates and nan mean nothing here; write a number") from None
    asked = from_json(text, Submission, name=name)
    if not Path(asked.script).is_file():
        raise ProblemError(f"{name}: script {asked.script}: no such file")
    if not Path(asked.profiles).exists():
        raise ProblemError(
            f"{name}: profiles {asked.profiles}: no such folder", hint="run `hetflow profile` first"
        )
    if not Path(asked.directory).is_dir():
        raise ProblemError(f"{name}: directory {asked.directory}: no such folder")
    _check_strategy(asked, name)
    return asked


def _check_strategy(asked: Submission, name: str) -> None:
    if asked.strategy == "split":
        if asked.microbatch_size is not None:
            raise ProblemError(
                f"{name}: microbatch_size is for pipelines",
                hint="give virtual_nodes, or strategy pipeline",
            )
        return
    if asked.virtual_nodes is not None:
        raise ProblemError(
            f"{name}: virtual_nodes are for splits", hint="give microbatch_size for a pipeline"
        )
    if asked.microbatch_size is None:
        raise ProblemError(
            f"{name}: a pipeline needs microbatch_size",
            hint="its checkpoint can be loaded on other devices only if microbatches are the same",
        )
    if asked.batch_size % asked.microbatch_size:
        raise ProblemError(
            f"{name}: batch_size {asked.batch_size} is not a multiple of microbatch_size "
            f"{asked.microbatch_size}"
        )
    check_pipeline_level(asked.level)


def submit(store: Store, asked: Submission) -> int:
    """Add a job to the queue; its number."""
    with store.transaction():
        return store.run(
            "INSERT INTO jobs (submission, submitted) VALUES (?, ?)", to_json(asked), time.time()
        )
