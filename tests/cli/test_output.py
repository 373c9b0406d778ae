"""Where stdout cannot take a result: one line, the right exit code, no traceback."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.engines.protocol import OUTPUT
from hetflow.clusters.scheduler.leases import plan_lease
from hetflow.clusters.scheduler.store import ClusterStore

FULL = Path("/dev/full")


@pytest.fixture
def graph(tmp_path: Path) -> list[str]:
    """A command that prints a long document."""
    lines = [
        f"node{i} -- Linear -- forward_compute_time=1.0, backward_compute_time=2.0, "
        "activation_size=10.0, parameter_size=10.0"
        for i in range(1, 400)
    ]
    lines += [f"\tnode{i} -- node{i + 1}" for i in range(1, 399)]
    (tmp_path / "graph.txt").write_text("\n".join(lines) + "\n")
    options = ["--device-memory", "16GB", "--device-type", "v100"]
    return [sys.executable, "-m", "hetflow", "import", str(tmp_path / "graph.txt"), *options]


def test_a_closed_stdout_is_one_line(
    graph: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)  # as Python has it after `>&-`
        assert run(graph[3:]) == 2
    assert capsys.readouterr().err == (
        "hetflow: stdout: is closed, so there is no place for the result\n"
    )


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stdout_is_one_line(graph: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(graph, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    said = "hetflow: stdout: the result could not be written: No space left on device"
    assert done.stderr.splitlines() == [said, "hint: make room, or send it elsewhere"]


def test_a_reader_that_leaves_the_help_is_no_error() -> None:
    with unread():
        assert run(["--help"]) == 0


def test_a_reader_that_leaves_is_no_error(graph: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(graph, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@contextmanager
def unread() -> Iterator[None]:
    """Whoever read stdout has gone."""
    read, write = os.pipe()
    os.close(read)
    before = sys.stdout, sys.stderr
    with os.fdopen(write, "w") as stream, Path(os.devnull).open("w") as nowhere:
        sys.stdout = stream
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before
            os.dup2(nowhere.fileno(), write)  # for what is left in the buffer


@pytest.mark.parametrize("command", [["queue", "--watch"], ["logs", "--follow", "1"]])
def test_what_repeats_ends_with_its_reader(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = ClusterStore.create(tmp_path)
    store.run('INSERT INTO jobs (submission, submitted) VALUES (\'{"name": "a"}\', 1.0)')
    plan_lease(store, 1, ["cpu:0"], 1.0)
    store.lease_folder(1, 1).mkdir(parents=True)
    (store.lease_folder(1, 1) / OUTPUT).write_text("line\n" * 100_000)
    naps = iter(range(3))
    monkeypatch.setattr(time, "sleep", lambda seconds: next(naps))
    with unread():
        code = run([*command, "--state", str(tmp_path)])
    assert (code, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("text", ["a = " + "9" * 5000, "a = " + "[" * 100_000])
def test_a_toml_file_that_python_cannot_hold_is_refused_in_one_line(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ClusterStore.create(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert run(["submit", "--state", str(tmp_path), str(path)]) == 2
    monkeypatch.setenv("HETFLOW_CONFIG", str(path))
    assert run(["queue", "--state", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count(f"hetflow: {path}: not valid TOML: ") == 2
    assert "Traceback" not in said


def test_an_interrupt_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    ClusterStore.create(tmp_path)
    monkeypatch.setattr(time, "sleep", interrupted)
    assert run(["queue", "--watch", "--state", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "hetflow: interrupted\n"


@pytest.mark.parametrize(
    ("asked", "variable", "value"),
    [
        (["allocate", "jobs.json", "--throughputs", "t.json"], "HETFLOW_ALLOCATE_BUDGET", "5.0"),
        (["launch", "plan.json", "train.py"], "HETFLOW_LAUNCH_GRACE", "5.0"),
        (["simulate", "a.trace", "--throughputs", "t"], "HETFLOW_SIMULATE_FAILURE_HOURS", "5.0"),
    ],
)
def test_an_option_is_read_from_the_variable_of_its_flag(
    asked: list[str],
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, value)
    assert run([asked[0], "--show-config", *asked[1:]]) == 0
    assert f" = {value}  (environment {variable})" in capsys.readouterr().out


def test_values_and_where_they_come_from_are_json_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HETFLOW_SHOW_PLOT", "a.svg")
    assert run(["show", "plan.json", "--json", "--show-config"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["plot"] == {"value": "a.svg", "from": "environment HETFLOW_SHOW_PLOT"}
    assert told["file"]["from"] == "flag"
