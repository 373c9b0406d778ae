"""One job on a spot market, tick by tick."""
