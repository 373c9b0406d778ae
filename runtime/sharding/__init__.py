"""States that the workers of a split share: weights, gradients, the optimizer's."""
