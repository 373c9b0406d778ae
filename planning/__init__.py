"""From profiles, a pool and options to a plan that has been checked and can be launched."""
