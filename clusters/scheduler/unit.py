"""A systemd unit that runs a scheduler."""

import sys
from collections.abc import Sequence
from pathlib import Path


def systemd_unit(arguments: Sequence[str]) -> str:
    """The unit that runs `hetflow` with these arguments, in this folder."""
    words = [sys.executable, "-m", "hetflow", *arguments]
    return (
        "[Unit]\nDescription=hetflow scheduler\nAfter=network.target\n\n[Service]\n"
        f"ExecStart={' '.join(map(_quoted, words))}\n"
        f"WorkingDirectory={_escaped(str(Path.cwd()))}\n"
        # Jobs outlive the scheduler, and the next one adopts them.
        "KillMode=process\nRestart=on-failure\n\n[Install]\nWantedBy=default.target\n"
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """A word of ExecStart: systemd expands % and $ and reads backslashes in quotes."""
    escaped = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return '"' + escaped.replace("\n", "\\n") + '"'
