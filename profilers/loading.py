"""Have measuring processes load a workload: a factory's, or a script that runs up to its loop."""

from dataclasses import dataclass
from typing import Any

from ..schema import files
from ..schema.launch import LaunchConfig
from .process import Child
from .rehearsal import config_of
from .targets import Target


@dataclass(frozen=True, slots=True)
class Loading:
    """What is loaded.

    Attributes:
        target: The workload.
        device_type: The type of the devices that train it.
        memory_bytes: A device's memory; enforced on a host's own.
        optimizer: The optimizer where the workload brings none.
        num_threads: Of its arithmetic on the host.
    """

    target: Target
    device_type: str
    memory_bytes: int
    optimizer: str
    num_threads: int

    def ask_alone(self, child: Child, device: str) -> None:
        """Have a process train by itself; its answer are facts about the workload."""
        if self.target.is_script:
            self._ask_script(child, device, config_of([[1]], device_type=self.device_type))
            return
        child.send(
            "load",
            target=self.target.text,
            device=device,
            memory_bytes=self.memory_bytes,
            optimizer=self.optimizer,
            num_threads=self.num_threads,
        )

    def ask_together(
        self, child: Child, device: str, *, rank: int, workers: int, port: int
    ) -> None:
        """Have a process be one worker of a script, which meet in a store at a port."""
        config = config_of([[1]] * workers, device_type=self.device_type)
        self._ask_script(child, device, config, rank=rank, port=port)

    def _ask_script(
        self,
        child: Child,
        device: str,
        config: LaunchConfig,
        *,
        rank: int = 0,
        port: int | None = None,
    ) -> None:
        values: dict[str, Any] = {"config": files.to_json(config), "rank": rank, "port": port}
        child.send(
            "script",
            script=[self.target.location, *self.target.arguments],
            device=device,
            memory_bytes=self.memory_bytes,
            few_samples=self.target.few_samples,
            **values,
        )
