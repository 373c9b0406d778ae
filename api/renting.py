"""``hetflow.rent``: which machines to rent, when and where; the commands ``hetflow rent ...``.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ..schema.lazy import lazy_names

if TYPE_CHECKING:
    from .odds import odds
    from .rent import advice, fleet, zones
    from .rent import rent as deadline
    from .rent_machines import rent_machines as machines
    from .rent_prices import rent_prices as prices
    from .rent_run import rent_run as run

_WHERE = {
    "advice": ".rent",
    "deadline": ".rent:rent",
    "fleet": ".rent",
    "machines": ".rent_machines:rent_machines",
    "odds": ".odds",
    "prices": ".rent_prices:rent_prices",
    "run": ".rent_run:rent_run",
    "zones": ".rent",
}

__all__ = ["advice", "deadline", "fleet", "machines", "odds", "prices", "run", "zones"]

__getattr__, __dir__ = lazy_names(globals(), _WHERE)
