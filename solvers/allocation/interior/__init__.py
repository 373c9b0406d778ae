"""Linear programs by Newton's method: interior points, and centres of optimal faces."""
