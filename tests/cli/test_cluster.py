"""The commands of a live cluster, without one: what they refuse, and what they write down."""

import json
import sys
from pathlib import Path

import pytest

from hetflow.cli.main import run
from hetflow.clusters.engines.protocol import OUTPUT, EngineDevice
from hetflow.clusters.scheduler.sharing import ClusterSettings, check_settings
from hetflow.clusters.scheduler.store import ClusterStore, lock
from hetflow.clusters.scheduler.submission import read_entities
from hetflow.schema.jobs import Entity


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that was started, a script and profiles; the test runs beside them."""
    folder = tmp_path / "state"
    store = ClusterStore.create(folder)
    with store.transaction():
        store.set("drainable", ["P100", "V100"])
    store.close()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "profiles").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HETFLOW_STATE", str(folder))
    return folder


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert run(["queue", "--json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)["jobs"]
    return found


SUBMIT = ["submit", "--profiles", "profiles", "--batch-size", "16", "--steps", "10"]


def test_a_script_is_submitted_with_its_arguments(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, "--name", "a 'b' $(c)", "train.py", "--epochs", "3; rm"]) == 0
    assert capsys.readouterr().out == "1\n"
    [row] = ClusterStore.open(state).rows("SELECT submission FROM jobs")
    asked = json.loads(row["submission"])
    assert asked["arguments"] == ["--epochs", "3; rm"]
    assert Path(asked["script"]).is_absolute()
    [job] = rows(capsys)
    assert (job["name"], job["state"], job["number"]) == ("a 'b' $(c)", "submitted", 1)


def test_a_path_of_several_lines_is_kept_and_names_the_job_in_one(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "a 'b'\n$(touch c);.py"
    script.write_text("")
    assert run([*SUBMIT, script.name, "--tag", "x\ny"]) == 0
    [row] = ClusterStore.open(state).rows("SELECT submission FROM jobs")
    asked = json.loads(row["submission"])
    assert asked["script"] == str(script)
    assert asked["arguments"] == ["--tag", "x\ny"]
    assert [job["name"] for job in rows(capsys)] == ["a 'b' $(touch c);"]
    script.unlink()
    assert run([*SUBMIT, script.name]) == 2
    [error] = capsys.readouterr().err.splitlines()
    assert error.startswith("hetflow: submit: script ")
    assert error.endswith("no such file")


def test_a_file_is_submitted_and_options_go_before_it(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "job.toml").write_text(
        'script = "../train.py"\nprofiles = "../profiles"\nbatch_size = 16\nsteps = 10\n'
        "priority_weight = 2\n"
    )
    assert run(["submit", "--json", "--weight", "3", "sub/job.toml"]) == 0
    assert json.loads(capsys.readouterr().out) == {"number": 1, "name": "train"}
    [job] = rows(capsys)
    assert job["priority_weight"] == 3.0
    assert run(["submit", "sub/job.toml", "--weight", "3"]) == 2
    assert "hetflow's options before it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("script = ", "not valid TOML"),
        ('script = "no.py"\nprofiles = "profiles"\nbatch_size = 1\nsteps = 1', "no such file"),
        ('script = "train.py"\nprofiles = "no"\nbatch_size = 1\nsteps = 1', "no such folder"),
        ('script = "train.py"\nprofiles = "profiles"\nbatch_sise = 1\nsteps = 1', "batch_size"),
        ('script = "train.py"\nprofiles = "profiles"\nbatch_size = 1\nsteps = nan', "nan"),
        (
            'name = "a\\nb"\nscript = "train.py"\nprofiles = "profiles"\nbatch_size = 1\nsteps = 1',
            "name",
        ),
        (
            'script = "train.py"\nprofiles = "profiles"\nbatch_size = 1\nsteps = 1\n'
            "deadline_seconds = -3.0",
            "must be > 0.0, got -3",
        ),
    ],
)
def test_a_file_with_faults_is_refused_in_a_line(
    state: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("job.toml").write_text(text)
    assert run(["submit", "job.toml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("hetflow: job.toml")
    assert all(line.startswith("hint: ") for line in error.splitlines()[1:])
    assert rows(capsys) == []


def test_jobs_are_named_by_number_or_name_and_wishes_noted(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two", "two"):
        assert run([*SUBMIT, "--name", name, "train.py"]) == 0
    assert run(["hold", "one"]) == 0
    assert run(["cancel", "3"]) == 0
    assert [job["wanted"] for job in rows(capsys)] == ["hold", None, "cancel"]
    for words, message in (
        (["hold", "two"], "2 jobs are called 'two'"),
        (["hold", "none"], "no job 'none'"),
        (["hold", "9" * 30], "no job '9"),
        (["release", "2"], "is submitted, not held"),
    ):
        assert run(words) == 2
        assert message in capsys.readouterr().err


def test_the_table_names_states_and_reasons(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, "train.py"]) == 0
    ClusterStore.open(state).run("UPDATE jobs SET state = 'held', reason = 'exit code 1: boom'")
    capsys.readouterr()
    assert run(["queue"]) == 0
    assert "exit code 1: boom" in capsys.readouterr().out


def test_logs_are_those_of_all_leases(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run([*SUBMIT, "train.py"]) == 0
    store = ClusterStore.open(state)
    for number in (1, 2):
        store.run("INSERT INTO leases (job, number, devices, state, planned) "
                  "VALUES (1, ?, '[\"V100:0\"]', 'over', 0)", number)  # fmt: skip
        store.lease_folder(1, number).mkdir(parents=True)
        (store.lease_folder(1, number) / OUTPUT).write_text(f"lease {number}\n")
    capfd.readouterr()
    assert run(["logs", "1"]) == 0
    assert capfd.readouterr().out == "lease 1\nlease 2\n"


def test_drain_knows_what_there_is(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "drain", "P100"]) == 0
    assert ClusterStore.open(state).get("drained") == ["P100"]
    assert run(["cluster", "drain", "P100", "--undo"]) == 0
    assert ClusterStore.open(state).get("drained") == []
    assert run(["cluster", "drain", "K80"]) == 2
    assert "it has P100, V100" in capsys.readouterr().err


def test_no_cluster_another_format_and_a_second_scheduler_are_refused(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["queue", "--state", str(tmp_path / "none")]) == 2
    assert "no cluster was started there" in capsys.readouterr().err
    start = ["cluster", "start", "--gpus", "1xcpu:fast"]
    with lock(state):
        assert run(start) == 2
    assert "a scheduler runs on this state already" in capsys.readouterr().err
    store = ClusterStore.open(state)
    with store.transaction():
        store.set("format", "hetflow.cluster-state/9")
    for words in (["queue"], start):
        assert run(words) == 2
        assert "hetflow.cluster-state/9" in capsys.readouterr().err
    (state / "state.sqlite").write_text("x" * 5000)
    (state / "state.sqlite-wal").unlink(missing_ok=True)
    assert run(["queue"]) == 2
    assert "not a cluster's state" in capsys.readouterr().err


def test_only_the_owner_may_read_the_state(state: Path) -> None:
    assert (state / "state.sqlite").stat().st_mode & 0o77 == 0
    assert state.stat().st_mode & 0o77 == 0


def test_a_unit_is_printed_with_what_systemd_would_expand_quoted(
    state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cluster", "start", "--gpus", "1xcpu:fast", "--state", 'a "b" $c %d', "--print-unit"]
    monkeypatch.setattr(sys, "argv", ["hetflow", *words])
    assert run(words) == 0
    unit = capsys.readouterr().out
    assert '"--state" "a \\"b\\" $$c %%d"' in unit
    assert "--print-unit" not in unit
    assert "KillMode=process" in unit


TREE = """
[[entities]]
name = "vision"
weight = 3

[[entities]]
name = "speech"
policy = "fifo"
"""


def test_jobs_belong_to_entities_that_the_cluster_knows(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tree.toml").write_text(TREE)
    tree = read_entities(tmp_path / "tree.toml")
    assert tree == (Entity(name="vision", weight=3.0), Entity(name="speech", policy="fifo"))
    assert run([*SUBMIT, "--entity", "vision", "train.py"]) == 0  # nobody knows yet
    store = ClusterStore.open(state)
    for names, words, hint in (
        (["vision", "speech"], "vison", "did you mean 'vision'?"),
        (["vision", "speech"], "xyz", "it has vision, speech"),
        ([], "vision", "start it with --entities FILE"),
    ):
        with store.transaction():
            store.set("started_with", {"entities": [{"name": name} for name in names]})
        capsys.readouterr()
        assert run([*SUBMIT, "--entity", words, "train.py"]) == 2
        assert capsys.readouterr().err.splitlines()[-1].endswith(hint)
    assert len(rows(capsys)) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no entities"),
        ("entities = 3", "entities"),
        ('[[entities]]\nname = "a"\nparent = "b"', "'b', which is not an entity"),
        ('[[entities]]\nname = "a"\nparent = "a"', "cycle"),
        ('[[entities]]\nname = "a"\nwait = 1', "wait"),
        ('[[entities]]\nname = "a"\nweight = 1999-01-01', "dates"),
        ("[[entities]", "not valid TOML"),
    ],
)
def test_a_tree_with_faults_is_refused_in_a_line(
    state: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("tree.toml").write_text(text)
    assert run(["cluster", "start", "--gpus", "1xcpu:fast", "--entities", "tree.toml"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert all(line.startswith("hint: ") for line in error.splitlines()[1:])


@pytest.mark.parametrize(
    ("policy", "message"), [("hierarchical", "needs entities"), ("min_cost", "price")]
)
def test_a_policy_that_lacks_something_is_refused_before_it_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str, message: str
) -> None:
    words = ["cluster", "start", "--gpus", "1xcpu:fast", "--policy", policy]
    assert run([*words, "--state", str(tmp_path / "state")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    tree = (Entity(name="a"),)
    settings = ClusterSettings(policy=policy, entities=tree, dollars_per_hour={"cpu:fast": 1.0})
    check_settings(settings, [EngineDevice("cpu:fast:0", "cpu:fast", "here")])


def test_what_is_asked_for_is_answered_in_json(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> object:
        assert run([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    assert run([*SUBMIT, "train.py"]) == 0
    capsys.readouterr()
    assert said("hold", "train") == {"job": "train", "asked": "hold"}
    assert said("cancel", "1") == {"job": "1", "asked": "cancel"}
    assert said("cluster", "drain", "P100") == {"named": "P100", "drained": True}
    assert said("cluster", "drain", "P100", "--undo") == {"named": "P100", "drained": False}
    assert said("logs", "train") == {"number": 1, "launches": []}
    unit = said("cluster", "start", "--gpus", "1xcpu:fast", "--print-unit")
    assert isinstance(unit, dict)
    assert unit["unit"].startswith("[Unit]")
    assert run(["cluster", "drain", "P100"]) == 0
    assert capsys.readouterr().out == ""
