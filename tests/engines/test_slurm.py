"""The slurm engine: what it gives to Slurm and reads from it, and leases on a real one."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from hetflow.api.formats import export
from hetflow.clusters.engines.protocol import ENGINES, Fate, UnsuitableDevicesError, Work, claim
from hetflow.clusters.engines.slurm import (
    NodeGpus,
    SlurmEngine,
    canonical,
    job_name,
    parse_nodes,
    parse_queue,
    render_script,
    submission,
)
from hetflow.schema import files
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import ProblemError
from hetflow.tests.engines.slurm_daemons import kill_slurmd, slurm_cluster, start_slurmd, why_not
from hetflow.tests.exporters import launch_cases

from . import leases
from .leases import output, work

until = partial(leases.until, seconds=90.0)

# As Slurm 22.05.8 wrote them; the third node is in two partitions, as a cluster's may be.
NODES = """\
fast0|idle|4|400|(null)|gpu:cpu_fast:2
slow0|mixed|4|400|cpu_slow|gpu:2
"""
MORE_NODES = """\
n0|down*|96|512000+|ib,A100-SXM4|gpu:8(S:0-1)
n1|drained|64|256000|(null)|gpu:v100:2(S:0,1),gpu:p100:2(S:1),mps:400
n1|drained|64|256000|(null)|gpu:v100:2(S:0,1),gpu:p100:2(S:1),mps:400
n2|idle|64|256000|(null)|(null)
"""
GPUS = NodeGpus("slow0", True, "gpu", frozenset({"cpu_slow"}), 2, 2, 200)


def test_gpus_of_nodes_have_the_type_of_their_gres_or_the_nodes_features() -> None:
    assert parse_nodes(NODES) == [
        NodeGpus("fast0", True, "gpu:cpu_fast", frozenset({"cpu_fast"}), 2, 2, 200),
        GPUS,
    ]
    assert parse_nodes(MORE_NODES) == [
        NodeGpus("n0", False, "gpu", frozenset({"ib", "a100_sxm4"}), 8, 12, 64000),
        NodeGpus("n1", False, "gpu:v100", frozenset({"v100"}), 2, 16, 64000),
        NodeGpus("n1", False, "gpu:p100", frozenset({"p100"}), 2, 16, 64000),
    ]
    assert canonical("cpu:fast") == "cpu_fast"
    assert canonical("NVIDIA A100-SXM4") == "nvidia_a100_sxm4"


def test_jobs_are_found_by_name_whatever_others_are_called() -> None:
    queue = parse_queue("1|RUNNING|a|b\n2|COMPLETED|hetflow-0\n3|PENDING|hetflow-0\n")
    assert queue == {
        "a|b": [("1", "RUNNING")],
        "hetflow-0": [("2", "COMPLETED"), ("3", "PENDING")],
    }


def test_a_folder_of_any_name_is_quoted_and_a_job_is_never_requeued() -> None:
    folder = Path("/a lease's; $(touch x)\n%j")
    script = render_script(folder)
    assert script.startswith("#!/bin/sh\nexec srun --ntasks=1 ")
    assert shlex.split(script.partition("exec ")[2])[:6] == [
        "srun", "--ntasks=1", sys.executable, "-m", "hetflow.clusters.engines.keeper",
        str(folder),
    ]  # fmt: skip
    command = submission(folder, GPUS, 2, ["7", "9"], folder / "job.sh")
    assert command[-1] == str(folder / "job.sh")
    assert {"--no-requeue", "--gres=gpu:2", "--mem=400M", "--cpus-per-task=4"} <= set(command)
    assert "--dependency=afterany:7:9" in command
    assert job_name(folder) in command
    assert job_name(folder) != job_name(Path("/another"))


def test_a_lease_is_claimed_once(tmp_path: Path) -> None:
    assert claim(tmp_path, "step")
    assert not claim(tmp_path, "engine")


def test_without_slurm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ProblemError, match="sinfo: no such command"):
        ENGINES.get("slurm")(POOL)


def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Put programs in front of Slurm's."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_controller_that_does_not_answer_loses_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    sinfo = f"printf '{NODES}'"
    answering(tmp_path, monkeypatch, sinfo=sinfo, squeue=away, sbatch=away, scancel=away)
    engine, lease = SlurmEngine(POOL), tmp_path / "lease"
    engine.start(work(engine, lease, "true"))
    assert engine.fate(lease) == Fate("waiting")
    monkeypatch.setattr("hetflow.clusters.engines.slurm._AGAIN_AFTER_SECONDS", 0.0)
    sbatch = 'echo "$@" >> "$0.asked"; echo 12'
    answering(tmp_path, monkeypatch, squeue="exit 0", sbatch=sbatch, scancel=away)
    assert engine.fate(lease) == Fate("waiting")  # submitted now
    never = Fate("ended", has_begun=False)
    assert engine.fate(lease) == never  # the queue does not have it
    assert SlurmEngine(POOL).fate(lease) == never
    assert len((tmp_path / "sbatch.asked").read_text().splitlines()) == 1
    assert not claim(lease, "step")  # should it come after all


def test_a_job_that_slurm_refuses_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1"
    answering(tmp_path, monkeypatch, sinfo=f"printf '{NODES}'", squeue="exit 0", sbatch=refuses)
    engine = SlurmEngine(POOL)
    with pytest.raises(ProblemError, match="Invalid account"):
        engine.start(work(engine, tmp_path / "lease", "true"))
    given = work(engine, tmp_path / "other", "true")
    both = (*given.devices, *engine.devices()[-1:])
    with pytest.raises(UnsuitableDevicesError, match="one node"):
        engine.start(Work(folder=given.folder, command=("true",), directory=tmp_path, devices=both))
    with pytest.raises(ProblemError, match="3 x cpu:slow, Slurm's nodes have 2"):
        SlurmEngine(Cluster.parse("3xcpu:slow"))


POOL = Cluster.parse("2xcpu:fast,2xcpu:slow")
SAVES = """
import signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a launch: at a second one it ends
    time.sleep(0.3)
    assert worker.poll() is None  # nobody else was asked
    worker.kill()
    print("saved", time.time(), flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What Slurm's commands need, of a cluster that lasts as long as these tests."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.fixture
def slurm(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> SlurmEngine:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return SlurmEngine(POOL)


@pytest.mark.slow
@pytest.mark.processes
def test_a_lease_runs_on_its_node_and_ends_with_its_code(
    slurm: SlurmEngine, tmp_path: Path
) -> None:
    assert [device.name for device in slurm.devices()] == [
        "fast0/cpu:fast:0", "fast0/cpu:fast:1", "slow0/cpu:slow:0", "slow0/cpu:slow:1"
    ]  # fmt: skip
    show = (
        "import os; print(os.environ['SLURMD_NODENAME'], os.environ['SLURM_JOB_GPUS'], '$(hi)');"
        "raise SystemExit(7)"
    )
    leases = [tmp_path / "a lease's; $(touch x)\n%j", tmp_path / "b"]
    for device, lease in enumerate(leases):
        given = work(slurm, lease, sys.executable, "-c", show, device=2 * device)
        assert slurm.fate(lease) == Fate("absent")
        slurm.start(given)
        assert slurm.fate(lease).is_open
    for lease, node in zip(leases, ("fast0", "slow0"), strict=True):
        until(lambda lease=lease: slurm.fate(lease).state == "ended")  # type: ignore[misc]
        assert slurm.fate(lease) == Fate("ended", 7)
        assert output(lease) == f"{node} 0 $(hi)\n" + output(lease).partition("\n")[2]
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_another_scheduler_adopts_a_job_which_saves_and_its_successor_waits(
    slurm: SlurmEngine, tmp_path: Path
) -> None:
    lease, successor = tmp_path / "lease", tmp_path / "successor"
    given = work(slurm, lease, sys.executable, "-c", SAVES)
    slurm.start(given)
    until(lambda: output(lease) == "ready\n")
    (lease / "submitted.json").unlink()  # as if it was killed before it had noted the number
    second = SlurmEngine(POOL)
    second.start(given)
    assert second.fate(lease) == Fate("running")
    show = "import time; print(time.time())"
    then = work(second, successor, sys.executable, "-c", show, device=2)
    second.start(
        Work(folder=successor, command=then.command, directory=successor, devices=then.devices,
             after=(lease,))
    )  # fmt: skip
    time.sleep(1.5)  # longer than a job takes to begin
    assert output(successor) == ""
    for _ in range(3):
        second.stop(lease)
    until(lambda: second.fate(successor).state == "ended")
    assert second.fate(lease) == Fate("ended", 143)
    second.start(given)
    assert slurm.fate(lease) == Fate("ended", 143)
    [saved] = [line for line in output(lease).splitlines() if line.startswith("saved ")]  # once
    assert float(output(successor)) > float(saved.split()[1])


@pytest.mark.slow
@pytest.mark.processes
def test_what_heeds_no_signal_is_killed_and_what_waits_never_begins(
    slurm: SlurmEngine, tmp_path: Path
) -> None:
    deaf, waits = tmp_path / "deaf", tmp_path / "waits"
    program = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); "
    given = work(slurm, deaf, sys.executable, "-c", program + "time.sleep(60)")
    both = slurm.devices()[:2]
    slurm.start(Work(folder=deaf, command=given.command, directory=deaf, devices=both))
    until(lambda: output(deaf) == "1\n")
    slurm.start(work(slurm, waits, "touch", str(tmp_path / "ran")))
    time.sleep(1.0)
    assert slurm.fate(waits) == Fate("waiting")
    slurm.stop(waits)
    assert slurm.fate(waits) == Fate("ended", 143)
    slurm.stop(deaf)
    time.sleep(0.5)
    assert slurm.fate(deaf) == Fate("running")
    slurm.kill(deaf)
    until(lambda: slurm.fate(deaf).state == "ended")
    assert slurm.fate(deaf) == Fate("ended", None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_killed_slurmd_costs_no_lease(
    slurm: SlurmEngine, variables: dict[str, str], tmp_path: Path
) -> None:
    lease = tmp_path / "lease"
    slurm.start(work(slurm, lease, sys.executable, "-c", SAVES, device=2))
    until(lambda: output(lease) == "ready\n")
    kill_slurmd(variables, "slow0")
    time.sleep(1.0)
    assert slurm.fate(lease) == Fate("running")
    start_slurmd(variables, "slow0")
    slurm.stop(lease)
    until(lambda: slurm.fate(lease).state == "ended")
    assert slurm.fate(lease) == Fate("ended", 143)
    assert output(lease).splitlines()[1].startswith("saved ")


@pytest.mark.slow
@pytest.mark.processes
def test_an_exported_heterogeneous_job_trains_the_plan(
    variables: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "a folder's $(x)"
    folder.mkdir()
    alone = launch_cases.write_case(folder)
    script = launch_cases.write_script(
        folder, "slurm", directives=["--mem=300M"],
        names={"cpu:fast": "cpu_fast", "cpu:slow": "feature:cpu_slow"},
    )  # fmt: skip
    command = ["sbatch", "--wait", "--output=out", str(script)]
    environment = launch_cases.environment(**variables)
    done = subprocess.run(command, cwd=folder, env=environment, timeout=120, check=False)
    assert done.returncode == 0, (folder / "out").read_text()
    [run] = (folder / "hetflow-runs").iterdir()
    assert launch_cases.digest_of(run / "host0") == alone
    assert launch_cases.types_of(run / "host0") == ["cpu:fast", "cpu:slow", "cpu:slow"]
    assert not list(folder.glob("x"))


STOPS = """
import pathlib, signal, sys, time
def leave(*_):
    pathlib.Path("stopped").write_text(" ".join(sys.argv[1:]))
    time.sleep(0.5)  # a second signal would end it here
    pathlib.Path("saved").write_text("")
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
pathlib.Path("ready").write_text("")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_an_exported_job_gets_one_sigterm_when_it_is_asked_to_leave(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """The launch is one that only waits; Slurm sends its signal to every process of the step."""
    (tmp_path / "hetflow").write_text(f"#!{sys.executable}\n{STOPS}")
    (tmp_path / "hetflow").chmod(0o755)
    files.write(tmp_path / "plan.json", launch_cases.plan_of(("cpu:fast", 1, 4)))
    text = export(
        tmp_path / "plan.json", "slurm", "train.py", names={"cpu:fast": "cpu_fast"},
        setup=[f"PATH={tmp_path}:$PATH"], directives=["--mem=300M"],
    )  # fmt: skip
    (tmp_path / "job").write_text(text)
    environment = {**os.environ, **variables}
    command = ["sbatch", "--parsable", "--output=out", "job"]
    number = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).strip()
    until((tmp_path / "ready").exists)
    subprocess.run(["scancel", "--signal=URG", number], env=environment, check=True)
    until((tmp_path / "saved").exists)
    assert (tmp_path / "stopped").read_text().startswith("launch --seed 0")
    show = ["squeue", "--noheader", "--states=all", f"--job={number}", "--format=%T"]

    def state() -> str:
        return subprocess.check_output(show, env=environment, text=True).strip()

    until(lambda: state() not in ("RUNNING", "COMPLETING"))
    assert state() == "FAILED"  # with the launch's own code, 143


def test_it_is_said_when_slurm_goes_away_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    away = "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1"
    answering(tmp_path, monkeypatch, sinfo=f"printf '{NODES}'", squeue=away)
    engine = SlurmEngine(POOL)
    monkeypatch.setattr("hetflow.clusters.engines.slurm._AGAIN_AFTER_SECONDS", 0.0)
    for _ in range(2):
        engine.start(work(engine, tmp_path / "lease", "true"))
        engine.fate(tmp_path / "lease")
        answering(tmp_path, monkeypatch, sinfo=away)
        with pytest.raises(ProblemError, match="Unable to contact"):
            engine.devices()
        answering(tmp_path, monkeypatch, sinfo=f"printf '{NODES}'")
    engine.devices()
    said = [record.message.partition(" (")[0] for record in caplog.records]
    assert said[0] == "Slurm does not answer"
    assert said[1] == "Slurm answers again"  # sinfo did
    assert all(one != two for one, two in zip(said, said[1:], strict=False))  # each once


def test_a_job_that_slurm_requeued_is_taken_out_of_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requeued job would wait, and a cancelled one with it; its step would not run again."""
    lease = tmp_path / "lease"
    state = tmp_path / "state"
    squeue = f'echo "12|$(cat {state})|{job_name(lease)}"'
    scancel = f'echo "$@" >> {tmp_path}/asked; echo CANCELLED > {state}'
    answering(tmp_path, monkeypatch, sinfo=f"printf '{NODES}'", squeue="true", sbatch="echo 12",
              scancel=scancel)  # fmt: skip
    engine = SlurmEngine(POOL)
    engine.start(work(engine, lease, "true"))
    monkeypatch.setattr("hetflow.clusters.engines.slurm._LOOK_EVERY_SECONDS", 0.0)
    state.write_text("PENDING")
    answering(tmp_path, monkeypatch, squeue=squeue)
    assert engine.fate(lease) == Fate("waiting")
    assert claim(lease, "step")
    state.write_text("RUNNING")
    assert engine.fate(lease).is_open
    assert not (tmp_path / "asked").exists()
    state.write_text("PENDING")
    engine.fate(lease)
    assert (tmp_path / "asked").read_text() == "--quiet 12\n"
    assert engine.fate(lease) == Fate("ended", None)
