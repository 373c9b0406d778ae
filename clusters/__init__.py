"""Many jobs on many devices: who runs where next, simulated and live."""
