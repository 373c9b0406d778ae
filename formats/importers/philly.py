"""Read Microsoft's Philly trace (``cluster_job_log``): jobs of a real cluster, as a stream.

The file is one JSON array of jobs: ``jobid``, ``submitted_time``, and ``attempts`` with
``start_time``, ``end_time`` and the ``gpus`` of each machine in ``detail``. It names neither models
nor device types. So a hash of its id gives each job a model of a throughput table. Its steps are as
many as that model makes on a reference device while all attempts ran. The array is decoded one job
at a time; jobs out of order are sorted within a window.
"""

import hashlib
import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from ...schema.errors import FileError, HetflowError
from ...schema.files import reading
from ...schema.jobs import Job, Throughputs
from ...schema.spelling import did_you_mean

CHUNK = 1 << 16
LONGEST = 1 << 24  # characters of one job


@dataclass(slots=True)
class PhillyTrace:
    """A Philly trace on disk; iterate over it to get its jobs in order of arrival.

    Arrival times are seconds since the first job. A job asks for as many GPUs as its last attempt
    used, or for the largest smaller number in the throughput table.

    Attributes:
        path: The JSON file.
        throughputs: The table of models.
        reference_device: The device type whose throughputs turn seconds into steps.
        window: By how many places a job may be out of order.
        num_skipped: How many jobs were left out because they never ran on a GPU.
    """

    path: Path
    throughputs: Throughputs
    reference_device: str
    window: int = 10_000
    num_skipped: int = 0

    def __iter__(self) -> Iterator[Job]:
        """Yield the jobs in order of arrival.

        Raises:
            FileError: The file cannot be read, is cut short, holds an invalid value or an id
                twice, or a job is further out of order than the window.
        """
        rates = self._rates()
        ready: list[tuple[float, int, dict[str, Any], int]] = []
        seen: set[str] = set()
        last, start = float("-inf"), 0.0
        self.num_skipped = 0
        entries = self._entries()
        while True:
            entry = next(entries, None)
            if entry is not None:
                number, line, raw = entry
                id_, submitted = self._head(raw, line)
                if id_ in seen:
                    raise FileError(
                        f"{self.path}: line {line}: job {id_!r} appears twice; keep one"
                    )
                seen.add(id_)
                if submitted < last:
                    raise FileError(
                        f"{self.path}: line {line}: job {id_!r} was submitted before jobs that "
                        f"stand more than {self.window} places above it; sort the trace by "
                        "submitted_time"
                    )
                heapq.heappush(ready, (submitted, number, raw, line))
            if entry is None and not ready:
                return
            if entry is None or len(ready) > self.window:
                submitted, _, raw, line = heapq.heappop(ready)
                job = self._job(raw, submitted - start, rates, f"{self.path}: line {line}")
                if job is None:
                    self.num_skipped += 1
                    continue
                if last == float("-inf"):
                    start, job = submitted, self._job(raw, 0.0, rates, f"{self.path}: line {line}")
                last = submitted
                assert job is not None
                yield job

    def _rates(self) -> dict[int, list[tuple[str, float]]]:
        """Models and their steps per second on the reference device, by scale factor."""
        rates: dict[int, list[tuple[str, float]]] = {}
        for entry in self.throughputs.models:
            rate = entry.steps_per_second.get(self.reference_device, 0.0)
            if rate > 0:
                rates.setdefault(entry.scale_factor, []).append((entry.model, rate))
        if not rates:
            types = sorted({t for e in self.throughputs.models for t in e.steps_per_second})
            fix = did_you_mean(self.reference_device, types, f"known: {', '.join(types)}")
            raise FileError(
                f"{self.path}: no model has a throughput on {self.reference_device!r}; {fix}"
            )
        return rates

    def _head(self, raw: dict[str, Any], line: int) -> tuple[str, float]:
        where = f"{self.path}: line {line}"
        id_ = raw.get("jobid")
        if not isinstance(id_, str) or not id_:
            raise FileError(f"{where}: a job needs a jobid")
        submitted = _seconds(raw.get("submitted_time"), f"{where}: submitted_time")
        if submitted is None:
            raise FileError(f"{where}: job {id_!r} has no submitted_time")
        return id_, submitted

    def _job(
        self,
        raw: dict[str, Any],
        arrival: float,
        rates: dict[int, list[tuple[str, float]]],
        where: str,
    ) -> Job | None:
        """A job; None if it never ran on a GPU."""
        attempts = raw.get("attempts")
        if not isinstance(attempts, list) or not all(isinstance(one, dict) for one in attempts):
            raise FileError(f"{where}: attempts must be a list of objects")
        seconds, gpus = 0.0, 0
        for attempt in attempts:
            start = _seconds(attempt.get("start_time"), f"{where}: start_time")
            end = _seconds(attempt.get("end_time"), f"{where}: end_time")
            if start is None or end is None:
                continue
            if end < start:
                raise FileError(f"{where}: an attempt ends before it starts")
            seconds += end - start
            gpus = _gpus(attempt.get("detail"), where) or gpus
        if seconds <= 0 or not gpus:
            return None
        scale = max((known for known in rates if known <= gpus), default=min(rates))
        digest = hashlib.sha256(str(raw["jobid"]).encode()).digest()
        models = rates[scale]
        model, rate = models[int.from_bytes(digest[:8], "big") % len(models)]
        try:
            return Job(
                id=raw["jobid"],
                model=model,
                steps=seconds * rate,
                scale_factor=scale,
                arrival_seconds=arrival,
            )
        except HetflowError as error:
            raise FileError(f"{where}: {error.message}") from None

    def _entries(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield number, line and object of each job, decoded one after another."""
        with reading(self.path), self.path.open(encoding="utf-8") as file:
            yield from _objects(file, str(self.path))


def _objects(file: TextIO, name: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the objects of a JSON array, with one chunk of the file in memory at a time."""
    decoder = json.JSONDecoder()
    buffer, line, number = file.read(CHUNK), 1, 0
    opened = False
    wanted = CHUNK
    while True:
        text = buffer.lstrip(" \t\r\n" if not opened or not number else " \t\r\n,")
        line += buffer.count("\n", 0, len(buffer) - len(text))
        buffer = text
        if not buffer:
            buffer = file.read(CHUNK)
            if not buffer:
                raise FileError(
                    f"{name}: line {line}: ends within the list; the trace is truncated"
                )
            continue
        if not opened:
            if buffer[0] != "[":
                raise FileError(f"{name}: line {line}: must be a JSON list of jobs")
            opened, buffer = True, buffer[1:]
            continue
        if buffer[0] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer)
        except json.JSONDecodeError as error:
            more = file.read(wanted)
            if more and len(buffer) < LONGEST:
                buffer, wanted = buffer + more, 2 * wanted
                continue
            at = line + buffer.count("\n", 0, error.pos)
            reason = error.msg if more else "ends within a job; the trace is truncated"
            raise FileError(f"{name}: line {at}: {reason}") from None
        except RecursionError:
            raise FileError(f"{name}: line {line}: nested too deeply to be a job") from None
        except ValueError:
            raise FileError(
                f"{name}: line {line}: holds a whole number of thousands of digits"
            ) from None
        if not isinstance(value, dict):
            raise FileError(f"{name}: line {line}: a job must be an object")
        yield number, line, value
        line += buffer.count("\n", 0, end)
        buffer, number, wanted = buffer[end:], number + 1, CHUNK


def _seconds(value: Any, where: str) -> float | None:
    """A time such as ``2017-10-09 07:57:31`` in seconds; None where there is none."""
    if value is None or value == "None" or value == "":
        return None
    if not isinstance(value, str):
        raise FileError(f"{where}: must be a time, got {str(value)[:60]}")
    try:
        return (datetime.fromisoformat(value) - datetime(1970, 1, 1)).total_seconds()
    except (ValueError, TypeError):
        raise FileError(f"{where}: {value[:60]!r} is no time such as 2017-10-09 07:57:31") from None


def _gpus(detail: Any, where: str) -> int:
    if detail is None:
        return 0
    if not isinstance(detail, list):
        raise FileError(f"{where}: detail must be a list of machines")
    total = 0
    for machine in detail:
        held = machine.get("gpus") if isinstance(machine, dict) else None
        if not isinstance(held, list):
            raise FileError(f"{where}: a machine of detail has no list of gpus")
        total += len(held)
    return total
