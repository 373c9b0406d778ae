"""Workers that share states, against the same virtual nodes in one process. A script, not a test.

Usage: sharded.py STORE_FILE RANK KIND... Each worker trains each kind of model under each sharding.
It holds gradients, norms, updates and what is whole at a time against a model of its own. A number
in place of kinds: one worker runs a layer more often (0) or less often (1) in the second pass.
"""

import sys
from collections.abc import Sequence
from copy import deepcopy
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hetflow.runtime.group import Place
from hetflow.runtime.peers import SharedStore
from hetflow.runtime.protocol.environment import Start
from hetflow.runtime.repeated_layers import listed_blocks
from hetflow.runtime.sharding import states as sharding
from hetflow.runtime.sharding.flats import Flat
from hetflow.runtime.sharding.leaves import LeafSums, NodeOrder
from hetflow.runtime.sharding.precision import AS_IS, Precision, precision_of
from hetflow.runtime.sharding.states import SharedStates
from hetflow.schema.layers import unit_of
from hetflow.schema.options import Activations, Shard
from hetflow.tests.runtime import host_lane, model_kinds

SHARES = ALIKE, UNLIKE = [1, 1, 1], [3, 0, 7]
STOOD_FOR = ("compiled", "gpt", "policy of lora", "fsdp2", "llama", "resnet")
ROUNDS, STEPS, NEAR, LIMIT = 2, 2, 1e-10, 0.5
SAMPLES = (3, 1, 2)
"""Of a pass of each worker."""


class _Adapter(nn.Module):
    """Frozen layers, one of them quantized, and what is trained beside them, as LoRA has it."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base
        codes = torch.randint(-127, 128, (4 * width, width), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.down = nn.Linear(width, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, 4 * width, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        quantized = nn.functional.linear(x, self.codes.to(x.dtype) / 1000)
        found: Tensor = self.base(x) + quantized + self.up(self.down(x))
        return found


def lora() -> Any:
    """GPT-2 whose base is frozen, with adapters in its blocks."""
    model, data, loss = model_kinds.hf_gpt2()
    model.requires_grad_(False)
    for block in model.transformer.h:
        block.mlp.c_fc = _Adapter(block.mlp.c_fc, model_kinds.WIDTH)
    return model, data, loss


class _Chosen(nn.Module):
    """Layers that each worker's samples choose, some twice, in no order of their registration."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(5))
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.order: list[int] = []  # in place of what samples choose

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order or self._order_of(x):
            x = x + self.layers[number](x).tanh()
        found: Tensor = self.head(x)
        return found

    @staticmethod
    def _order_of(x: Tensor) -> list[int]:
        chosen, order = int(1000 * x.abs().sum()) % 120, list[int]()
        for number in (4, 2, 0, 3, 1):
            order += [number] * (chosen % 3)
            chosen = chosen * 7 // 5
        return order


def chosen() -> Any:
    """A model of such layers."""

    def data(number: int, generator: torch.Generator) -> Tensor:
        return torch.randn(number, 6, generator=generator, dtype=torch.float64)

    return _Chosen(), data, lambda model, x: model(x).square().mean()


class _Tower(nn.Module):
    """A block of a name without a number; with another one in it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class _Towers(nn.Module):
    """Towers of names, of which one runs twice in a row, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.left, self.right, self.top = _Tower(16), _Tower(48), _Tower(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.top(self.right(self.right(self.left(self.stem(x))))))


def towers() -> Any:
    """A model whose blocks a user lists."""
    return (
        _Towers().double(),
        lambda number, generator: torch.randn(number, 4, generator=generator, dtype=torch.float64),
        lambda model, x: model(x).square().sum(1).mean(),
    )


BLOCKS: dict[str, Any] = {"towers": ["left.up", _Tower], "compiled": [_Tower]}
KINDS = {
    "towers": towers,
    "compiled": towers,  # block by block, in place
    "chosen": chosen,
    "gpt": model_kinds.hf_gpt2,
    "llama": model_kinds.hf_llama,
    "resnet": model_kinds.resnet,
    "lora": lora,
}


class Watch:
    """The most bytes of weights that are whole at a time."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, states: SharedStates) -> None:
        """Note how much is whole now."""
        held = sum(
            flat._whole.untyped_storage().nbytes() for unit in states._all for flat in unit.flats
        )
        self.most = max(self.most, held)


def most_whole_bytes(model: nn.Module, blocks: Sequence[str]) -> int:
    """What docs/sharding.md allows: the rest, and the two largest units."""

    def block_of(path: str) -> str:
        named = [name for name in blocks if name == path.split(".")[0]]
        return named[0] if named else "" if blocks else unit_of(path)

    homes: dict[int, set[str]] = {}
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes.setdefault(id(parameter), set()).add(block_of(name.rpartition(".")[0]))
    for parameter in model.parameters():
        home = homes[id(parameter)]
        name = next(iter(home)) if len(home) == 1 else ""
        sizes[name] = sizes.get(name, 0) + parameter.nbytes
    rest = sizes.pop("", 0)
    return rest + sum(sorted(sizes.values())[-2:])


def states_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    shard: Shard,
    shares: list[int],
    name: str,
    blocks: Any = (),
    precision: Precision = AS_IS,
) -> SharedStates:
    """A model's states, shared by all workers."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = SharedStore(dist.distributed_c10d._get_default_store()).under(f"{name}{shard}{shares}")
    place = Place(Start(), None, torch.device("cpu"), rank=rank, world_size=world, store=store)
    session: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()), optimizers=(optimizer,), place=place,
        model=model, device=place.device,
    )  # fmt: skip
    return SharedStates(session, shard, shares, blocks=blocks, precision=precision)


def train(kind: str, shard: Shard, shares: list[int]) -> None:
    """Train shared and whole; they must agree."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model, data, loss = KINDS[kind]()
    torch.manual_seed(4 + rank)  # only the first worker's values count
    whole = deepcopy(model)
    if rank:
        for parameter in model.parameters():
            parameter.data.fill_(3)

    def optimizer_of(of: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in of.parameters() if p.requires_grad], lr=0.01)

    optimizer, own = optimizer_of(model), optimizer_of(whole)
    blocks = listed_blocks(model, BLOCKS.get(kind, ()))
    states, watch = states_of(model, optimizer, shard, shares, kind, blocks), Watch()
    # Under unlike shares two of three recompute their layers, and one offloads their activations.
    lane = host_lane.install()
    how: Activations = "recomputed" if rank < shares[-1] // 3 else "offloaded"
    states.treat(how)
    for name in blocks if kind == "compiled" else ():
        model.get_submodule(name).compile(backend="aot_eager")
    wait = Flat.wait

    def waiting(flat: Flat) -> None:
        wait(flat)
        watch.look(states)

    Flat.wait = waiting  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        nodes = [[data(SAMPLES[r], generator) for _ in range(ROUNDS)] for r in range(world)]
        optimizer.zero_grad()
        own.zero_grad()
        for inputs in [each for of in nodes for each in of]:
            (loss(whole, inputs) / 6).backward()
        states.begin(num_passes=ROUNDS)
        for inputs in nodes[rank]:
            states.enter(0)
            (loss(model, inputs) / 6).backward()
            states.leave()
        states.launch_rest()
        states.wait()
        norms = [nn.utils.clip_grad_norm_(of.parameters(), LIMIT) for of in (model, whole)]
        assert abs(float(norms[0] - norms[1])) < NEAR, norms
        places = states.places()
        for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            if parameter.grad is not None and other.grad is not None:
                flat, number = places[id(parameter)]
                expected = other.grad.reshape(-1)[flat.slice_of(number)]
                assert torch.allclose(parameter.grad, expected, rtol=0, atol=NEAR)
        optimizer.step()
        own.step()
    if shard == "all":
        most = most_whole_bytes(whole, blocks)
        assert watch.most <= most, (watch.most, most)
    Flat.wait = wait  # type: ignore[method-assign]
    with torch.no_grad(), states.open():
        inputs = data(2, generator)
        model.eval()
        whole.eval()
        for norm in [*model.modules(), *whole.modules()]:
            if isinstance(norm, nn.BatchNorm2d):
                norm.reset_running_stats()  # a virtual node's own
        assert abs(float(loss(model, inputs) - loss(whole, inputs))) < NEAR
    assert (lane.num_put > 0) == (how == "offloaded")
    states.make_whole()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert (parameter - other).abs().max() < NEAR
    states.close()


def train_masters(kind: str, shard: Shard, shares: list[int]) -> None:
    """Train a bfloat16 model by float32 masters, and by hand; no bit may differ.

    With a policy a float64 model runs in float32, and so may a part of it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    way, _, name = kind.partition(" of ")
    made, data, loss = KINDS[name]()
    casts = way == "policy"
    kept, runs = (torch.float64, torch.float32) if casts else (torch.float32, torch.bfloat16)
    given = torch.float64 if name == "towers" else None
    policy = MixedPrecisionPolicy(runs, torch.float64, given)
    precision = precision_of(policy) if casts else Precision(masters=kept)
    model = made if casts else made.to(runs)
    masters = [
        nn.Parameter(p.detach().to(kept if p.is_floating_point() else p.dtype), p.requires_grad)
        for p in model.parameters()
    ]
    whole = deepcopy(model).to(runs)
    if casts and given is not None:
        whole.register_forward_pre_hook(lambda _, inputs: (inputs[0].to(runs),))
        whole.register_forward_hook(lambda *called: called[-1].to(given))
    store = SharedStore(dist.distributed_c10d._get_default_store())
    store = store.under(f"{kind}{shard}{shares}")
    place = Place(Start(), None, torch.device("cpu"), rank=rank, world_size=world, store=store)
    optimizer, own = (torch.optim.AdamW(each, lr=0.01) for each in (model.parameters(), masters))
    session: Any = SimpleNamespace(
        parameters=dict(model.named_parameters()), optimizers=(optimizer,), place=place,
        model=model, device=place.device,
    )  # fmt: skip
    holdings = [[rank * ROUNDS + turn for turn in range(ROUNDS)] for rank in range(world)]
    states = SharedStates(session, shard, shares, NodeOrder(holdings), precision=precision)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        batches = [data(SAMPLES[node // ROUNDS], generator) for node in range(ROUNDS * world)]
        if not casts:
            batches = [batch.to(runs) for batch in batches]
        sums = [LeafSums(len(batches)) for _ in masters]
        for node, batch in enumerate(batches):
            whole.zero_grad()
            (loss(whole, batch) / 6).backward()
            for into, parameter in zip(sums, whole.parameters(), strict=True):
                assert (parameter.grad is not None) == parameter.requires_grad
                if parameter.grad is not None:
                    into.add_leaf(node, parameter.grad.to(kept))
        for master, found in zip(masters, sums, strict=True):
            master.grad = found.root()
        optimizer.zero_grad()
        states.begin(num_passes=ROUNDS)
        for node in holdings[rank]:
            states.enter(node)
            (loss(model, batches[node]) / 6).backward()
            states.leave()
        states.launch_rest()
        states.wait()
        optimizer.step()
        own.step()
        with torch.no_grad():
            for parameter, master in zip(whole.parameters(), masters, strict=True):
                parameter.copy_(master)
    inputs = data(2, generator)
    inputs = inputs if casts else inputs.to(runs)
    with torch.no_grad(), states.open():  # a script that writes nothing changes no master
        evaluated = loss(model, inputs)
    assert torch.equal(evaluated, loss(whole, inputs))
    states.make_whole()
    states.keep_own()
    assert {p.dtype for p in model.parameters() if p.is_floating_point()} == {kept}
    assert all(
        value.dtype == kept
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim()
    )
    saved = {name: value.clone() for name, value in states.in_turn()}
    for (name, _), master in zip(whole.named_parameters(), masters, strict=True):
        assert torch.equal(saved[name], master), name
    states.make_whole()
    with torch.no_grad():  # whole weights are as the script has made them, but in a pass
        assert torch.equal(loss(model, inputs), evaluated)
    ends = masters if casts else list(whole.parameters())
    for parameter, end in zip(model.parameters(), ends, strict=True):
        assert parameter.dtype == end.dtype
        assert torch.equal(parameter, end)
    with torch.no_grad():
        next(model.parameters()).add_(1e-12)
    seen = next(model.parameters()).clone()
    states.keep_own()
    states.make_whole()
    assert torch.equal(next(model.parameters()), seen)
    states.close()


def train_beside_fsdp2(shard: Shard, shares: list[int]) -> None:
    """Train a float64 model that runs in float32, with torch's own ``fully_shard`` beside it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = MixedPrecisionPolicy(torch.float32, torch.float64)
    torch.manual_seed(3)
    model, data, loss = towers()
    whole = deepcopy(model)
    for part in (whole.left, whole.right, whole.top, whole):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        part.set_gradient_divide_factor(1.0)  # rounded as here: a sum
    optimizer, own = (torch.optim.SGD(m.parameters(), 0.1, 0.9) for m in (model, whole))
    blocks, precision = listed_blocks(model, _Tower), precision_of(policy)
    states = states_of(model, optimizer, shard, shares, "fsdp2", blocks, precision)
    states.treat("kept" if shares[1] else "recomputed")
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        batches = [data(SAMPLES[n % world], generator) for n in range(ROUNDS * world)][rank::world]
        states.begin(num_passes=ROUNDS)
        for number, batch in enumerate(batches):
            whole.set_requires_gradient_sync(number == ROUNDS - 1)
            (loss(whole, batch) / 6).backward()
            states.enter(0)
            (loss(model, batch) / 6).backward()
            states.leave()
        states.launch_rest()
        states.wait()
        for each in (optimizer, own):
            each.step()
            each.zero_grad()
    with torch.no_grad(), states.open():
        batch = data(2, generator)
        assert abs(float(loss(model, batch) - loss(whole, batch))) < NEAR
    states.make_whole()
    whole.reshard()
    for parameter, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert parameter.dtype == torch.float64
        assert (parameter - other.full_tensor()).abs().max() < 1e-12
    states.close()


def refuse(*, again: int) -> None:
    """Run a layer more often, or less, than another worker, which it did not in the first pass."""
    sharding._ALIKE_SECONDS = 1.0
    model = _Chosen()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    states = states_of(model, optimizer, "all", [1] * dist.get_world_size(), f"again {again}")
    for number in range(2):
        is_unlike = number == 1 and dist.get_rank() == 1
        model.order = [4, 3, 2, 1, 0] + [3] * (1 - again if is_unlike else again)
        states.begin(num_passes=1)
        states.enter(0)
        model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        states.leave()
        states.wait()


def main() -> None:
    """Run all kinds under all shardings."""
    store = dist.FileStore(sys.argv[1], len(SAMPLES))
    rank, size = int(sys.argv[2]), len(SAMPLES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    kinds = sys.argv[3:]
    if kinds[0].isdigit():
        refuse(again=int(kinds[0]))
        return
    for kind, (shard, shares) in product(kinds, product(get_args(Shard), SHARES)):
        # Of models that others stand for each sharding meets one kind of shares.
        if kind in STOOD_FOR and shares is (UNLIKE if shard == "optimizer" else ALIKE):
            continue
        try:
            if kind == "fsdp2":
                train_beside_fsdp2(shard, shares)
            else:
                (train_masters if " of " in kind else train)(kind, shard, shares)
            sys.stderr.write(f"{kind}, {shard}, {shares}: as one process\n")
        except BaseException:
            sys.stderr.write(f"{kind}, {shard}, {shares}\n")
            raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
