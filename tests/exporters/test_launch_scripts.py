"""Scripts and manifests that start plans elsewhere: every text in them comes back as it was."""

import ast
import json
import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetflow.exporters.registry import EXPORTERS
from hetflow.exporters.yaml_text import yaml_text
from hetflow.schema.deployment import Deployment, HostGroup, Machine, job_name
from hetflow.schema.errors import ProblemError
from hetflow.tests.profiles import examples

yaml: Any = pytest.importorskip("yaml")

MIXED = (
    HostGroup(num_hosts=1, devices={"V100": 2}),
    HostGroup(num_hosts=2, devices={"P100": 4}),
)
ODD = ["a b", "it's", '"', "$(touch x)", "`x`", "\n", "a\nHETFLOW\n", "\\", "%j", "-x", "--", "é",
       "!", "#", ": ", "- ", "{{}}", "\x7f", "\x85", "\u2028", "\ufeff", "\U0001f600", "~", "*",
       "", "null", "1e3", "0x1", "on", "{", "'''", '"""', "\\N{DASH}", "\t", "\r"]  # fmt: skip
TEXTS = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    st.lists(st.sampled_from(ODD), max_size=4).map("".join),
)
FULL = st.builds("/{}x".format, TEXTS)


def deployment(**changes: Any) -> Deployment:
    made = Deployment(
        name="m", model="m", plan="plan.json", plan_text='{"a": "it\'s $(x)"}\n',
        script=("train.py",), groups=MIXED,
    )  # fmt: skip
    return replace(made, **changes)


def render(target: str, made: Deployment) -> str:
    return EXPORTERS.get(target).render(made, made.plan)


def stubs(folder: Path) -> dict[str, str]:
    """Programs that the scripts call: launchers print their words, srun runs one host's task."""
    shown = """#!/bin/sh
printf 'PLAN=%s\\0' "$HETFLOW_PLAN"; printf 'CHECKPOINT=%s\\0' "$HETFLOW_CHECKPOINT"
pwd -P | head -c -1; printf '\\0'; printf '%s\\0' "$@"
"""
    texts = {
        "hetflow": shown,
        "torchrun": shown,
        "scontrol": '#!/bin/sh\ncase "$*" in *hostnames*) echo n0;; *) echo "a NodeAddr=10.0.0.1 ";; '
        "esac\n",
        "srun": '#!/bin/sh\nexport SLURM_PROCID=2\nfor last; do :; done\nexec bash -c "$last"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "LC_ALL": "C.UTF-8"}


def said(text: str, folder: Path, *arguments: str) -> list[str]:
    """What the launcher of one host was told, by a script that bash runs."""
    script = folder / "script"
    script.write_text(text, newline="")
    done = subprocess.run(
        ["bash", str(script), *arguments], env=stubs(folder), capture_output=True, check=True,
        cwd=folder,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=examples(16), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=FULL, checkpoint=FULL, arguments=st.lists(TEXTS, max_size=3))
def test_a_shell_gives_every_text_back(
    tmp_path: Path, plan: str, checkpoint: str, arguments: list[str]
) -> None:
    made = deployment(plan=plan, checkpoint=checkpoint, script=("train.py", *arguments))
    own = ["--nnodes", "3", "--node-rank", "2", "--rdzv-endpoint"]
    for target, arguments_of_script in (("slurm", ()), ("hosts", ("2", "h")), ("torchrun", ("2", "h"))):
        words = said(render(target, made), tmp_path, *arguments_of_script)
        assert words[-1 - len(arguments) :] == ["train.py", *arguments], target
        if target == "torchrun":
            assert words[:2] == [f"PLAN={plan}", f"CHECKPOINT={checkpoint}"]
            assert words[3:9] == ["--nproc-per-node", "4", "--role", "P100", "--nnodes", "3"]
            continue
        endpoint = "10.0.0.1:20007" if target == "slurm" else "h:29400"
        assert words[3:12] == ["launch", *own, endpoint, "--devices", "4xP100"]
        assert words[words.index("--checkpoint") + 1] == checkpoint
        assert words[words.index("--", 12) + 1] == plan
    assert sorted(os.listdir(tmp_path)) == ["hetflow", "scontrol", "script", "srun", "torchrun"]


VALUES = st.recursive(
    TEXTS | st.booleans() | st.integers(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(TEXTS, inside, max_size=3),
    max_leaves=12,
)


@given(documents=st.lists(VALUES, min_size=1, max_size=3))
def test_yaml_gives_every_value_back(documents: list[Any]) -> None:
    assert list(yaml.safe_load_all(yaml_text(*documents))) == documents
