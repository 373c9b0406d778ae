"""Unmodified scripts from combinations of habits: each equals one process, or is refused.

Usage::

    python -m hetflow.tests.runtime.script_campaign \\
        [--scripts N] [--seed N] [--only N] [--library NAME ...] [--plan NAME ...] [--into FILE]

With ``--into`` each answer is kept as a line of JSON, and what is kept there is not run again. At
the end a table counts, for each library, how scripts have ended.

A script is a choice from each list below, written as text. It runs as one process, and under plans
for two and three unlike workers, for one, and for two that share all states. Then its parameters
and the losses that it logs after backward passes are those of one process. Its workers began the
same exchanges in one order. Or the launch ends with exit code 2 and one line. Each script is
started anew, from a process that has imported the libraries.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetflow.formats.reports.grid import grid
from hetflow.schema import files
from hetflow.tests import programs
from hetflow.tests.runtime import exchanges
from hetflow.tests.runtime.conftest import _plan_of
from hetflow.tests.runtime.sharded_plans import shared

# A plan of one device refuses no loss, because the script's batches stay whole.
PLANS = {
    "two": [(1, 18), (1, 6)],
    "three": [(1, 12), (1, 8), (1, 4)],
    "whole": [(1, 24)],
    "shared": [(1, 18), (1, 6)],  # all states, unlike parts of them
}
CLOSE = {"double": 1e-8, "single": 2e-4, "bfloat16": 5e-2, "scaled": 2e-4}

EACH = 'each = F.cross_entropy(out, y, reduction="none")'
MASK = "mask = (x.flatten(1)[:, 0] > 3).to(out.dtype)"
LOSSES = {
    "mean": "loss = F.cross_entropy(out, y)",
    "smoothed": "loss = F.cross_entropy(out, y, label_smoothing=0.1)",
    "squares": "loss = (out - F.one_hot(y, 3)).square().mean()",
    "by length": 'loss = F.cross_entropy(out, y, reduction="sum") / len(y)',
    "two terms": "loss = F.cross_entropy(out, y) + 0.5 * out.square().mean()",
    "penalised": (
        "loss = F.cross_entropy(out, y) + 0.01 * sum(p.square().sum() for p in model.parameters())"
    ),
    "focal": f"{EACH}\nloss = ((1 - (-each).exp()) ** 2 * each).mean()",
    "divergence": (
        'loss = F.kl_div(out.log_softmax(1), F.one_hot(y, 3) * 0.7 + 0.1, reduction="batchmean")'
    ),
    "sum": 'loss = F.cross_entropy(out, y, reduction="sum")',
    "sum / 16": 'loss = F.cross_entropy(out, y, reduction="sum") / 16',
    "variational": (
        "code, target = torch.sigmoid(out), F.one_hot(y, 3).to(out.dtype)\n"
        'loss = F.binary_cross_entropy(code, target, reduction="sum") + 0.5 * out.square().sum()'
    ),
    "root": "loss = (out - F.one_hot(y, 3)).square().mean().sqrt()",
    "log of mean": "loss = F.cross_entropy(out, y).log()",
    "contrast": (
        "unit = F.normalize(out)\n"
        "loss = F.cross_entropy(unit @ unit.T / 0.2, torch.arange(len(out)))"
    ),
    "hardest": f"{EACH}\nloss = each.topk(2).values.mean()",
    "harder half": f"{EACH}\nloss = each.topk((len(each) + 1) // 2).values.mean()",
    "masked": f"{EACH}\n{MASK}\nloss = (each * mask).sum() / mask.sum().clamp(min=1)",
    "mostly full mask": (
        f"{EACH}\n{MASK.replace('3', '2')}\nloss = (each * mask).sum() / mask.sum().clamp(min=1)"
    ),
    "selected": f"{EACH}\nloss = each[y != 1].mean()",
    "masked by item": f"{EACH}\n{MASK}\nloss = (each * mask).sum() / max(mask.sum().item(), 1)",
    "ignoring": "loss = F.cross_entropy(out, y.where(x.flatten(1)[:, 0] > 3, -100))",
    "class weights": "loss = F.cross_entropy(out, y, weight=torch.tensor([1.0, 2, 3]).to(out))",
    "batch weights": f"{EACH}\nloss = (each * each.detach() / each.detach().sum()).sum()",
    "spread": "loss = F.cross_entropy(out, y) + (1 - out.std(0)).relu().mean()",
    "centred": "loss = ((out - out.mean(0)) - F.one_hot(y, 3)).square().mean()",
}
RIGHT = {
    "mean", "smoothed", "squares", "by length", "two terms", "penalised", "focal", "divergence",
    "masked", "mostly full mask", "ignoring", "class weights",
}  # fmt: skip
# Trials of Lightning's steps look at them from outside.
REFUSED_BY_STEPS = {"masked", "mostly full mask", "ignoring", "class weights"}
STEPS = {"lightning", "by hand"}
HABITS = {
    "loop": ("plain", "clipped", "accumulated", "closure", "twice", "endless", "stopped"),
    "optimizer": ("SGD", "Adam", "AdamW", "RMSprop", "groups", "LBFGS"),
    "scheduler": ("none", "epochs", "steps", "plateau"),
    "precision": ("double", "double", "single", "bfloat16", "scaled"),
    "data": ("even", "short", "one short sample", "dropped", "dicts", "workers"),
    "model": ("plain", "norm", "convolution", "returns loss"),
    "logging": ("after", "gathered", "evaluated"),
    "wrapper": ("default", "unused", "static", "view"),
}
LIBRARIES = ("ddp", "accelerate", "trainer", "lightning", "by hand", "fabric")
OPTIMIZERS = {
    "SGD": "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)",
    "Adam": "torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)",
    "AdamW": "torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)",
    "RMSprop": "torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-2)",
    "groups": (
        'torch.optim.SGD([{"params": [p for p in model.parameters() if p.dim() > 1], '
        '"weight_decay": 0.1}, '
        '{"params": [p for p in model.parameters() if p.dim() < 2]}], lr=0.05)'
    ),
    "LBFGS": "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)",
}
SCHEDULERS = {
    "none": "",
    "epochs": "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)",
    "steps": "scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)",
    "plateau": (
        "scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, "
        "threshold=0.02)"
    ),
}
SIZES = {"short": 91, "one short sample": 73, "dropped": 91}


@dataclass(frozen=True)
class Script:
    """One choice from each list."""

    library: str
    loss: str
    loop: str
    optimizer: str
    scheduler: str
    precision: str
    data: str
    model: str
    logging: str
    wrapper: str


def scripts(number: int, seed: int, libraries: Sequence[str] = LIBRARIES) -> list[Script]:
    """So many choices for each library, which do not depend on other libraries.

    Every loss comes about equally often.
    """
    rows = []
    for library in libraries:
        draw = random.Random(f"{seed} {library}")  # noqa: S311
        losses = itertools.cycle(draw.sample(list(LOSSES), len(LOSSES)))
        habits = ({k: draw.choice(values) for k, values in HABITS.items()} for _ in range(number))
        rows.append([_fitted(library, next(losses), drawn) for drawn in habits])
    return [script for column in zip(*rows, strict=True) for script in column]


def _fitted(library: str, loss: str, habits: dict[str, str]) -> Script:
    """A script of habits of which one may ask for another: alone it runs."""
    if habits["optimizer"] == "LBFGS":  # it needs a closure, which Trainer has not
        # Its steps make rounding larger, and are compared in 64 bits.
        own = {"loop": "closure", "precision": "double"}
        habits |= {"optimizer": "SGD"} if library == "trainer" else own
    if habits["loop"] == "accumulated" and habits["wrapper"] == "static":
        habits["wrapper"] = "default"  # torch knows no static graph within no_sync
    if habits["data"] == "one short sample" and (habits["model"] == "norm" or loss == "hardest"):
        habits["data"] = "short"  # one value has no variance, nor two hardest ones
    return Script(library, loss, **habits)


def is_right(script: Script) -> bool:
    """Whether it must train, and may not be refused."""
    if script.loss not in RIGHT or script.loss in REFUSED_BY_STEPS and script.library in STEPS:
        return False
    return script.library != "fabric" or script.data != "one short sample"


HEAD = """\
import json
import os
import signal
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

ANSWER, SAVED = sys.argv[1], sys.argv[1] + ".pt"
torch.set_default_dtype(torch.{kind})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {layers}

    def forward(self, x, y=None):
        out = self.layers(x)
        if y is None:
            return out
        model = self
{inner}
        return {{"loss": loss, "logits": out}}


class Rows(Dataset):
    def __init__(self, number):
        drawn = torch.Generator().manual_seed(0)
        self.x = 3 + torch.randn(number, {shape}, generator=drawn)
        self.y = torch.randint(3, (number,), generator=drawn)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {row}


def save(model, **others):
    parameters = {{k: v.double().flatten().tolist() for k, v in model.state_dict().items()}}
    with open(ANSWER, "w") as stream:
        json.dump({{"parameters": parameters, **others}}, stream)


"""
LAYERS = {
    "plain": "nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))",
    "norm": (
        "nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), "
        "nn.Linear(12, 3))"
    ),
    "convolution": (
        "nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Tanh(), "
        "nn.Flatten(), nn.Linear(16, 3))"
    ),
}
LAYERS["returns loss"] = LAYERS["plain"]


def indented(text: str, number: int) -> str:
    return "\n".join(" " * number + line for line in text.splitlines())


def text_of(script: Script) -> str:
    """The script's source."""
    is_trainer, text = script.library == "trainer", TEXTS.get(script.library, _loop)
    head = HEAD.format(
        kind="float64" if script.precision == "double" else "float32",
        layers=LAYERS[script.model],
        inner=indented(LOSSES[script.loss], 8),
        shape="2, 4, 4" if script.model == "convolution" else "6",
        row='{"x": self.x[i], "y": self.y[i]}'
        if script.data == "dicts" or is_trainer
        else "self.x[i], self.y[i]",
    )
    return head + text(script)


def _loop(script: Script) -> str:
    is_ddp, is_fabric = script.library == "ddp", script.library == "fabric"
    number = SIZES.get(script.data, 96)
    options = "".join(
        {"dropped": ", drop_last=True", "workers": ", num_workers=2"}.get(script.data, "")
    )
    lines = ["torch.manual_seed(1)", f"rows = Rows({number})", "model = Net()"]
    if is_ddp:
        wrapped = {
            "unused": ", find_unused_parameters=True",
            "static": ", static_graph=True",
            "view": ", gradient_as_bucket_view=True",
        }.get(script.wrapper, "")
        lines = [
            "import torch.distributed as dist",
            "from torch.nn.parallel import DistributedDataParallel as DDP",
            "from torch.utils.data.distributed import DistributedSampler",
            "",
            'rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])',
            'local_rank = int(os.environ["LOCAL_RANK"])',
            "if torch.cuda.is_available():",
            "    torch.cuda.set_device(local_rank)",
            'dist.init_process_group("gloo")',
            *lines,
            "sampler = DistributedSampler(rows, seed=2)",
            f"loader = DataLoader(rows, batch_size=24 // world_size, sampler=sampler{options})",
            "if world_size > 1:",
            "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)",
            "dist.barrier()",
            f"model = DDP(model{wrapped})",
        ]
    else:
        head = [
            "from accelerate import Accelerator",
            "",
            f"accelerator = Accelerator({_accelerator(script)})",
        ]
        if is_fabric:
            precision = ', precision="bf16-mixed"' if script.precision == "bfloat16" else ""
            head = [
                "from lightning.fabric import Fabric",
                "",
                f'fabric = Fabric(accelerator="cpu"{precision})',
                "fabric.launch()",
            ]
        lines = [
            *head,
            *lines,
            f"loader = DataLoader(rows, batch_size=24, shuffle=True{options})",
        ]
    lines.append(f"optimizer = {OPTIMIZERS[script.optimizer]}")
    lines += [SCHEDULERS[script.scheduler]] if script.scheduler != "none" else []
    if is_fabric:
        lines += ["model, optimizer = fabric.setup(model, optimizer)"]
        lines += ["loader = fabric.setup_dataloaders(loader)"]
    elif not is_ddp:
        lines.append("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)")
        if script.scheduler in ("steps", "epochs"):
            lines.append("scheduler = accelerator.prepare(scheduler)")
    if is_ddp and script.precision == "scaled":
        lines.append('scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)')
    lines.append("bare = model.module if hasattr(model, 'module') else model")
    lines.append("logs, start = [], 0")
    if script.loop == "stopped":
        place = {"ddp": "None", "fabric": "fabric.device"}.get(script.library, "accelerator.device")
        lines += [
            "is_resumed = os.path.exists(SAVED)",
            "if is_resumed:",
            f"    saved = torch.load(SAVED, map_location={place})",
            '    bare.load_state_dict(saved["model"])',
            '    optimizer.load_state_dict(saved["optimizer"])',
            '    start = saved["epoch"]',
        ]
    lines += ["for epoch in range(start, 2):", "    model.train()", "    total, count = 0.0, 0"]
    if is_ddp:
        lines.append("    sampler.set_epoch(epoch)")
    elif script.loop == "stopped":
        lines.append("    torch.manual_seed(10 + epoch)")
    if script.loop == "endless":
        lines += ["    batches = iter(loader)", "    for number in range(len(loader)):"]
        lines.append("        batch = next(batches)")
    else:
        lines.append("    for number, batch in enumerate(loader):")
    lines.append("        " + _taken(script))
    lines += indented("\n".join(_step(script)), 8).splitlines()
    lines += ["        total, count = total + loss.item(), count + 1"]
    lines += indented("\n".join(_logged(script)), 8).splitlines()
    if script.scheduler == "steps":
        lines.append("        scheduler.step()")
    if script.scheduler == "epochs":
        lines.append("    scheduler.step()")
    if script.scheduler == "plateau":
        lines.append("    scheduler.step(total / count)")
    if script.logging == "evaluated":
        lines += EVALUATION
    is_main, meet, end = {
        "ddp": ("rank == 0", "dist.barrier()", "dist.destroy_process_group()"),
        "accelerate": (
            "accelerator.is_main_process",
            "accelerator.wait_for_everyone()",
            "accelerator.end_training()",
        ),
        "fabric": ("fabric.is_global_zero", "fabric.barrier()", "fabric.barrier()"),
    }[script.library]
    if script.loop == "stopped":
        lines += [
            f"    if {is_main}:",
            '        torch.save({"model": bare.state_dict(), "optimizer": optimizer.state_dict(),',
            '                    "epoch": epoch + 1}, SAVED)',
            f"    {meet}",
            "    if not is_resumed and epoch == 0:",
            "        os.kill(os.getpid(), signal.SIGTERM)",
            "        signal.pause()",
        ]
    lines += [f"if {is_main}:", "    save(bare, logs=logs)", end]
    return "\n".join(lines) + "\n"


def _accelerator(script: Script) -> str:
    found = ["cpu=True"]
    if script.loop == "accumulated":
        found.append("gradient_accumulation_steps=2")
    if script.precision == "bfloat16":
        found.append('mixed_precision="bf16"')
    return ", ".join(found)


def _taken(script: Script) -> str:
    return 'x, y = batch["x"], batch["y"]' if script.data == "dicts" else "x, y = batch"


def _forward(script: Script) -> list[str]:
    if script.model == "returns loss":
        inner = ['loss = model(x, y)["loss"]']
    else:
        inner = ["out = model(x)", *LOSSES[script.loss].splitlines()]
    if script.library == "ddp" and script.precision == "bfloat16":
        inner = ['with torch.autocast("cpu", torch.bfloat16):', *(f"    {line}" for line in inner)]
    return inner


def _step(script: Script) -> list[str]:
    is_ddp = script.library == "ddp"
    backward, clip, waits = {
        "ddp": (
            "loss.backward()",
            "nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
            "nullcontext() if is_last else model.no_sync()",
        ),
        "accelerate": (
            "accelerator.backward(loss)",
            "accelerator.clip_grad_norm_(model.parameters(), 0.1)",
            "",
        ),
        "fabric": (
            "fabric.backward(loss)",
            "fabric.clip_gradients(model, optimizer, max_norm=0.1)",
            "fabric.no_backward_sync(model, enabled=not is_last)",
        ),
        "by hand": (
            "self.manual_backward(loss)",
            'self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")',
            "nullcontext()",
        ),
    }[script.library]
    step = ["optimizer.step()"]
    if is_ddp and script.precision == "scaled" and script.loop != "closure":
        backward, step = (
            "scaler.scale(loss).backward()",
            ["scaler.step(optimizer)", "scaler.update()"],
        )
    forward = _forward(script)
    if script.loop == "clipped":
        is_scaled = is_ddp and script.precision == "scaled"
        step = [*(["scaler.unscale_(optimizer)"] if is_scaled else []), clip, *step]
    if script.loop == "closure":
        kind = "nonlocal" if script.library == "by hand" else "global"
        inner = [f"{kind} loss", "optimizer.zero_grad()", *forward, backward, "return loss"]
        return ["def closure():", *(f"    {line}" for line in inner), "optimizer.step(closure)"]
    if script.loop == "twice":
        again = backward.replace("(loss)", "(other)").replace("loss.", "other.")
        other = ["other = 0.1 * model(x).square().mean()", again]
        return ["optimizer.zero_grad()", *forward, backward, *other, *step]
    if script.loop == "accumulated":
        if script.library == "accelerate":
            inner = [*forward, backward, *step, "optimizer.zero_grad()"]
            return ["with accelerator.accumulate(model):", *(f"    {line}" for line in inner)]
        return [
            "from contextlib import nullcontext",
            "is_last = number % 2 == 1 or number + 1 == len(loader)",
            f"with {waits}:",
            *(f"    {line}" for line in forward),
            "    loss = loss / 2",
            f"    {backward}",
            "if is_last:",
            *(f"    {line}" for line in step),
            "    optimizer.zero_grad()",
        ]
    return ["optimizer.zero_grad()", *forward, backward, *step]


def _logged(script: Script) -> list[str]:
    if script.logging != "gathered":
        return ["logs.append(loss.item())"]
    if script.library == "fabric":
        return ["logs.append(fabric.all_reduce(loss.detach().clone()).item())"]
    if script.library == "ddp":
        return [
            "shown = loss.detach().clone()",
            "dist.all_reduce(shown)",
            "logs.append(shown.item() / world_size)",
        ]
    return ["logs.append(accelerator.gather(loss.detach()).mean().item())"]


EVALUATION = [
    "    model.eval()",
    "    with torch.no_grad():",
    "        logs.append(bare(rows.x).square().mean().item())",
]


def _trainer(script: Script) -> str:
    collected = "None" if script.model == "returns loss" else "collate"
    arguments = {
        "per_device_train_batch_size": "24",
        "num_train_epochs": "2",
        "learning_rate": "0.01",
        "save_strategy": '"epoch"' if script.loop == "stopped" else '"no"',
        "report_to": "[]",
        "disable_tqdm": "True",
        "use_cpu": "True",
        "logging_steps": "1",
        "gradient_accumulation_steps": "2" if script.loop == "accumulated" else "1",
        "max_grad_norm": "0.1" if script.loop == "clipped" else "0.0",
        "dataloader_drop_last": str(script.data == "dropped"),
        "lr_scheduler_type": '"constant"' if script.scheduler == "none" else '"linear"',
        "remove_unused_columns": "False",
        "bf16": str(script.precision == "bfloat16"),
    }
    given = "\n".join(f"    {name}={value}," for name, value in arguments.items())
    return f"""\
from transformers import Trainer, TrainingArguments, set_seed

set_seed(1)
rows = Rows({SIZES.get(script.data, 96)})
model = Net()


def collate(batch):
    return {{k: torch.stack([row[k] for row in batch]) for k in ("x", "y")}}


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x, y = inputs["x"], inputs["y"]
        out = model(x)
{indented(LOSSES[script.loss], 8)}
        return (loss, {{"logits": out}}) if return_outputs else loss


arguments = TrainingArguments(
    ANSWER + "-out",
{given}
)
kind = {"Trainer" if script.model == "returns loss" else "Own"}
optimizer = {OPTIMIZERS[script.optimizer]}
trainer = kind(
    model, arguments, train_dataset=rows, data_collator={collected}, optimizers=(optimizer, None)
)
trainer.train()
if trainer.is_world_process_zero():
    logs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    save(model, logs=logs if {script.precision == "double"} else [])
"""


def _lightning(script: Script) -> str:
    by_hand = script.library == "by hand"
    options = {"dropped": ", drop_last=True", "workers": ", num_workers=2"}.get(script.data, "")
    shown = ", on_step=True, on_epoch=True, sync_dist=True" if script.logging == "gathered" else ""
    name = "train_loss_epoch" if script.logging == "gathered" else "train_loss"
    if script.scheduler == "plateau" and script.logging != "gathered":
        shown = ", on_step=False, on_epoch=True"
    step = ["model = self.net", _taken(script)]
    if by_hand:
        start = ["loader, number = self.trainer.train_dataloader, batch_idx", "loss = None"]
        step += [*start, "optimizer = self.optimizers()", *_step(script)]
        if script.scheduler == "steps":
            step.append("self.lr_schedulers().step()")
    else:
        step += _forward(script)
    step += [f'self.log("train_loss", loss{shown})']
    if not by_hand:
        out = "x.detach()" if script.model == "returns loss" else "out.detach()"
        step.append(
            f'return {{"loss": loss, "out": {out}}}' if script.loop == "twice" else "return loss"
        )
    methods = [("training_step(self, batch, batch_idx)", step)]
    if script.logging == "evaluated":
        methods.append(
            (
                "validation_step(self, batch, batch_idx)",
                [_taken(script), 'self.log("val_size", self.net(x).square().mean())'],
            )
        )
    ends = []
    if by_hand and script.scheduler == "epochs":
        ends.append("self.lr_schedulers().step()")
    if by_hand and script.scheduler == "plateau":
        ends.append(f'self.lr_schedulers().step(self.trainer.callback_metrics["{name}"])')
    ends.append("seen = self.trainer.callback_metrics")
    ends.append("self.logs += [float(v) for _, v in sorted(seen.items())]")
    methods.append(("on_train_epoch_end(self)", ends))
    if script.scheduler != "plateau" or script.logging == "gathered":
        methods.append(
            (
                "on_train_batch_end(self, outputs, batch, batch_idx)",
                [
                    "seen = self.trainer.callback_metrics",
                    'wanted = ("train_loss", "train_loss_step")',
                    "self.logs += [float(v) for k, v in seen.items() if k in wanted]",
                ],
            )
        )
    if script.loop == "closure" and not by_hand:
        methods.append(
            (
                "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None)",
                ["optimizer.step(closure=optimizer_closure)"],
            )
        )
    made = ["model = self.net", f"optimizer = {OPTIMIZERS[script.optimizer]}"]
    given = "optimizer"
    if script.scheduler != "none":
        made.append(SCHEDULERS[script.scheduler])
        interval = "step" if script.scheduler == "steps" else "epoch"
        monitor = f', "monitor": "{name}"' if script.scheduler == "plateau" else ""
        given = (
            '{"optimizer": optimizer, "lr_scheduler": '
            f'{{"scheduler": scheduler, "interval": "{interval}"{monitor}}}}}'
        )
    methods.append(("configure_optimizers(self)", [*made, f"return {given}"]))
    body = "\n\n".join(
        f"    def {head}:\n" + indented("\n".join(lines), 8) for head, lines in methods
    )
    settings = {
        "logger": "False",
        "enable_progress_bar": "False",
        "enable_model_summary": "False",
        "accelerator": '"cpu"',
    }
    if script.precision == "bfloat16":
        settings["precision"] = '"bf16-mixed"'
    if script.loop == "clipped" and not by_hand:
        settings["gradient_clip_val"] = "0.1"
    if script.loop == "accumulated" and not by_hand:
        settings["accumulate_grad_batches"] = "2"
    if script.loop == "endless":
        settings["max_steps"] = "6"
    if script.loop != "stopped":
        settings["enable_checkpointing"] = "False"
    if script.wrapper == "unused":
        settings["strategy"] = '"auto"'
    given = "".join(f", {name}={value}" for name, value in settings.items())
    fit = [f"trainer = L.Trainer(max_epochs=2{given})", "trainer.fit(lit, loader, held)"]
    if script.loop == "stopped":
        fit = [
            f"trainer = L.Trainer(max_epochs=1, default_root_dir=ANSWER + '-out'{given})",
            "trainer.fit(lit, loader, held)",
            "saved = trainer.checkpoint_callback.best_model_path",
            "lit = Lit()",
            "torch.manual_seed(5)",
            f"trainer = L.Trainer(max_epochs=2, enable_checkpointing=False{given})",
            "trainer.fit(lit, loader, held, ckpt_path=saved)",
        ]
    held = "loader_of(Rows(51), 24)" if script.logging == "evaluated" else "None"
    return f"""\
import lightning as L


class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = {not by_hand}
        self.net = Net()
        self.logs = []

{body}


def loader_of(rows, size, **options):
    return DataLoader(rows, batch_size=size, **options)


L.seed_everything(1)
loader = loader_of(Rows({SIZES.get(script.data, 96)}), 24, shuffle=True{options})
held = {held}
lit = Lit()
""" + "\n".join([*fit, "if trainer.is_global_zero:", "    save(lit.net, logs=lit.logs)", ""])


TEXTS = {"trainer": _trainer, "lightning": _lightning, "by hand": _lightning}


def _off(one: dict, many: dict) -> float:
    """The largest difference, relative to the largest number of each tensor."""
    worst = 0.0
    pairs = [(one["parameters"][name], many["parameters"][name]) for name in one["parameters"]]
    for expected, found in [*pairs, (one["logs"], many["logs"])]:
        if len(expected) != len(found):
            return math.inf
        largest = max((abs(value) for value in expected), default=0.0)
        gaps = [abs(a - b) for a, b in zip(expected, found, strict=True)]
        if any(map(math.isnan, gaps)):  # both may be no numbers
            return 0.0 if str(expected) == str(found) else math.inf
        worst = max(worst, max(gaps, default=0.0) / (largest or 1.0))
    return worst


def judge(
    script: Script, folder: Path, plans: Sequence[str] = tuple(PLANS)
) -> tuple[str, list[str], list[str]]:
    """How a script ends: (a word, its faults, how it was refused)."""
    (folder / "train.py").write_text(text_of(script))
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **variables, "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    libraries = programs.LIBRARIES if script.library != "ddp" else ()
    env[programs.VARIABLE] = programs.preloaded(*libraries)
    if script.library != "ddp":
        env = {k: v for k, v in env.items() if k not in (*variables, "MASTER_PORT")}
    resumes = script.loop == "stopped" and script.library in ("ddp", "accelerate", "fabric")
    times = 2 if resumes else 1

    def run(*command: str):
        for _ in range(times):
            done = programs.run(command, timeout=120, cwd=folder, env=env)
            if done.returncode == 2:
                break
        return done

    done = run(sys.executable, "train.py", "one")
    if done.returncode:
        return "fails alone", [done.stderr[-600:]], []
    one, ends, faults = json.loads((folder / "one").read_text()), [], []
    for name in plans:
        for noted in folder.glob("exchanges.*"):
            noted.unlink()
        plan = shared(_plan_of(PLANS[name]), "all" if name == "shared" else None, (3, 1))
        files.write(folder / "plan.json", plan, force=True)
        launch = [sys.executable, "-m", "hetflow.cli.main", "launch", "--timeout", "30"]
        done = run(*launch, "plan.json", exchanges.__file__, "train.py", name)
        if done.returncode == 2 and "Traceback" not in done.stderr and "hint: " in done.stderr:
            said = [line for line in done.stderr.splitlines() if line.startswith("hetflow: ")]
            ends.append("refused: " + (said[-1] if said else done.stderr[-300:]))
            if name == "whole" or (is_right(script) and name != "shared"):
                faults.append(f"{name}: refused, though it is right: {ends[-1]}")
        elif done.returncode:
            faults.append(f"{name}: exit code {done.returncode}: {done.stderr[-1500:]}")
        else:
            off = _off(one, json.loads((folder / name).read_text()))
            ends.append("equal")
            if not off <= CLOSE[script.precision]:
                faults.append(f"{name}: other parameters or losses ({off:.1e} off)")
            if where := exchanges.unlike(folder):
                faults.append(f"{name}: {where}")
    refusals = [end for end in ends if end != "equal"]
    return "fault" if faults else "refused" if refusals else "equal", faults, refusals


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", type=int, default=34, help="of each library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="print and run this one of each library")
    parser.add_argument("--library", choices=LIBRARIES, nargs="*", default=LIBRARIES)
    parser.add_argument("--plan", choices=PLANS, nargs="*", default=tuple(PLANS))
    parser.add_argument("--into", type=Path, help="keep answers here, and go on from them")
    given = parser.parse_args()
    known: list[dict[str, Any]] = []
    if given.into is not None and given.into.exists():
        known = [json.loads(line) for line in given.into.read_text().splitlines()]
    done = {(entry["seed"], *entry["script"].values()) for entry in known}
    for at, script in enumerate(scripts(given.scripts, given.seed, given.library)):
        number = at // len(given.library)
        if given.only not in (None, number) or (given.seed, *asdict(script).values()) in done:
            continue
        if given.only is not None:
            sys.stdout.write(text_of(script))
        with tempfile.TemporaryDirectory() as folder:
            end, faults, said = judge(script, Path(folder), given.plan)
        entry = {"seed": given.seed, "number": number, "script": asdict(script)}
        known.append({**entry, "end": end, "faults": faults, "said": said})
        if given.into is not None:
            with given.into.open("a") as stream:
                stream.write(json.dumps(known[-1]) + "\n")
        for fault in faults:
            sys.stdout.write(f"{number} {end}: {list(asdict(script).values())}: {fault}\n")
            sys.stdout.flush()
    counts = Counter((entry["script"]["library"], entry["end"]) for entry in known)
    ends = ("equal", "refused", "fault", "fails alone")
    rows = [[name, *(counts[name, end] for end in ends)] for name in LIBRARIES]
    sys.stdout.write(grid(["kind", *ends], rows) + "\n")
    sys.exit(any(entry["faults"] for entry in known))


if __name__ == "__main__":
    main()
