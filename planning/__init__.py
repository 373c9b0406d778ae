"""Turn profiles, a pool and options into a plan that is checked and ready to launch."""
