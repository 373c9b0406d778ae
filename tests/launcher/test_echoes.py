"""Workers that NCCL's watchdog aborts because another failed are not blamed before that one."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetflow.runtime.launcher import supervisor
from hetflow.runtime.launcher.failures import Failure, failure_of, first_cause
from hetflow.runtime.launcher.generations import Generations
from hetflow.runtime.launcher.request import LaunchRequest
from hetflow.runtime.launcher.supervisor import Inbox, Launched
from hetflow.runtime.launcher.workers import WorkerLine
from hetflow.runtime.protocol.messages import FromWorker, Joined
from hetflow.schema.launch import LaunchConfig

from .test_dealing import config_of
from .test_hosts import plan_of

ABORTED = -6  # by SIGABRT
# Lines of torch 2.9, shortened, with the frames that follow them.
FRAMES = "".join(f"frame #{n}: <unknown function> + 0xdc253 (0x7fef5aed7e33)\n" for n in range(40))
TIMED_OUT = (
    "[rank0]:[E1218 20:27:21.426415540 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran "
    "for 600081 milliseconds before timing out.\nterminate called after throwing an instance of "
    f"'c10::DistBackendError'\n{FRAMES}"
)
LOST = (
    "[rank2]:[E1218 20:27:21.4 ProcessGroupNCCL.cpp:2168] [PG ID 0 Rank 2] Process group watchdog "
    "thread terminated with exception: NCCL error: remote process exited or there was a network "
    "error\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    f"exiting prematurely.\n{FRAMES}"
)
OWN_KERNEL = (
    "[rank1]:[E1218 20:27:21.4 ProcessGroupNCCL.cpp:2168] [PG ID 0 Rank 1] Process group watchdog "
    f"thread terminated with exception: CUDA error: device-side assert triggered\n{FRAMES}"
)
CRASH = "terminate called after throwing an instance of 'std::out_of_range'\n"


def failed(folder: Path, rank: int, log: str, returncode: int, **described: object) -> Failure:
    (folder / f"{rank}.err").write_text(log)
    note = folder / f"{rank}.failed.json"
    if described:
        note.write_text(json.dumps(described))
    return failure_of(rank, "V100", returncode, note, folder / f"{rank}.err")


def test_the_written_failure_is_the_cause_whoever_was_aborted(tmp_path: Path) -> None:
    late = failed(tmp_path, 0, TIMED_OUT, ABORTED)
    lost = failed(tmp_path, 2, LOST, ABORTED)
    real = failed(tmp_path, 1, "", 1, error="ValueError: bad", traceback="T", at_seconds=9.0)
    exchange = failed(tmp_path, 3, "", 1, error="reset", at_seconds=8.0, may_be_echo=True)
    assert first_cause([late, lost, real, exchange]) is real
    # An exchange of the script's own that failed says more than an abort for lack of others.
    assert first_cause([late, lost, exchange]) is exchange
    assert late.is_echo
    assert lost.is_echo
    assert (late.timed_out, lost.timed_out) == (True, False)


@pytest.mark.parametrize("log", [OWN_KERNEL, CRASH], ids=["CUDA error", "crash"])
def test_an_abort_for_its_own_error_comes_before_those_who_lost_it(
    tmp_path: Path, log: str
) -> None:
    own = failed(tmp_path, 1, log, ABORTED)
    others = [failed(tmp_path, 0, TIMED_OUT, ABORTED), failed(tmp_path, 2, LOST, ABORTED)]
    assert first_cause([*others, own]) is own


def test_an_abort_says_what_the_watchdog_said_and_no_frame(tmp_path: Path) -> None:
    said = failed(tmp_path, 0, TIMED_OUT, ABORTED).sentence()
    assert said.startswith(
        "worker 0 (V100) was killed by SIGABRT: Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE"
    )
    assert (
        "SIGABRT: remote process exited or there was"
        in failed(tmp_path, 2, LOST, ABORTED).sentence()
    )


class Held:
    """Workers of a host: some have failed, others are still there."""

    def __init__(self, failures: list[Failure], running: list[Failure]) -> None:
        self._failures, self._running = failures, running

    def failures(self) -> list[Failure]:
        return self._failures

    def left_early(self) -> None:
        return None

    def running(self) -> list[Failure]:
        return self._running


def test_who_keeps_the_others_waiting_under_nccl_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CAUSE_SECONDS", 0.0)
    hangs = Failure(exit_code=1, error="", rank=1, device_type="V100")
    late = [failed(tmp_path, rank, TIMED_OUT, ABORTED) for rank in (0, 2)]
    workers = Held(late, [hangs])
    found = supervisor.cause_among(workers, config_of("V100", "V100", "V100"), {})  # type: ignore[arg-type]
    assert found is not None
    assert found.sentence().startswith(
        "worker 1 (V100) hangs: worker 0 (V100) waited for it in vain: Watchdog caught"
    )


class Processes:
    """Workers under a supervisor, without processes."""

    def __init__(
        self, folder: Path, *, checkpoint: Path | None, number: int = 2, **asked: float
    ) -> None:
        config = config_of(*["V100"] * number)
        self.checkpoint = checkpoint
        self.heard: list[tuple[str, FromWorker]] = []
        self.held = {str(rank): WorkerLine() for rank in range(number)}
        self.dead: dict[str, Failure] = {}
        self.inbox = Inbox(folder)
        self.told: list[str] = []
        request = LaunchRequest(
            plan=plan_of(("V100", 2, 4)), config=config, script="t.py", folder=folder,
            checkpoint=checkpoint, on_failure="replace", **asked,  # type: ignore[arg-type]
        )  # fmt: skip
        launched = Launched(
            request=request, slots=config.workers, workers=self, inbox=self.inbox,  # type: ignore[arg-type]
            starter=self, check_signals=lambda: None, warn=self.told.append,  # type: ignore[arg-type]
        )  # fmt: skip
        self.supervisor = Generations(launched, self)

    def read(self, key: str) -> str | None:
        return None

    def lines(self) -> dict[str, WorkerLine]:
        return self.held

    def hear(self) -> list[tuple[str, FromWorker]]:
        heard, self.heard = self.heard, []
        return heard

    def failures(self) -> list[Failure]:
        return [failure for name, failure in self.dead.items() if name in self.held]

    def running(self) -> list[Failure]:
        alive = [int(name) for name in self.held if name not in self.dead]
        return [Failure(exit_code=1, error="", rank=rank, device_type="V100") for rank in alive]

    def is_stopped(self, name: str) -> bool:
        return False

    def left_early(self) -> None:
        return None

    def is_done(self, name: str) -> bool:
        return False

    def is_held(self, name: str) -> bool:
        return name in self.held

    def kill(self, name: str, why: str) -> None:
        self.dead[name] = Failure(
            exit_code=137, error="", rank=int(name), device_type="V100", why=why
        )

    def show(self, name: str) -> None: ...

    def forget(self, name: str) -> None:
        line = self.held.pop(name)
        line.theirs.close()
        line.close()

    def start(self, entry: str, config: LaunchConfig, number: int, ranks: dict[str, int]) -> None:
        assert entry == "restart"
        self.held |= {name: WorkerLine() for name in ranks}


@pytest.fixture(params=[True])
def processes(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Processes]:
    """With a checkpoint, unless the test says otherwise."""
    monkeypatch.setattr(supervisor, "CAUSE_SECONDS", 0.5)
    made = Processes(tmp_path, checkpoint=tmp_path / "saved" if request.param else None)
    yield made
    made.inbox.close()
    for line in made.held.values():
        line.theirs.close()
        line.close()


def test_an_abort_restarts_nobody_when_the_error_behind_it_comes_late(
    tmp_path: Path, processes: Processes
) -> None:
    processes.dead["0"] = failed(tmp_path, 0, TIMED_OUT, ABORTED)
    real = failed(tmp_path, 1, "", 1, error="ValueError: bad", traceback="T", at_seconds=9.0)
    threading.Timer(0.1, lambda: processes.dead.update({"1": real})).start()
    assert processes.supervisor.tick(0.0) is None
    assert processes.supervisor.tick(0.0) == real
    assert processes.told == []


def test_a_restart_after_an_abort_says_who_hung(tmp_path: Path, processes: Processes) -> None:
    for line in processes.held.values():
        line.theirs.close()
    processes.dead["0"] = failed(tmp_path, 0, TIMED_OUT, ABORTED)
    assert processes.supervisor.tick(0.0) is None
    (said,) = processes.told
    assert said.startswith("worker 1 (V100) hangs: worker 0 (V100) waited for it in vain: Watchdog")
    assert said.endswith("; starting again from the last checkpoint")
    assert list(processes.held) == ["2", "3"]


@pytest.mark.parametrize("processes", [True, False], indirect=True)
def test_a_death_that_is_told_after_what_followed_from_it_comes_first(
    tmp_path: Path, processes: Processes
) -> None:
    """A worker's exchange outside of a step broke; that the other was killed is heard later."""
    for line in processes.held.values():
        line.theirs.close()
    processes.heard = [(name, Joined(generation=0, pause_seconds=0.0)) for name in ("0", "1")]
    assert processes.supervisor.tick(0.0) is None
    processes.dead["0"] = failed(tmp_path, 0, "", 1, error="reset", may_be_echo=True)
    killed = failed(tmp_path, 1, "", -9)
    threading.Timer(0.1, lambda: processes.dead.update({"1": killed})).start()
    assert processes.supervisor.tick(0.0) is None
    found = processes.supervisor.tick(0.0)
    death = "worker 1 (V100) was killed by SIGKILL"
    if found is None:
        lost = "worker 0 (V100) failed with exit code 1: reset"
        assert processes.told == [f"{death}; {lost}; starting again from the last checkpoint"]
    else:
        outside = "worker 0 (V100) could not go on without it outside of a step"
        assert (found.exit_code, found.sentence()) == (1, f"{death}; {outside}")
    assert (found is None) == (tmp_path / "saved" == processes.checkpoint)
