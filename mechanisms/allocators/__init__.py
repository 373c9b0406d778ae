"""Who should have what part of the time: policies and baselines as a simulator calls them."""
