"""``hetflow rent odds``: how long spot machines last, and what that means."""

from ..schema.requests.odds import OddsRequest
from .asking import Asked, asks
from .common import ForceFlag, JsonFlag, ReportOption, emit_either, emit_file


@asks(OddsRequest)
def rent_odds(
    asked: Asked, output: ReportOption = None, force: ForceFlag = False, json: JsonFlag = False
) -> None:
    """Estimate how long spot machines last, how prices spread, and how zones go together.

    \b
    hetflow rent odds us-west-2a us-west-2b --checkpoint-seconds 30
    """
    from ..api.odds import odds
    from ..formats.reports.market_tables import odds_table
    from ..schema.files import check_outputs, to_plain

    check_outputs(output, force=force)
    report = odds(**asked)
    if output is not None:
        emit_file(report, output, force=force)
    emit_either(json, to_plain(report), lambda: odds_table(report))
