"""The devices of a live cluster by name, and as mechanisms count them: by type and server."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ..engines.protocol import EngineDevice
from ..mechanisms.cluster.layout import Layout
from ..mechanisms.cluster.seats import Device, Seat


class Places:
    """Names of devices, and their places: (type, server among those that have it, number there).

    Types, and the servers of each, are in the order in which the engine lists them.

    Attributes:
        num_devices: Devices of each type.
        num_servers: Servers that have a device.
        sizes: Devices of each type on each server that has it [types][servers].
        layout: These, with which servers they are.
    """

    def __init__(self, devices: Iterable[EngineDevice]) -> None:
        """Number the devices of an engine."""
        listed = list(devices)
        self.num_devices = dict(Counter(device.device_type for device in listed))
        rows: dict[str, dict[str, list[str]]] = {name: {} for name in self.num_devices}
        for device in listed:
            rows[device.device_type].setdefault(device.server, []).append(device.name)
        self.sizes = tuple(
            tuple(len(names) for names in servers.values()) for servers in rows.values()
        )
        self._name = {
            (kind, place, number): name
            for kind, servers in enumerate(rows.values())
            for place, names in enumerate(servers.values())
            for number, name in enumerate(names)
        }
        self._device = {name: device for device, name in self._name.items()}
        servers = list(dict.fromkeys(device.server for device in listed))
        self.num_servers = len(servers)
        self.layout = Layout(
            self.sizes, tuple(tuple(map(servers.index, row)) for row in rows.values())
        )

    @property
    def largest(self) -> dict[str, int]:
        """Devices of each type on the server that has most of them."""
        return {name: max(row) for name, row in zip(self.num_devices, self.sizes, strict=True)}

    @property
    def servers(self) -> tuple[tuple[int, ...], ...] | None:
        """Devices of each type on each server; None where placement does not count."""
        return self.sizes if any(len(row) > 1 for row in self.sizes) else None

    def device(self, name: str) -> Device:
        """The place of a device."""
        return self._device[name]

    def seat(self, names: Iterable[str]) -> Seat:
        """The places of some devices, in order."""
        return tuple(sorted(self._device[name] for name in names))

    def names(self, seat: Sequence[Device]) -> list[str]:
        """The devices at some places."""
        return [self._name[device] for device in seat]
