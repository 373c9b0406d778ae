"""Check a proof against itself: its bound, its gap, and what it calls optimal."""

from collections.abc import Iterable, Iterator

from ...schema.plan import Known, Proof

MOST_TOLERANCE = 0.02
"""How much slower than the least step a simpler plan may be, relative to it (docs/decisions.md)."""


class Verdict(list[str]):
    """The faults of a plan, one sentence each, and how its bound is known."""

    def __init__(
        self,
        faults: Iterable[str] = (),
        bound: Known = "stated",
    ) -> None:
        super().__init__(faults)
        self.bound = bound


def proof_faults(proof: Proof, near: float) -> Iterator[str]:
    """Yield every fault of a proof, as a sentence.

    Only a plan that meets its bound is optimal: exactly, or within the tolerance that the proof
    states, up to which the measurements cannot tell plans apart.
    """
    optimal, tolerance = proof.termination == "optimal", proof.tolerance
    if proof.lower_bound is None:
        if optimal:
            yield "proof: optimal without a lower_bound"
        if proof.gap is not None:
            yield f"proof: gap is {proof.gap} without a lower_bound"
        return
    if proof.lower_bound > proof.objective * (1 + near):
        yield f"proof: lower_bound {proof.lower_bound} is above the objective {proof.objective}"
        return
    gap = (proof.objective - proof.lower_bound) / proof.objective if proof.objective else 0.0
    if proof.gap is None or abs(gap - proof.gap) > near:
        yield f"proof: gap is {proof.gap}, but the bound leaves {gap}"
    allowed = proof.lower_bound * (1 + (tolerance or 0.0))
    if optimal and gap > near and proof.objective > allowed * (1 + near):
        beyond = "" if tolerance is None else f", beyond its tolerance of {tolerance}"
        yield f"proof: optimal, but the bound leaves a gap of {gap}{beyond}"
    if not optimal and gap <= 0.0:
        yield "proof: feasible, but the objective meets the bound, which proves it optimal"


def tolerance_faults(proof: Proof) -> list[str]:
    """List a tolerance above what ``hetflow solve`` gives up; solvers may be asked for more."""
    if (proof.tolerance or 0.0) <= MOST_TOLERANCE * (1 + 1e-9):
        return []
    return [f"proof: tolerance {proof.tolerance} is above {MOST_TOLERANCE}, the most given up"]
