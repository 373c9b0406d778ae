"""``hetflow simulate`` from a file and from a recipe."""

import _thread
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from hetflow.cli.listing import with_common_flags
from hetflow.cli.simulate import simulate
from hetflow.clusters.simulator import cases
from hetflow.schema import files
from hetflow.schema.errors import HetflowError
from hetflow.schema.jobs import Entity, Job, Jobs, ModelThroughput, PairThroughput, Throughputs
from hetflow.schema.simulation import SimulationRun

LINE = "conv\tpython train.py\tdata\t-n\t1\t4000\t1\t1\t-1.000000\t{}\n"


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer()
    made.command()(with_common_flags(simulate))
    return made


@pytest.fixture
def table(tmp_path: Path) -> Path:
    models = (
        ModelThroughput(model="conv", steps_per_second={"fast": 4.0, "slow": 1.0}),
        ModelThroughput(model="rnn", steps_per_second={"fast": 2.0, "slow": 1.5}),
    )
    path = tmp_path / "throughputs.json"
    files.write(path, Throughputs(models=models))
    return path


def _arguments(trace: object, table: Path, *more: str) -> list[str]:
    return [str(trace), "--throughputs", str(table), "--gpus", "2xfast,2xslow", *more]


def test_a_gavel_trace_with_plot_and_file(app: typer.Typer, table: Path, tmp_path: Path) -> None:
    trace = tmp_path / "jobs.trace"
    trace.write_text("".join(LINE.format(500.0 * n) for n in range(4)))
    plot, output = tmp_path / "run.svg", tmp_path / "run.json"
    arguments = _arguments(trace, table, "--plot", str(plot), "-o", str(output), "--json")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert b"<svg" in plot.read_bytes()
    run = files.read(output, SimulationRun)
    assert len(run.jobs) == 4
    assert json.loads(result.stdout)["metrics"]["num_jobs"] == 4


def test_a_sweep_is_a_line_each_and_the_same_in_processes(app: typer.Typer, table: Path) -> None:
    more = ("--loads", "1,4", "--seeds", "2", "--num-jobs", "5")
    arguments = _arguments("continuous-single", table, *more)
    alone = CliRunner().invoke(app, arguments)
    assert alone.exit_code == 0, alone.output
    assert len(alone.stdout.splitlines()) == 2 + 4  # head, rule, runs
    spread = CliRunner().invoke(app, [*arguments, "--processes", "2"])
    assert spread.stdout == alone.stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINE.format(0.0) + LINE.format(0.0)[:40], "may be truncated"),
        (LINE.format(100.0) + LINE.format(50.0), "sort the trace by arrival"),
        (LINE.format(-3.0), "arrival_seconds"),
        (LINE.format(0.0).replace("4000", "-4000"), "steps"),
        (LINE.format("soon"), "line 1: arrival_seconds: must be a number, got 'soon'"),
        (LINE.format("nan"), "line 1: arrival_seconds: must be finite"),
        (LINE.format(0.0).replace("\t1\t1\t", "\t1.5\t1\t"), "scale_factor: must be a whole"),
    ],
)
def test_bad_traces_write_nothing(
    app: typer.Typer, table: Path, tmp_path: Path, text: str, words: str
) -> None:
    trace, output = tmp_path / "bad.trace", tmp_path / "run.json"
    trace.write_text(text)
    result = CliRunner().invoke(app, _arguments(trace, table, "-o", str(output)))
    assert isinstance(result.exception, HetflowError)
    assert words in result.exception.message
    assert "\n" not in result.exception.message
    assert not output.exists()


@pytest.mark.parametrize(
    ("trace", "more", "words"),
    [
        ("continuous-single", (), "needs jobs_per_hour"),
        ("continuous-single", ("--loads", "a"), "--loads: must be numbers"),
        ("static-single", ("--window", "9:3"), "--window: must be FROM:TO"),
        ("static-single", ("--policy", "lass"), "did you mean 'las'"),
        ("static-single", ("--scheduler", "elastic", "--num-jobs", "3"), "one device type"),
        ("nowhere.trace", (), "no such file"),
        ("continuos-single", (), "did you mean 'continuous-single'"),
        ("static-single", ("--round-seconds", "nan"), "rounds must last 1 to 1e+07 s"),
        ("static-single", ("--round-seconds", "1e-30"), "rounds must last 1 to 1e+07 s"),
        ("static-single", ("--restart-seconds", "inf"), "all finite"),
        ("static-single", ("--failure-hours", "nan"), "between failures must be > 0 s"),
        ("static-single", ("--failure-hours", "1", "--repair-hours", "-1"), "a repair must take"),
        ("static-single", ("--failure-hours", "1", "--repair-hours", "1000"), "the limit of 1 %"),
        ("static-single", ("--server-failure-hours", "9"), "give servers, such as"),
        ("static-single", ("--scheduler", "yarn", "--policy", "makespan"), "yarn would ignore"),
        ("static-single", ("--scheduler", "yarn", "--agnostic"), "yarn would ignore"),
        ("static-single", ("--scheduler", "yarn", "--restart-seconds", "nan"), "a resize must"),
        ("static-single", ("--policy", "makespan_budget"), "one allocation"),
        ("static-single", ("--resize-seconds", "-1"), "resizes >= 0 s"),
        ("static-single", ("--scheduler", "yarn", "--resize-seconds", "1"), "yarn resizes no job"),
        ("static-single", ("--scheduler", "yarn", "--early-rounds"), "yarn would ignore"),
    ],
)
def test_bad_options(
    app: typer.Typer, table: Path, trace: str, more: tuple[str, ...], words: str
) -> None:
    result = CliRunner().invoke(app, _arguments(trace, table, *more))
    assert isinstance(result.exception, HetflowError)
    assert words in result.exception.message


def test_two_outputs_in_one_file_are_refused_before_the_run(
    app: typer.Typer, table: Path, tmp_path: Path
) -> None:
    """The second was refused when the first was there, after the whole run."""
    out = str(tmp_path / "run.svg")
    result = CliRunner().invoke(app, _arguments("static-single", table, "-o", out, "--plot", out))
    assert isinstance(result.exception, HetflowError)
    assert "two outputs have this name" in result.exception.message
    assert not Path(out).exists()


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(
    app: typer.Typer, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr("hetflow.clusters.simulator.cases.run_case", never)
    result = CliRunner().invoke(
        app, _arguments("static-single", table, "--plot", str(tmp_path / "run.gif"))
    )
    assert "must end in .png or .svg" in str(result.exception)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = CliRunner().invoke(
        app, _arguments("static-single", table, "--plot", str(tmp_path / "run.png"))
    )
    assert isinstance(result.exception, HetflowError)
    assert "matplotlib" in result.exception.message


def test_a_hierarchy_of_entities(app: typer.Typer, table: Path, tmp_path: Path) -> None:
    """Two teams of equal weight on one device: the FIFO team of two against a fair team of one.

    Each team has half of the time until the fair one's job ends; the queue's second job starts
    when its first is done.
    """
    entities = (Entity(name="queue", policy="fifo"), Entity(name="fair"))
    jobs = tuple(
        Job(id=name, model="conv", steps=28800.0, entity=team)
        for name, team in (("q0", "queue"), ("q1", "queue"), ("f0", "fair"))
    )
    files.write(tmp_path / "jobs.json", Jobs(jobs=jobs, entities=entities))
    arguments = [str(tmp_path / "jobs.json"), "--throughputs", str(table), "--gpus", "1xfast",
                 "--policy", "hierarchical", "-o", str(tmp_path / "run.json")]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    done = {job.id: job for job in files.read(tmp_path / "run.json", SimulationRun).jobs}
    assert done["q0"].finish_seconds == pytest.approx(14400.0, rel=0.06)
    assert done["f0"].finish_seconds == pytest.approx(14400.0, rel=0.06)
    assert done["q1"].start_seconds >= min(done[name].finish_seconds for name in ("q0", "f0"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
@pytest.mark.slow
def test_an_interrupted_sweep_leaves_no_process(table: Path, how: int, code: int) -> None:
    sweep = ("--loads", "4", "--seeds", "4", "--num-jobs", "200000", "--processes", "2")
    call = [sys.executable, "-m", "hetflow", "simulate"]
    call += _arguments("continuous-single", table, *sweep)
    run = subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        children = _wait_for(lambda: _children(run.pid), lambda found: len(found) >= 2)
        run.send_signal(how)
        output, errors = run.communicate(timeout=30)
    finally:
        run.kill()
    assert run.returncode == code
    assert output == b""
    assert b"Traceback" not in errors
    assert not _wait_for(
        lambda: [pid for pid in children if _parent_of(pid) is not None], lambda left: not left
    )


def test_an_interrupt_that_another_thread_took_waits_until_the_processes_are_started(
    app: typer.Typer, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However this thread blocks the signal, Python interrupts it all the same."""
    started = []

    class Executor(cases.ProcessPoolExecutor):
        def __init__(self, *args: object, **named: object) -> None:
            _thread.interrupt_main()
            super().__init__(*args, **named)
            started.append(self)

    monkeypatch.setattr(cases, "ProcessPoolExecutor", Executor)
    sweep = ("--loads", "4", "--seeds", "2", "--num-jobs", "3", "--processes", "2")
    result = CliRunner().invoke(app, _arguments("continuous-single", table, *sweep))
    assert result.exit_code != 0
    assert len(started) == 1


def _wait_for(look: Callable[[], list[int]], is_enough: Callable[[list[int]], bool]) -> list[int]:
    until = time.monotonic() + 30.0
    while not is_enough(found := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def _children(parent: int) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [pid for pid in pids if _parent_of(pid) == parent]


def _parent_of(pid: int) -> int | None:
    """The parent of a process that runs."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return None
    return None if state == "Z" else int(parent)


def test_the_philly_trace(app: typer.Typer, table: Path, tmp_path: Path) -> None:
    attempt = {
        "start_time": "2017-10-09 07:00:00",
        "end_time": "2017-10-09 07:10:00",
        "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
    }
    jobs = [
        {"jobid": f"job{n}", "submitted_time": f"2017-10-09 06:0{n}:00", "attempts": [attempt]}
        for n in (1, 0, 2)
    ]
    trace = tmp_path / "cluster_job_log"
    trace.write_text(json.dumps(jobs))
    result = CliRunner().invoke(app, _arguments(trace, table, "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["num_jobs"] == 3
    trace.write_text(json.dumps(jobs)[:-20])
    broken = CliRunner().invoke(app, _arguments(trace, table, "--json"))
    assert "truncated" in str(broken.exception)
    assert broken.stdout == ""


def test_pairs_and_servers_from_the_command_line(
    app: typer.Typer, table: Path, tmp_path: Path
) -> None:
    alone = files.read(table, Throughputs).models
    pairs = (PairThroughput(models=("conv", "conv"), steps_per_second={"fast": (3.0, 3.0)}),)
    both = tmp_path / "pairs.json"
    files.write(both, Throughputs(models=alone, pairs=pairs))
    trace = tmp_path / "jobs.trace"
    trace.write_text("".join(LINE.format(0.0) for _ in range(2)))
    arguments = [str(trace), "--throughputs", str(both), "--gpus", "1xfast", "--json"]
    apart = CliRunner().invoke(app, arguments)
    shared = CliRunner().invoke(app, [*arguments, "--space-sharing"])
    times = [json.loads(run.stdout)["metrics"]["makespan_seconds"] for run in (apart, shared)]
    assert times[1] == pytest.approx(4000.0 / 3.0)
    assert times[0] >= 2000.0
    spread = [*arguments[:4], "2x(1xfast),1x(2xslow)", "--json"]
    assert CliRunner().invoke(app, spread).exit_code == 0


def test_jobs_that_fit_nowhere_and_no_jobs_at_all(
    app: typer.Typer, table: Path, tmp_path: Path
) -> None:
    trace, output = tmp_path / "jobs.json", tmp_path / "run.json"
    jobs = [Job(id="wide", model="conv", steps=9.0, scale_factor=64)]
    jobs += [Job(id=f"j{n}", model="conv", steps=4000.0) for n in range(3)]
    files.write(trace, Jobs(jobs=tuple(jobs)))
    result = CliRunner().invoke(app, _arguments(trace, table, "-o", str(output), "--json"))
    assert result.exit_code == 0, result.output
    assert "warning: job 'wide' is left out: it asks for 64 devices" in result.stderr
    assert json.loads(result.stdout)["left_out"].keys() == {"wide"}
    assert files.read(output, SimulationRun).metrics.num_jobs == 3
    files.write(trace, Jobs(jobs=()), force=True)
    result = CliRunner().invoke(app, _arguments(trace, table, "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["metrics"]["num_jobs"] == 0
    shown = CliRunner().invoke(app, _arguments(trace, table)).stdout.splitlines()[-1]
    assert shown.split() == ["las", "-", "0", "0", *"--------"]


def test_whole_servers_fail_from_the_command_line(
    app: typer.Typer, table: Path, tmp_path: Path
) -> None:
    trace = tmp_path / "jobs.trace"
    trace.write_text("".join(LINE.format(0.0).replace("4000", "400000") for _ in range(3)))
    arguments = [str(trace), "--throughputs", str(table), "--gpus", "2x(1xfast,1xslow)",
                 "--server-failure-hours", "10", "--json"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout)
    assert run["num_server_failures"] > 0
    assert run["num_failures"] == 0


def test_one_run_keeps_who_held_which_devices_and_a_table_does_not(
    app: typer.Typer, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-o and --json keep spans, with the figures of the run that keeps none."""
    from hetflow.clusters.simulator import cases

    output, kept = tmp_path / "run.json", list[bool]()
    run_case = cases.run_case

    def spy(case: cases.Case, *given: object) -> cases.Simulation:
        kept.append(case.records_spans)
        return run_case(case, *given)  # type: ignore[arg-type]

    monkeypatch.setattr("hetflow.clusters.simulator.cases.run_case", spy)
    arguments = _arguments("static-single", table, "--num-jobs", "5")
    plain = CliRunner().invoke(app, arguments)
    written = CliRunner().invoke(app, [*arguments, "-o", str(output)])
    assert (plain.exit_code, plain.stdout) == (0, written.stdout)
    printed = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    assert kept == [False, True, True]
    run = files.read(output, SimulationRun)
    assert {name for span in run.spans for name in span.devices} == {
        "fast:0", "fast:1", "slow:0", "slow:1"
    }  # fmt: skip
    assert [tuple(span["devices"]) for span in printed["spans"]] == [s.devices for s in run.spans]
