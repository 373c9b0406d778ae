"""Scripts and manifests that start plans elsewhere: every text in them comes back as it was."""

import json
import lzma
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetflow.formats.exporters.registry import EXPORTERS
from hetflow.formats.exporters.yaml_text import yaml_text
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


def rendered_documents(target: str, made: Deployment) -> list[Any]:
    return list(yaml.safe_load_all(render(target, made)))


def stubs(folder: Path) -> dict[str, str]:
    """Programs that the scripts call: launchers print their words, srun runs one host's task."""
    shown = """#!/bin/sh
printf 'PLAN=%s\\0' "$HETFLOW_PLAN"; printf 'CHECKPOINT=%s\\0' "$HETFLOW_CHECKPOINT"
pwd -P | head -c -1; printf '\\0'; printf '%s\\0' "$@"
"""
    texts = {
        "hetflow": shown,
        "torchrun": shown,
        "scontrol": """#!/bin/sh
case "$*" in *hostnames*) echo n0;; *) echo "Node=n0 NodeAddr=10.0.0.1 Version=22";; esac
""",
        "srun": '#!/bin/sh\nexport SLURM_PROCID=2\nfor last; do :; done\nexec bash -c "$last"\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "LC_ALL": "C.UTF-8"}


def said(text: str, folder: Path, *arguments: str, **variables: str) -> list[str]:
    """What the launcher of one host was told, by a script that bash runs."""
    script = folder / "script"
    script.write_text(text, newline="")
    done = subprocess.run(
        ["bash", str(script), *arguments], env=stubs(folder) | variables, capture_output=True,
        check=True, cwd=folder,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.decode().split("\0")[:-1]


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=FULL, checkpoint=FULL, arguments=st.lists(TEXTS, max_size=3))
def test_a_shell_gives_every_text_back(
    tmp_path: Path, plan: str, checkpoint: str, arguments: list[str]
) -> None:
    made = deployment(plan=plan, checkpoint=checkpoint, script=("train.py", *arguments))
    own = ["--nnodes", "3", "--node-rank", "2", "--rdzv-endpoint"]
    for target, arguments_of_script in (
        ("slurm", ()),
        ("hosts", ("2", "h")),
        ("torchrun", ("2", "h")),
    ):
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


def test_manifests_and_ray_run_the_same_launch(tmp_path: Path) -> None:
    odd = tuple(text for text in ODD if text)
    folder = tmp_path / "it's; $(y)"
    folder.mkdir()
    text = "".join(ODD)
    made = deployment(
        script=("train.py", *odd), plan_text=text, directory=str(folder), image="me/a:1",
        names={"V100": "v", "P100": "nvidia.com/p=p"}, checkpoint="$(c)", seed=3,
    )  # fmt: skip
    wanted = ["--seed", "3", "--determinism", "none", "--checkpoint", "$(c)"]
    config, _, *jobs = rendered_documents("kubernetes", made)
    assert config["data"]["plan.json"] == text
    firsts = [job["spec"]["template"]["spec"]["containers"][0]["env"][0] for job in jobs]
    assert firsts == [{"name": "FIRST_RANK", "value": n} for n in ("0", "1")]
    group = rendered_documents("skypilot", replace(made, names={}))
    assert group[0] == {"name": "m", "execution": "parallel"}
    assert [one.get("num_nodes", 1) for one in group[1:]] == [1, 2]
    ray: dict[str, Any] = {}
    constants = render("ray", replace(made, names={})).partition("HOSTS = ")[2]
    exec("HOSTS = " + constants.partition("\n\n\n")[0], ray)
    assert ray["PLAN"] == text
    assert ray["HOSTS"][1] == ("4xP100", 4, 4, {"accelerator_type:P100": 0.001})
    home = {"HOME": str(tmp_path)}
    programs = {
        "kubernetes": (config["data"]["start.sh"], {"FIRST_RANK": "1", "JOB_COMPLETION_INDEX": "1"},
                       "m-0-0.m:29400", "/hetflow/plan.json"),
        "skypilot": (group[2]["run"], {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_JOBGROUP_NAME": "j"},
                     "m-0-0.j:29400", f"{tmp_path}/hetflow-plan.json"),
        "ray": (ray["PROGRAM"], {"rank": "2", "host": "h", "port": "1", "devices": "4xP100",
                                 "plan": "/tmp/p"}, "h:1", "/tmp/p"),
    }  # fmt: skip
    for target, (program, variables, endpoint, plan) in programs.items():
        words = said(program, tmp_path, **home, **variables)
        assert words[2] == f"{folder}", target
        assert words[3:7] == ["launch", "--nnodes", "3", "--node-rank"]
        assert words[7:12] == ["2", "--rdzv-endpoint", endpoint, "--devices", "4xP100"]
        assert words[12:18] == wanted
        assert words[-2 - len(odd) :] == [plan, "train.py", *odd]
    assert (tmp_path / "hetflow-plan.json").read_bytes().decode() == text


def test_what_a_target_asks_for() -> None:
    made = deployment(cpus_per_device=6, directives=("--time=1:00:00",))
    directives = [
        line.removeprefix("#SBATCH ")
        for line in render("slurm", replace(made, names={"P100": "feature:p100"})).splitlines()
        if line.startswith("#SBATCH")
    ]
    assert directives == [
        "--job-name=m", "--no-requeue",
        "--nodes=1 --ntasks-per-node=1", "--cpus-per-task=12", "--gres=gpu:V100:2",
        "--signal=URG@120", "--time=1:00:00",
        "hetjob",
        "--nodes=2 --ntasks-per-node=1", "--cpus-per-task=24", "--constraint=p100", "--gres=gpu:4",
        "--signal=URG@120", "--time=1:00:00",
    ]  # fmt: skip
    both = (HostGroup(num_hosts=1, devices={"V100": 2, "P100": 1}),)
    assert "--gres=gpu:V100:2,gpu:P100:1\n" in render("slurm", replace(made, groups=both))
    for target in ("kubernetes", "skypilot", "torchrun"):
        with pytest.raises(ProblemError, match="cannot ask for 2xV100,1xP100 in one host") as error:
            render(target, replace(made, groups=both, image="x"))
        assert (
            error.value.hint == "put each type on hosts of its own: hosts='1x(2xV100),1x(1xP100)'"
        )
    alone = (HostGroup(num_hosts=1, devices={"cpu": 2}),)
    on_processors = replace(made, groups=alone, host_types=frozenset({"cpu"}), image="x")
    assert "gres" not in render("slurm", on_processors)
    assert "gpu" not in render("kubernetes", on_processors)
    [task] = rendered_documents("skypilot", on_processors)
    assert task["resources"] == {"cpus": "12+"}


def test_a_rented_task_has_its_resources_in_order() -> None:
    def machine(cloud: str, place: str, name: str, spot: bool, dollars: float) -> Machine:
        return Machine(cloud=cloud, place=place, instance_type=name, is_spot=spot,
                       dollars_per_hour=dollars)  # fmt: skip

    group = HostGroup(
        num_hosts=2,
        devices={"V100": 1},
        machines=(
            machine("aws", "us-east-1d", "p3.2xlarge", True, 0.9),
            machine("azure", "us_east", "NC6s v3", True, 1.0),
            machine("azure", "us_west", "NC6s v3", True, 1.1),
            machine("aws", "", "p3.2xlarge", False, 3.06),
            machine("home", "", "box", False, 4.0),
        ),
    )
    made = deployment(groups=(group,))
    [task] = rendered_documents("skypilot", made)
    assert task["num_nodes"] == 2
    assert task["resources"]["ordered"] == [
        {"accelerators": "V100:1", "infra": "aws/us-east-1/us-east-1d", "use_spot": True,
         "instance_type": "p3.2xlarge"},
        {"accelerators": "V100:1", "infra": "azure", "use_spot": True},
        {"accelerators": "V100:1", "infra": "aws", "use_spot": False,
         "instance_type": "p3.2xlarge"},
    ]  # fmt: skip
    assert "hosts 0 to 1: 1xV100 each; rent aws us-east-1d p3.2xlarge spot at 0.9 $/h" in render(
        "hosts", made
    )


EMULATED = {"virtual_types": frozenset({"V100"})}


@pytest.mark.parametrize(
    ("changes", "target", "message", "hint"),
    [
        ({}, "kubernetes", "no image is given", "image=NAME"),
        ({"image": "x"}, "kubernetes", "which nodes have V100", "kubectl get nodes"),
        ({"image": "a\nb: c"}, "kubernetes", "is no container image", "docker pull"),
        ({"image": "x", "names": {"V100": "v\u00fcv"}}, "kubernetes", "v' is no label", "kubectl"),
        ({"image": "x", "names": {"V100": "a b"}}, "kubernetes", "'a b' is no label", "kubectl"),
        ({"image": "x", "plan_text": "x" * 10**6}, "kubernetes", "a ConfigMap does not", "target="),
        ({"names": {"V100": "x\n#SBATCH y"}}, "slurm", "no type of a GPU", "sinfo"),
        ({"directives": ("time",)}, "slurm", "is no option of sbatch", "command line"),
        ({"directives": ("--a\n",)}, "slurm", "is no option of sbatch", "command line"),
        ({"names": {"V100": "a:b"}}, "skypilot", "is no accelerator", "sky gpus list"),
        (EMULATED, "ray", "the plan's V100 is emulated", 'names={"V100": NAME}'),
        (EMULATED, "slurm", "is emulated", "solve for devices"),
        (EMULATED, "skypilot", "is emulated", "solve for devices"),
    ],
)  # fmt: skip
def test_what_cannot_be_started_says_what_to_do(
    changes: dict[str, Any], target: str, message: str, hint: str
) -> None:
    with pytest.raises(ProblemError, match=message) as error:
        render(target, deployment(**changes))
    assert hint in (error.value.hint or "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"script": ()}, "there is no script"),
        ({"plan": "a\0b"}, "holds NUL"),
        ({"script": ("train.py", "\udcff")}, "no text in UTF-8"),
        ({"names": {"T4": "t4"}}, "the plan has no T4"),
        ({"name": "M x"}, "at most 40 small letters"),
    ],
)
def test_a_deployment_refuses_what_no_script_can_hold(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ProblemError, match=message):
        deployment(**changes)


@given(text=TEXTS)
def test_any_model_gives_a_job_a_name(text: str) -> None:
    assert deployment(name=job_name(text)).name == job_name(text)


SCHEMAS = Path(__file__).parents[1] / "data" / "kubernetes_schemas.json.xz"


def test_a_manifest_keeps_the_published_schema() -> None:
    validators = pytest.importorskip("jsonschema")
    schemas = json.loads(lzma.decompress(SCHEMAS.read_bytes()))
    made = deployment(
        image="me/a:1", names={"V100": "v", "P100": "p"}, volume=("runs", "/runs"), groups=MIXED
    )
    documents = rendered_documents("kubernetes", made)
    assert [one["kind"] for one in documents] == ["ConfigMap", "Service", "Job", "Job"]
    for document in documents:
        found = {"$ref": f"#/definitions/{document['kind']}", **schemas}
        validators.Draft7Validator(found).validate(document)
    documents[2]["spec"]["template"]["spec"]["subdomains"] = "m"
    with pytest.raises(validators.ValidationError, match="subdomains"):
        validators.Draft7Validator({"$ref": "#/definitions/Job", **schemas}).validate(documents[2])
