"""Workers begin an epoch together, over datasets of one length."""

from types import SimpleNamespace

import pytest
import torch

from hetflow.runtime import totals
from hetflow.schema.errors import TargetError

PLACE = SimpleNamespace(distributed=True, device=torch.device("cpu"))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([8, -8], None),
        ([9, -8], "has 8 samples here, and 8 to 9 on the workers"),
        # 1.0 and 0.0 of another exchange, read as whole numbers
        ([4607182418800017408, 0], "another is elsewhere in the script"),
        ([8, 4607182418800017408], "another is elsewhere in the script"),
    ],
)
def test_unlike_lengths_are_told_from_unlike_places(
    found: list[int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        totals.peers, "all_reduce", lambda tensor, **_: tensor.copy_(torch.tensor(found))
    )
    if said is None:
        assert totals.check_same_length(list(range(8)), PLACE) == list(range(8))
        return
    with pytest.raises(TargetError, match=said):
        totals.check_same_length(list(range(8)), PLACE)
