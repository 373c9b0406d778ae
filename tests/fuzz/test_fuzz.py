"""Malformed input ends as the CLI contract says; the fuzzing itself can fail."""

import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import campaign, corpus, mutations

Outcomes = list[tuple[campaign.Case, campaign.Outcome]]


def _run(folder: Path, *arguments: str) -> Outcomes:
    """A campaign in a process that is small, without torch: it forks for each case."""
    command = [sys.executable, "-m", "hetflow.tests.fuzz.campaign", "--folder", str(folder)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, check=False, timeout=1500
    )
    assert (folder / "outcomes.pickle").exists(), done.stderr
    return list(pickle.loads((folder / "outcomes.pickle").read_bytes()))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcomes]:
    """The good files, and the outcomes of every command on them and of 160 cases."""
    folder = tmp_path_factory.mktemp("corpus")
    return folder / "good", _run(folder, "--with-undamaged", "--seed", "12", "--cases", "160")


@pytest.fixture
def good(ran: tuple[Path, Outcomes]) -> Path:
    return ran[0]


@pytest.mark.slow
def test_every_command_accepts_the_good_files(ran: tuple[Path, Outcomes]) -> None:
    done = ran[1][: len(corpus.COMMANDS)]
    assert [case.command.name for case, _ in done] == [c.name for c in corpus.COMMANDS]
    refused = {}
    for case, outcome in done:
        assert case.damaged == ()
        assert outcome.faults == (), (case.command.name, outcome)
        if outcome.code:
            refused[case.command.name] = outcome.stderr
    # Nobody answers for the run that is asked to resize.
    assert list(refused) == ["resize"]
    assert "no answer within" in refused["resize"]


@pytest.mark.slow
def test_a_seed_tells_the_same_case(good: Path, tmp_path: Path) -> None:
    found = [campaign.prepare(tmp_path / name, good, 7, 11) for name in ("a", "b")]
    assert found[0] == found[1]
    for name in found[0].damaged:
        if (tmp_path / "a" / name).is_file():
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_damage_is_never_the_same_content_twice_in_a_row() -> None:
    content = b'{"a": [1, 2.5, "x"], "b": {"c": null}}'
    different = {mutations.damage(content, random.Random(seed)) for seed in range(200)}
    assert len(different) > 100


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "fault"),
    [
        (1, "", "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", "exit code 1"),
        (1, "", "Traceback (most recent call last):\n  x\nKeyError: 'a'\n", "a traceback: "),
        (2, "", "oops\n", "0 error lines"),
        (2, "", "hetflow: a\nhetflow: b\n", "2 error lines"),
        (2, "half a result", "hetflow: a\n", "a result on stdout"),
        (2, "", "hetflow: \x1b[31m\n", "control characters"),
        (0, "", "progress 10 %\n", "words on stderr"),
        (-9, "", "", "hung"),
    ],
)
def test_a_broken_contract_is_seen(code: int, stdout: str, stderr: str, fault: str) -> None:
    case = campaign.Case(0, 0, corpus.COMMANDS[1], corpus.COMMANDS[1].arguments, ())
    assert any(found.startswith(fault) for found in campaign.faults_of(code, stdout, stderr, case))


@pytest.mark.slow
def test_a_half_written_output_is_seen(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "case"
    shutil.copytree(good, folder)
    before = campaign.contents(folder)
    (folder / corpus.OUTPUT).write_text('{"schema": "hetflow.plan/1", "kind"')
    (folder / ".out.json.tmp").touch()
    (folder / "split.json").write_text("{}")
    faults = campaign.faults_of_files(before, folder, 0)
    assert [fault.split(":")[0] for fault in faults] == [
        "split.json was changed",
        "a temporary file is left",
        "an output that cannot be read back",
    ]


@pytest.mark.slow
def test_malformed_input_ends_as_promised(ran: tuple[Path, Outcomes]) -> None:
    done = ran[1][len(corpus.COMMANDS) :]
    assert len(done) == 160
    assert all(case.damaged for case, _ in done)
    assert not any(outcome.faults for _, outcome in done), campaign.report(done)
