"""Slurm's log of jobs: what ``sacct`` of a real slurmdbd wrote, and newer forms of it."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from hetflow.formats.importers.sacct import read_sacct
from hetflow.schema.errors import FileError, ProblemError
from hetflow.tests.importers.sacct_log import LOG

JSON = Path(__file__).parents[1] / "data" / "sacct.json.xz"


def written(folder: Path, text: str) -> Path:
    path = folder / "log"
    path.write_text(text)
    return path


def newer(value: Any, key: str = "") -> Any:
    """The JSON as releases from 23.02 on write it: numbers in objects, states in lists."""
    if isinstance(value, dict):
        return {name: newer(entry, name) for name, entry in value.items()}
    if isinstance(value, list):
        return [newer(entry) for entry in value]
    if key == "current":
        return [value]
    if key in ("task_id", "job_offset"):
        return {"set": value is not None, "infinite": False, "number": value or 0}
    return value


def test_jobs_are_read_from_lines_and_from_json_alike(tmp_path: Path) -> None:
    log = read_sacct(written(tmp_path, LOG))
    assert log.num_left_out == 2  # no GPU; cancelled before it ran
    found = {job.id: job for job in log.jobs}
    assert list(found) == ["1", "2", "3", "5_0", "5_1", "7"]
    first = found["1"]
    assert (first.name, first.state, first.device_type) == ("a|b c's", "COMPLETED", "cpu_fast")
    assert (first.num_devices, first.run_seconds, first.num_starts) == (2, 3, 1)
    assert (found["3"].num_devices, found["3"].run_seconds) == (2, 2)  # two components
    assert found["2"].device_type == "gpu"
    again = found["7"]  # requeued: 9 seconds, then 2
    assert (again.state, again.num_starts, again.run_seconds) == ("COMPLETED", 2, 11)
    assert again.end_seconds - again.submit_seconds == 22
    assert log.num_devices == {"cpu_fast": 2, "gpu": 2}  # which is what the nodes have
    text = lzma.decompress(JSON.read_bytes()).decode()
    by_json = read_sacct(written(tmp_path, text))
    assert by_json == log
    assert read_sacct(written(tmp_path, json.dumps(newer(json.loads(text))))) == by_json


def test_a_log_becomes_jobs_for_a_simulation(tmp_path: Path) -> None:
    log = read_sacct(written(tmp_path, LOG))
    jobs, table = log.as_jobs({"cpu_fast": 4.0, "gpu": 1.0})
    assert [job.steps for job in jobs.jobs][:2] == [12.0, 3.0]
    assert {one.model for one in table.models} == {"job of Slurm"}
    pinned, own = log.as_jobs()
    assert [job.arrival_seconds for job in pinned.jobs] == [0.0] * 6
    assert {tuple(one.steps_per_second) for one in own.models} == {("cpu_fast",), ("gpu",)}
    with pytest.raises(ProblemError, match="there is no rate for 'gpu'"):
        log.as_jobs({"cpu_fast": 1.0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("JobID|State\n1|RUNNING\n", "names no column JobName"),
        ("", "names no column JobID"),
        (LOG.splitlines()[0] + "\n1|x|COMPLETED\n", "line 2: 3 cells under 7 columns"),
        (LOG.splitlines()[0] + "\n1|x|COMPLETED|noon|noon|noon|\n", "line 2: 'noon' is no time"),
        (
            LOG.splitlines()[0] + "\n1|x|FAILED|1|2|3|gres/gpu=x\n",
            "line 2: 'gres/gpu=x' is no list",
        ),
        (
            LOG.splitlines()[0] + "\n1|x|FAILED|1|2|3|gres/gpu=\u00b2\n",
            "line 2: 'gres/gpu=\u00b2' is no list",
        ),
        (LOG.splitlines()[0] + "\n1|x|PENDING|1|Unknown|Unknown|\n", "none of 1 jobs has run on"),
        ('{"jobs": [{"job_id": 1}]}', "is no output of `sacct --json`"),
        ('{"jobs": ', "is no output of `sacct --json`"),
    ],
)
def test_what_is_no_log_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        read_sacct(written(tmp_path, text))


def test_a_job_that_started_before_it_was_submitted_came_when_it_started(tmp_path: Path) -> None:
    """Clocks that are set back made its time to completion 0 or negative."""
    text = LOG.splitlines()[0] + "\n1|x|COMPLETED|9|2|9|gres/gpu=1\n"
    (job,) = read_sacct(written(tmp_path, text)).jobs
    assert job.end_seconds - job.submit_seconds == 7
