"""Deaths between steps: in ``job.predict``, and in collectives of the script's own."""

import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from .elastic_runs import Launch, wait_until

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("outside_script.py")


def launch_of(folder: Path, nodes: list[int], *options: str, stops: dict[int, str]) -> Launch:
    """A launch in which a worker stops at the place that ``stops`` names for it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, place in stops.items():
        (folder / f"stop-{name}").write_text(place)
    return Launch(folder, nodes, *options, epochs=3, script=SCRIPT)


def kill_where_it_stops(launch: Launch, name: int, number: int = signal.SIGKILL) -> None:
    stopped = launch.folder / f"stopped-{name}"
    wait_until(lambda: launch.process.poll() is not None or stopped.exists())
    assert launch.process.poll() is None, launch.process.communicate()[1]
    wait_until(stopped.read_text)
    os.kill(int(stopped.read_text()), number)
    (launch.folder / f"stop-{name}").unlink()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The digest of a run in which nobody dies, by what it does between epochs."""

    @cache
    def digest_of(what: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("WHAT", what)
            return launch_of(tmp_path_factory.mktemp("whole"), [8], stops={}).digest()

    return digest_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "name", "place"),
    [
        ("main", 0, "body"),
        ("all", 1, "pass"),
        ("main", 1, "pass"),
        ("main", 0, "pass"),
        ("all", 0, "body"),
    ],
)
def test_a_death_in_a_prediction_leaves_the_outputs_as_they_were(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Callable[[str], str],
    what: str,
    name: int,
    place: str,
) -> None:
    monkeypatch.setenv("WHAT", what)
    launch = launch_of(tmp_path / "run", [3, 3, 2], stops={name: place})
    kill_where_it_stops(launch, name)
    assert launch.digest() == undisturbed(what)
    generations = launch.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "failure"]
    assert generations[1]["left"] == [str(name)]


def test_a_death_in_a_collective_of_the_script_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT", "own")
    launch = launch_of(tmp_path / "run", [4, 4], stops={1: "own"})
    kill_where_it_stops(launch, 1)
    code, err = launch.end()
    assert code == 1
    said = [line for line in err.splitlines() if line.startswith(("hetflow: worker 1", "hint"))]
    assert said == [
        "hetflow: worker 1 (cpu:fast) was killed by SIGKILL; worker 0 (cpu:fast) could not go on "
        "without it outside of a step",
        "hint: with --checkpoint and --checkpoint-every all would start again from the last one",
    ]


@pytest.mark.slow
def test_a_death_comes_before_an_error_that_may_have_followed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHAT", "wait")
    launch = launch_of(tmp_path / "run", [4, 4], stops={1: "own"})
    kill_where_it_stops(launch, 1)
    code, err = launch.end()
    last = [line for line in err.splitlines() if line.startswith("hetflow: ")][-1]
    death = "hetflow: worker 1 (cpu:fast) was killed by SIGKILL"
    assert last.startswith(death)
    if code != 137:  # on a busy machine the launch may have ended before worker 0 has its error
        assert code == 1
        error = "; then worker 0 (cpu:fast) failed with exit code 1: RuntimeError: "
        assert last.removeprefix(death).startswith(error)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "number"), [("own", signal.SIGKILL), ("group", signal.SIGSTOP)])
def test_with_a_checkpoint_all_start_again_after_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: Callable[[str], str],
    what: str,
    number: int,
) -> None:
    monkeypatch.setenv("WHAT", what)
    options = ["--checkpoint", str(tmp_path / "saved"), "--checkpoint-every", "2"]
    options += ["--heartbeat", "3"]
    launch = launch_of(tmp_path / "run", [4, 4], *options, stops={1: "own"})
    kill_where_it_stops(launch, 1, number)
    assert launch.digest() == undisturbed(what)
    generations = launch.record()["generations"]
    assert [g["kind"] for g in generations] == ["start", "restart"]
    assert (generations[1]["left"], generations[1]["joined"]) == (["0", "1"], ["2", "3"])
    assert generations[1]["detail"].startswith("worker 1 (cpu:fast) ")
