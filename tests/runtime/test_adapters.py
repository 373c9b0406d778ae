"""Scripts as they are under uneven plans equal one process, or are refused in one line."""

import csv
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboardX.proto.event_pb2 import Event

from hetflow.runtime.adapters.patching import check_version
from hetflow.schema import files
from hetflow.schema.errors import TargetError
from hetflow.schema.options import Shard
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.runtime.sharded_plans import shared

SCRIPTS = Path(__file__).parent / "adapters"
ROOT = Path(__file__).parents[2]
Plans = Callable[..., Plan]
LAUNCH = [sys.executable, "-m", "hetflow.cli.main", "launch", "plan.json"]


def start_with(script: str | Path) -> dict[str, str]:
    """The environment of a program that runs a script; those of DDP find no library imported."""
    is_of_ddp = Path(script).name in ("habits.py", "sampled.py", "wrapped.py")
    preload = programs.preloaded() if is_of_ddp else programs.preloaded(*programs.LIBRARIES)
    return {**os.environ, programs.VARIABLE: preload}


def launch(folder: Path, plan: Plan, *script: str | Path) -> tuple[int, str]:
    files.write(folder / "plan.json", plan, force=True)
    command = [*LAUNCH, *map(str, script)]
    done = programs.run(command, timeout=180, cwd=folder, env=start_with(script[0]))
    return done.returncode, done.stderr


def alone(folder: Path, *script: str | Path, **variables: str) -> None:
    env = {**start_with(script[0]), **variables}
    done = programs.run([sys.executable, *map(str, script)], timeout=180, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of all numbers in an answer, in order."""
    entries = value.items() if isinstance(value, dict) else ()
    for key, entry in entries:
        yield from numbers(entry, f"{name}.{key}")
    for entry in value if isinstance(value, list) else ():
        yield from numbers(entry, name)
    if not isinstance(value, dict | list):
        yield name, float(value)


def assert_refused(launched: tuple[int, str], folder: Path, expected: dict[str, str]) -> None:
    code, stderr = launched
    assert code == 0, stderr
    said = json.loads((folder / "said").read_text())
    assert said.keys() == expected.keys()
    for kind, part in expected.items():
        assert part in said[kind]
        assert "\n" not in said[kind]


def assert_equal(
    folder: Path, *, script: str = "", parameters: float, others: float, rough: float = 0
) -> None:
    """Compare the answers of one process and of a launch, within tolerances.

    They are absolute, and relative for numbers beyond 1: a loss of 4 in float32 has steps of 2e-7.
    """
    answers = (numbers(json.loads((folder / name).read_text())) for name in ("one", "many"))
    one, many = ([entry for entry in found if script in entry[0]] for found in answers)
    assert len(one) == len(many) > 100
    for (name, expected), (found_name, found) in zip(one, many, strict=True):
        kind = name.rsplit(".", 1)[1]
        close = {"parameters": parameters, "rough": rough}.get(kind, others)
        assert name == found_name
        assert abs(expected - found) <= close * max(1, abs(expected)), (name, expected, found)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "devices", "shard"),
    [
        ("classifier.py", [(1, 24), (1, 8)], "all"),
        ("gan.py", [(1, 16), (1, 10), (1, 6)], None),
    ],
)
def test_accelerate_trains_as_one_process(
    script: str,
    devices: list[tuple[int, int]],
    shard: Shard | None,
    tmp_path: Path,
    plan_of: Plans,
) -> None:
    alone(tmp_path, SCRIPTS / script, "one")
    plan = replace(shared(plan_of(devices), shard, (1, 3)), blocks=("0", "2") if shard else None)
    code, stderr = launch(tmp_path, plan, SCRIPTS / script, "many", *(["fsdp"] if shard else []))
    assert code == 0, stderr
    assert ("script's blocks (0) are not those that the plan's memory counts" in stderr) == (
        shard is not None
    )
    assert_equal(tmp_path, parameters=1e-12, others=0)
    (record,) = tmp_path.glob("hetflow-runs/*/run.json")
    run = json.loads(record.read_text())
    assert run["status"] == "done"
    shares = [device["num_samples"] for device in run["devices"]]
    assert shares[0] > shares[-1] > 0
    assert sum(shares) == (2 * 161 if script == "classifier.py" else 2 * 80)


def scripts(*names: str) -> list[str | Path]:
    """The arguments that run scripts one after another in one process; the answer's name first."""
    return [SCRIPTS / "several.py", *names]


@pytest.mark.slow
@pytest.mark.processes
def test_scripts_of_accelerate_train_as_one_process(tmp_path: Path, plan_of: Plans) -> None:
    """Padded labels, buckets, streams, LoRA; states that are saved and loaded in the middle."""
    same = ("bucketed.py", "streamed.py:once", "streamed.py:alike")
    first = ("ner.py:alone", *same, "resumed.py:saved", "resumed.py:again:saved")
    alone(tmp_path, *scripts("one", *first))
    plan = plan_of([(1, 20), (1, 12)])
    then = ("ner.py:logs", *same, "resumed.py:other:saved")
    code, stderr = launch(tmp_path, plan, *scripts("many", *then))
    assert code == 0, stderr
    # The language model computes its loss in 32 bits.
    assert_equal(tmp_path, parameters=1e-6, others=1e-6)
    logged = scalars_in(tmp_path / "logs")
    assert [step for step, name, _ in sorted(logged) if name == "train_loss"] == [0, 1, 2]
    shares = [v for step, name, v in sorted(logged) if step == 2 and "samples_" in name]
    assert shares == [20, 12]


@pytest.mark.slow
@pytest.mark.processes
def test_trainers_arguments_do_as_in_one_process(tmp_path: Path, plan_of: Plans) -> None:
    """Label smoothing, recomputed activations, grouping by length, the best model, generation."""
    kinds = ("smooth", "stream", "bf16", "generated")
    alone(tmp_path, *scripts("one", *(f"featured.py:one-{kind}:{kind}" for kind in kinds)))
    resumed = (
        "featured.py:smooth:smooth:one-smooth/checkpoint-4",
        "featured.py:stream:stream:one-stream/checkpoint-3",
        "featured.py:bf16:bf16",
        "featured.py:generated:generated",
    )
    code, stderr = launch(tmp_path, plan_of([(3, 8), (1, 8)]), *scripts("many", *resumed))
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-9, others=1e-6, rough=2e-3)
    # One process and other numbers of workers find the random state under these names.
    assert (tmp_path / "stream" / "checkpoint-6" / "rng_state.pth").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_trl_and_peft_train_as_one_process(tmp_path: Path, plan_of: Plans) -> None:
    """Packed corpora, one in a single row; LoRA on prompts whose completions alone count."""
    kinds = ("packing-whole", "packing", "completion-lora")
    alone(tmp_path, *scripts("one", *(f"sft.py:one-{kind}:{kind}" for kind in kinds)))
    plan = plan_of([(1, 20), (1, 12)])
    code, stderr = launch(tmp_path, plan, *scripts("many", *(f"sft.py:{k}:{k}" for k in kinds)))
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-6, others=1e-6)


@pytest.mark.slow
@pytest.mark.processes
def test_lightning_trains_and_logs_as_one_process(tmp_path: Path, plan_of: Plans) -> None:
    """A loop of Fabric's; a GAN in manual optimization; batch norm, metrics and callbacks."""
    others = ("fabric.py", "lit_gan.py", "lit_average.py:late")
    alone(tmp_path, *scripts("one", *others, "lit_classifier.py:alone:norm"))
    # The classifier's last batch has two samples, so the second worker has none.
    plan = plan_of([(1, 20), (1, 12)])
    code, stderr = launch(tmp_path, plan, *scripts("many", *others, "lit_classifier.py:out:norm"))
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-9, others=1e-9)
    (logged,) = (tmp_path / "out").rglob("metrics.csv")
    rows = list(csv.DictReader(logged.read_text().splitlines()))
    shown = {name: value for name, value in rows[-1].items() if name.startswith("hetflow/")}
    assert float(shown.pop("hetflow/measured_step_seconds")) > 0
    assert float(shown.pop("hetflow/predicted_step_seconds")) == pytest.approx(0.01)
    shares = {f"hetflow/samples_{rank}_cpu_fast": str(n) for rank, n in enumerate((20, 12))}
    assert shown == shares
    # The same under a plan that shares states, where the script asks for FSDP.
    plan = replace(shared(plan, "all", (3, 7)), blocks=("net.0", "net.1"))
    shares_states = ("fabric.py", "lit_average.py", "lit_classifier.py:again:norm:fsdp")
    code, stderr = launch(tmp_path, plan, *scripts("many", *shares_states))
    assert code == 0, stderr
    assert "script's blocks (net.0, net.3) are not those" in stderr
    without_gan = json.loads((tmp_path / "one").read_text())
    del without_gan["1.lit_gan.py"]
    (tmp_path / "one").write_text(json.dumps(dict(enumerate(without_gan.values()))))
    found = json.loads((tmp_path / "many").read_text())
    (tmp_path / "many").write_text(json.dumps(dict(enumerate(found.values()))))
    assert_equal(tmp_path, parameters=1e-9, others=1e-9)


@pytest.mark.slow
@pytest.mark.processes
def test_lightning_runs_virtual_nodes_and_resumes_as_one_process(
    tmp_path: Path, plan_of: Plans
) -> None:
    """What cannot be exact is refused in the same launch."""
    alone(tmp_path, *scripts("one", "lit_language.py:alone", "lit_classifier.py:alone:plain"))
    (tmp_path / "checkpoints" / "epoch=0.ckpt").rename(tmp_path / "saved.ckpt")
    then = ("lit_language.py:out:saved.ckpt", "lit_classifier.py:out:plain", "lit_refused.py:said")
    code, stderr = launch(tmp_path, plan_of([(3, 8), (1, 8)]), *scripts("many", *then))
    assert code == 0, stderr
    # Parts of the language model's loss are computed in 32 bits.
    assert_equal(tmp_path, script="lit_language", parameters=1e-6, others=2e-6)
    assert_equal(tmp_path, script="lit_classifier", parameters=1e-9, others=1e-9)
    said = json.loads((tmp_path / "said").read_text())
    expected = {
        "fsdp": "strategy=fsdp",
        "batch size": "batches of 6 samples, and the plan's global batch has 32",
        "stream": "an IterableDataset has no order of samples",
        "several loaders": "takes batches of several loaders",
        "contrast": "in training_step, the loss of a batch does not follow",
        "perplexity": "'perplexity' of a batch does not follow",
        "epoch": "'mean_of_batches' is logged in on_validation_epoch_end and differs",
        "metric on steps": "the metric 'f1' is logged on each step",
        "no loss": "training_step returns no loss",
        "by hand": "manual optimization runs once on a batch",
        "compiled": "torch.compile",
        "uncut": "cannot be cut into parts",
        "scalers": "the workers' GradScalers differ",
        "stateful": "a Stateful keeps the position of whole batches",
        "fabric fsdp": "Lightning's Fabric has strategy=fsdp",
        "fabric stream": "an IterableDataset has no order of samples",
        "fabric batches": "a Bucketed may give batches that leave a worker without samples",
    }
    assert said.keys() == expected.keys()
    for name, words in expected.items():
        assert words in said[name], (name, said[name])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("names", "device"),
    [
        (["fabric.py", "lit_gan.py", "gan.py", "language.py:out"], (1, 32)),
        (["lit_language.py:out", "language.py:out"], (4, 8)),
    ],
    ids=["whole", "virtual nodes"],
)
def test_a_plan_of_one_worker_trains_as_one_process(
    names: list[str], device: tuple[int, int], tmp_path: Path, plan_of: Plans
) -> None:
    """A solved plan may leave all devices but one out; a DDP script is generated (FOUND)."""
    alone(tmp_path, *scripts("one", *names))
    code, stderr = launch(tmp_path, plan_of([device]), *scripts("many", *names))
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-6, others=2e-6)
    (record,) = tmp_path.glob("hetflow-runs/*/run.json")
    (worker,) = json.loads(record.read_text())["devices"]
    assert worker["num_samples"] > 100


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_for_torchrun_trains_as_one_process(tmp_path: Path, plan_of: Plans) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone(tmp_path, SCRIPTS / "sampled.py", "one", **variables)
    plan = plan_of([(1, 16), (1, 8), (1, 6)])
    code, stderr = launch(tmp_path, plan, SCRIPTS / "sampled.py", "many")
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-12, others=0)


@pytest.mark.slow
@pytest.mark.processes
def test_policies_of_fsdp_run_and_keep_weights_in_other_types(
    tmp_path: Path, plan_of: Plans
) -> None:
    """Against masters by hand in one process, by each library that knows such policies."""
    kinds = ("accelerate", "lightning", "fsdp2", "short", "unlike")
    alone(tmp_path, SCRIPTS / "cast.py", "one", "hand", *kinds)
    plan = shared(plan_of([(1, 18), (1, 6)]), "all", (3, 7))
    code, stderr = launch(tmp_path, plan, SCRIPTS / "cast.py", "many", *kinds)
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-6, others=1e-6)


@pytest.mark.slow
@pytest.mark.processes
def test_wrapped_models_whose_states_are_shared_train_as_one_process(
    tmp_path: Path, plan_of: Plans
) -> None:
    """By DDP and by FSDP2; the last step's state is saved whole, by one worker or by all.

    FSDP2's script saves and loads by torch.distributed.checkpoint too.
    """
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone(tmp_path, SCRIPTS / "wrapped.py", "one", "ddp", **variables)
    for kind, shard in (("ddp", "gradients"), ("fsdp", "all")):
        plan = shared(plan_of([(1, 18), (1, 12)]), shard, (3, 7))
        plan = replace(plan, blocks=None if kind == "ddp" else ("first", "last"))
        code, stderr = launch(tmp_path, plan, SCRIPTS / "wrapped.py", "many", kind)
        assert code == 0, stderr
        told = "script's blocks (blocks.0, blocks.1 and 1 more) are not those"
        assert (told in stderr) == (kind == "fsdp")
        assert_equal(tmp_path, parameters=1e-12, others=1e-12)
    # Weights are whole while a trial runs the model again.
    code, stderr = launch(tmp_path, plan, SCRIPTS / "wrapped.py", "many", "mixing")
    assert (code, "the model mixes the samples of a batch" in stderr) == (2, True), stderr
    # The first worker has all, so layers in place of each other have messages of equal sizes.
    alone(tmp_path, SCRIPTS / "wrapped.py", "one", "choosing", **variables)
    plan = shared(plan_of([(1, 26), (1, 4)]), "all", (1, 0))
    code, stderr = launch(tmp_path, plan, SCRIPTS / "wrapped.py", "many", "choosing")
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-12, others=1e-12)


@pytest.mark.slow
@pytest.mark.processes
def test_hooks_and_sequences_of_a_script_do_as_in_one_process(
    tmp_path: Path, plan_of: Plans
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone(tmp_path, SCRIPTS / "habits.py", "one", **variables)
    plan = plan_of([(1, 16), (1, 8), (1, 6)])
    code, stderr = launch(tmp_path, plan, SCRIPTS / "habits.py", "many")
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-12, others=0)


HABITS_REFUSED = {
    "have_a_floor": "the loss was the mean of its samples' losses in earlier batches",
    "clamp_parts": "changes the gradient of 0.weight, which is of this worker's samples",
    "gather_features": "the script gathers tensors of unlike sizes",
    "set_rates_alone": "lr of the optimizer's group",
    "add_a_term_alone": "the workers compute losses of unlike forms",
    "sum_later": "a loss that came after the first batch is no mean over samples",
    "keep_a_centre": "something in it follows from a worker's own share",
    "take_gradients": "gradients of the model's parameters, which would be those of",
    "call_a_part": "batch norm in training mode, which would see a worker's own share",
    "resume_by_position": "Resumed gives 75 of the 90 samples of its order",
    "read_padding": "the model or the loss reads padding",
    "take_a_root_in_16_bits": "is not the mean of its samples' losses",
}


@pytest.mark.slow
@pytest.mark.processes
def test_what_a_share_would_change_is_refused_in_a_line(tmp_path: Path, plan_of: Plans) -> None:
    plan = plan_of([(1, 16), (1, 14)])
    assert_refused(
        launch(tmp_path, plan, SCRIPTS / "habits.py", "said", "refused"), tmp_path, HABITS_REFUSED
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_goes_back_from_no_loss_is_refused(tmp_path: Path, plan_of: Plans) -> None:
    plan = plan_of([(1, 16), (1, 14)])
    code, stderr = launch(tmp_path, plan, SCRIPTS / "habits.py", "said", "by hand")
    assert code == 2
    assert "went back from no loss" in stderr
    assert "sums a number over workers that is not whole" in stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_one_worker_leaves_early_is_refused(tmp_path: Path, plan_of: Plans) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    files.write(tmp_path / "plan.json", plan_of([(1, 16), (1, 14)]))
    command = [*LAUNCH[:-1], "--timeout", "5", LAUNCH[-1], "leaving.py"]
    done = programs.run(command, timeout=120, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert "this worker's script has ended after 1 steps" in done.stderr


LEAVING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
rows = TensorDataset(torch.randn(90, 4, generator=torch.Generator().manual_seed(0)))
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for (x,) in DataLoader(rows, batch_size=15, sampler=DistributedSampler(rows)):
    model(x).square().mean().backward()
    optimizer.step()
    if len(x) == 16:  # the first worker's share
        break
"""


@pytest.mark.slow
@pytest.mark.processes
def test_trainer_resumes_under_another_plan_as_one_process(tmp_path: Path, plan_of: Plans) -> None:
    """Under one that shares states, where the script asks for FSDP."""
    alone(tmp_path, SCRIPTS / "language.py", "one", "alone")
    saved = tmp_path / "alone" / "checkpoint-3"
    # Older libraries resume in another order of samples than they had, in one process too.
    alone(tmp_path, SCRIPTS / "language.py", "one", "again", saved)
    plan = shared(plan_of([(3, 8), (1, 8)]), "optimizer", (1, 3))
    code, stderr = launch(tmp_path, plan, SCRIPTS / "language.py", "many", "out", saved, "fsdp")
    assert code == 0, stderr
    # Parts of the loss are computed in 32 bits.
    assert_equal(tmp_path, parameters=1e-6, others=2e-6)
    one, many = (
        torch.load(tmp_path / name / "checkpoint-6" / "optimizer.pt")["state"]
        for name in ("again", "out")
    )
    assert [s["exp_avg"].shape for s in one.values()] == [s["exp_avg"].shape for s in many.values()]


@pytest.mark.slow
@pytest.mark.processes
def test_trainer_weights_a_mean_over_labels_by_labels(tmp_path: Path, plan_of: Plans) -> None:
    alone(tmp_path, SCRIPTS / "tokens.py", "one", "alone")
    code, stderr = launch(
        tmp_path, plan_of([(2, 10), (1, 12)]), SCRIPTS / "tokens.py", "many", "out"
    )
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-9, others=1e-6)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("library", ["ddp", "accelerate", "trainer"])
def test_batch_norm_sees_the_whole_batch(library: str, tmp_path: Path, plan_of: Plans) -> None:
    script = SCRIPTS / "norms.py"
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    alone(tmp_path, script, library, "one", **(variables if library == "ddp" else {}))
    # In the last batch a worker has no sample.
    code, stderr = launch(tmp_path, plan_of([(1, 13), (1, 8), (1, 3)]), script, library, "many")
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-10, others=1e-9)


@pytest.mark.slow
@pytest.mark.processes
def test_batch_norm_under_virtual_nodes_is_refused(tmp_path: Path, plan_of: Plans) -> None:
    code, stderr = launch(tmp_path, plan_of([(2, 8), (1, 8)]), SCRIPTS / "norms.py", "", "many")
    assert code == 2, stderr
    assert "the model has batch norm, and the plan gives a device several" in stderr
    assert "Traceback" not in stderr


def scalars_in(folder: Path) -> list[tuple[int, str, float]]:
    """(step, name, value) of each scalar in TensorBoard's files below a folder."""
    found = []
    for path in folder.rglob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:  # length, checksum, an event, checksum
            length = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + length])
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            data = data[16 + length :]
    return found


@pytest.mark.slow
@pytest.mark.processes
def test_trainer_saves_on_a_signal_and_logs_as_one_run(tmp_path: Path, plan_of: Plans) -> None:
    script = SCRIPTS / "stopped.py"
    alone(tmp_path, script, "one", "alone")
    files.write(tmp_path / "first.json", plan_of([(2, 12), (1, 8)]))
    command = [*LAUNCH[:-1], "--checkpoint", "saved", "first.json", str(script), "many", "out"]
    asks, told = tmp_path / "out.stepped", tmp_path / "told"
    stopped = programs.run_until_stopped(
        [*command, "slow"], asks, told, timeout=180, cwd=tmp_path, env=start_with(script)
    )
    assert stopped.returncode == 143, stopped.stderr
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert 0 < int(saved.name.split("-")[1]) < 12
    code, stderr = launch(tmp_path, plan_of([(1, 24), (1, 8)]), script, "many", "out", "resume")
    assert code == 0, stderr
    assert_equal(tmp_path, parameters=1e-12, others=1e-6)
    logged = scalars_in(tmp_path / "out")
    losses = [step for step, name, _ in logged if name == "train/loss"]
    assert sorted(losses) == list(range(1, 13))  # once each, and of one worker
    shown = {name: value for _, name, value in logged if name.startswith("train/hetflow/")}
    assert shown.pop("train/hetflow/measured_step_seconds") > 0
    assert shown.pop("train/hetflow/predicted_step_seconds") == pytest.approx(0.01)
    assert shown == {
        "train/hetflow/samples_0_cpu_fast": 24,
        "train/hetflow/samples_1_cpu_fast": 8,
    }


REFUSED = {
    "unsampled": "trains on a batch of no loader that hetflow has cut into shares",
    "divided sum": "a sum that is divided by a multiple of 16, the batch size of a DataLoader",
    "sum for a mean": "a sum that is multiplied by 2, which is the number of workers",
    "by hand": "the workers have unlike data (tensors differs)",
    "root": "a batch's loss is not the mean of its samples' losses",
    "own step": "goes back from a loss that compute_loss did not give",
    "twice": "the script's sum over workers would count twice",
    "unlike": "each worker reads other samples",
    "nodes": "split_dataset_by_node gives each worker other samples",
    "compiled": "torch_compile was not tested",
    "finding": "auto_find_batch_size changes the batch",
    "rebalanced": "batch_rebalance gives each worker other batches",
    "unknown": "not their sum, nor their mean by samples or by labels",
    "rows by node": "split_dataset_by_node gives each worker other samples",
    "stateful": "a StatefulDataLoader goes back to a position",
    "fsdp": "accelerate is set to FSDP",
}


@pytest.mark.slow
@pytest.mark.processes
def test_what_libraries_may_not_do_is_refused_in_a_line(tmp_path: Path, plan_of: Plans) -> None:
    plan = plan_of([(1, 24), (1, 8)])
    assert_refused(
        launch(tmp_path, plan, SCRIPTS / "refused.py", "said", *REFUSED), tmp_path, REFUSED
    )


@pytest.mark.slow
@pytest.mark.processes
def test_a_loss_that_gathers_is_refused_under_virtual_nodes(tmp_path: Path, plan_of: Plans) -> None:
    plan = plan_of([(3, 8), (1, 8)])
    code, stderr = launch(tmp_path, plan, SCRIPTS / "refused.py", "said", "gathering")
    assert code == 0, stderr
    said = json.loads((tmp_path / "said").read_text())
    assert "the loss gathers results of all workers" in said["gathering"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([(1, 40), (1, 8)], "trains on batches of 32 samples, and the plan's global batch has 48"),
        ([(3, 8), (1, 8)], "this device 3 virtual nodes"),
    ],
)
def test_a_plan_that_the_script_does_not_fit_is_refused(
    devices: list[tuple[int, int]], said: str, tmp_path: Path, plan_of: Plans
) -> None:
    code, stderr = launch(tmp_path, plan_of(devices), SCRIPTS / "gan.py", "many")
    assert code == 2, stderr
    assert said in stderr
    assert "hint: " in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "many").exists()


def test_versions_that_were_not_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"accelerate": "1.15.3"}
    monkeypatch.setattr("hetflow.runtime.adapters.patching.version", found.__getitem__)
    check_version("accelerate", ((1, 15), (1, 15)))
    for other in ("1.14.9", "1.16.0.dev0", "2.0"):
        found["accelerate"] = other
        with pytest.raises(TargetError, match=f"accelerate {other} is installed"):
            check_version("accelerate", ((1, 15), (1, 15)))


def test_the_installed_versions_are_those_that_the_adapters_name() -> None:
    from hetflow.runtime.adapters import accelerate, lightning, transformers

    oldest = (ROOT / ".ci" / "libraries").read_text()
    adapters = {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}
    for library, adapter in adapters.items():
        assert importlib.metadata.version(library)
        check_version(library, adapter.VERSIONS)
        major, minor = adapter.VERSIONS[0]
        assert f"{library}=={major}.{minor}." in oldest
