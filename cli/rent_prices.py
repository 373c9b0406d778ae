"""``hetflow rent prices``: which machine to take when prices change, and when to move."""

from ..schema.requests.rent import PricesRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, OutputOption, emit, emit_file, emit_json


@asks(PricesRequest)
def rent_prices(
    asked: Asked, output: OutputOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Replay strategies for one job on price histories, beside a lower bound on the cost.

    \b
    hetflow rent prices aws.json azure.json --rate V100=9.6 --rate K80=1 --work-hours 96
    """
    from ..api.rent_prices import rent_prices as replay
    from ..reports.market_tables import strategies_table
    from ..schema.files import check_writable, to_plain

    if output is not None:
        check_writable(output, force=force)
    report = replay(**asked)
    if output is not None:
        emit_file(report, output, force=force)
    if json:
        emit_json(to_plain(report))
    else:
        emit(strategies_table(report))
