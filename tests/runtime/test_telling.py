"""The runtime speaks through logging: as lines on stderr, unless the script has another way."""

import logging
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hetflow.runtime.log import log, speak


@pytest.fixture(autouse=True)
def as_in_a_fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(log, "level", logging.NOTSET)


def test_messages_become_lines_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        speak()
    log.info("going on from ckpt (step 3)")
    log.warning("the loss is a mean")
    said = "hetflow: going on from ckpt (step 3)\nhetflow: warning: the loss is a mean\n"
    assert capsys.readouterr().err == said


def test_a_scripts_own_handler_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[str] = []
    own = logging.Handler()
    own.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    log.addHandler(own)
    speak()
    log.warning("heard")
    assert (kept, log.handlers) == (["heard"], [own])
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_behind_stderr_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stderr", full)
    speak()
    log.warning("what cannot be written")
    with pytest.raises(OSError, match="No space"):
        full.write("the same without the logger\n")
    with suppress(OSError):
        full.close()
