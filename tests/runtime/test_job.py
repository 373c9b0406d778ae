"""The script's API in one process: what plain ``python`` runs, and what is refused."""

from collections import OrderedDict, UserDict
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    TensorDataset,
)

from hetflow import runtime as hf
from hetflow.runtime.determinism import generator_of
from hetflow.schema.errors import TargetError

NUM_SAMPLES, BATCH = 22, 8


@pytest.fixture(autouse=True)
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HETFLOW_PLAN", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True))


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def square(model: nn.Module):
    return lambda x, y: (model(x) - y).pow(2).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def test_a_plain_run_has_the_bits_of_plain_pytorch() -> None:
    ours, theirs, dataset = model_of(), model_of(), data()
    optimizer, reference = adam(ours), adam(theirs)
    job = hf.prepare(ours, optimizer)
    for epoch in range(2):
        order = torch.randperm(NUM_SAMPLES, generator=generator_of(0, "order", epoch))
        parts = order.split(BATCH)
        batches = job.batches(DataLoader(dataset, batch_size=BATCH, shuffle=True), epoch=epoch)
        assert len(batches) == len(parts) == 3
        for batch, index in zip(batches, parts, strict=True):
            loss = job.backward(square(ours), batch)
            optimizer.step()
            optimizer.zero_grad()
            expected = square(theirs)(*dataset[index])
            expected.backward()
            reference.step()
            reference.zero_grad()
            assert loss.item() == expected.item()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert (job.is_main, job.rank, job.world_size, job.num_steps) == (True, 0, 1, 6)
    job.finish()


def test_all_gradients_are_views_of_one_buffer() -> None:
    model = model_of()
    job = hf.prepare(model, adam(model))
    batch = next(iter(job.batches(DataLoader(data(), batch_size=BATCH))))
    job.backward(square(model), batch)
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == 1
    job.finish()


def test_gradients_that_were_not_cleared_add_up_as_in_plain_pytorch() -> None:
    ours, theirs, dataset = model_of(), model_of(), data()
    job = hf.prepare(ours)
    for number, batch in enumerate(job.batches(DataLoader(dataset, batch_size=BATCH))):
        job.backward(square(ours), batch)
        square(theirs)(*dataset[number * BATCH : (number + 1) * BATCH]).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=0)
    job.finish()


def test_freezing_in_the_middle_is_followed() -> None:
    model = model_of()
    job = hf.prepare(model)
    batches = iter(job.batches(DataLoader(data(), batch_size=BATCH)))
    job.backward(square(model), next(batches))
    model.zero_grad()
    model[0].requires_grad_(False)
    job.backward(square(model), next(batches))
    assert model[0].weight.grad is None
    assert model[2].weight.grad is not None
    job.finish()


def test_a_batch_left_out_is_not_anothers() -> None:
    model, seen = model_of(), []
    job = hf.prepare(model)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return (model(x) - y).pow(2).mean()

    for number, batch in enumerate(job.batches(DataLoader(data(), batch_size=BATCH))):
        if number != 1:
            job.backward(loss_of, batch)
    assert torch.equal(torch.cat(seen), data().tensors[0][[*range(8), *range(16, 22)]])
    with pytest.raises(TargetError, match="this batch was used already"):
        job.backward(loss_of, batch)
    job.finish()
    with pytest.raises(TargetError, match="the job is finished"):
        job.backward(loss_of, batch)


def test_parameters_of_the_loss_are_trained_too() -> None:
    model, temperature = model_of(), nn.Parameter(torch.ones((), dtype=torch.float64))
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
    job = hf.prepare(model, optimizer)
    batch = next(iter(job.batches(DataLoader(data(), batch_size=BATCH))))
    job.backward(lambda x, y: (model(x) * temperature - y).pow(2).mean(), batch)
    assert temperature.grad is not None
    job.finish()


def test_evaluation_leaves_the_mode_as_it_was() -> None:
    model = model_of()
    job = hf.prepare(model)
    with job.evaluation() as same:
        assert same is model
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training
    job.finish()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (7, "needs a torch DataLoader, an iterable of batches or a function that draws one"),
        (
            DataLoader(
                data(), batch_size=4, sampler=DistributedSampler(data(), num_replicas=2, rank=0)
            ),
            "DistributedSampler shards the data",
        ),
    ],
)
def test_loaders_that_cannot_be_cut(loader: object, message: str) -> None:
    job = hf.prepare(model_of())
    with pytest.raises(TargetError, match=message):
        job.batches(loader)
    job.finish()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.DataParallel(nn.Linear(1, 1)), "wrapped in DataParallel"),
        (nn.LazyLinear(3), "lazy parameters"),
        ("model", "needs a torch.nn.Module, got str"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_models_that_would_train_wrongly(model: object, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        hf.prepare(model)


@pytest.mark.parametrize("device", ["gpu0", 0.5])
def test_a_device_that_is_none_is_refused(device: object) -> None:
    with pytest.raises(TargetError, match=f"torch knows no device {device!r}"):
        hf.prepare(nn.Linear(1, 1), device=device)
    with pytest.raises(TargetError, match="the seed must be a whole number, got '7'"):
        hf.prepare(nn.Linear(1, 1), seed="7")


@pytest.mark.slow
def test_a_model_sharded_by_fsdp2_is_refused() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("FSDP2 came with torch 2.6")
    model = nn.Sequential(nn.Linear(2, 2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(TargetError, match=r"^0.weight is a DTensor, as fully_shard \(FSDP2\)"):
            hf.prepare(model)
    finally:
        dist.destroy_process_group()


def test_a_module_captured_in_graphs_is_refused() -> None:
    def make_graphed_callables(module: nn.Module) -> None:  # torch's needs a GPU
        def new_forward(*inputs: object) -> None: ...

        module.forward = new_forward

    model = nn.Sequential(nn.Linear(2, 2))
    make_graphed_callables(model[0])
    with pytest.raises(TargetError, match="^0 is captured in graphs of kernels"):
        hf.prepare(model)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda loss: loss.expand(3), r"scalar mean loss, got Tensor of shape \(3,\)"),
        (lambda loss: None, "scalar mean loss, got NoneType"),
        (lambda loss: hf.Weighted(loss, -1), "weight of a loss must be finite and >= 0, got -1"),
        (lambda loss: hf.Weighted(loss, float("nan")), "weight of a loss must be finite"),
        (lambda loss: (loss, 3), "returned a tuple of 2, and hetflow does not guess"),
    ],
)
def test_losses_that_make_no_sense(answer, message: str) -> None:
    model = model_of()
    job = hf.prepare(model)
    batch = next(iter(job.batches(DataLoader(data(), batch_size=BATCH))))
    with pytest.raises(TargetError, match=message):
        job.backward(lambda x, y: answer(square(model)(x, y)), batch)
    job.finish()


def refusal_of(use: Callable[[hf.Job, DataLoader, nn.Module], object]) -> str:
    model = model_of()
    job = hf.prepare(model, adam(model))
    with pytest.raises(TargetError) as caught:
        use(job, DataLoader(data(), batch_size=BATCH), model)
    job.abandon()
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return str(caught.value)


def use_twice(job: hf.Job, loader: DataLoader, model: nn.Module) -> None:
    batch = next(iter(job.batches(loader)))
    for _ in range(2):
        job.backward(square(model), batch)


def without_gradients(job: hf.Job, loader: DataLoader, model: nn.Module) -> None:
    with torch.no_grad():
        loss = model(data()[:1][0]).mean()
    job.backward(lambda x, y: loss + 0 * x.mean().item(), next(iter(job.batches(loader))))


def from_detached_outputs(job: hf.Job, loader: DataLoader, model: nn.Module) -> None:
    job.backward(
        lambda x: model(x[0] if isinstance(x, list) else x).detach(),
        next(iter(job.batches(DataLoader(data().tensors[0], batch_size=BATCH)))),
        over_batch=lambda z: z.pow(2).mean().detach(),
    )


def shuffled_by_its_own(job: hf.Job, loader: DataLoader, model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    job.batches(DataLoader(data(), batch_size=BATCH, shuffle=True, generator=generator))


ORDINARY = {
    "a batch is used twice": (use_twice, "job.backward takes each batch once"),
    "get_batch in place of a loader": (
        lambda job, loader, model: job.batches(lambda: (1, 2)),
        "a function that draws batches has no end",
    ),
    "prepare is given the loader": (
        lambda job, loader, model: hf.prepare(model, adam(model), loader),
        "takes a model and its optimizers, got also a DataLoader",
    ),
    "a loss under no_grad": (without_gradients, "the loss has no gradient"),
    "a loss of the batch under no_grad": (from_detached_outputs, "the loss has no gradient"),
    "a generator of the loader": (shuffled_by_its_own, "shuffles by a generator of its own"),
}


@pytest.mark.parametrize("case", ORDINARY)
def test_what_ordinary_scripts_try_is_refused_in_one_line(case: str) -> None:
    use, said = ORDINARY[case]
    assert said in refusal_of(use)


class Named(dict):
    """A batch as libraries make them."""

    @property
    def x(self) -> torch.Tensor:
        return self["x"]


@pytest.mark.parametrize("kind", [dict, OrderedDict, Named, UserDict])
def test_a_batch_that_is_a_dict_keeps_its_type(kind: type) -> None:
    model, seen = model_of(), []
    job = hf.prepare(model, adam(model))

    def collate(rows: list) -> object:
        made = kind({"x": torch.stack([x for x, _ in rows])})
        made["mask"] = None
        return made

    def loss(batch):
        seen.append(type(batch))
        return model(batch.x if kind is Named else batch["x"]).pow(2).mean()

    loader = DataLoader(data(), batch_size=BATCH, collate_fn=collate)
    for batch in job.batches(loader):
        job.backward(loss, batch)
    assert set(seen) == {kind}
    job.finish()


def test_windows_of_a_text_and_two_models_in_turns() -> None:
    text = torch.arange(50, dtype=torch.float64)

    class Windows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(text) - 5

        def __getitem__(self, index: int) -> torch.Tensor:
            return text[index : index + 5] / 50

    maker, judge = model_of(), nn.Linear(1, 1).double()
    first, second = adam(maker), adam(judge)
    job = hf.prepare(nn.ModuleList([maker, judge]), [first, second])
    batches = iter(job.batches(DataLoader(Windows(), batch_size=BATCH, shuffle=True)))
    losses = []
    for one in batches:
        job.backward(lambda x: judge(maker(x).detach()).pow(2).mean(), one)
        assert maker[0].weight.grad is None
        second.step()
        second.zero_grad()
        other = next(batches, None)
        if other is None:
            break
        losses.append(job.backward(lambda x: (judge(maker(x)) - 1).pow(2).mean(), other))
        first.step()
        first.zero_grad()
        second.zero_grad()
    assert len(losses) == 3
    job.finish()
