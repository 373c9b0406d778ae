"""The Philly trace: streamed, put in order within a window, refused in one clear line."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hetflow.formats.importers.philly import PhillyTrace
from hetflow.schema.errors import FileError
from hetflow.schema.jobs import ModelThroughput, Throughputs

TABLE = Throughputs(
    models=tuple(
        ModelThroughput(model=model, scale_factor=scale, steps_per_second={"v100": 2.0 * scale})
        for model in ("conv", "rnn")
        for scale in (1, 2, 4)
    )
)


def entry(id_: str, minute: int, gpus: int = 1, run_seconds: int | None = 60) -> dict[str, Any]:
    end = (
        None
        if run_seconds is None
        else f"2017-10-09 23:{run_seconds // 60:02d}:{run_seconds % 60:02d}"
    )
    return {
        "status": "Pass",
        "vc": "ee9e8c",
        "jobid": id_,
        "attempts": [
            {
                "start_time": "2017-10-09 23:00:00",
                "end_time": end,
                "detail": [{"ip": "m1", "gpus": [f"gpu{i}" for i in range(gpus)]}],
            }
        ],
        "submitted_time": f"2017-10-09 05:{minute:02d}:00",
        "user": "ce2f4c",
    }


def trace(tmp_path: Path, text: str, window: int = 10_000) -> PhillyTrace:
    path = tmp_path / "cluster_job_log"
    path.write_text(text)
    return PhillyTrace(path, TABLE, "v100", window)


def test_jobs_with_their_gpus_and_lengths(tmp_path: Path) -> None:
    entries = [entry("a", 10), entry("b", 12, 2, 120), entry("c", 15, 3), entry("d", 16, 1, None)]
    reader = trace(tmp_path, json.dumps(entries, indent=4))
    jobs = list(reader)
    assert [(job.id, job.arrival_seconds, job.scale_factor, job.steps) for job in jobs] == [
        ("a", 0.0, 1, 120.0),
        ("b", 120.0, 2, 480.0),
        ("c", 300.0, 2, 240.0),  # 3 GPUs: the largest number below that the table knows
    ]
    assert reader.num_skipped == 1  # d never ended
    assert [job.model for job in jobs] == [job.model for job in reader]  # by the id, not by chance


def test_attempts_add_up_and_the_last_ones_gpus_count(tmp_path: Path) -> None:
    one = entry("a", 0, 1, 60)
    one["attempts"] += entry("a", 0, 4, 30)["attempts"]
    [job] = trace(tmp_path, json.dumps([one]))
    assert (job.scale_factor, job.steps) == (4, 90.0 * 8.0)


def test_disorder_within_the_window_is_put_in_order(tmp_path: Path) -> None:
    text = json.dumps([entry("b", 12), entry("a", 10), entry("c", 11)])
    assert [job.id for job in trace(tmp_path, text, window=2)] == ["a", "c", "b"]
    with pytest.raises(FileError, match="'a' was submitted before .* sort the trace"):
        list(trace(tmp_path, text, window=0))


def test_a_job_longer_than_a_chunk(tmp_path: Path) -> None:
    large = {**entry("a", 0), "note": "x" * 300_000}
    text = json.dumps([large, entry("b", 1)])
    assert [job.id for job in trace(tmp_path, text)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "truncated"),
        ("[", "truncated"),
        (json.dumps([entry("a", 0)])[:-1], "truncated"),
        (json.dumps([entry("a", 0), entry("b", 1)])[:-40], "truncated"),
        ("{}", "must be a JSON list"),
        ("[1]", "a job must be an object"),
        (json.dumps([entry("a", 0), entry("a", 1)]), "'a' appears twice"),
        (json.dumps([{**entry("a", 0), "submitted_time": "noon"}]), "'noon' is no time"),
        (json.dumps([{**entry("a", 0), "submitted_time": None}]), "no submitted_time"),
        (json.dumps([{**entry("a", 0), "jobid": 7}]), "needs a jobid"),
        (json.dumps([{**entry("a", 0), "attempts": 3}]), "attempts must be a list"),
        ('[{"jobid": "a",\n nonsense}]', "line 2"),
    ],
)
def test_bad_traces_are_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(FileError, match=words) as caught:
        list(trace(tmp_path, text))
    assert "\n" not in caught.value.message
    assert "cluster_job_log" in caught.value.message


def test_no_file_and_no_such_device(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such file"):
        list(PhillyTrace(tmp_path / "nothing", TABLE, "v100"))
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps([entry("a", 0)]))
    with pytest.raises(FileError, match="did you mean 'v100'"):
        list(PhillyTrace(path, TABLE, "v10"))


@pytest.mark.slow
def test_the_file_is_never_wholly_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "cluster_job_log"
    with path.open("w") as file:
        for number in range(4000):
            one = {**entry(f"job{number}", 0), "note": "x" * 2000}
            file.write(("[" if not number else ",\n") + json.dumps(one))
        file.write("]")
    size = path.stat().st_size
    tracemalloc.start()
    count = sum(1 for _ in PhillyTrace(path, TABLE, "v100", window=10))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 4000
    assert peak < size / 4
