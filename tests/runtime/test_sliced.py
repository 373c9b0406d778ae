"""Slices that a script reads and writes do as the whole tensor does."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hetflow.runtime.sharding.sliced import Origin, SlicedParameter, plain
from hetflow.schema.errors import TargetError


class Worker:
    """A worker that holds a slice of a parameter and of its gradient; the rest is kept beside."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.value, self.gradient = torch.randn(4, 3), torch.randn(4, 3)
        kept = slice(2, 9)

        def brought(whole: Tensor) -> Callable[[Tensor], Tensor]:
            def bring(own: Tensor) -> Tensor:
                with plain():
                    found = whole.clone()
                    found.view(-1)[kept] = own.detach()
                    return found

            return bring

        shape = self.value.shape
        of_gradient = Origin(shape, kept, brought(self.gradient))
        self.parameter = nn.Parameter(self.value.view(-1)[kept].clone())
        self.parameter.grad = of_gradient.of(self.gradient.view(-1)[kept].clone())
        Origin(shape, kept, brought(self.value), gradient=of_gradient).hold(self.parameter)
        self.parameter.__class__ = SlicedParameter
        self.kept = kept

    def own(self) -> tuple[Tensor, Tensor]:
        with plain():
            gradient = self.parameter.grad
            assert gradient is not None
            return self.parameter.detach().clone(), gradient.clone()


def of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


MASK = torch.arange(12).view(4, 3) % 2


@pytest.mark.parametrize(
    "read",
    [
        lambda p: of(p).norm(),
        lambda p: p.detach().abs().max(),
        lambda p: (p.data**2).mean(dim=1),
        lambda p: torch.cat([p.detach().flatten(), of(p).view(-1)]),
        lambda p: torch.nn.utils.parameters_to_vector([p]),
        lambda p: torch.nn.utils.get_total_norm([of(p)]),
        lambda p: torch.tensor([*p.shape, p.numel(), p.dim(), len(p), *p.data.size()]),
        lambda p: torch.zeros_like(p).lerp_(p, 0.5),
        lambda p: torch.ones(4, 3).mul_(of(p)),
        lambda p: torch.from_numpy(p.detach().numpy()),
        lambda p: copy.deepcopy(p),
        lambda p: torch.stack(torch._foreach_mul([p, of(p)], 2.0)),
        lambda p: p.T @ of(p),
    ],
)
def test_what_is_read_is_the_whole_tensors(read: Callable[[nn.Parameter], Tensor]) -> None:
    worker, whole = Worker(), Worker()
    expected = nn.Parameter(whole.value)
    expected.grad = whole.gradient
    with torch.no_grad():
        found = read(worker.parameter)
        assert type(found.detach()) is not type(worker.parameter)
        torch.testing.assert_close(found.detach().clone(), read(expected).detach())


def _set_data(p: nn.Parameter) -> None:
    p.data = p.data.sign() * (p.data.abs() - 0.1).clamp(min=0)


def _set_gradient(p: nn.Parameter) -> None:
    p.grad = of(p) - of(p).mean()


def _set_rows(p: nn.Parameter) -> None:
    p.data[1] = 0


def _subtract(p: nn.Parameter) -> None:
    p -= 0.1 * of(p)


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.mul_(0.9),
        lambda p: p.data.add_(MASK),
        lambda p: p.mul_(MASK),
        lambda p: p.addcmul_(p, of(p), value=0.1),
        lambda p: p.div_(p.norm(dim=1, keepdim=True)),
        lambda p: of(p).sub_(of(p).mean(dim=1, keepdim=True)),
        lambda p: of(p).data.clamp_(-0.1, 0.1),
        lambda p: torch._foreach_mul_([p, of(p)], 0.5),
        lambda p: p.copy_(torch.ones(3, 4).cumsum(0).T),
        lambda p: of(p).zero_(),
        _set_data,
        _set_gradient,
        _set_rows,
        _subtract,
    ],
)
def test_what_is_written_is_written_to_the_slice(write: Callable[[nn.Parameter], Any]) -> None:
    worker, whole = Worker(), Worker()
    expected = nn.Parameter(whole.value)
    expected.grad = whole.gradient
    with torch.no_grad():
        write(worker.parameter)
        write(expected)
    value, gradient = worker.own()
    torch.testing.assert_close(value, expected.detach().view(-1)[worker.kept])
    torch.testing.assert_close(gradient, of(expected).view(-1)[worker.kept])


def test_a_saved_parameter_is_whole_and_needs_no_hetflow() -> None:
    worker, file = Worker(), io.BytesIO()
    torch.save([worker.parameter, worker.parameter.data.view(-1)], file)
    file.seek(0)
    saved, flat = torch.load(file, weights_only=True)
    assert [type(saved), type(flat)] == [nn.Parameter, Tensor]
    torch.testing.assert_close([saved.detach(), flat], [worker.value, worker.value.view(-1)])


def test_what_would_be_lost_is_refused() -> None:
    parameter = Worker().parameter
    with pytest.raises(TargetError, match="writes to a view"):
        parameter.data[1:][0].zero_()
    with pytest.raises(TargetError, match="reads a parameter outside of its layer"):
        parameter.pow(2).sum().backward()
    with pytest.raises(TargetError, match="to a tensor of shape"):
        parameter.data = torch.zeros(7)
