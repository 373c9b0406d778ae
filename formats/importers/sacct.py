"""Read what ``sacct`` says of a Slurm cluster's jobs: ``--parsable2`` with a header, or ``--json``.

From the output of Slurm 22.05 with its database, and for newer releases from documentation: a job's
steps have lines of their own (``12.batch``); components of a heterogeneous job are ``12+0``,
``12+1``; an array's tasks ``12_3``; a job that was requeued has one line for each time
(``--duplicates``). Newer releases wrap numbers of the JSON into ``{"set": true, "number": 5}`` and
states into lists. Times are the cluster's local ones, or seconds where ``SLURM_TIME_FORMAT=%s`` was
set.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...schema.errors import FileError, ProblemError
from ...schema.files import read_text
from ...schema.jobs import Job, Jobs, ModelThroughput, Throughputs
from ...schema.options import option
from ...schema.spelling import whole_number

FORMAT = "JobID,JobName,State,Submit,Start,End,AllocTRES"
"""What to ask of ``sacct --format``."""
_MODEL = "job of Slurm"
_UNTYPED = "gpu"
_UNKNOWN = ("", "Unknown", "None", "N/A")
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SacctJob:
    """A job that ran on GPUs and is over.

    Attributes:
        id: Slurm's number, with an array's task.
        name: What its user calls it.
        state: Slurm's, such as ``COMPLETED``.
        submit_seconds: When it was submitted; all times are of one clock.
        end_seconds: When it ended.
        run_seconds: How long it ran, over all of its starts.
        device_type: The GRES type of its GPUs; ``gpu`` where it has none. Of several types, the
            one that it held most of.
        num_devices: How many GPUs it held.
        num_starts: How often it started.
    """

    id: str
    name: str
    state: str
    submit_seconds: float
    end_seconds: float
    run_seconds: float
    device_type: str
    num_devices: int
    num_starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SacctLog:
    """The jobs in order of submission, and how many were left out: no GPU, or not over."""

    jobs: tuple[SacctJob, ...]
    num_left_out: int

    @property
    def num_devices(self) -> dict[str, int]:
        """Device type -> the most GPUs of it that were held at once."""
        changes: dict[str, list[tuple[float, int]]] = {}
        for job in self.jobs:
            # Where it started several times, its last run is known best.
            start = job.end_seconds - job.run_seconds
            changes.setdefault(job.device_type, []).append((start, job.num_devices))
            changes[job.device_type].append((job.end_seconds, -job.num_devices))
        most: dict[str, int] = {}
        for device_type, each in changes.items():
            held = most[device_type] = 0
            for _, change in sorted(each):
                held += change
                most[device_type] = max(most[device_type], held)
        return most

    def as_jobs(self, rates: Mapping[str, float] | None = None) -> tuple[Jobs, Throughputs]:
        """The jobs as a simulation takes them, with a table of their throughputs.

        A job has as many steps as it ran for seconds, times its type's rate. A log does not say how
        fast a job would have been on another type: without rates, it can run on its own only.

        Args:
            rates: Device type -> relative speed, such as V100 3.5 and K80 1, the same for all
                jobs.

        Raises:
            ProblemError: A rate is missing or not positive.
        """
        for name in {job.device_type for job in self.jobs} if rates else ():
            if not (rates or {}).get(name, 0) > 0:
                raise ProblemError(
                    f"there is no rate for {name!r}, on which jobs ran",
                    hint=f"add {option('rates', f'{name}=1')}; relative speeds of all types are "
                    "needed",
                )
        first = self.jobs[0].submit_seconds
        jobs, shapes = [], {}
        for job in self.jobs:
            model = _MODEL if rates else f"{_MODEL} on {job.device_type}"
            own = dict(rates) if rates else {job.device_type: 1.0}
            shapes[model, job.num_devices] = own
            jobs.append(
                Job(
                    id=job.id,
                    model=model,
                    steps=job.run_seconds * own[job.device_type],
                    scale_factor=job.num_devices,
                    arrival_seconds=job.submit_seconds - first,
                )
            )
        table = tuple(
            ModelThroughput(model=model, scale_factor=number, steps_per_second=own)
            for (model, number), own in shapes.items()
        )
        return Jobs(jobs=tuple(jobs)), Throughputs(models=table)


def read_sacct(path: Path) -> SacctLog:
    """Read the output of ``sacct``.

    Raises:
        FileError: The file is missing, is no such output, lacks a column, or holds no job that ran
            on GPUs.
    """
    text = read_text(path)
    try:
        rows = list(_rows_of_json(text) if text.lstrip().startswith("{") else _rows(text))
        parts: dict[str, list[_Row]] = {}
        for row in rows:
            parts.setdefault(row.id.partition("+")[0], []).append(row)
        found = [_job(number, each) for number, each in parts.items()]
    except ProblemError as error:
        raise FileError(f"{path}: {error.message}", hint=error.hint) from None
    jobs = [one for one in found if one is not None]
    if not jobs:
        raise FileError(
            f"{path}: none of {len(found)} jobs has run on GPUs and is over",
            hint=f"write it with `sacct --allusers --starttime DATE --parsable2 --format={FORMAT}`",
        )
    jobs.sort(key=lambda job: (job.submit_seconds, job.id))
    return SacctLog(jobs=tuple(jobs), num_left_out=len(found) - len(jobs))


@dataclass(frozen=True, slots=True)
class _Row:
    """One time that one component of a job ran."""

    id: str
    name: str
    state: str
    submit: float | None
    start: float | None
    end: float | None
    gpus: Mapping[str, int]


def _rows(text: str) -> Iterator[_Row]:
    """The lines of ``--parsable2``; a name may hold the delimiter, other columns cannot."""
    lines = text.splitlines()
    heads = lines[0].split("|") if lines else []
    wanted = FORMAT.split(",")
    missing = [name for name in wanted if name not in heads]
    if missing:
        raise ProblemError(
            f"the first line names no column {missing[0]}",
            hint=f"write it with `sacct --parsable2 --format={FORMAT}`, with its header",
        )
    name_at = heads.index("JobName")
    for number, line in enumerate(lines[1:], start=2):
        cells = line.split("|")
        extra = len(cells) - len(heads)
        if not line.strip():
            continue
        if extra < 0:
            raise ProblemError(f"line {number}: {len(cells)} cells under {len(heads)} columns")
        cells[name_at : name_at + extra + 1] = ["|".join(cells[name_at : name_at + extra + 1])]
        row = dict(zip(heads, cells, strict=True))
        if "." in row["JobID"]:
            continue  # a step
        try:
            yield _Row(
                id=row["JobID"],
                name=row["JobName"],
                state=row["State"].partition(" ")[0],  # "CANCELLED by 1000"
                submit=_seconds(row["Submit"]),
                start=_seconds(row["Start"]),
                end=_seconds(row["End"]),
                gpus=_gpus(row["AllocTRES"]),
            )
        except ValueError as error:
            raise ProblemError(f"line {number}: {error}") from None


def _seconds(text: str) -> float | None:
    if text in _UNKNOWN:
        return None
    if re.fullmatch(r"\d{1,12}", text):
        return float(text) or None
    try:
        # Only differences count. Local time is read as UTC; a change of the clocks shifts one hour.
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise ValueError(f"{text[:40]!r} is no time such as 2026-11-23T02:25:55") from None


def _gpus(text: str) -> dict[str, int]:
    """GPUs by type, of ``billing=4,cpu=4,gres/gpu:v100=2,gres/gpu=2,node=1``."""
    pairs = [part.partition("=") for part in text.split(",") if part.startswith("gres/gpu")]
    numbers = {name.removeprefix("gres/"): whole_number(number) for name, _, number in pairs}
    if None in numbers.values():
        raise ValueError(f"{text[:80]!r} is no list such as cpu=4,gres/gpu:v100=2")
    return _typed({name: number or 0 for name, number in numbers.items()})


def _typed(found: Mapping[str, int]) -> dict[str, int]:
    """GPUs by type; Slurm counts those with a type a second time without it."""
    typed = {name[4:]: number for name, number in found.items() if name.startswith("gpu:")}
    untyped = found.get("gpu", 0) - sum(typed.values())
    if untyped > 0:
        typed[_UNTYPED] = untyped
    return {name: number for name, number in typed.items() if number > 0}


def _rows_of_json(text: str) -> list[_Row]:
    try:
        return [_row_of(job) for job in json.loads(text)["jobs"]]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ProblemError(
            f"is no output of `sacct --json`: {type(error).__name__} {str(error)[:80]}"
        ) from None


def _row_of(job: Mapping[str, Any]) -> _Row:
    state, time = job["state"]["current"], job["time"]
    number, task = _number(job["job_id"]), _number(job.get("array", {}).get("task_id"))
    leader, offset = (_number(job.get("het", {}).get(key)) for key in ("job_id", "job_offset"))
    id_ = f"{number}"
    if leader:
        id_ = f"{leader}+{offset or 0}"
    elif job.get("array", {}).get("job_id") and task is not None:
        id_ = f"{_number(job['array']['job_id'])}_{task}"
    return _Row(
        id=id_,
        name=str(job["name"]),
        state=state[0] if isinstance(state, list) else str(state),
        submit=_number(time["submission"]) or None,
        start=_number(time["start"]) or None,
        end=_number(time["end"]) or None,
        gpus=_typed(
            {
                str(one["name"]): int(_number(one["count"]) or 0)
                for one in job["tres"]["allocated"]
                if one["type"] == "gres"
            }
        ),
    )


def _number(value: Any) -> int | None:
    """A number of the JSON, in the form of any release."""
    if isinstance(value, Mapping):
        return int(value["number"]) if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


@dataclass(slots=True)
class _Run:
    """One time that a job ran: its components overlap, its starts do not."""

    start: float
    end: float
    gpus: Counter[str]


def _job(number: str, rows: Sequence[_Row]) -> SacctJob | None:
    rows = sorted(rows, key=lambda row: (row.submit or 0.0, row.start or 0.0))
    submits = [row.submit for row in rows if row.submit is not None]
    runs: list[_Run] = []
    for row in rows:
        if row.start is None or row.end is None or row.end <= row.start or not row.gpus:
            continue
        if runs and row.start < runs[-1].end:
            runs[-1].end = max(runs[-1].end, row.end)
            runs[-1].gpus.update(row.gpus)
        else:
            runs.append(_Run(row.start, row.end, Counter(row.gpus)))
    if not runs or not submits or rows[-1].state not in _OVER:
        return None
    held = runs[-1].gpus
    return SacctJob(
        id=number,
        name=rows[0].name,
        state=rows[-1].state,
        submit_seconds=min(*submits, runs[0].start),  # clocks may be set back in between
        end_seconds=runs[-1].end,
        run_seconds=sum(run.end - run.start for run in runs),
        device_type=max(held, key=lambda name: (held[name], name)),
        num_devices=held.total(),
        num_starts=len(runs),
    )
