"""``hetflow.rent``: which machines to rent, when and where; the commands ``hetflow rent ...``.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ..schema.lazy import lazy_names

if TYPE_CHECKING:
    from .rent import advice, fleet, odds, zones
    from .rent import rent as deadline
    from .rent import rent_machines as machines
    from .rent import rent_prices as prices
    from .rent_run import rent_run as run

_NAMES = {
    ".rent": "advice fleet odds zones",
    ".rent:rent": "deadline",
    ".rent:rent_machines": "machines",
    ".rent:rent_prices": "prices",
    ".rent_run:rent_run": "run",
}

__all__ = ["advice", "deadline", "fleet", "machines", "odds", "prices", "run", "zones"]

__getattr__, __dir__ = lazy_names(globals(), _NAMES)
