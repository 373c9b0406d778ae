"""An engine without processes whose launches can be resized: each has a real control folder."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hetflow.clusters.engines.protocol import EngineDevice, Work
from hetflow.clusters.scheduler.leases import PLAN, RUN, folder_of, open_leases
from hetflow.clusters.scheduler.store import ClusterStore
from hetflow.runtime.launcher.supervisor import Inbox
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.files import read_plan
from hetflow.schema.launch import LaunchConfig, ResizeAnswer, ResizeRequest

from .conftest import FakeEngine


def types_of(config: LaunchConfig) -> Counter[str]:
    """The devices of a launch by type; it does not know their names."""
    return Counter(slot.device_type for slot in config.workers)


@dataclass
class Launch:
    """What a launch's controller knows."""

    box: Inbox
    config: LaunchConfig
    request: tuple[Path, ResizeRequest] | None = None

    @property
    def holds(self) -> Counter[str]:
        """In a resize, new workers start beside those that are there."""
        if self.request is None:
            return types_of(self.config)
        return types_of(self.config) | types_of(self.request[1].config)


@dataclass
class ResizableEngine(FakeEngine):
    """Its launches answer as a test says, one call of ``serve`` after they were asked."""

    answer: Literal["done", "refused", "failed", "silent"] = "done"
    is_starting: bool = False
    """Whether launches that begin take no requests yet."""
    launches: dict[Path, Launch] = field(default_factory=dict)

    def can_resize(self, held: Sequence[EngineDevice], wanted: Sequence[EngineDevice]) -> bool:
        return True

    def check_free(self, held: set[str]) -> None:
        """``check`` does it: names of devices are known to the state alone."""

    def start(self, work: Work) -> None:
        super().start(work)
        if work.folder in self.running and work.folder not in self.launches:
            config = lower(read_plan(work.folder / PLAN), 7, "elastic")
            (work.folder / RUN).mkdir(exist_ok=True)
            self.launches[work.folder] = launch = Launch(Inbox(work.folder / RUN), config)
            if not self.is_starting:
                launch.box.show(config)

    def end(self, folder: Path, code: int | None, said: str = "") -> None:
        super().end(folder, code, said)
        self.launches.pop(folder).box.close()

    def serve(self) -> None:
        """Let launches finish what they were asked for, and take the next request."""
        for launch in self.launches.values():
            if launch.request is not None:
                path, request = launch.request
                if self.answer == "silent":
                    continue
                launch.request = None
                if self.answer == "done":
                    assert request.config.seed == 7
                    assert request.config.determinism == "elastic"
                    launch.config = request.config
                    launch.box.show(launch.config)
                launch.box.answer(path, ResizeAnswer(status=self.answer, detail="as it was told"))
            launch.request = launch.box.next()

    def check(self, store: ClusterStore) -> None:
        """No device is in two leases, and no launch holds others than its own lease says."""
        held = [lease for lease in open_leases(store) if lease.holds_devices]
        names = [name for lease in held for name in lease.held]
        assert len(names) == len(set(names)), held
        for lease in held:
            launch = self.launches.get(folder_of(store, lease))
            if launch is not None:
                recorded = Counter(name.rpartition(":")[0] for name in lease.held)
                assert not launch.holds - recorded, lease


class OneTypeEngine(ResizableEngine):
    """Fast devices alone."""

    def devices(self) -> tuple[EngineDevice, ...]:
        return tuple(one for one in super().devices() if one.device_type == "cpu:fast")
