"""The load of the machine while something runs: cores that others used, and its own speed."""

import os
import resource
import statistics
import time
from pathlib import Path

_BUSY = (0, 1, 2, 5, 6)  # user, nice, system, irq and softirq of /proc/stat's first line
_STOLEN = 7


_LOOPS, _LOOP = 5, 200_000


class Load:
    """What happens between entering and leaving; ``figures`` afterwards.

    ``others_cores`` are cores that other processes kept busy, on average; ``stolen_cores`` those
    that the hypervisor gave to others. Both None where there is no /proc/stat. A virtual machine
    may also be slowed down without a sign of either, by others on the same chip:
    ``loop_seconds`` is how long a fixed loop of pure Python took just before, which should not
    vary.
    """

    def __enter__(self):
        self._loop_seconds = _loop_seconds()
        self._began, self._own, self._stat = time.monotonic(), _own_seconds(), _machine_seconds()
        return self

    def __exit__(self, *failure):
        wall = time.monotonic() - self._began
        own, stat = _own_seconds() - self._own, _machine_seconds()
        self.figures = {"wall_seconds": wall, "load_average": os.getloadavg()[0]}
        self.figures["loop_seconds"] = self._loop_seconds
        self.figures |= {"own_cores": own / wall, "others_cores": None, "stolen_cores": None}
        if stat is not None and self._stat is not None:
            busy, stolen = (after - before for after, before in zip(stat, self._stat, strict=True))
            self.figures["others_cores"] = max(0.0, (busy - own) / wall)
            self.figures["stolen_cores"] = stolen / wall


def _loop_seconds():
    """The median over a few runs of a fixed loop."""
    found = []
    for _ in range(_LOOPS):
        began, total = time.perf_counter(), 0
        for number in range(_LOOP):
            total += number
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _own_seconds():
    """CPU seconds of this process and of those it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in used)


def _machine_seconds():
    """(busy, stolen) CPU seconds of all cores since the machine began."""
    try:
        line = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return None
    ticks = [int(field) for field in line.split()[1:]]
    rate = os.sysconf("SC_CLK_TCK")
    return sum(ticks[index] for index in _BUSY) / rate, ticks[_STOLEN] / rate
