"""``hetflow doctor``: what the installation lacks to use this machine."""

from dataclasses import asdict

from ..schema.errors import HetflowError
from .common import JsonFlag, emit, emit_json


def doctor(json: JsonFlag = False) -> None:
    """Check torch, drivers, devices and extras, and say how to fix what is missing.

    \b
    hetflow doctor
    """
    from ..devices.doctor import collect_facts, findings, is_usable

    facts = collect_facts()
    found = findings(facts)
    if json:
        emit_json({"facts": asdict(facts), "findings": [asdict(f) for f in found]})
    else:
        from tabulate import tabulate

        emit(tabulate(facts.rows(), tablefmt="plain", disable_numparse=True))
        emit("")
        for finding in found:
            emit(f"{finding.level}: {finding.text}")
            if finding.mend:
                emit(f"    {finding.mend}")
    if not is_usable(found):
        first = next(finding for finding in found if finding.level == "error")
        raise HetflowError(first.text, hint=first.mend)
