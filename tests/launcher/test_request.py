"""Where a run goes when the user names no folder."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

import pytest

import hetflow
from hetflow.runtime.launcher.request import RUNS_FOLDER, default_folder, run_folder
from hetflow.schema import files
from hetflow.schema.errors import FileError, TargetError

from .elastic_runs import plan_of


def test_launches_of_one_moment_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20260101-000000")
    barrier = Barrier(8)

    def claimed(opened: ExitStack) -> Path:
        barrier.wait()
        return opened.enter_context(run_folder(None, "a/model"))

    with ExitStack() as opened, ThreadPoolExecutor(8) as threads:
        found = {folder.name for folder in threads.map(claimed, [opened] * 8)}
        numbers = ["", *(f"-{number}" for number in range(2, 9))]
        assert found == {f"a_model-20260101-000000{number}" for number in numbers}
        (Path(RUNS_FOLDER) / "a_model-20260101-000000-3" / "run.json").touch()
    # Who wrote nothing leaves nothing.
    assert [path.name[-2:] for path in Path(RUNS_FOLDER).iterdir()] == ["-3"]
    assert default_folder("a/model").name == "a_model-20260101-000000"


def test_a_refused_launch_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.write(tmp_path / "plan.json", plan_of([4, 4]))
    with pytest.raises(TargetError, match="no such script"):
        hetflow.launch("plan.json", "script.py")
    assert not Path(RUNS_FOLDER).exists()
    Path(RUNS_FOLDER).touch()
    with pytest.raises(FileError, match="cannot be made"):
        hetflow.launch("plan.json", "script.py")
