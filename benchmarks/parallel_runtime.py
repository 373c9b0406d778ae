"""Training under plans of three dimensions: hetflow's runtime against torch's pieces.

    python benchmarks/parallel_runtime.py [--quick] [--json PATH] [--only CASE,CASE] [--sizes SIZE]
                                          [--steps N]

The pieces are composed by hand as torchtitan does it: DTensor's ``parallelize_module``,
``PipelineStage`` with Schedule1F1B or ScheduleInterleaved1F1B, and DistributedDataParallel or
``fully_shard``. Both train the same decoder from the same values on the same microbatches, in the
same gloo processes, one step of each in turn: passes, all sums, and the update. The clocks stop
when every worker is done. Beside step times stand the CPU seconds of all workers, which a busy
machine changes less. A step includes that the graphs of its losses are freed. Every step's losses
must agree.
"""

import argparse
import gc
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline_runtime import quartiles, run_world

from hetflow.schema.plan import Prediction, Stage
from hetflow.tests.plan_parts import parallel_plan_of

MICROBATCHES, MICROBATCH_SIZE, BLOCKS, WARM_UP = 8, 2, 4, 5
MOST_DIFFERENCE = 1e-3  # of losses, relative; float32, after all steps


@dataclass(frozen=True)
class Size:
    """A decoder: its width and what it reads."""

    channels: int
    hidden: int
    tokens: int
    vocabulary: int
    head_channels: int = 32


@dataclass(frozen=True)
class Case:
    """Degrees p, t and d, and the ways in which torch's pieces are composed.

    With a ``vocabulary`` of its own, hetflow's logits stay cut.
    """

    pipeline: int
    tensor: int
    data: int
    chunks: int = 1
    sequence: bool = False
    vocabulary: int | None = None
    torch_ways: tuple[str, ...] = ("torch",)

    @property
    def num_workers(self):
        """Number of workers."""
        return self.pipeline * self.tensor * self.data


SIZES = {"small": Size(128, 352, 32, 512), "large": Size(256, 704, 64, 512)}
CASES = {
    "t2": Case(1, 2, 1),
    "t2-sequences": Case(1, 2, 1, sequence=True),
    "t2-vocabulary": Case(1, 2, 1, vocabulary=8192, torch_ways=("torch", "loss_parallel")),
    "p2": Case(2, 1, 1),
    "p2-v2": Case(2, 1, 1, chunks=2),
    "d2": Case(1, 1, 2, torch_ways=("DDP", "fully_shard")),
    "p2-t2": Case(2, 2, 1),
    "p2-d2": Case(2, 1, 2, torch_ways=("DDP",)),
    "t2-d2": Case(1, 2, 2, torch_ways=("fully_shard",)),
}
LARGE = ("t2", "p2", "d2", "p2-t2")  # cases that the large decoder trains too


def size_of(case, name):
    """The decoder of a case."""
    size = SIZES[name]
    return replace(size, vocabulary=case.vocabulary) if case.vocabulary else size


def decoder(size):
    """A Llama-like decoder of equal values on every worker."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(self, name, nn.Linear(size.channels, size.channels, bias=False))

        def forward(self, x):
            q, k, v = (
                project(x).unflatten(-1, (-1, size.head_channels)).transpose(1, 2)
                for project in (self.q_proj, self.k_proj, self.v_proj)
            )
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o_proj(mixed.transpose(1, 2).flatten(2))

    class FeedForward(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj = nn.Linear(size.channels, size.hidden, bias=False)
            self.up_proj = nn.Linear(size.channels, size.hidden, bias=False)
            self.down_proj = nn.Linear(size.hidden, size.channels, bias=False)

        def forward(self, x):
            return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm = nn.RMSNorm(size.channels)
            self.self_attn = Attention()
            self.post_attention_layernorm = nn.RMSNorm(size.channels)
            self.mlp = FeedForward()

        def forward(self, x):
            x = x + self.self_attn(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = nn.Embedding(size.vocabulary, size.channels)
            self.layers = nn.ModuleList([Block() for _ in range(BLOCKS)])
            self.norm = nn.RMSNorm(size.channels)
            self.lm_head = nn.Linear(size.channels, size.vocabulary, bias=False)

        def forward(self, x):
            if self.embed_tokens is not None:
                x = self.embed_tokens(x)
            for layer in self.layers:
                x = layer(x)
            return x if self.lm_head is None else self.lm_head(self.norm(x))

        def cut(self, stage, num_stages):
            """Keep one stage's modules only."""
            length = BLOCKS // num_stages
            self.layers = self.layers[stage * length : (stage + 1) * length]
            if stage:
                self.embed_tokens = None
            if stage < num_stages - 1:
                self.norm = self.lm_head = None
            return self

    torch.manual_seed(0)
    return Decoder()


def optimizer_of(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss_of(logits, targets):
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plan_of(case, size):
    """The plan of a case: equal stages, equal replicas."""
    from hetflow.runtime.pipeline.trace import layers_of
    from hetflow.schema.plan import Proof, ReplicaGroup

    num_stages = case.pipeline * case.chunks
    layers = [[] for _ in range(num_stages)]
    place = 0
    for layer in layers_of(decoder(size)).layers:
        head, _, rest = layer.id.partition(".")
        if head == "layers":
            place = int(rest.partition(".")[0]) * num_stages // BLOCKS
        layers[place].append(layer.id)
    batch = MICROBATCHES * MICROBATCH_SIZE * case.data
    replicas = ReplicaGroup(
        device_type="cpu", tensor_parallel_size=case.tensor, num_replicas=case.data, samples=batch,
        virtual_nodes=MICROBATCHES, virtual_node_batch_size=MICROBATCH_SIZE,
    )  # fmt: skip
    return parallel_plan_of(
        model="decoder", global_batch_size=batch, microbatch_size=MICROBATCH_SIZE,
        num_microbatches=MICROBATCHES, num_model_chunks=case.chunks,
        schedule="1f1b" if case.chunks == 1 else "interleaved",
        sequence_parallel=case.sequence or None,
        stages=tuple(
            Stage(layers=tuple(names), recompute="none", replicas=(replicas,))
            for names in layers
        ),
        predicted=Prediction(step_seconds=1, samples_per_second=1),
        proof=Proof(
            termination="feasible", objective=1, lower_bound=None, gap=None, method="stated",
            space="this plan",
        ),
    )  # fmt: skip


def share_layers(part, mesh, *, sequence, cut_logits):
    """Tensor parallelism of a stage as torchtitan does it: one f for q, k and v together."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()

    def whole_input():
        return PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))

    for layer in part.layers:
        styles = {
            "self_attn": whole_input(),
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            "mlp": whole_input(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            norms = ("input_layernorm", "post_attention_layernorm")
            styles |= {name: SequenceParallel() for name in norms}
        parallelize_module(layer, mesh, styles)
    ends = {}
    if part.embed_tokens is not None:
        ends["embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if part.lm_head is not None:
        ends["lm_head"] = ColwiseParallel(
            input_layouts=between,
            output_layouts=Shard(-1) if cut_logits else Replicate(),
            use_local_output=not cut_logits,
        )
        if sequence:
            ends["norm"] = SequenceParallel()
    parallelize_module(part, mesh, ends)


def replicated(part, way, mesh):
    """A stage whose gradients are summed over its replicas."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if way == "DDP":
        return DistributedDataParallel(
            part, process_group=mesh.get_group(), gradient_as_bucket_view=True
        )
    if way == "fully_shard":
        # As little exchange as it can do: weights are gathered once a step.
        for layer in part.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(part, mesh=mesh, reshard_after_forward=False)
        for module in (*part.layers, part):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    return part


class Torch:
    """A worker of torch's pieces; ``step`` leaves gradients' sums and updates its parameters."""

    def __init__(self, case, size, way, mesh):
        from torch import device
        from torch.distributed.pipelining import (
            PipelineStage,
            Schedule1F1B,
            ScheduleInterleaved1F1B,
        )

        place, self.lane = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        self.is_first, self.is_last = place == 0, place == case.pipeline - 1
        num_stages = case.pipeline * case.chunks
        numbers = range(place, num_stages, case.pipeline)
        self.parts = [decoder(size).cut(number, num_stages) for number in numbers]
        if case.tensor > 1:
            for part in self.parts:
                share_layers(
                    part,
                    mesh["tp"],
                    sequence=case.sequence,
                    cut_logits=way == "loss_parallel",
                )
        if case.data > 1:
            self.parts = [replicated(part, way, mesh["dp"]) for part in self.parts]
        self.way = way
        self.optimizers = [optimizer_of(part) for part in self.parts]
        self.schedule = None
        if case.pipeline > 1:
            stages = [
                PipelineStage(part, n, num_stages, device("cpu"), group=mesh["pp"].get_group())
                for n, part in zip(numbers, self.parts, strict=True)
            ]
            if case.chunks > 1:
                made = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of)
            else:
                made = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss_of)
            self.schedule = made

    def step(self, x, y):
        """One step over a global batch; the mean of this worker's losses, None without any."""
        length = MICROBATCHES * MICROBATCH_SIZE
        own = slice(self.lane * length, (self.lane + 1) * length)
        losses = self.pipeline(x[own], y[own]) if self.schedule else self.loop(x[own], y[own])
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def pipeline(self, x, y):
        """The losses of a step that a schedule runs."""
        last = {"target": y, "losses": []} if self.is_last else {}
        self.schedule.step(*([x] if self.is_first else []), return_outputs=False, **last)
        return last.get("losses", [])

    def loop(self, x, y):
        """The losses of a step without stages."""
        from torch.distributed.tensor.parallel import loss_parallel

        losses, (part,) = [], self.parts
        for number in range(MICROBATCHES):
            rows = slice(number * MICROBATCH_SIZE, (number + 1) * MICROBATCH_SIZE)
            self.sums_now(number == MICROBATCHES - 1)
            with loss_parallel() if self.way == "loss_parallel" else nullcontext():
                loss = loss_of(part(x[rows]), y[rows])
                (loss / MICROBATCHES).backward()
            losses.append(loss.to_local() if self.way == "loss_parallel" else loss)
        return losses

    def sums_now(self, last):
        """Sum gradients over the replicas in the last microbatch's backward pass only."""
        (part,) = self.parts
        if self.way == "DDP":
            part.require_backward_grad_sync = last  # what no_sync() sets
        elif self.way == "fully_shard":
            part.set_requires_gradient_sync(last)
            part.set_is_last_backward(last)
            part.set_reshard_after_backward(last)


def work(case_name, size_name, steps):
    """One worker: step and CPU seconds of each variant, and the losses of every step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.utils.data import DataLoader, TensorDataset

    from hetflow import runtime as hf

    class Rows(TensorDataset):
        """Gives a whole microbatch at once."""

        def __getitems__(self, indices):
            return [tensor[indices[0] : indices[-1] + 1] for tensor in self.tensors]

    torch.set_num_threads(1)
    case, steps = CASES[case_name], int(steps)
    size = size_of(case, size_name)
    batch_size = MICROBATCHES * MICROBATCH_SIZE * case.data
    torch.manual_seed(1)
    ids = torch.randint(size.vocabulary, (batch_size * steps, size.tokens + 1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    loader = DataLoader(Rows(x, y), batch_size, collate_fn=lambda items: items)
    model = decoder(size)
    if case.vocabulary:
        hf.tensor_parallel(model, {"lm_head": "logits"}, known=True)
    optimizer = optimizer_of(model)
    job = hf.prepare(model, optimizer)
    shape = (case.pipeline, case.data, case.tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    theirs = {way: Torch(case, size, way, mesh) for way in case.torch_ways}

    def ours(batch):
        loss = job.backward(lambda a, b: loss_of(model(a), b), batch)
        optimizer.step()
        optimizer.zero_grad()
        return [loss]

    names = ["hetflow", *theirs]
    seconds, cpu, losses = ({name: [] for name in names} for _ in range(3))
    for number, batch in enumerate(job.batches(loader)):
        drawn = [inputs for _, inputs in batch.inputs()]
        batch.renew(batch.passes, iter(drawn))
        rows = slice(number * batch_size, (number + 1) * batch_size)
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            if name == "hetflow":
                made = ours(batch)
            else:
                made = theirs[name].step(x[rows], y[rows])
            # Each frees the graphs of its own losses; kept longer, the next one would pay for it.
            made = [loss.detach() for loss in made]
            used = time.process_time() - cpu_began
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
            cpu[name].append(used)
            losses[name].append([sum(float(loss) for loss in made), len(made)])
    sums = torch.tensor([cpu[name] for name in names], dtype=torch.float64)
    dist.all_reduce(sums)
    means = torch.tensor([losses[name] for name in names], dtype=torch.float64)
    dist.all_reduce(means)
    rank = job.rank
    job.finish(whole=False)
    if rank == 0:
        said = {
            "seconds": seconds,
            "cpu": dict(zip(names, sums.tolist(), strict=True)),
            "losses": dict(zip(names, (means[..., 0] / means[..., 1]).tolist(), strict=True)),
        }
        print(json.dumps(said))


def row_of(said):
    """The figures of a case: [first quartile, median, third] of each kind."""
    mine, row = said["losses"]["hetflow"], {}
    for name, values in said["losses"].items():
        worst = max(abs(a / b - 1) for a, b in zip(mine, values, strict=True))
        if not worst <= MOST_DIFFERENCE:
            raise SystemExit(f"losses of hetflow and {name} differ by {worst:.1e}")
        kept, used = (said[kind][name][WARM_UP:] for kind in ("seconds", "cpu"))
        row[name] = {"first_and_last_loss": [values[0], values[-1]]}
        row[name] |= {"step_seconds": quartiles(kept), "cpu_seconds": quartiles(used)}
        if name == "hetflow":
            continue
        row[name] |= {
            "hetflow_over_it": over(said["seconds"]["hetflow"], said["seconds"][name]),
            "hetflow_over_it_cpu": over(said["cpu"]["hetflow"], said["cpu"][name]),
            "largest_difference_of_losses": worst,
        }
    return row


def over(ours, theirs):
    """Quartiles of the ratios of neighbouring steps."""
    pairs = zip(ours[WARM_UP:], theirs[WARM_UP:], strict=True)
    return quartiles([a / b for a, b in pairs])


def show(results):
    """Print a table."""
    for key, row in results.items():
        ours = row["hetflow"]
        for name, found in row.items():
            if name == "hetflow":
                continue
            low, middle, high = found["hetflow_over_it"]
            print(
                f"{key}: hetflow {ours['step_seconds'][1] * 1e3:.1f} ms, {name} "
                f"{found['step_seconds'][1] * 1e3:.1f} ms, ratio {middle:.3f} ({low:.3f} to "
                f"{high:.3f}); CPU {ours['cpu_seconds'][1] * 1e3:.1f} and "
                f"{found['cpu_seconds'][1] * 1e3:.1f} ms, ratio "
                f"{found['hetflow_over_it_cpu'][1]:.3f}; losses differ by "
                f"{found['largest_difference_of_losses']:.1e}",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small decoder, fewer steps")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    parser.add_argument("--only", default=",".join(CASES), help="which cases")
    parser.add_argument("--sizes", default=",".join(SIZES), help="which decoders, without --quick")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each kind (25; quick 15)")
    arguments = parser.parse_args()
    sizes, usual = (["small"], 15) if arguments.quick else (arguments.sizes.split(","), 25)
    steps = arguments.steps or usual
    results = {}
    for size in sizes:
        for name in arguments.only.split(","):
            if size == "large" and name not in LARGE:
                continue
            case = CASES[name]
            plan = plan_of(case, size_of(case, size))
            said = run_world(plan, case.num_workers, name, size, steps, script=__file__)
            results[f"{size}, {name}"] = row_of(said)
            show({f"{size}, {name}": results[f"{size}, {name}"]})
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if "--worker" in sys.argv:
        work(*sys.argv[2:])
    else:
        main()
