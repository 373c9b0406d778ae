"""What recomputation costs in time and saves in memory: nothing, attention cores, or all.

    python benchmarks/recomputation.py [--quick] [--json PATH]

One stage trains a GPT that keeps its attention weights, one microbatch of each kind in turn, on one
thread. Beside hetflow's three kinds stands ``torch.utils.checkpoint`` around each core, as a person
would write it. Bytes are those that live on after a forward pass; the planner's are those of the
profile's layers. The gradients of all kinds must have the same bits.
"""

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path

import torch
from pipeline_runtime import quartiles
from torch import nn
from torch.utils.checkpoint import checkpoint

from hetflow.profilers.bench import Bench
from hetflow.profilers.layers import graph_of, measure_layers
from hetflow.profilers.operator_counts import tallied
from hetflow.profilers.targets import as_workload
from hetflow.profilers.zoo.models import GPT
from hetflow.runtime.pipeline.cut import cut
from hetflow.runtime.pipeline.stage import StageRunner
from hetflow.runtime.pipeline.trace import layers_of

CHANNELS, HEADS, DEPTH, VOCABULARY, SAMPLES = 256, 8, 4, 512, 2
TOKENS = (256, 512)
KINDS = ("none", "selective", "full")


def core(q, k, v):
    """Scores, softmax and context of causal attention, from its weights."""
    tokens = q.shape[-2]
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v


def attend(attention, by_hand, x):
    """The zoo's attention with a core in plain functions; ``by_hand`` checkpoints it."""
    qkv = attention.project_in(x).unflatten(-1, (3, HEADS, attention.head_channels))
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    made = checkpoint(core, q, k, v, use_reentrant=False) if by_hand else core(q, k, v)
    return attention.project_out(made.transpose(1, 2).flatten(2))


def model_of(tokens, *, by_hand=False):
    """The decoder, of equal values each time."""
    torch.manual_seed(0)
    model = GPT(
        vocabulary=VOCABULARY, max_tokens=tokens, depth=DEPTH, num_heads=HEADS, channels=CHANNELS
    )
    for block in model.blocks:
        block.attention.forward = partial(attend, block.attention, by_hand)
    return model


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class OneStage:
    """A stage of all layers, with one kind of recomputation."""

    def __init__(self, tokens, kind):
        self.model = model_of(tokens)
        layered = layers_of(self.model)
        (part,) = cut(layered, [[layer.id for layer in layered.layers]])
        self.stage = StageRunner(
            part,
            recompute=kind == "full",
            recompute_cores=kind == "selective",
            device=torch.device("cpu"),
        )

    def forward(self, ids, targets):
        """The loss of a microbatch."""
        logits = self.stage.forward(0, {"ids_BT": ids}, ((), ()), None)
        self.stage.keep(0, (loss_of(logits, targets),))

    def backward(self):
        """Its gradients."""
        self.stage.backward(0, None)


class ByHand:
    """The model itself, each core in torch's checkpoint."""

    def __init__(self, tokens):
        self.model = model_of(tokens, by_hand=True)

    def forward(self, ids, targets):
        """The loss of a microbatch."""
        self.loss = loss_of(self.model(ids), targets)

    def backward(self):
        """Its gradients."""
        self.loss.backward()
        del self.loss


def planned_bytes(tokens):
    """What the planner counts for a microbatch in flight, by kind."""

    def batch(size):
        ids = torch.zeros(size, tokens, dtype=torch.int64)
        return ids, ids

    parts = model_of(tokens), batch, lambda model, pair: loss_of(model(pair[0]), pair[1])
    bench = Bench(as_workload(parts, "gpt"), "cpu", "sgd")
    nodes = graph_of(measure_layers(bench, SAMPLES, 1)).nodes
    none = sum(node.stashed_bytes for node in nodes)
    selective = sum((node.core or node).stashed_bytes for node in nodes)
    return {"none": none, "selective": selective}


def measure(tokens, rounds):
    """Seconds and bytes of each kind."""
    variants = {kind: OneStage(tokens, kind) for kind in KINDS}
    variants["checkpoint by hand"] = ByHand(tokens)
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (SAMPLES, tokens + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    kept = {}
    for name, variant in variants.items():
        with tallied() as tally:
            variant.forward(x, y)
            gc.collect()
            kept[name] = tally.live_bytes
        variant.backward()
    expected = [p.grad for p in variants["none"].model.parameters()]
    for name, variant in variants.items():
        found = [p.grad for p in variant.model.parameters()]
        if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
            raise SystemExit(f"gradients of {name} differ")
    cpu = {name: [] for name in variants}
    names = list(variants)
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            variants[name].model.zero_grad(set_to_none=False)
            gc.collect()
            began = time.process_time()
            variants[name].forward(x, y)
            variants[name].backward()
            cpu[name].append(time.process_time() - began)
    planned = planned_bytes(tokens)
    return {
        name: {
            "cpu_seconds": quartiles(cpu[name][2:]),
            "over_none": quartiles(
                [a / b for a, b in zip(cpu[name], cpu["none"], strict=True)][2:]
            ),
            "kept_bytes": kept[name],
            "planned_bytes": planned.get(name),
        }
        for name in names
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the shortest sequences, fewer passes")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for tokens in TOKENS[:1] if arguments.quick else TOKENS:
        results[tokens] = measure(tokens, 5 if arguments.quick else 14)
        for name, row in results[tokens].items():
            low, middle, high = row["over_none"]
            planned = row["planned_bytes"]
            print(
                f"{tokens} tokens, {name}: {row['cpu_seconds'][1] * 1e3:.0f} ms of CPU, "
                f"{middle:.3f} ({low:.3f} to {high:.3f}) of none; keeps "
                f"{row['kept_bytes'] / 2**20:.1f} MiB"
                + ("" if planned is None else f", planned {planned / 2**20:.1f}"),
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
