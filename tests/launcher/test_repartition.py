"""A running pipeline changes its plan, or starts again from a checkpoint within the launch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetflow.runtime.launcher.failures import Failure
from hetflow.runtime.launcher.generations import Repartitions, check_same_job
from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.launcher.supervisor import Inbox, Launched
from hetflow.runtime.protocol.control import ask
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import ProblemError, TargetError
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.plan_parts import with_rounds

from ..faults.processes import is_gone

pytestmark = pytest.mark.processes

HETFLOW = [sys.executable, "-m", "hetflow.cli.main"]
SCRIPT = Path(__file__).with_name("pipeline_script.py")
EPOCHS, STEPS = 3, 15


def one_stage(plan: Plan) -> Plan:
    layers = tuple(layer for stage in plan.stages for layer in stage.layers)
    return replace(plan, stages=(replace(plan.stages[0], layers=layers, num_in_flight=1),))


def other_cut(plan: Plan) -> Plan:
    first, second = plan.stages
    return replace(plan, stages=(replace(first, layers=("0",)), replace(second, layers=("1", "2"))))


class Run:
    """A launch of the script in a folder of its own."""

    def __init__(
        self, folder: Path, plan: Plan, *options: str, holds: tuple[int, ...] = ()
    ) -> None:
        folder.mkdir()
        self.folder, self.run = folder, folder / "run"
        files.write(folder / "plan.json", plan)
        command = [*HETFLOW, "launch", *options, "-o", str(self.run), str(folder / "plan.json")]
        command += [str(SCRIPT), str(folder), str(EPOCHS), *map(str, holds)]
        self.process = programs.start(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def notes(self) -> list[tuple[int, int, int, int, tuple[int, ...]]]:
        """(step, rank, workers, process, samples) of every step of every worker."""
        found = []
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    step, rank, size, *samples = map(int, line.split())
                    found.append((step, rank, size, int(path.name[6:]), tuple(samples)))
        return sorted(found)

    def samples(self) -> dict[int, set[tuple[int, ...]]]:
        """What was trained on in each step, over all workers and attempts."""
        return {
            step: {note[4] for note in self.notes() if note[0] == step}
            for step in range(1, STEPS + 1)
        }

    def wait_for_step(self, number: int, workers: int) -> None:
        deadline = time.monotonic() + 120
        while sum(note[0] == number for note in self.notes()) < workers:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def resize(self, plan: Plan, *, go: int) -> dict[str, Any]:
        """Ask for a plan; let the workers go on when they were asked to hand over; the answer."""
        files.write(self.folder / "next.json", plan, force=True)
        return self.ask("--plan", str(self.folder / "next.json"), go=go)

    def ask(self, *options: str, go: int) -> dict[str, Any]:
        """``hetflow resize`` with these options, and the same."""
        before = len(list(self.folder.glob("asked-*")))
        size = self.notes()[-1][2]
        asked = programs.start(
            [*HETFLOW, "resize", str(self.run), "--json", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 120
        while len(list(self.folder.glob("asked-*"))) < before + size and asked.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.go(go)
        out, err = asked.communicate(timeout=120)
        assert asked.returncode in (0, 1), err
        answer: dict[str, Any] = json.loads(out)
        return answer

    def go(self, step: int) -> None:
        (self.folder / f"go-{step}").touch()

    def end(self) -> dict[str, torch.Tensor]:
        """Parameters of a run that succeeded."""
        _, err = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, err
        found: dict[str, torch.Tensor] = torch.load(self.folder / "end.pt", weights_only=True)
        return found

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "run.json").read_text())
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, two_stages: Plan) -> Run:
    run = Run(tmp_path_factory.mktemp("whole") / "a", two_stages)
    run.end()
    return run


def assert_same_parameters(run: Run, undisturbed: Run) -> None:
    own, theirs = run.end(), undisturbed.end()
    for name, value in theirs.items():
        torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10)


def assert_alike(run: Run, undisturbed: Run) -> None:
    assert_same_parameters(run, undisturbed)
    assert run.samples() == undisturbed.samples()


@pytest.mark.slow
def test_a_pipeline_goes_from_two_workers_to_one_and_back(
    tmp_path: Path, two_stages: Plan, undisturbed: Run
) -> None:
    run = Run(tmp_path / "a", two_stages, holds=(2, 8))
    run.wait_for_step(2, workers=2)
    answer = run.resize(one_stage(two_stages), go=2)
    assert (answer["status"], answer["joined"], answer["left"]) == ("done", ["2"], ["0", "1"])
    run.wait_for_step(8, workers=1)
    answer = run.resize(two_stages, go=8)
    assert (answer["status"], answer["joined"], answer["left"]) == ("done", ["3", "4"], ["2"])
    assert_alike(run, undisturbed)
    generations = run.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "resize", "resize"]
    assert [len(g["workers"]) for g in generations] == [2, 1, 2]
    assert all(0 < g["pause_seconds"] < 30 for g in generations[1:])
    steps = sorted((step, size) for step, rank, size, _, _ in run.notes() if rank == 0)
    assert [step for step, _ in steps] == list(range(1, STEPS + 1))  # none is made twice
    assert {size for step, size in steps if 5 <= step <= 8} == {1}
    assert run.record()["world_size"] == 2
    assert not (run.run / "handover").exists()
    assert not (run.run / "control").exists()


WORKLOAD = """
import torch
from torch import nn

def workload():
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    batch = lambda n: (torch.randn(n, 6, dtype=torch.float64), torch.randint(3, (n,)))
    return model, batch, lambda model, b: nn.functional.cross_entropy(model(b[0]), b[1])
"""


@pytest.mark.slow
def test_profile_solve_launch_and_resize_to_other_devices(tmp_path: Path, undisturbed: Run) -> None:
    def hetflow(*arguments: str) -> None:
        done = programs.run([*HETFLOW, *arguments], cwd=tmp_path, timeout=150)
        assert done.returncode == 0, done.stderr

    (tmp_path / "model.py").write_text(WORKLOAD)
    devices = ("--device", "cpu:fast=0.5", "--device", "cpu:slow=0.25", "--name", "small")
    how = ("--quick", "--sync-devices", "0", "--layers", "--microbatch-size", "2")
    hetflow("profile", "model.py:workload", *devices, *how, "--batch-sizes", "2,8")
    asked = ("--profiles", "profiles", "--gpus", "1xcpu:fast,1xcpu:slow", "--batch-size", "8")
    pipeline = ("--strategy", "pipeline", "--num-stages", "2", "--microbatch-size", "2")
    # The resize counts the same optimizer, which the profiles do not say.
    hetflow("solve", *asked, *pipeline, "--optimizer", "sgd-momentum", "-o", "plan.json")
    run = Run(tmp_path / "a", files.read(tmp_path / "plan.json", Plan), holds=(2, 8))
    profiles = ("--profiles", str(tmp_path / "profiles"))
    run.wait_for_step(2, workers=2)
    answer = run.ask("--gpus", "1xcpu:fast", *profiles, go=2)
    assert (answer["status"], answer["detail"]) == ("done", "1xcpu:fast from now on")
    run.wait_for_step(8, workers=1)
    answer = run.ask("--gpus", "2xcpu:slow", *profiles, go=8)
    assert answer["status"] == "done"  # on one of them, where measured to be faster
    assert_same_parameters(run, undisturbed)
    for step, parts in run.samples().items():  # a stage may have got replicas
        whole = sorted(sample for part in parts for sample in part)
        assert whole == sorted(*undisturbed.samples()[step]), step
    final = undisturbed.record()["final_loss"]
    assert run.record()["final_loss"] == pytest.approx(final, rel=1e-10)
    kinds = [[w["device_type"] for w in g["workers"]] for g in run.record()["generations"]]
    assert sorted(kinds[0]) == ["cpu:fast", "cpu:slow"]
    assert (kinds[1], set(kinds[2])) == (["cpu:fast"], {"cpu:slow"})


@pytest.mark.slow
def test_a_killed_worker_is_replaced_from_the_last_checkpoint(
    tmp_path: Path, two_stages: Plan, undisturbed: Run
) -> None:
    options = ("--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2")
    run = Run(tmp_path / "a", two_stages, *options, holds=(5,))
    run.wait_for_step(5, workers=2)
    os.kill(next(pid for _, rank, _, pid, _ in run.notes() if rank == 1), signal.SIGKILL)
    run.go(5)
    assert_alike(run, undisturbed)
    record, generations = run.record(), run.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "restart"]
    assert generations[1]["detail"] == "worker 1 (stage 1, cpu:slow) was killed by SIGKILL"
    assert generations[1]["joined"] == ["2", "3"]
    assert 0 < generations[1]["pause_seconds"] < 30
    assert record["parameters_digest"] == undisturbed_digest(undisturbed)
    made = [note[0] for note in run.notes() if note[1] == 0]
    assert made.count(5) == 2
    assert made.count(4) == made.count(6) == 1


@pytest.mark.slow
def test_a_frozen_worker_is_found_by_its_heartbeat(
    tmp_path: Path, two_stages: Plan, undisturbed: Run
) -> None:
    options = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2"]
    options += ["--heartbeat", "3"]
    run = Run(tmp_path / "a", two_stages, *options, holds=(5,))
    run.wait_for_step(5, workers=2)
    pid = next(note[3] for note in run.notes() if note[1] == 1)
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not is_gone(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.go(5)
    assert_alike(run, undisturbed)
    generations = run.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "restart"]
    said = "worker 1 (stage 1, cpu:slow) gave no sign of life for "
    assert generations[1]["detail"].startswith(said)


def undisturbed_digest(undisturbed: Run) -> str:
    found: str = undisturbed.record()["parameters_digest"]
    return found


@pytest.mark.slow
def test_a_plan_whose_workers_fail_leaves_the_job_as_it_was(
    tmp_path: Path, two_stages: Plan, undisturbed: Run
) -> None:
    wrong = replace(two_stages.stages[1], layers=("7",))
    run = Run(tmp_path / "a", two_stages, holds=(2,))
    run.wait_for_step(2, workers=2)
    answer = run.resize(replace(two_stages, stages=(two_stages.stages[0], wrong)), go=2)
    assert answer["status"] == "failed"
    assert answer["detail"].startswith("the new plan's workers failed: worker ")
    assert_alike(run, undisturbed)
    assert [g["kind"] for g in run.record()["generations"]] == ["start", "restart"]


class Processes:
    """Workers without processes: what they were started for, and how they left."""

    def __init__(self, plan: Plan, folder: Path, *, restarts: bool) -> None:
        self.box = Inbox(folder)
        self.codes: dict[str, int] = {"0": 0, "1": 0}
        self.store: dict[str, str] = {"hetflow/0/training": "2"}
        self.told: list[str] = []
        request = LaunchRequest(
            plan=plan, config=lower(plan), script="t.py", folder=folder,
            checkpoint=folder / "saved", on_failure="replace" if restarts else "stop",
        )  # fmt: skip
        launched = Launched(
            request=request, slots=request.config.workers, workers=self, inbox=self.box,  # type: ignore[arg-type]
            starter=self, check_signals=lambda: None, warn=self.told.append,  # type: ignore[arg-type]
        )  # fmt: skip
        self.generations = Repartitions(launched, self)
        self.generations.tick(0)

    def start(self, entry: str, config: Any, number: int, ranks: dict[str, int]) -> None:
        self.codes |= dict.fromkeys(ranks, 0)
        self.started = (entry, number, tuple(ranks))

    def lines(self) -> dict[str, Any]:
        return {}

    def hear(self) -> list[Any]:
        return []

    def failures(self) -> list[Failure]:
        return [Failure(exit_code=c, error="", rank=int(n)) for n, c in self.codes.items() if c]

    def forget(self, name: str) -> None:
        del self.codes[name]

    def is_held(self, name: str) -> bool:
        return name in self.codes

    def is_done(self, name: str) -> bool:
        return False

    def show(self, name: str) -> None:
        assert name in self.codes

    def signal(self, name: str, number: int) -> None:
        self.codes[name] = 143  # it saves and leaves

    def read(self, key: str) -> str | None:
        return self.store.get(key)

    def write(self, key: str, value: str) -> None:
        self.store[key] = value

    def fail(self, name: str, code: int) -> Failure | None:
        self.codes[name] = code
        return self.generations.tick(0)


@pytest.fixture
def processes(tmp_path: Path, two_stages: Plan) -> Iterator[Callable[[bool], Processes]]:
    made: list[Processes] = []

    def make(restarts: bool) -> Processes:
        made.append(Processes(two_stages, tmp_path, restarts=restarts))
        return made[-1]

    yield make
    for each in made:
        each.box.close()


def test_restarts_from_one_checkpoint_are_three_and_a_newer_one_counts_anew(
    processes: Callable[[bool], Processes],
) -> None:
    workers = processes(True)
    name = 0
    for number, found in enumerate(["none", "a", "a", "b", "b", "b"]):
        workers.store[f"hetflow/{number}/checkpoint"] = found
        assert workers.fail(str(name), 137) is None
        name += 2
        assert workers.started == ("restart", number + 1, (str(name), str(name + 1)))
        assert set(workers.codes) == {str(name), str(name + 1)}
    workers.store["hetflow/6/checkpoint"] = "b"
    failure = workers.fail(str(name), 137)
    assert failure is not None
    assert failure.exit_code == 137


@pytest.mark.parametrize(("restarts", "code"), [(False, 137), (True, 1)])
def test_without_a_checkpoint_or_by_an_error_of_the_script_the_launch_ends(
    processes: Callable[[bool], Processes], restarts: bool, code: int
) -> None:
    failure = processes(restarts).fail("1", code)
    assert failure is not None
    assert failure.exit_code == code


def test_newcomers_that_fail_before_or_after_their_turn_leave_the_plan_before(
    tmp_path: Path, two_stages: Plan, processes: Callable[[bool], Processes]
) -> None:
    workers = processes(False)
    ask(tmp_path, lower(one_stage(two_stages)))
    workers.generations.tick(0)
    assert workers.started == ("follow", 1, ("2",))
    assert workers.fail("2", 1) is None
    assert workers.codes == {"0": 0, "1": 0}  # as it was
    ask(tmp_path, lower(one_stage(two_stages)))
    workers.generations.tick(0)
    workers.store["hetflow/2/ready"] = "1"
    workers.generations.tick(0)
    assert workers.codes == {"0": 143, "1": 143, "3": 0}
    assert "hetflow/2/go" not in workers.store
    workers.generations.tick(0)
    assert workers.store["hetflow/2/go"] == "1"
    assert workers.fail("3", 1) is None
    assert workers.started == ("restart", 3, ("4", "5"))
    assert workers.codes == {"4": 0, "5": 0}


def test_a_pipeline_without_a_checkpoint_cannot_be_replaced(two_stages: Plan) -> None:
    asked = LaunchRequest(
        plan=two_stages, config=lower(two_stages), script="t.py", folder=Path("r")
    )
    assert asked.policy == "stop"
    assert replace(asked, checkpoint=Path("c")).policy == "replace"
    with pytest.raises(TargetError, match="has none to start from"):
        replace(asked, on_failure="replace")
    with pytest.raises(TargetError, match="a pipeline cannot go on without a worker that dies"):
        replace(asked, on_failure="shrink", checkpoint=Path("c"))


def test_other_microbatches_or_models_are_refused(two_stages: Plan) -> None:
    config = lower(two_stages)
    check_same_job(config, lower(other_cut(two_stages)))
    larger = with_rounds(two_stages.stages, 2, 4)
    other = lower(replace(two_stages, num_microbatches=2, microbatch_size=4, stages=larger))
    with pytest.raises(ProblemError, match="has 2 microbatches of 4 samples, the job has 4 of 2"):
        check_same_job(config, other)
    with pytest.raises(ProblemError, match="the plan is of x, the run trains small"):
        check_same_job(config, lower(replace(two_stages, model="x")))
