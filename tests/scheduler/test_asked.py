"""What a submitter asks for besides devices: environment, time, order; and what owners are told."""

import csv
import io
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.scheduler.history import usage
from hetflow.clusters.scheduler.serve import Notices
from hetflow.clusters.scheduler.sharing import ClusterSettings
from hetflow.clusters.scheduler.submission import array_indices, submit, submit_array, user_name
from hetflow.clusters.scheduler.view import ask, queue
from hetflow.schema.errors import HetflowError, ProblemError
from hetflow.tests.engines.leases import until

from .conftest import FakeEngine
from .test_loop import ROUND, Asked, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "state", FakeEngine(number=1))


def reason(cluster: Cluster, job: int) -> str:
    return str(cluster.job(job)["reason"])


def test_a_job_has_the_variables_that_were_chosen_and_no_other_of_its_submitter(
    cluster: Cluster, asked: Asked, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    job = asked("a")
    words = ["submit", "--state", str(cluster.folder), "--profiles", str(job.profiles),
             "--batch-size", "16", "--steps", "10"]  # fmt: skip
    monkeypatch.setenv("OF_MINE", "$(touch x) 'quoted'\nsecond line")
    monkeypatch.setenv("NOT_CHOSEN", "1")
    chosen = ["--env", "OF_MINE", "--env", "GIVEN=a=b", "--env", "EMPTY="]
    assert run([*words, *chosen, "--array", "3,7-8", job.script]) == 0
    assert capsys.readouterr().out.split() == ["1", "2", "3"]
    cluster.tick()
    first, second = (cluster.engine.running[folder] for folder in sorted(cluster.engine.running))
    names = {"OF_MINE", "GIVEN", "EMPTY", "HETFLOW_ARRAY_INDEX", "HETFLOW_FIRST_STEP"}
    assert first.environment.keys() == names
    assert first.environment["OF_MINE"] == "$(touch x) 'quoted'\nsecond line"
    assert first.environment["GIVEN"] == "a=b"
    indices = [work.environment["HETFLOW_ARRAY_INDEX"] for work in (first, second)]
    assert indices == ["3", "7"]
    assert [row.name for row in queue(cluster.store)] == ["train[3]", "train[7]", "train[8]"]
    for wrong, said in (
        (["--env", "NOT_THERE"], "--env NOT_THERE: is not set here"),
        (["--env", "a b=c"], "is no name of a variable"),
        (["--env", "CUDA_VISIBLE_DEVICES=0"], "hetflow sets it"),
        (["--array", "7-3"], "write indices"),
        (["--array", "0-999999999"], "more than 10000 jobs"),
        (["--after", "nobody:ok"], "no job 'nobody'"),
        (["--time-limit", "0"], "time_limit_seconds"),
    ):
        assert run([*words, *wrong, job.script]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()[:1]
        assert said in line
    assert len(queue(cluster.store)) == 3


def test_only_its_owner_reads_a_jobs_variables(tmp_path: Path) -> None:
    from hetflow.clusters.engines.protocol import WORK, write_atomically

    write_atomically(tmp_path / WORK, {"environment": {"KEY": "secret"}})
    assert (tmp_path / WORK).stat().st_mode & 0o077 == 0


def test_indices_of_an_array() -> None:
    assert array_indices("7, 1-3,2") == (1, 2, 3, 7)
    for wrong in ("", "a", "3-1", "-1", "1,,2"):
        with pytest.raises(ProblemError, match="write indices"):
            array_indices(wrong)


def test_a_job_is_held_when_its_time_is_over_and_has_as_much_again_when_it_is_released(
    cluster: Cluster, asked: Asked
) -> None:
    """A script that hangs; the time in a batch system's queue does not count."""
    cluster.engine.waiting = {1}
    cluster.submit(asked("hangs", time_limit_seconds=25.0), asked("b", devices=1))
    for _ in range(5):
        cluster.tick(ROUND)
    cluster.engine.waiting, cluster.engine.starting = set(), {1}
    cluster.tick()
    for _ in range(2):
        for _ in range(2):
            cluster.tick(ROUND)
        assert cluster.states() == ["running", "running"]
        cluster.tick(6.0)
        cluster.tick(0.1)
        assert cluster.states() == ["held", "running"]
        assert reason(cluster, 1).startswith("its time limit of 25 s is over")
        ask(cluster.store, 1, "release")
        cluster.tick()
    assert cluster.states() == ["running", "running"]
    assert 143 in cluster.engine.ended.values()


def test_a_job_begins_after_others(cluster: Cluster, asked: Asked) -> None:
    first = submit(cluster.store, asked("first"))
    submit(cluster.store, asked("ok", after=("first:ok",)))
    submit(cluster.store, asked("any", after=(str(first),)))
    submit(cluster.store, asked("last", after=("2:ok", "any")))
    cluster.tick()
    cluster.tick(ROUND)
    assert cluster.states() == ["running", "submitted", "submitted", "submitted"]
    assert reason(cluster, 2) == "it begins after job 1"
    cluster.restart()
    cluster.engine.end(cluster.engine.jobs()[1], 0)
    cluster.tick()
    assert cluster.states() == ["done", "running", "running", "submitted"]
    assert cluster.job(2)["reason"] is None
    ask(cluster.store, 2, "cancel")
    for _ in range(3):
        cluster.tick()
    assert cluster.states() == ["done", "cancelled", "running", "held"]
    assert reason(cluster, 4) == "job 2 was cancelled, and it was to begin when that is done"
    with pytest.raises(HetflowError, match="no job 'train'"):
        submit(cluster.store, asked("e", after=("train",)))


@pytest.mark.parametrize(("wish", "state"), [("cancel", "cancelled"), ("hold", "held")])
def test_a_job_that_waits_for_another_can_be_held_and_cancelled(
    cluster: Cluster, asked: Asked, wish: str, state: str
) -> None:
    cluster.submit(asked("a"), asked("b", after=("1",)))
    cluster.tick()
    cluster.want(2, wish)
    cluster.tick()
    assert cluster.states() == ["running", state]
    if wish == "hold":
        cluster.want(2, "release")
        cluster.tick()
        assert cluster.states() == ["running", "submitted"]


def test_a_job_of_a_user_who_is_an_entity_is_that_entitys(cluster: Cluster, asked: Asked) -> None:
    with cluster.store.transaction():
        tree = [{"name": user_name()}, {"name": "lab"}]
        cluster.store.set("started_with", {"entities": tree})
    submit(cluster.store, asked("mine"))
    submit(cluster.store, asked("of the lab", entity="lab"))
    rows = cluster.store.rows("SELECT user, submission FROM jobs")
    assert [row["user"] for row in rows] == [user_name()] * 2
    assert [json.loads(row["submission"])["entity"] for row in rows] == [user_name(), "lab"]


def test_use_is_counted_by_user_entity_and_type_over_time(
    cluster: Cluster, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 23:59:50 on: 10 s of the first day, and 20 s of the second one."""
    cluster.now = 1_700_006_390.0  # 2023-11-14T23:59:50
    cluster.submit(asked("a", entity="lab"), asked("b"))
    cluster.store.run("UPDATE jobs SET user = 'ann' WHERE number = 1")
    cluster.tick()
    for _ in range(3):
        cluster.tick(ROUND)
    for folder in list(cluster.engine.running):
        cluster.engine.end(folder, 0)
    cluster.tick()
    days = usage(cluster.store, period="day", now=cluster.now)
    total = sum(row["device_seconds"] for row in cluster.store.rows("SELECT * FROM jobs"))
    assert sum(one.device_seconds for one in days) == pytest.approx(total) == pytest.approx(60.0)
    first = [one for one in days if one.period == "2023-11-14T00:00:00+00:00"]
    assert sum(one.device_seconds for one in first) == pytest.approx(20.0)
    assert {(one.user, one.entity) for one in days} == {("ann", "lab"), (user_name(), "")}
    assert len({one.period for one in usage(cluster.store, period="month", now=0.0)}) == 1
    assert run(["cluster", "usage", "--state", str(cluster.folder), "--per", "all"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert sum(float(row["device_seconds"]) for row in rows) == pytest.approx(60.0)
    assert run(["cluster", "usage", "--state", str(cluster.folder), "--per", "week"]) == 2


def test_a_program_and_an_address_are_told_of_each_change(
    cluster: Cluster, asked: Asked, tmp_path: Path
) -> None:
    posted: list[bytes] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *given: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    program = tmp_path / "tell me.py"
    heard = tmp_path / "heard"
    program.write_text(f"import sys\nopen({str(heard)!r}, 'a').write(sys.stdin.read() + '\\n')\n")
    said: list[str] = []
    both = [
        Notices(cluster.store, to, said.append)
        for to in (f"{sys.executable} '{program}'", f"http://127.0.0.1:{server.server_port}/x")
    ]
    cluster.engine.starting = {1}
    for act in ("submit", "start", "train", "end"):
        if act == "submit":
            cluster.submit(asked("a job's $(touch x)"))
        elif act == "train":
            cluster.engine.starting = set()
        elif act == "end":
            cluster.engine.end(cluster.engine.jobs()[1], 0)
        if act != "submit":
            cluster.tick()
        for one in both:
            one.look(cluster.now)
    try:
        until(lambda: len(posted) == 4 and heard.exists() and heard.read_text().count("\n") == 4)
    finally:
        server.shutdown()
        server.server_close()
    for lines in (posted, heard.read_text().splitlines()):
        found = [json.loads(line) for line in lines]
        assert [(one["before"], one["state"]) for one in found] == [
            (None, "submitted"), ("submitted", "starting"), ("starting", "running"),
            ("running", "done"),
        ]  # fmt: skip
        assert {one["name"] for one in found} == {"a job's $(touch x)"}
        assert {one["user"] for one in found} == {user_name()}
    assert said == []
    silent = Notices(cluster.store, "/no/such/program --token secret", said.append)
    cluster.submit(asked("b"))
    silent.look(cluster.now)
    until(lambda: len(said) == 1)
    assert said[0].startswith("job 2: submitted: could not be told:")
    assert "secret" not in said[0]
    with pytest.raises(ProblemError, match="on-change"):
        Notices(cluster.store, "a 'b", said.append)
    assert "on_change" not in json.dumps(cluster.store.get("started_with"))
    assert ClusterSettings().on_change is None


def test_an_array_is_added_whole_or_not_at_all(cluster: Cluster, asked: Asked) -> None:
    with pytest.raises(HetflowError):
        submit_array(cluster.store, asked("x" * 200), range(3))  # their names are too long
    assert cluster.states() == []
