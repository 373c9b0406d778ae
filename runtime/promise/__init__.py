"""The test, before the first update, that hetflow's virtual nodes train on the script's loss."""
