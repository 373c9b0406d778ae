"""Small training scripts from combinations: each equals one process, or is refused in one line.

Usage::

    python -m hetflow.tests.runtime.loss_campaign [--scripts N] [--seed N]

A script is a choice of a loss, a form of its weight, a loop, an optimizer, data and a forward hook.
They run on two workers with unequal numbers of virtual nodes, one after another. The parameters are
compared with those of the same script without hetflow. The model has neither batch-norm nor
dropout, whose statistics and draws belong to virtual nodes.
"""

import argparse
import itertools
import math
import os
import random
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hetflow import runtime as hf
from hetflow.schema.errors import TargetError
from hetflow.tests.runtime import losses, over_batch

BATCH = 16
MAPPINGS = {"even nodes": [(3, 4), (1, 4)], "uneven nodes": [(1, 13), (3, 1)]}
# Draws and counts of calls belong to a virtual node, so no other mapping repeats them.
_OWN_DRAWS = {"diffusion", "dropped", "mixed_up", "scaled_at_random"}
RIGHT = {name: make for name, make in losses.RIGHT.items() if name not in _OWN_DRAWS}
# That of a fixed batch fails by its own error in whatever splits a batch.
WRONG = {name: make for name, (make, _) in losses.WRONG.items() if name != "a fixed batch"}
OVER_BATCH = {f"over batch: {name}": make for name, make in over_batch.LOSSES.items()}
WEIGHTS = {
    "none": None,
    "samples": lambda x, y: len(x),
    "targets": lambda x, y: int((y != -100).sum()),
    "mask": lambda x, y: (x[:, 0] > 0).sum(),
}
LOOPS = (
    "plain", "clipped", "clipped by value", "accumulated", "scheduled", "scheduled each step",
    "evaluated", "with values", "kept zeros", "two optimizers", "groups",
)  # fmt: skip
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01, eps=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=0.01, eps=1e-3, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, eps=1e-3),
}
DATA = {
    "even": 2 * BATCH, "short": 43, "dicts": 2 * BATCH, "nested": 2 * BATCH,
    "one short sample": 2 * BATCH + 1,
}  # fmt: skip


@dataclass(frozen=True)
class Script:
    """One choice from each list."""

    loss: str
    weight: str
    loop: str
    optimizer: str
    data: str
    is_hooked: bool


def scripts(number: int, seed: int) -> list[Script]:
    """So many unlike choices; every loss comes about equally often."""
    draw = random.Random(seed)  # noqa: S311
    rest = list(itertools.product(WEIGHTS, LOOPS, OPTIMIZERS, DATA, (False, True)))
    kinds = [*RIGHT, *WRONG, *OVER_BATCH]
    draw.shuffle(kinds)
    drawn = [draw.sample(rest, -(-number // len(kinds))) for _ in kinds]
    return [
        Script(kind, *c)
        for row in zip(*drawn, strict=True)
        for kind, c in zip(kinds, row, strict=True)
    ][:number]


def as_dict(script: Script, x, y):
    """A sample, or a batch, in the form of the script's data."""
    return {"x": x, "y": y} if script.data == "dicts" else {"x": {"inner": [x]}, "y": (y,)}


def of_dict(script: Script, found):
    """Its inputs and targets."""
    return (found["x"], found["y"]) if script.data == "dicts" else (
        found["x"]["inner"][0], found["y"][0]
    )  # fmt: skip


class Rows(TensorDataset):
    """Samples as dicts."""

    def __init__(self, script: Script, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self._script = script

    def __getitem__(self, index):
        return as_dict(self._script, *super().__getitem__(index))


def data_of(script: Script) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DATA[script.data], 5, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (len(x),), generator=generator)
    if not script.loss.startswith("over batch"):
        y[::3] = -100
    return Rows(script, x, y) if script.data in ("dicts", "nested") else TensorDataset(x, y)


def model_of(script: Script) -> nn.Module:
    torch.manual_seed(1)
    if script.loss.startswith("over batch"):
        model = over_batch.Net(norm=False)
    else:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    if script.is_hooked:
        model.register_forward_hook(lambda module, given, made: 2 * made)
    return model


def functions_of(script: Script, model: nn.Module):
    """The function of a batch, and the arguments that job.backward gets with it."""
    options = {}
    if script.loss in OVER_BATCH:
        function, options["over_batch"] = OVER_BATCH[script.loss](model)
    else:
        function = {**RIGHT, **WRONG}[script.loss](model)
    if script.weight != "none":
        options["weight"] = WEIGHTS[script.weight]
    if script.loop == "with values":
        inner, options["has_aux"] = function, True

        def function(x, y):
            return inner(x, y), {"rows": x.sum(1)}

    if script.data in ("dicts", "nested"):
        by_rows = function

        def function(batch):
            return by_rows(*of_dict(script, batch))

        if "weight" in options:
            weight = options["weight"]
            options["weight"] = lambda batch: weight(*of_dict(script, batch))
    return function, options


def train(script: Script, model: nn.Module, batches, backward, evaluation) -> None:
    """The script's loop; ``batches`` and ``backward`` are those of hetflow or of plain PyTorch."""
    make, parameters = OPTIMIZERS[script.optimizer], list(model.parameters())
    if script.loop == "two optimizers":
        optimizers = [make(parameters[:2]), make(parameters[2:])]
    elif script.loop == "groups":
        few = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        many = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
        optimizers = [make([few, many])]
    else:
        optimizers = [make(parameters)]
    step, evaluate = backward(optimizers), evaluation
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in optimizers]
    for epoch in range(2):
        for number, batch in enumerate(batches(epoch)):
            step(batch)
            if script.loop == "accumulated" and number % 2 == 0:
                continue
            if script.loop == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if script.loop == "clipped by value":
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
                optimizer.step()
                optimizer.zero_grad(set_to_none=script.loop != "kept zeros")
                if script.loop == "scheduled each step":
                    scheduler.step()
        if script.loop == "scheduled":
            schedulers[0].step()
        if script.loop == "evaluated":
            evaluate()


def plainly(script: Script) -> dict[str, torch.Tensor] | None:
    """The parameters that the script trains without hetflow; None where a loss is no number."""
    from hetflow.runtime.determinism import generator_of

    model, dataset = model_of(script), data_of(script)
    function, options = functions_of(script, model)
    over, losses_seen = options.get("over_batch"), []

    def batches(epoch):
        order = torch.randperm(len(dataset), generator=generator_of(0, "order", epoch))
        for index in order.split(BATCH):
            x, y = (tensor[index] for tensor in dataset.tensors)
            yield (as_dict(script, x, y),) if script.data in ("dicts", "nested") else (x, y)

    def backward(optimizers):
        def step(batch):
            found = function(*batch)
            if options.get("has_aux"):
                found = found[0]
            if over is not None:
                found = over(*found) if isinstance(found, tuple) else over(found)
            if isinstance(found, tuple):
                found = found[0]
            loss = found.loss if isinstance(found, hf.Weighted) else found
            loss.backward()
            losses_seen.append(float(loss.detach()))

        return step

    train(script, model, batches, backward, lambda: model.eval() and model.train())
    return model.state_dict() if all(map(math.isfinite, losses_seen)) else None


def under_hetflow(script: Script) -> dict[str, torch.Tensor] | TargetError:
    """The parameters, or the refusal before the first update."""
    model = model_of(script)
    function, options = functions_of(script, model)
    loader = DataLoader(data_of(script), batch_size=BATCH, shuffle=True)
    made = []

    def backward(optimizers):
        made.append(hf.prepare(model, optimizers))
        return lambda batch: made[0].backward(function, batch, **options)

    def evaluate():
        with made[0].evaluation() as evaluated:
            evaluated(torch.ones(2, 5, dtype=torch.float64))

    try:
        train(script, model, lambda epoch: made[0].batches(loader), backward, evaluate)
        found = model.state_dict()
    except TargetError as error:
        if made[0].num_steps:  # other workers may not know: end the launch, as scripts do
            raise
        found = error
    made[0].finish()
    return found


def judge(script: Script, found: dict[str, torch.Tensor] | TargetError) -> str | None:
    """What is wrong with a script's end under hetflow; None where nothing is."""
    if isinstance(found, TargetError):
        if "\n" in found.message or not found.hint:
            return f"the refusal is no line with a hint: {found.message}"
        has_weight = script.loss in ("ignoring", "masked")
        adds_up = script.loop in ("accumulated", "kept zeros")
        is_right = (script.loss in RIGHT or script.loss in OVER_BATCH) and script.weight == "none"
        is_right = is_right and not (has_weight and adds_up)
        is_right = is_right and not (script.loss in OVER_BATCH and script.loop == "with values")
        return f"was refused: {found.message}" if is_right else None
    expected = plainly(script)
    if expected is None:
        return None
    off = max(float((found[n] - v).abs().max() / v.abs().max()) for n, v in expected.items())
    return None if off < 1e-9 else f"trained in silence to other parameters ({off:.1e} off)"


def refusal_in(stderr: str) -> TargetError:
    """What a launch said at its end."""
    lines = stderr.splitlines()
    said = [line for line in lines if line.startswith("hetflow: worker")][-1:]
    hint = [line for line in lines if line.startswith("hint: ")][-1:]
    trace = "\n" if "Traceback" in stderr else ""
    return TargetError("".join(said) + trace, hint="".join(hint))


def campaign(number: int, seed: int, folder: Path, mapping: str) -> list[str]:
    """Run scripts in a few launches; the faults found on any worker.

    A refusal before the first update is met on all workers, and the next script follows in the
    same launch. A later one ends the launch, and the next script begins another.
    """
    from hetflow.schema import files
    from hetflow.tests import programs
    from hetflow.tests.runtime.conftest import _plan_of

    files.write(folder / "plan.json", _plan_of(MAPPINGS[mapping]))
    launch = [sys.executable, "-m", "hetflow.cli.main", "launch", "--timeout", "30"]
    launch += ["plan.json", __file__, "--scripts", str(number), "--seed", str(seed)]
    faults, first, asked = [], 0, scripts(number, seed)
    while first < number:
        done = programs.run(
            [*launch, "--in", str(folder), "--first", str(first)], timeout=60 + number, cwd=folder
        )
        for worker in range(2):
            for path in folder.glob(f"*-{worker}.pt"):
                at = int(path.name.partition("-")[0])
                fault = judge(asked[at], torch.load(path, weights_only=False))  # our own file
                faults += [f"{mapping}, worker {worker}: {asked[at]}: {fault}"] if fault else []
                first = max(first, at + 1)
                path.unlink()
        if done.returncode:
            is_refused = done.returncode == 2 and judge(asked[first], refusal_in(done.stderr))
            if done.returncode != 2 or is_refused:
                said = is_refused or f"exit code {done.returncode}: {done.stderr}"
                faults.append(f"{mapping}: {asked[first]}: {said}")
            first += 1
    return faults


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in", dest="folder", type=Path)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    if given.folder is not None:  # in a launch
        for at, script in list(enumerate(scripts(given.scripts, given.seed)))[given.first :]:
            end = under_hetflow(script)
            torch.save(end, given.folder / f"{at}-{os.environ['HETFLOW_SLOT']}.pt")
        return
    faults = []
    for mapping in MAPPINGS:
        with tempfile.TemporaryDirectory() as folder:
            faults += campaign(given.scripts, given.seed, Path(folder), mapping)
    said = [*faults, f"{given.scripts} scripts on {len(MAPPINGS)} mappings, {len(faults)} faults"]
    sys.stdout.write("\n".join(said) + "\n")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
