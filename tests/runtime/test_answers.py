"""Answers of a model arrive on another worker in the form in which the model gave them."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hetflow.runtime.pipeline.evaluation import made_again, message_of, portable
from hetflow.schema.errors import TargetError

Pair = namedtuple("Pair", "first second")  # noqa: PYI024


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    more: Any = None


class Output(OrderedDict):
    """As transformers' ModelOutput: an entry is also an attribute."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def sent(answer: Any) -> Any:
    return made_again(message_of(portable(answer), "the answer").value(torch.device("cpu")))


def test_an_answer_keeps_its_form() -> None:
    logits, other = torch.randn(2, 3), torch.tensor([True, False])
    found = sent(Answer(logits, {"pair": Pair(other, None), 3: [torch.Size([2]), (1.5, "x")]}))
    assert type(found) is Answer
    assert torch.equal(found.logits, logits)
    pair = found.more["pair"]
    assert type(pair) is Pair
    assert torch.equal(pair.first, other)
    assert pair.second is None
    assert found.more[3] == [(2,), (1.5, "x")]
    output = sent(Output(loss=logits.sum(), cache=object()))
    assert type(output) is Output
    assert output.loss == logits.sum()
    with pytest.raises(TargetError, match="holds a object, which a pipeline leaves out"):
        output.cache.size()


def test_a_call_with_an_object_is_refused() -> None:
    with pytest.raises(TargetError, match=r"a pipeline cannot send the call\[0\] is a object"):
        message_of([object()], "the call")
