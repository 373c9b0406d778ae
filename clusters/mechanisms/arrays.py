"""The arrays that a simulation is made of."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOWHERE = -1
"""The device type of a job that does not run."""
