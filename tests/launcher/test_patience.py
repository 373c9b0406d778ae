"""A store that does not answer, and one that is gone."""

import threading
from collections.abc import Iterator

import pytest

from hetflow.runtime.launcher.store import PatientStore, Unreachable


class Frozen:
    """A store whose host is frozen until the test is over."""

    def __init__(self) -> None:
        self.thaws = threading.Event()
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        return self.thaws.wait(60)


class Gone:
    """A store whose host is gone."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Broken pipe")


@pytest.fixture
def frozen() -> Iterator[Frozen]:
    store = Frozen()
    yield store
    store.thaws.set()


def test_a_host_that_is_frozen_is_given_up_and_not_asked_again(frozen: Frozen) -> None:
    store = PatientStore(frozen, 0.1).whole
    for _ in range(3):
        with pytest.raises(Unreachable, match="^its launcher did not answer for 0.1 s$"):
            store.check(["key"])
    assert frozen.num_asked == 1


def test_a_store_that_is_gone_is_said_to_be() -> None:
    with pytest.raises(Unreachable, match="^its launcher is gone, and the store with it$"):
        PatientStore(Gone(), 5.0).whole.check(["key"])


def test_what_stands_there_is_answered() -> None:
    dist = pytest.importorskip("torch.distributed")
    store = PatientStore(dist.HashStore(), 5.0)
    part = store.under("launcher")
    part.set("key", "value")
    assert part.check(["key"])
    assert part.get("key") == b"value"
    assert not store.whole.check(["key"])
    assert store.whole.get("launcher/key") == b"value"
    assert part.compare_set("key", "value", "other") == b"other"
