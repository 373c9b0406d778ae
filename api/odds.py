"""``hetflow.rent.odds``."""

from collections.abc import Sequence
from pathlib import Path

from ..formats.importers.availability import read_availability
from ..schema import files
from ..schema.errors import ProblemError
from ..schema.market import Availability, Market, OddsReport, PriceHistory
from ..schema.records import PositiveSeconds
from ..solvers.market.odds import Zone
from ..solvers.market.odds import odds as estimate
from .calls import checks


@checks
def odds(
    sources: Sequence[Market | Path | str], *, checkpoint_seconds: PositiveSeconds | None = None
) -> OddsReport:
    """Estimate from a market's past how long spot machines last, their prices, and correlations.

    Args:
        sources: Markets, their files, or folders of availability files of one zone, which is named
            after the folder.
        checkpoint_seconds: Seconds to write a checkpoint, as measured or from a run record. If
            given, the report says how often to write one in each zone.

    Returns:
        Lifetimes by zone, quantiles of prices, and correlations between zones.

    Raises:
        ProblemError: There is nothing to estimate from, or ``checkpoint_seconds`` is not > 0.
        FileError: A file is missing or has faults.

    Example:
        >>> import hetflow
        >>> from hetflow.schema.market import Availability, Market
        >>> seen = Availability(zone="a", tick_seconds=600, available=(0, 1, 1, 1, 0, 1, 0))
        >>> report = hetflow.rent.odds([Market(availability=(seen,))], checkpoint_seconds=60)
        >>> report.zones[0].rate.mean_seconds, round(report.zones[0].young_seconds)
        (1200.0, 379)
    """
    windows: dict[Zone, list[Availability]] = {}
    prices: list[PriceHistory] = []
    for source in sources:
        market: Market | None
        if isinstance(source, Market):
            found, market = source.availability, source
        else:
            found, market = _read(Path(source))
        for window in found:
            folder = None if market is not None else Path(str(source)).name
            windows.setdefault((folder or window.zone, window.instance_type), []).append(window)
        prices += market.prices if market is not None else ()
    report = estimate(windows, prices, checkpoint_seconds)
    if not report.zones and not report.prices:
        raise ProblemError(
            "there is nothing to estimate from",
            hint="give windows of availability in which a machine was there, or price histories",
        )
    return report


def _read(path: Path) -> tuple[tuple[Availability, ...], Market | None]:
    """Read windows of availability, and the market that holds them (None for a folder)."""
    if path.is_file():
        data = files.read_text(path)
        if '"hetflow.market/1"' in data[:1000]:
            market = files.from_json(data, Market, name=str(path))
            return market.availability, market
    return read_availability(path), None
