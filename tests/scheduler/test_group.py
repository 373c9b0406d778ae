"""Several users of one host: who asks is who the kernel says, and a job runs as its submitter."""

import grp
import io
import json
import os
import pwd
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.engines.accounts import Account, account
from hetflow.clusters.engines.local import LocalEngine
from hetflow.clusters.engines.protocol import OUTPUT, Fate, Work, progress
from hetflow.clusters.scheduler import leases, requests, view
from hetflow.clusters.scheduler.history import usage
from hetflow.clusters.scheduler.leases import CHECKPOINT, PLAN
from hetflow.clusters.scheduler.requests import MOST_OF_USER, SOCKET, Group
from hetflow.clusters.scheduler.store import FILE, RUN, ClusterStore
from hetflow.schema.cluster import Cluster as Pool
from hetflow.schema.errors import HetflowError, ProblemError
from hetflow.schema.files import read_plan, to_json, write
from hetflow.schema.run import RunRecord
from hetflow.tests.engines.leases import until

from .conftest import FakeEngine, profile, write_workplace
from .test_live import SCRIPT
from .test_loop import Asked, Cluster

pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("useradd") is None,
        reason="makes two users, which needs root and useradd",
    ),
    pytest.mark.xdist_group("group"),
]


ACCESS_LIST = "system.posix_acl_access"

Job = Callable[..., list[str]]
"""Words that submit a job of a user, with options."""


@dataclass
class EngineOfRoot(FakeEngine):
    """One whose leases may be anybody's."""

    def may_run_as(self, uid: int) -> bool:
        return True


@dataclass(frozen=True)
class Host:
    """Two users of a group, a third one who is not in it, and a folder that all can reach."""

    folder: Path
    group: str
    ann: Account
    bob: Account
    eve: Account


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    names = {one: f"hf{one}{os.getpid()}" for one in ("lab", "ann", "bob", "eve")}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        try:
            subprocess.run(["groupadd", names["lab"]], check=True)
            for one in ("ann", "bob", "eve"):
                more = [] if one == "eve" else ["--groups", names["lab"]]
                home = str(folder / one)
                command = ["useradd", "--create-home", "--home-dir", home, *more, names[one]]
                subprocess.run(command, check=True, capture_output=True)
            users = (account(pwd.getpwnam(names[one]).pw_uid) for one in ("ann", "bob", "eve"))
            yield Host(folder, names["lab"], *users)
        finally:
            for one in ("ann", "bob", "eve"):
                subprocess.run(["userdel", "--force", names[one]], check=False, capture_output=True)
            subprocess.run(["groupdel", names["lab"]], check=False, capture_output=True)


def become(user: Account) -> None:
    os.setgroups(user.groups)
    os.setgid(user.gid)
    os.setuid(user.uid)


def as_user(user: Account, act: Callable[[], int]) -> tuple[int, str, str]:
    """Do something in a process that has become a user's; its exit code and what it printed.

    The interpreter may lie where the user cannot read, so that nothing more can be imported.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            code = 99
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (
                    io.TextIOWrapper(os.fdopen(n, "wb", 0), write_through=True) for n in (1, 2)
                )
                become(user)
                code = act()
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


def hetflow(user: Account, *words: str) -> tuple[int, str, str]:
    return as_user(user, lambda: run(list(words)))


@contextmanager
def served(host: Host, cluster: Cluster, may_run: bool = True) -> Iterator[None]:
    with Group(cluster.folder, host.group, lambda uid: may_run).serving(cluster.store):
        yield


@pytest.fixture
def cluster(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    folder = host.folder / ("x" * 60) / f"state{time.monotonic_ns()}"  # too long for a socket
    folder.parent.mkdir(exist_ok=True)
    monkeypatch.setenv("HETFLOW_STATE", str(folder))
    yield Cluster(folder, EngineOfRoot(number=1))
    shutil.rmtree(folder)


@pytest.fixture
def job(host: Host) -> Job:
    """Words that submit a job of files that only a user reads."""

    def make(user: Account, *options: str) -> list[str]:
        home = Path(user.home)
        (home / "train.py").write_text("")
        (home / "profiles").mkdir(exist_ok=True)
        for name, seconds, speed in (("cpu:fast", 0.02, 0.1), ("cpu:slow", 0.04, 0.05)):
            path = home / "profiles" / f"{name.replace(':', '-')}.json"
            path.write_text(json.dumps(profile(name, seconds, speed)))
        for path in (home, home / "profiles", *home.glob("**/*")):
            path.chmod(0o700)
            os.chown(path, user.uid, user.gid)
        file = home / "job.toml"
        file.write_text(
            'script = "train.py"\nprofiles = "profiles"\nbatch_size = 16\nsteps = 1000\n'
            f'directory = "{home}"\n'
        )
        file.chmod(0o644)
        return ["submit", *options, str(file)]

    return make


def test_members_submit_and_look_after_their_own_jobs_alone(
    host: Host, cluster: Cluster, asked: Asked, job: Job
) -> None:
    ann, bob = host.ann, host.bob
    cluster.submit(asked("of root"))
    run(["queue"])  # imports what users cannot
    with served(host, cluster):
        assert hetflow(ann, *job(ann, "--env", "KEY=secret")) == (0, "2\n", "")
        assert hetflow(bob, *job(bob, "--array", "3,5")) == (0, "3\n4\n", "")
        rows = cluster.store.rows("SELECT user, uid FROM jobs ORDER BY number")
        assert [(row["user"], row["uid"]) for row in rows] == [
            ("root", None), (ann.name, ann.uid), (bob.name, bob.uid), (bob.name, bob.uid),
        ]  # fmt: skip
        cluster.tick()
        assert cluster.states() == ["running", "running", "queued", "queued"]
        work = next(w for f, w in cluster.engine.running.items() if f.parent.parent.name == "2")
        assert (work.user, work.environment["KEY"]) == (ann.uid, "secret")
        for path, of in (
            (work.folder / RUN, ann.uid), (work.folder / PLAN, ann.uid), (work.folder, 0),
            (work.folder.parent.parent / CHECKPOINT, ann.uid), (work.folder.parent, 0),
        ):  # fmt: skip
            assert path.stat().st_uid == of
            assert path.stat().st_mode & 0o066 == 0
        for whose, words, said in (
            (bob, ["cancel", "2"], f"job 2 is {ann.name}'s"),
            (bob, ["hold", "2"], f"job 2 is {ann.name}'s"),
            (bob, ["logs", "2"], f"job 2 is {ann.name}'s"),
            (bob, ["release", "1"], "job 1 is root's"),
            (bob, ["cancel", "77"], "no job '77'"),
            (ann, ["hold", "3"], f"job 3 is {bob.name}'s"),
            (host.eve, ["queue"], "another user's"),
            (host.eve, ["cancel", "2"], "another user's"),
            (ann, ["cluster", "drain", "cpu:slow"], "another user's"),
            (ann, job(ann, "--weight", "2"), "only the cluster's owner gives weights"),
            (ann, job(ann, "--entity", bob.name), f"is neither {ann.name} nor a group"),
            (host.eve, job(ann), ""),
        ):  # fmt: skip
            code, out, err = hetflow(whose, *words)
            assert (code, out) == (2, ""), (words, out, err)
            assert said in err.splitlines()[0]
            assert "Traceback" not in err
        assert [row["wanted"] for row in cluster.store.rows("SELECT wanted FROM jobs")] == [
            None
        ] * 4
        assert hetflow(bob, "hold", "3") == (0, "", "")
        assert hetflow(bob, "cancel", "4") == (0, "", "")
        output = work.folder / OUTPUT
        output.write_text("a secret of ann\n")
        output.chmod(0o600)
        os.chown(output, ann.uid, ann.gid)
        assert hetflow(ann, "logs", "2")[1] == "a secret of ann\n"
        cluster.tick()
        assert cluster.states()[2:] == ["held", "cancelled"]
        held = {whose.name: hetflow(whose, "queue", "--json")[1] for whose in (ann, bob)}
        assert all(ann.name in text for text in held.values())
        assert "held by its user" in held[bob.name]
        assert "held by its user" not in held[ann.name]
        assert run(["cancel", "2"]) == 0  # the owner may
    found = usage(cluster.store, period="all", now=cluster.now)
    assert {one.user for one in found} <= {"root", ann.name}
    code, _, err = hetflow(ann, "queue")
    assert (code, "another user's" in err) == (2, True)  # no scheduler is there


def test_an_entity_of_a_members_own_group_or_name_has_its_jobs(
    host: Host, cluster: Cluster, job: Job
) -> None:
    with cluster.store.transaction():
        entities = [{"name": host.ann.name}, {"name": host.group}, {"name": "other"}]
        cluster.store.set("started_with", {"entities": entities})
    run(["queue"])
    with served(host, cluster):
        for user, more in ((host.ann, []), (host.ann, ["--entity", host.group]), (host.bob, [])):
            assert hetflow(user, *job(user, *more))[0] == 0
    rows = cluster.store.rows("SELECT json_extract(submission, '$.entity') AS entity FROM jobs")
    assert [row["entity"] for row in rows] == [host.ann.name, host.group, None]


def test_a_group_reads_and_changes_nothing_in_the_folder(
    host: Host, cluster: Cluster, asked: Asked
) -> None:
    cluster.submit(asked("of root"))
    cluster.tick()
    [lease] = cluster.engine.running
    (lease / OUTPUT).write_text("root's")
    state = cluster.folder

    def look() -> int:
        for act in (
            lambda: os.listdir(state), lambda: os.listdir(state / "jobs"),
            lambda: os.listdir(state / "jobs" / "1"), lambda: (state / FILE).read_bytes(),
            lambda: (state / "scheduler.lock").read_bytes(), lambda: (lease / OUTPUT).read_text(),
            lambda: (state / "new").touch(), lambda: (state / "jobs" / "new").touch(),
            lambda: (state / SOCKET).unlink(), lambda: (state / FILE).unlink(),
        ):  # fmt: skip
            with suppress(PermissionError):
                act()
                return 1
        return 0

    with served(host, cluster):
        from hetflow.clusters.scheduler.store import lock

        with lock(state):
            for user in (host.ann, host.eve):
                assert as_user(user, look)[0] == 0


def test_what_is_no_request_gets_one_line_and_ends_nothing(
    host: Host, cluster: Cluster, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LONGEST_SECONDS", 1.0)
    given = asked("a")
    whole = to_json(requests.Request(wish="submit", submission=given))

    def say(text: str) -> int:
        try:
            requests.ask(cluster.folder, text)
        except HetflowError as error:
            sys.stdout.write(error.message)
            return 2
        return 0

    with served(host, cluster):
        for text, said in (
            ("", "not valid JSON"), ("[]", "must be an object"), ("[" * 10**5, "nested"),
            ('{"schema": "hetflow.request/1", "wish": "drain"}', "wish"),
            ('{"schema": "hetflow.request/1", "wish": "cancel"}', "names no job"),
            ('{"schema": "hetflow.request/1", "wish": "submit"}', "no submission"),
            (whole.replace('"wish"', '"uid": 0, "wish"'), "uid"),
            (whole, "profiles must come with"),
            (whole.replace(given.script, "train.py"), "is no absolute path"),
            (whole.replace(given.script, "/a\\u0000b"), "zero byte"),
            (whole.replace('"environment": {', '"environment": {"HETFLOW_RANK": "1"'), "sets it"),
        ):  # fmt: skip
            code, out, err = as_user(host.ann, lambda text=text: say(text))  # type: ignore[misc]
            assert (code, said in out) == (2, True), (text[:80], out, err)

        def hold_all() -> int:
            mute = [socket.socket(socket.AF_UNIX) for _ in range(MOST_OF_USER + 1)]
            os.chdir(cluster.folder)
            for one in mute:
                one.connect(SOCKET)
            with closing(mute[-1]) as last:
                assert b"too many requests" in last.recv(1000)
            time.sleep(0.5)
            return 0

        pid = os.fork()
        if not pid:
            try:
                become(host.ann)
                os._exit(hold_all())
            finally:
                os._exit(9)
        time.sleep(0.2)
        queue = '{"schema": "hetflow.request/1", "wish": "queue"}'
        assert as_user(host.bob, lambda: say(queue))[0] == 0  # others are not kept waiting
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        until(lambda: as_user(host.ann, lambda: say(queue))[0] == 0, 10.0)
    assert cluster.states() == []


def test_where_jobs_cannot_run_as_their_submitters_these_are_told(
    host: Host, cluster: Cluster, job: Job
) -> None:
    run(["queue"])
    with served(host, cluster, may_run=False):
        code, out, err = hetflow(host.ann, *job(host.ann))
    assert (code, out) == (2, "")
    assert "this cluster runs jobs as root alone" in err
    assert cluster.states() == []
    open_to_all = host.folder / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    there = Cluster(open_to_all / "state", FakeEngine(number=1))
    with pytest.raises(ProblemError, match="others may rename"), served(host, there):
        pass
    with pytest.raises(ProblemError, match="this host has none of that name"):
        Group(cluster.folder, "no such group", lambda uid: True)


def test_a_job_of_a_member_is_held_by_a_scheduler_that_cannot_run_it_as_that_user(
    host: Host, cluster: Cluster, job: Job
) -> None:
    run(["queue"])
    with served(host, cluster):
        submitted = hetflow(host.ann, *job(host.ann))
        assert submitted == (0, "1\n", "")
    cluster.engine = FakeEngine(number=1)  # such as slurm
    cluster.restart()
    cluster.tick()
    assert cluster.states() == ["held"]
    assert "cannot run it as that user" in str(cluster.job(1)["reason"])


def test_a_launch_has_its_users_rights_and_nothing_of_the_schedulers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_ROOT", "secret")
    engine = LocalEngine(Pool.parse("1xcpu:fast"))
    ann = host.ann
    show = "id -u; id -g; id -G; pwd; umask; touch made; env"

    def start(name: str, directory: Path) -> Path:
        lease = host.folder / name
        lease.mkdir(mode=0o711)
        engine.start(
            Work(
                folder=lease, command=("/bin/sh", "-c", show), directory=directory,
                devices=engine.devices(), environment={"MINE": "1"}, user=ann.uid,
            )
        )  # fmt: skip
        until(lambda: engine.fate(lease).state == "ended")
        return lease

    lease = start("lease", Path(ann.home))
    assert engine.fate(lease) == Fate("ended", 0), (lease / OUTPUT).read_text()
    uid, gid, groups, directory, mask, *env = (lease / OUTPUT).read_text().splitlines()
    assert (int(uid), int(gid), directory, int(mask, 8)) == (ann.uid, ann.gid, ann.home, 0o077)
    names = {grp.getgrgid(int(one)).gr_name for one in groups.split()}
    assert names == {host.group, ann.name}
    assert {"MINE=1", f"HOME={ann.home}", f"USER={ann.name}"} <= set(env)
    assert not any(line.startswith("OF_ROOT") for line in env)
    assert (Path(ann.home) / "made").stat().st_uid == ann.uid
    files = {path.name: path.stat() for path in lease.iterdir()}
    assert {name for name, one in files.items() if one.st_uid == ann.uid} == {OUTPUT}
    assert all(one.st_mode & 0o077 == 0 for one in files.values())
    secret = host.folder / "secret"
    secret.mkdir(mode=0o700)
    lease = start("refused", secret)
    assert engine.fate(lease) == Fate("ended", 127)
    assert "cannot be entered" in (lease / OUTPUT).read_text()


def test_what_a_member_puts_in_place_of_a_record_is_not_followed(
    host: Host, cluster: Cluster, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(["queue"])
    with served(host, cluster):
        assert hetflow(host.ann, *job(host.ann)) == (0, "1\n", "")
    cluster.tick()
    [lease] = cluster.engine.running
    record, other = lease / RUN / "run.json", host.folder / "other"
    whole = RunRecord(
        plan=read_plan(lease / PLAN), status="done", exit_code=0, world_size=1, wall_seconds=9.0,
        num_steps=40, predicted_step_seconds=None, measured_step_seconds=None, devices=(),
        step_seconds_error=None, final_loss=None, parameters_digest=None,
    )  # fmt: skip
    write(other, whole)
    write(record, whole)
    assert leases._record(record) == whole
    with monkeypatch.context() as patch:
        patch.setattr(leases, "_MOST_OF_RECORD", 1)
        with pytest.raises(ProblemError, match="more than 1 bytes"):
            leases._record(record)
    for put in (os.mkfifo, partial(os.link, other), partial(os.symlink, other)):
        record.unlink()
        put(record)
        with pytest.raises((OSError, HetflowError)):
            leases._record(record)
    (lease / "run" / "first-step").symlink_to("/no such file")
    assert progress(lease).state == "training"  # that a link is there is all that is looked at
    cluster.engine.end(lease, 1)
    cluster.tick()
    assert cluster.states() == ["queued"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_trains_as_its_submitter(
    host: Host, monkeypatch: pytest.MonkeyPatch, open_to_ann: None
) -> None:
    python = [sys.executable, "-m", "hetflow"]
    home, state = Path(host.ann.home) / "live", str(host.folder / "live")
    home.mkdir()
    write_workplace(home, SCRIPT, monkeypatch)
    for path in (home, *home.glob("**/*")):
        os.chown(path, host.ann.uid, host.ann.gid)
        path.chmod(0o700)
    start = [*python, "cluster", "start", "--gpus", "1xcpu:fast", "--state", state,
             "--group", host.group]  # fmt: skip

    def ask(*words: str) -> str:
        answer = subprocess.run(
            [*python, *words], user=host.ann.uid, group=host.ann.gid, cwd=home,
            extra_groups=list(host.ann.groups), capture_output=True, text=True, check=False,
            env={**host.ann.environment(os.environ), "HETFLOW_STATE": state},
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        return answer.stdout

    with subprocess.Popen(start, stderr=subprocess.PIPE, text=True) as scheduler:
        try:
            assert scheduler.stderr is not None
            scheduler.stderr.readline()
            until(lambda: (Path(state) / SOCKET).exists())
            ask("submit", "--profiles", "profiles", "--batch-size", "16", "--steps", "200",
                "--virtual-nodes", "4", "train.py")  # fmt: skip
            store = ClusterStore.open(Path(state))
            until(lambda: view.queue(store)[0].state == "done", 240.0)
            assert '"state": "done"' in ask("queue", "--json")
            assert "epoch 49" in ask("logs", "1")
            run_folder = Path(state) / "jobs/1/leases/1/run"
            owners = {path.stat().st_uid for path in run_folder.glob("**/*")}
            assert owners == {host.ann.uid}
        finally:
            scheduler.terminate()


@pytest.fixture
def open_to_ann(host: Host) -> Iterator[None]:
    """Let Ann, and nobody else, pass through the closed folders above this Python and checkout.

    A CI that runs as root often keeps both below a home that only root may enter.
    """
    needed = (os.path.realpath(sys.executable), sys.prefix, __file__)
    above = {folder for path in needed for folder in Path(path).absolute().parents}
    closed = [one for one in sorted(above) if not one.stat().st_mode & stat.S_IXOTH]
    # An access list as the kernel keeps it: version 2, then tag, permissions and id of each entry.
    nobody, (user, group, other) = 2**32 - 1, (0x01, 0x04, 0x20)
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in closed}
    try:
        for folder, mode in modes.items():
            entries = (
                (user, mode >> 6 & 7, nobody), (0x02, 1, host.ann.uid),
                (group, mode >> 3 & 7, nobody), (0x10, 7, nobody), (other, mode & 7, nobody),
            )  # fmt: skip
            packed = b"".join(struct.pack("<HHI", *entry) for entry in entries)
            try:
                os.setxattr(folder, ACCESS_LIST, struct.pack("<I", 2) + packed)
            except OSError as error:  # a file system without access lists
                pytest.skip(f"other users cannot pass {folder}: {error.strerror}")
        yield
    finally:
        for folder, mode in modes.items():
            with suppress(OSError):
                os.removexattr(folder, ACCESS_LIST)
            folder.chmod(mode)
